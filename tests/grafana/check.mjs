// Says where a dashboard has another shape than Grafana's types give it: `node check.mjs FILE …`.

import { readFileSync, writeFileSync } from 'node:fs';
import ts from 'typescript';

// Enumerations of strings are written as plain strings in JSON.
const head = `import type { Dashboard } from '@grafana/schema';
type Plain<T> = T extends string ? \`\${T}\`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
`;
const boards = process.argv.slice(2).map((name, at) =>
  `export const board${at}: Plain<Dashboard> = ${readFileSync(name, 'utf8')};\n`);
writeFileSync('boards.ts', head + boards.join(''));
const options = {
  noEmit: true,
  strict: true,
  skipLibCheck: true,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
  target: ts.ScriptTarget.ES2022,
};
const faults = ts.getPreEmitDiagnostics(ts.createProgram(['boards.ts'], options));
const host = {
  getCanonicalFileName: (name) => name,
  getCurrentDirectory: () => process.cwd(),
  getNewLine: () => '\n',
};
process.stdout.write(ts.formatDiagnostics(faults, host));
process.exitCode = faults.length > 0 || boards.length === 0 ? 1 : 0;

// What the checks of the page share: a browser, waiting, axe and pictures. Started with the browser in
// CHROMIUM. With SHOTS=FOLDER pictures are left there.
import assert from "node:assert/strict";
import { AxeBuilder } from "@axe-core/playwright";
import { chromium } from "playwright-core";

const LIMIT_MS = 240_000;

// Processes that end with this one.
export const children = new Set();
process.on("exit", () => children.forEach((child) => child.kill("SIGKILL")));
process.stdin.on("end", () => process.exit(3)).resume(); // the process that started this is gone
setTimeout(() => { console.error("the page was not checked within " + LIMIT_MS / 1000 + " s"); process.exit(4); }, LIMIT_MS).unref();

export const launch = () => chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-quic"] });

export const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

export async function until(what, isSo, withinMs = 20_000) {
  const end = Date.now() + withinMs;
  for (;;) {
    const found = await isSo();
    if (found) return found;
    if (Date.now() > end) throw new Error("not within " + withinMs / 1000 + " s: " + what);
    await sleep(100);
  }
}

export async function step(name, does) {
  const started = Date.now();
  try { await does(); } catch (error) { error.message = name + ": " + error.message; throw error; }
  console.log("ok", name, Date.now() - started, "ms");
}

export async function axe(page, what) {
  const { violations } = await new AxeBuilder({ page }).analyze();
  const found = violations.map((it) => it.id + ": " + it.nodes.map((node) => node.target + " " + node.failureSummary).join(" | "));
  assert.deepEqual(found, [], what);
}

export async function shot(page, name) {
  if (process.env.SHOTS) await page.screenshot({ path: process.env.SHOTS + "/" + name + ".png", fullPage: true });
}

export async function open(browser, url, colorScheme, more = {}, before = async () => {}) {
  const context = await browser.newContext({ colorScheme, viewport: { width: 1360, height: 1000 }, ...more });
  const page = await context.newPage(), faults = [];
  await before(page);
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => { if (message.text().includes("Content Security Policy")) faults.push(message.text()); });
  page.on("dialog", (dialog) => { faults.push("a dialog"); dialog.dismiss(); });
  await page.goto(url);
  await page.waitForFunction(() => document.documentElement.dataset.ready === "yes");
  return { page, faults, context };
}

export const text = (page, selector) => page.locator(selector).innerText();
export const live = (page, words) => until("the page says " + words, async () => (await text(page, "#live")).includes(words), 45_000);

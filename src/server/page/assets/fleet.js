// The fleet as the server sends it: a snapshot, then deltas. Figures that the server has are not
// calculated again here; this file only sorts and selects.

import { count, words } from "./words.js";

export const UNHEALTHY = 1, OVERALLOCATED = 2, MIG_PARENT = 4, KUBELET = 8, MIG_INSTANCE = 16;
export const ENDED = 1, UNLIMITED = 2, GUEST = 4, AWAY = 8, BORROWED = 16;
const TEAM_COLORS = 10;

// Pods that are allocated part of a GPU. Guests run there, and what they take counts as free; so does
// memory that pods use above their requests.
export const tenantsOf = (gpu) => gpu[4].filter((tenant) => !(tenant[3] & (GUEST | BORROWED)));
export const borrowedOf = (gpu) => gpu[4].filter((tenant) => tenant[3] & BORROWED);
export const guestsOf = (gpu) => gpu[4].filter((tenant) => tenant[3] & GUEST);

export const fleet = {
  at: "", loaded: 0, version: "", figures: null, figuresAt: 0, heardAt: 0, trend: [], models: [], namespaces: [], nodes: new Map(),
  fragmented: {}, // by node name, in millionths of a GPU; loaded when the map is sorted by it
  fits: null,     // answer to the request, by node name
  teams: new Map(),
  ranks: new Map(), // by node name: its position in name order, which is slow to find
};

const KEPT_POINTS = 720;

export function load(snapshot) {
  fleet.version = snapshot.version;
  fleet.models = snapshot.models;
  fleet.namespaces = snapshot.namespaces;
  fleet.nodes = new Map(snapshot.nodes.map((node) => [node.name, node]));
  fleet.trend = snapshot.trend;
  fleet.ranks.clear();
  fleet.loaded += 1;
  note(snapshot.at, snapshot.figures);
}

// Takes in a delta. Returns the names of the changed nodes, and whether nodes or GPUs came or went.
export function apply(delta) {
  for (const [at, name] of delta.models || []) fleet.models[at] = name;
  for (const [at, name] of delta.namespaces || []) fleet.namespaces[at] = name;
  const changed = new Set();
  let isOther = false;
  for (const node of delta.nodes || []) {
    const known = fleet.nodes.get(node.name);
    if (!known) fleet.ranks.clear();
    isOther ||= !known || known.gpus.length !== node.gpus.length || group(known) !== group(node);
    fleet.nodes.set(node.name, node);
    changed.add(node.name);
  }
  for (const name of delta.gone || []) isOther = fleet.nodes.delete(name) || isOther;
  fleet.trend.push(...(delta.trend || []));
  fleet.trend.splice(0, fleet.trend.length - KEPT_POINTS);
  note(delta.at, delta.figures);
  return { changed, isOther };
}

function note(at, figures) {
  fleet.at = at;
  fleet.heardAt = Date.now();
  if (figures) {
    fleet.figures = figures;
    fleet.figuresAt = Date.now();
  }
  const named = fleet.namespaces.filter((name) => name);
  if (fleet.teams.size !== named.length) named.sort().forEach(team);
}

// FNV-1a: the same name has the same color in each browser, as far as there are enough colors.
function hash(text) {
  let sum = 2166136261;
  for (let at = 0; at < text.length; at += 1) sum = Math.imul(sum ^ text.charCodeAt(at), 16777619);
  return sum >>> 0;
}

// A namespace's color by its hash, or the next free one; once given it stays.
function team(name) {
  if (fleet.teams.has(name)) return;
  const taken = new Set(fleet.teams.values());
  for (let step = 0; step < TEAM_COLORS; step += 1) {
    const place = (hash(name) + step) % TEAM_COLORS;
    if (!taken.has(place)) { fleet.teams.set(name, place); return; }
  }
  fleet.teams.set(name, -1);
}

// The namespace of a tenant; `null` is one whose pods this user may not see.
export function teamName(position) {
  return position === null ? "another team" : fleet.namespaces[position] || "unknown";
}

export function teamColor(position) {
  const place = fleet.teams.get(fleet.namespaces[position]) ?? -1;
  return place < 0 ? "--other" : "--team" + place;
}

export function allocated(gpu) {
  let share = 0, memory = 0;
  for (const tenant of tenantsOf(gpu)) { share += tenant[1]; memory += tenant[2]; }
  return { share, memory, fullness: Math.max(share, memory) };
}

// How many GPUs and MIG instances there are on these nodes; a GPU that is divided is one GPU. A device
// is empty if a pod could have all of it now.
export function tally(nodes) {
  const found = { gpus: 0, emptyGpus: 0, instances: 0, emptyInstances: 0 };
  for (const node of nodes) {
    for (const gpu of node.gpus) {
      const isEmpty = tenantsOf(gpu).length === 0 && node.state === "Reporting" && !(gpu[2] & (UNHEALTHY | KUBELET | MIG_PARENT));
      const isInstance = gpu[2] & MIG_INSTANCE;
      found[isInstance ? "instances" : "gpus"] += 1;
      if (isEmpty) found[isInstance ? "emptyInstances" : "emptyGpus"] += 1;
    }
  }
  return found;
}

// "160 GPUs, 32 MIG instances"; a kind of which there is none is left out.
export function devices({ gpus, instances }) {
  const named = instances ? count(instances, "MIG instance", "MIG instances") : "";
  return gpus || !instances ? count(gpus, "GPU", "GPUs") + (named && ", " + named) : named;
}

// "GPU 3", or "MIG instance 9".
export function deviceName(name, index) {
  const gpu = fleet.nodes.get(name)?.gpus[index];
  return (gpu && gpu[2] & MIG_INSTANCE ? "MIG instance " : "GPU ") + index;
}

// Memory that is allocated and not in use, in thousandths; null if its use is unknown.
export function idle(gpu) {
  return gpu[5] === null || gpu[5] === undefined ? null : Math.max(0, allocated(gpu).memory - gpu[5]);
}

const group = (node) => (node.gpus.length ? fleet.models[node.gpus[0][0]] : "No GPU reported");
const sum = (node, of) => node.gpus.reduce((all, gpu) => all + of(gpu), 0);
const trouble = (node) => (node.state === "Reporting" ? 0 : 1) + sum(node, (gpu) => (gpu[2] & OVERALLOCATED ? 3 : gpu[2] & UNHEALTHY ? 2 : 0));

// The smallest value first; equal ones by name.
export const SORTS = {
  name: ["by name", () => 0],
  empty: ["emptiest first", (node) => sum(node, (gpu) => Math.min(1000, allocated(gpu).fullness)) / Math.max(1, node.gpus.length)],
  full: ["fullest first", (node) => -sum(node, (gpu) => Math.min(1000, allocated(gpu).fullness)) / Math.max(1, node.gpus.length)],
  fragmented: ["most fragmented first", (node) => -(fleet.fragmented[node.name] || 0)],
  idle: ["most idle memory first", (node) => -sum(node, (gpu) => (idle(gpu) || 0) * gpu[1])],
  fits: ["fitting first", (node) => -((fleet.fits && fleet.fits[node.name]) || []).length],
  trouble: ["trouble first", (node) => -trouble(node)],
};

const names = new Intl.Collator("en", { numeric: true });

function ranks() {
  if (fleet.ranks.size === 0) [...fleet.nodes.keys()].sort(names.compare).forEach((name, at) => fleet.ranks.set(name, at));
  return fleet.ranks;
}

// The shown nodes by model.
export function groups(sort, model) {
  const found = new Map();
  for (const node of fleet.nodes.values()) {
    const title = group(node);
    if (model && title !== model) continue;
    if (!found.has(title)) found.set(title, []);
    found.get(title).push(node);
  }
  const key = (SORTS[sort] || SORTS.name)[1], rank = ranks();
  return [...found].sort((a, b) => names.compare(a[0], b[0])).map(([title, nodes]) => {
    const keyed = nodes.map((node) => ({ node, key: key(node), rank: rank.get(node.name) }));
    keyed.sort((a, b) => a.key - b.key || a.rank - b.rank);
    return { title, nodes: keyed.map((it) => it.node) };
  });
}

export const titles = () => [...new Set([...fleet.nodes.values()].map(group))].sort(names.compare);

export function isFitting(node, index) {
  const on = fleet.fits && fleet.fits[node.name];
  return Boolean(on && on.includes(index));
}

// The faults of a GPU, in words.
export function faults(node, gpu) {
  const found = [];
  if (node.state !== "Reporting") found.push("its node: " + words(node.state));
  if (gpu[2] & OVERALLOCATED) found.push("overallocated");
  if (gpu[2] & UNHEALTHY) found.push("unhealthy");
  if (gpu[2] & KUBELET) found.push("allocated by kubelet");
  if (gpu[2] & MIG_PARENT) found.push("divided into MIG instances");
  if (gpu[3] > 0) found.push((gpu[3] / 10).toFixed(0) + " % of memory in use and not allocated");
  if (gpu[4].some((tenant) => tenant[3] & ENDED)) found.push("draining");
  return found;
}

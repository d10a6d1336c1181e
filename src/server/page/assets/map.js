// The map: all GPUs on one canvas. Few GPUs are bars of their tenants; many are cells, drawn into a
// pixel buffer. All positions are calculated, never looked up, so drawing and pointing agree.
import { by, color, count, gib, make, number, percent, words } from "./words.js";
import { allocated, deviceName, devices, fleet, idle, faults, isFitting, tally, teamColor, teamName, borrowedOf, guestsOf, tenantsOf, AWAY, ENDED, KUBELET, MIG_PARENT, OVERALLOCATED, UNHEALTHY, UNLIMITED } from "./fleet.js";

export const CELLS_ABOVE = 1600;          // with more GPUs each is a cell
const CELL_SIZES = [14, 12, 10, 8, 7, 6, 5, 4];
const BAR_SIZES = [30, 26, 22, 18, 15];
const CELLS_HIGH = 620, BARS_HIGH = 560; // preferred largest height of a map, in pixels
const TITLE = 26, GAP = 26;

export const COLORS = { team: "by namespace", full: "by how full", idle: "by idle memory" };

const map = { groups: [], cells: false, shape: null, pointed: null, places: new Map(), image: null, colors: "team", namespace: "", onOpen: () => {} };

export const pointed = () => map.pointed;
export const order = () => map.groups.flatMap((group) => group.nodes);

// --- positions --------------------------------------------------------------------------------

export function layOut(groups, colors, namespace) {
  const gpus = groups.reduce((sum, group) => sum + group.nodes.reduce((s, node) => s + node.gpus.length, 0), 0);
  map.groups = groups;
  for (const group of groups) group.subtitle = count(group.nodes.length, "node", "nodes") + ", " + devices(tally(group.nodes));
  map.namespace = namespace;
  map.cells = gpus > CELLS_ABOVE;
  map.colors = colors;
  const room = by("map-box").clientWidth || 1200;
  const [sizes, most] = map.cells ? [CELL_SIZES, CELLS_HIGH] : [BAR_SIZES, BARS_HIGH];
  const largest = groups.reduce((most, group) => group.nodes.reduce((m, node) => node.gpus.reduce((k, gpu) => Math.max(k, gpu[1]), m), most), 1);
  let height = 0;
  for (const size of sizes) {
    height = arrange(room, size, largest);
    if (height <= most) break;
  }
  const canvas = by("map"), scale = window.devicePixelRatio || 1;
  const [pixelsX, pixelsY] = [Math.round(room * scale), Math.round(Math.max(height, 24) * scale)];
  if (canvas.width !== pixelsX || canvas.height !== pixelsY) {
    canvas.width = pixelsX;
    canvas.height = pixelsY;
    canvas.style.width = room + "px";
    canvas.style.height = Math.max(height, 24) + "px";
  }
  map.places = new Map();
  groups.forEach((group, at) => group.nodes.forEach((node, index) => map.places.set(node.name, [at, index])));
  const silent = groups.reduce((sum, group) => sum + group.nodes.filter((node) => node.state !== "Reporting").length, 0);
  canvas.setAttribute("aria-label", "Map of " + devices(tally(order())) + " on " + count(map.places.size, "node", "nodes") +
    (silent ? ", " + number.format(silent) + " of which do not report" : "") + ". Arrow keys walk through them, Enter opens one, T shows a table.");
  draw();
  return gpus;
}

const BOLD = "600 13px system-ui, 'DejaVu Sans', sans-serif", PLAIN = "12px system-ui, 'DejaVu Sans', sans-serif";

function titleWidth(group) {
  const pen = by("map").getContext("2d");
  pen.font = BOLD;
  const title = pen.measureText(group.title).width;
  pen.font = PLAIN;
  return Math.ceil(title + 10 + pen.measureText(group.subtitle).width);
}

// Arranges the groups like words of a text: beside each other while there is room.
function arrange(room, size, largest) {
  let x = 0, y = 0, high = 0;
  for (const group of map.groups) {
    const most = group.nodes.reduce((m, node) => Math.max(m, node.gpus.length), 1);
    if (map.cells) {
      const columns = Math.min(4, most), gap = size > 6 ? 4 : 3;
      group.shape = { columns, w: size - 1, h: size - 1, cell: size, stepX: columns * size + gap, stepY: Math.ceil(most / columns) * size + gap };
    } else {
      const first = group.nodes.find((node) => node.gpus.length), memory = first ? first.gpus[0][1] : 0;
      const h = Math.round((28 + 52 * Math.sqrt(memory / largest)) * Math.max(1, size / 20));
      group.shape = { columns: most, w: size, h, cell: size + 3, stepX: Math.max(most * (size + 3) + 22, 112), stepY: h + 28 };
    }
    const shape = group.shape, wide = Math.max(group.nodes.length * shape.stepX, titleWidth(group));
    if (x > 0 && x + wide > room) { y += high + 10; x = 0; high = 0; }
    shape.perRow = Math.max(1, Math.floor(Math.min(wide, room - x) / shape.stepX));
    [group.x, group.y] = [x + 2, y + TITLE];
    const rows = Math.ceil(group.nodes.length / shape.perRow);
    high = Math.max(high, TITLE + rows * shape.stepY);
    x += Math.min(wide, room) + GAP;
  }
  return y + high + 2;
}

function place(group, node, gpu) {
  const shape = group.shape;
  return {
    x: group.x + (node % shape.perRow) * shape.stepX + (gpu % shape.columns) * shape.cell,
    y: group.y + Math.floor(node / shape.perRow) * shape.stepY + Math.floor(gpu / shape.columns) * shape.cell,
  };
}

function hit(event) {
  const box = by("map").getBoundingClientRect();
  for (const [at, group] of map.groups.entries()) {
    const shape = group.shape, x = event.clientX - box.left - group.x, y = event.clientY - box.top - group.y;
    const column = Math.floor(x / shape.stepX), row = Math.floor(y / shape.stepY);
    if (x < 0 || y < 0 || column >= shape.perRow) continue;
    const index = row * shape.perRow + column, node = group.nodes[index];
    const inX = Math.floor((x - column * shape.stepX) / shape.cell);
    const inY = map.cells ? Math.floor((y - row * shape.stepY) / shape.cell) : 0;
    if (!node || inX >= shape.columns) continue;
    const gpu = inY * shape.columns + inX;
    if (gpu < node.gpus.length) return { group: at, node: index, gpu };
  }
  return null;
}

// Puts changed nodes into their old positions.
export function refreshNodes(names) {
  for (const name of names) {
    const found = map.places.get(name), node = fleet.nodes.get(name);
    if (found && node) map.groups[found[0]].nodes[found[1]] = node;
  }
}

// --- drawing ----------------------------------------------------------------------------------

const parsed = new Map();

// A CSS color for the pixel buffer, mixed with the background if it is dimmed.
function pixel(name, dim) {
  const key = name + dim;
  if (!parsed.has(key)) {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    pen.fillStyle = color("--card");
    pen.fillRect(0, 0, 1, 1);
    pen.globalAlpha = dim ? 0.28 : 1;
    pen.fillStyle = color(name);
    pen.fillRect(0, 0, 1, 1);
    parsed.set(key, new Uint32Array(pen.getImageData(0, 0, 1, 1).data.buffer)[0]);
  }
  return parsed.get(key);
}

export function forgetColors() { parsed.clear(); }

const ramp = (name, part) => (part <= 0 ? "--track" : "--" + name + Math.min(5, Math.max(1, Math.ceil(part / 200))));

// Whether it takes no tenants.
const isOut = (node, gpu) => node.state !== "Reporting" || Boolean(gpu[2] & (UNHEALTHY | KUBELET | MIG_PARENT));

function cellColor(node, gpu) {
  if (gpu[2] & OVERALLOCATED) return "--bad";
  if (isOut(node, gpu)) return "--edge";
  if (map.colors === "idle") return ramp("idle", idle(gpu) || 0);
  if (map.colors === "full") return ramp("fill", allocated(gpu).fullness);
  const first = tenantsOf(gpu).reduce((most, tenant) => (!most || tenant[2] > most[2] ? tenant : most), null);
  return first ? teamColor(first[0]) : "--track";
}

const isDim = (node, gpu, index) =>
  (fleet.fits !== null && !isFitting(node, index)) || (map.namespace !== "" && !gpu[4].some((tenant) => fleet.namespaces[tenant[0]] === map.namespace));

export function draw(changed) {
  const canvas = by("map"), pen = canvas.getContext("2d"), scale = window.devicePixelRatio || 1;
  if (changed && map.cells && map.image && map.image.width === canvas.width) drawCells(pen, scale, changed);
  else {
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    map.image = null;
    if (map.cells) drawCells(pen, scale, null); else { pen.setTransform(scale, 0, 0, scale, 0, 0); drawBars(pen); }
  }
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  drawTitles(pen);
  showRing();
}

function drawCells(pen, scale, changed) {
  const canvas = pen.canvas;
  if (!map.image) map.image = pen.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(map.image.data.buffer), wide = map.image.width;
  const fit = fleet.fits !== null;
  const fill = (group, node, at) => node.gpus.forEach((gpu, index) => {
    const { x, y } = place(group, at, index), shape = group.shape;
    const lit = fit && isFitting(node, index);
    const ink = lit ? pixel("--fit", false) : pixel(cellColor(node, gpu), isDim(node, gpu, index));
    const [left, right] = [Math.round(x * scale), Math.round((x + shape.w) * scale)];
    for (let line = Math.round(y * scale); line < Math.round((y + shape.h) * scale); line += 1) pixels.fill(ink, line * wide + left, line * wide + right);
  });
  if (changed) {
    for (const name of changed) {
      const found = map.places.get(name);
      if (!found) continue;
      const group = map.groups[found[0]];
      fill(group, group.nodes[found[1]], found[1]);
    }
  } else for (const group of map.groups) group.nodes.forEach((node, at) => fill(group, node, at));
  pen.putImageData(map.image, 0, 0);
}

function drawTitles(pen) {
  pen.textBaseline = "top";
  for (const group of map.groups) {
    pen.font = BOLD;
    pen.fillStyle = color("--ink");
    pen.fillText(group.title, group.x, group.y - TITLE + 4);
    const wide = pen.measureText(group.title).width;
    pen.font = PLAIN;
    pen.fillStyle = color("--soft");
    pen.fillText(group.subtitle, group.x + wide + 10, group.y - TITLE + 5);
  }
}

function drawBars(pen) {
  const ink = Object.fromEntries(["track", "edge", "soft", "bad", "hatch", "fit", "card", "other"].map((name) => [name, color("--" + name)]));
  const teams = fleet.namespaces.map((_, position) => color(teamColor(position)));
  for (const group of map.groups) {
    const shape = group.shape;
    group.nodes.forEach((node, at) => {
      node.gpus.forEach((gpu, index) => {
        const spot = place(group, at, index);
        pen.globalAlpha = isDim(node, gpu, index) ? 0.22 : 1;
        drawBar(pen, shape, spot, node, gpu, ink, teams);
        pen.globalAlpha = 1;
        if (fleet.fits !== null && isFitting(node, index)) {
          pen.strokeStyle = ink.fit;
          pen.lineWidth = 2.5;
          pen.strokeRect(spot.x - 1.2, spot.y - 1.2, shape.w + 2.4, shape.h + 2.4);
        }
      });
      const { x, y } = place(group, at, 0), isWell = node.state === "Reporting";
      pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
      pen.textBaseline = "top";
      pen.fillStyle = isWell ? ink.soft : ink.bad;
      pen.fillText(node.name + (isWell ? "" : " (" + words(node.state) + ")"), x, y + shape.h + 5, shape.stepX - 8);
    });
  }
}

function hatch(pen, x, y, w, h, ink, step) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, w, h);
  pen.clip();
  pen.beginPath();
  for (let at = -h; at < w; at += step) { pen.moveTo(x + at, y + h); pen.lineTo(x + at + h, y); }
  pen.strokeStyle = ink;
  pen.lineWidth = 1.2;
  pen.stroke();
  pen.restore();
}

// Left half compute, right half memory, one segment per tenant.
function drawBar(pen, shape, { x, y }, node, gpu, ink, teams) {
  const half = shape.w / 2, alpha = pen.globalAlpha, { memory } = allocated(gpu);
  pen.fillStyle = ink.track;
  pen.fillRect(x, y, shape.w, shape.h);
  const top = [0, 0];
  for (const tenant of tenantsOf(gpu)) {
    [tenant[1], tenant[2]].forEach((part, side) => {
      const from = y + shape.h * (1 - Math.min(1, top[side] / 1000));
      top[side] += part;
      const to = y + shape.h * (1 - Math.min(1, top[side] / 1000)), high = Math.max(0, from - to - 1);
      pen.globalAlpha = alpha * (tenant[3] & (ENDED | AWAY) ? 0.4 : 1);
      pen.fillStyle = map.colors === "full" ? color(ramp("fill", allocated(gpu).fullness))
        : map.colors === "idle" ? color(ramp("idle", idle(gpu) || 0)) : teams[tenant[0]] || ink.other; // that of another team has no place
      pen.fillRect(x + side * half, to + 1, half, high);
      if (tenant[3] & UNLIMITED && side === 1) hatch(pen, x + half, to + 1, half, high, ink.hatch, 5);
    });
  }
  pen.globalAlpha = alpha;
  for (const guest of [...guestsOf(gpu), ...borrowedOf(gpu)]) { // in free room
    [guest[1], guest[2]].forEach((part, side) => {
      const from = y + shape.h * (1 - Math.min(1, top[side] / 1000));
      top[side] += part;
      const to = y + shape.h * (1 - Math.min(1, top[side] / 1000));
      hatch(pen, x + side * half, to + 1, half, Math.max(0, from - to - 1), teams[guest[0]] || ink.other, 4);
    });
  }
  if (gpu[3] > 0) { // in use beyond what is allocated
    const high = shape.h * Math.min(1, gpu[3] / 1000), from = y + shape.h * (1 - Math.min(1, memory / 1000));
    hatch(pen, x + half, Math.max(y, from - high), half, Math.min(high, from - y), ink.bad, 3);
  }
  if (isOut(node, gpu)) cross(pen, x, y, shape.w, shape.h, gpu[2] & UNHEALTHY || node.state !== "Reporting" ? ink.bad : ink.edge);
  if (gpu[2] & OVERALLOCATED) edge(pen, x, y, shape.w, shape.h, ink.bad);
}

function cross(pen, x, y, w, h, ink) {
  pen.strokeStyle = ink;
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x, y); pen.lineTo(x + w, y + h);
  pen.moveTo(x + w, y); pen.lineTo(x, y + h);
  pen.stroke();
}

function edge(pen, x, y, w, h, ink) {
  pen.strokeStyle = ink;
  pen.lineWidth = 2;
  pen.strokeRect(x, y, w, h);
}

// --- legend -----------------------------------------------------------------------------------

let legend = "";

// `pick` is called with a chosen namespace.
export function showLegend(pick) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const seen = fleet.namespaces.filter((name) => name), named = [...seen].sort().filter((name) => (fleet.teams.get(name) ?? -1) >= 0);
  const ramps = (name, word) => [["--track", "nothing " + word], ["--" + name + 1, "up to 20 %"], ["--" + name + 3, "60 %"], ["--" + name + 5, "100 % " + word]];
  const entries = map.colors === "idle" ? ramps("idle", "idle") : map.colors === "full" ? ramps("fill", "allocated")
    : [...named.map((name) => ["--team" + fleet.teams.get(name), name, name]),
      ...(seen.length > named.length ? [["--other", count(seen.length - named.length, "other namespace", "other namespaces")]] : []),
      ...(seen.length < fleet.namespaces.length ? [["--other", "another team"]] : []), ["--track", "free"]];
  entries.push(...(map.cells ? [["--edge", "takes no tenants"], ["--bad", "overallocated"]]
    : [["hatch", "hatched: no verified memory limit"], ["untracked", "red hatching: memory in use that is not allocated"], ["pale", "pale: draining, or runs on another GPU"], ["guest", "colored hatching: borrowed by a guest, or above a request; counts as free"],
      ["cross", "crossed: takes no tenants"], ["edge", "red edge: overallocated"]]));
  const key = JSON.stringify(entries) + isDark;
  if (key === legend) return;
  legend = key;
  by("legend").replaceChildren(...entries.map(([name, text, namespace]) => {
    const item = make("li"), swatch = make("canvas");
    swatch.width = swatch.height = 14;
    swatch.setAttribute("aria-hidden", "true");
    const pen = swatch.getContext("2d"), isMark = !name.startsWith("--");
    pen.globalAlpha = name === "pale" ? 0.4 : 1;
    pen.fillStyle = color(["untracked", "cross", "guest"].includes(name) ? "--track" : isMark ? "--team8" : name);
    pen.fillRect(0, 0, 14, 14);
    if (name === "hatch") hatch(pen, 0, 0, 14, 14, color("--hatch"), 5);
    if (name === "untracked") hatch(pen, 0, 0, 14, 14, color("--bad"), 3);
    if (name === "guest") hatch(pen, 0, 0, 14, 14, color("--team8"), 4);
    if (name === "cross") cross(pen, 0, 0, 14, 14, color("--soft"));
    if (name === "edge") edge(pen, 1, 1, 12, 12, color("--bad"));
    item.append(swatch);
    if (namespace) {
      const choose = make("button", text, "plain");
      choose.type = "button";
      choose.addEventListener("click", () => pick(namespace));
      item.append(choose);
    } else item.append(make("span", text));
    return item;
  }));
}

export const isCells = () => map.cells;

// --- pointing ---------------------------------------------------------------------------------

export function describe(node, index) {
  const gpu = node.gpus[index], { share, memory } = allocated(gpu), wrong = faults(node, gpu);
  const guests = guestsOf(gpu), borrowed = borrowedOf(gpu);
  const tenants = tenantsOf(gpu).map((tenant) => teamName(tenant[0]) + " " + percent(tenant[1]) + (tenant[3] & AWAY ? " (runs on another GPU)" : "") +
    (Math.abs(tenant[2] - tenant[1]) > 5 ? " and " + percent(tenant[2]) + " of memory" : ""));
  return node.name + ", " + deviceName(node.name, index) + ", " + fleet.models[gpu[0]] + ", " + gib(gpu[1]) + ": compute " + percent(share) + ", memory " + percent(memory) + " allocated" +
    (gpu[5] === null || gpu[5] === undefined ? "" : ", about " + (gpu[5] / 10).toFixed(0) + " % in use") + ". " +
    (wrong.length ? "Note: " + wrong.join(", ") + ". " : "") + (isFitting(node, index) ? "It would take your request. " : "") +
    (tenants.length ? count(tenants.length, "tenant", "tenants") + ": " + tenants.join("; ") + "." : guests.length ? "No tenant." : "Empty.") +
    (guests.length ? " " + count(guests.length, "guest runs", "guests run") + " here until another pod needs it: " + guests.map((guest) => teamName(guest[0]) + " " + percent(guest[1])).join("; ") + "." : "") +
    (borrowed.length ? " Memory above requests, which is given back when another pod needs it: " + borrowed.map((pod) => teamName(pod[0]) + " about " + percent(pod[2])).join("; ") + "." : "");
}

const HINT = "Point at a GPU, or Tab to the map and walk with the arrow keys. Enter or a click shows its pods.";

function nodeAt(at) { return at && map.groups[at.group] && map.groups[at.group].nodes[at.node]; }

export function showRing() {
  const ring = by("ring"), at = map.pointed && map.places.get(map.pointed.name);
  const node = at && map.groups[at[0]].nodes[at[1]], isThere = Boolean(node && map.pointed.gpu < node.gpus.length);
  ring.hidden = !isThere;
  by("pointed").textContent = isThere ? describe(node, map.pointed.gpu) : HINT;
  if (!isThere) return;
  const group = map.groups[at[0]], { x, y } = place(group, at[1], map.pointed.gpu);
  Object.assign(ring.style, { left: x - 4 + "px", top: y - 4 + "px", width: group.shape.w + 8 + "px", height: group.shape.h + 8 + "px" });
}

export function point(name, gpu) {
  map.pointed = name === null ? null : { name, gpu };
  showRing();
}

function pointAt(at) {
  const node = nodeAt(at);
  if (!node) return;
  if (!map.pointed || map.pointed.name !== node.name || map.pointed.gpu !== at.gpu) point(node.name, at.gpu);
}

function walk(event) {
  const known = map.pointed && map.places.get(map.pointed.name);
  let [group, node] = known || [0, 0], gpu = known ? map.pointed.gpu : -1;
  const all = map.groups, of = () => (all[group].nodes[node] ? all[group].nodes[node].gpus.length : 0);
  if (!all.length) return;
  const perRow = all[group].shape.perRow, columns = map.cells ? all[group].shape.columns : Infinity;
  const next = () => { if (node + 1 < all[group].nodes.length) node += 1; else if (group + 1 < all.length) { group += 1; node = 0; } else return false; return true; };
  const last = () => { if (node > 0) node -= 1; else if (group > 0) { group -= 1; node = all[group].nodes.length - 1; } else return false; return true; };
  switch (event.key) {
    case "ArrowRight": if (gpu + 1 < of()) gpu += 1; else if (next()) gpu = 0; break;
    case "ArrowLeft": if (gpu > 0) gpu -= 1; else if (last()) gpu = of() - 1; break;
    case "ArrowDown": if (gpu + columns < of()) gpu += columns; else if (node + perRow < all[group].nodes.length) { node += perRow; gpu %= columns; }
      else if (group + 1 < all.length) { group += 1; node = 0; } break;
    case "ArrowUp": if (gpu - columns >= 0) gpu -= columns; else if (node >= perRow) node -= perRow; else if (group > 0) { group -= 1; node = 0; } break;
    case "Home": group = 0; node = 0; gpu = 0; break;
    case "End": group = all.length - 1; node = all[group].nodes.length - 1; gpu = of() - 1; break;
    case "Enter": case " ": event.preventDefault(); if (known) map.onOpen(map.pointed.name, map.pointed.gpu); return;
    default: return;
  }
  event.preventDefault();
  pointAt({ group, node, gpu: Math.max(0, Math.min(Number.isFinite(gpu) ? gpu : 0, of() - 1)) });
}

export function start(onOpen) {
  map.onOpen = onOpen;
  const canvas = by("map");
  canvas.addEventListener("pointermove", (event) => { const at = hit(event); if (at) pointAt(at); });
  canvas.addEventListener("click", (event) => { const at = hit(event); if (at) { pointAt(at); onOpen(map.pointed.name, map.pointed.gpu); } });
  canvas.addEventListener("keydown", walk);
  canvas.addEventListener("focus", () => { if (!map.pointed && canvas.matches(":focus-visible")) pointAt({ group: 0, node: 0, gpu: 0 }); });
}

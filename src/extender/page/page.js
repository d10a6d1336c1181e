// The first page: asks v1/summary again and again and draws it. No data is ever written as markup.
"use strict";

const CELLS_ABOVE = 2000;   // GPUs from which one cell per GPU is drawn in place of a bar
const QUICK_MS = 2000;      // between two questions in a small fleet
const SLOW_MS = 10000;      // and in one of more than SLOW_ABOVE nodes
const SLOW_ABOVE = 500;
const TIMEOUT_MS = 15000;
const TEAM_COLOURS = 10;
const UNHEALTHY = 1, OVERBOOKED = 2, MIG_PARENT = 4;

const by = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const state = { summary: null, answered: 0, groups: [], pointed: null, teams: new Map() };

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

const percent = (millionths) => (millionths / 10000).toFixed(1) + " %";
const gib = (mib) => (mib / 1024).toFixed(mib < 10240 ? 1 : 0) + " GiB";
const count = (amount, one, many) => number.format(amount) + " " + (amount === 1 ? one : many);

function span(seconds) {
  if (seconds < 120) return seconds + " s";
  if (seconds < 7200) return Math.floor(seconds / 60) + " min";
  if (seconds < 172800) return Math.floor(seconds / 3600) + " h";
  return Math.floor(seconds / 86400) + " days";
}

// --- questions --------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error("it answers with status " + answer.status);
  return answer.json();
}

async function poll() {
  let pause = QUICK_MS;
  if (!document.hidden) {
    try {
      state.summary = await ask("v1/summary");
      state.answered = Date.now();
      show();
    } catch (error) {
      showUnreachable(error);
    }
    if (state.summary && state.summary.nodes.length > SLOW_ABOVE) pause = SLOW_MS;
  }
  setTimeout(poll, pause);
}

function showUnreachable(error) {
  const known = state.answered
    ? "The figures below are of " + new Date(state.answered).toLocaleTimeString() + " and no longer true."
    : "There are no figures yet.";
  const why = error instanceof TypeError ? "no connection" : error.name === "TimeoutError" ? "no answer in time" : error.message;
  alarm("gpupack cannot be reached (" + why + "). " + known + " Trying again.");
  by("live").textContent = "Not connected";
  by("page").classList.toggle("stale", state.answered > 0);
}

function alarm(text) {
  if (by("alarm").textContent !== text) by("alarm").textContent = text;
  by("alarm").classList.toggle("shown", text !== "");
}

// --- words and numbers ------------------------------------------------------------------------

function show() {
  const summary = state.summary;
  by("page").classList.remove("stale");
  alarm(summary.readiness === "ready" ? ""
    : summary.readiness === "not_listed" ? "gpupack is starting: pods and nodes are not listed yet, nothing is placed."
    : "gpupack is starting: " + count(summary.awaited_nodes, "node that holds pods has", "nodes that hold pods have") + " not reported yet.");
  by("live").textContent = "Live, version " + summary.version + ", as of " + new Date(state.answered).toLocaleTimeString();
  showTiles(summary);
  showWaiting(summary);
  showMap(summary);
}

function showTiles(summary) {
  const packing = summary.packing;
  const none = packing.devices === 0;
  const tiles = [
    ["Packing efficiency", none ? "–" : percent(packing.efficiency_millionths), "mean fullness of the GPUs in use"],
    ["Fragmentation", none ? "–" : percent(packing.fragmentation_millionths), "of free compute is of no use to typical pods"],
    ["Allocation", none ? "–" : percent(packing.allocation_millionths), "of all compute is booked"],
    ["GPUs in use", number.format(packing.occupied), number.format(packing.devices - packing.occupied) + " of " + number.format(packing.devices) + " are empty"],
    ["GPUs overbooked", number.format(packing.overbooked), packing.overbooked ? "hold more than they have" : "none holds more than it has", packing.overbooked ? "bad" : "good"],
    ["Pods waiting", number.format(summary.waiting), summary.waiting ? "no node fits them now" : "every pod has a place", "", "#waiting-title"],
  ];
  const held = by("tiles").contains(document.activeElement);
  by("tiles").replaceChildren(...tiles.map(([title, figure, sentence, mood, target]) => {
    const tile = make("div", undefined, "tile"), shown = make("dd", target ? undefined : figure, "number " + (mood || ""));
    if (target) {
      const link = make("a", figure);
      link.href = target;
      shown.append(link);
    }
    tile.append(make("dt", title), shown, make("dd", sentence, "soft small"));
    return tile;
  }));
  if (held) by("tiles").querySelector("a").focus();
}

function showWaiting(summary) {
  const rows = summary.waiting_pods.map((pod) => {
    const row = make("tr");
    row.append(make("td", pod.pod, "wide"), make("td", pod.asks), make("td", pod.reason),
      make("td", number.format(pod.nodes), "n"), make("td", span(pod.seconds), "n"));
    return row;
  });
  by("waiting").tBodies[0].replaceChildren(...rows);
  by("waiting").hidden = rows.length === 0;
  by("nobody").hidden = rows.length !== 0;
  const unnamed = summary.waiting - rows.length;
  by("waiting-note").textContent = unnamed > 0 ? "the first " + rows.length + " of " + number.format(summary.waiting) : "";
}

// --- the map ----------------------------------------------------------------------------------

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A team keeps its colour while the page is open.
function teamColour(position) {
  const name = state.summary.namespaces[position];
  if (!state.teams.has(name)) state.teams.set(name, state.teams.size);
  const place = state.teams.get(name);
  return place < TEAM_COLOURS ? "--team" + place : "--other";
}

function booked(gpu) {
  let share = 0, memory = 0;
  for (const tenant of gpu[4]) { share += tenant[1]; memory += tenant[2]; }
  return { share, memory, fullness: Math.max(share, memory) };
}

function grouped(summary) {
  const groups = new Map();
  for (const node of summary.nodes) {
    const title = node.gpus.length ? summary.models[node.gpus[0][0]] : "No GPU reported";
    if (!groups.has(title)) groups.set(title, []);
    groups.get(title).push(node);
  }
  return [...groups].sort((a, b) => a[0].localeCompare(b[0]));
}

function showMap(summary) {
  const gpus = summary.nodes.reduce((sum, node) => sum + node.gpus.length, 0);
  const cells = gpus > CELLS_ABOVE;
  [...summary.namespaces].sort().forEach((name) => { if (!state.teams.has(name)) state.teams.set(name, state.teams.size); });
  by("fleet-note").textContent = count(summary.nodes.length, "node", "nodes") + ", " + count(gpus, "GPU", "GPUs") + ". " +
    (cells ? "A cell is a GPU, a block of cells a node." : "A bar is a GPU: its left half is compute, its right half memory. Taller GPUs have more memory.");
  const groups = grouped(summary);
  const titles = groups.map(([title]) => title).join("\n") + cells;
  if (state.groups.titles !== titles) {
    by("map").replaceChildren();
    state.groups = groups.map(([title]) => addGroup(title));
    state.groups.titles = titles;
    state.pointed = null;
  }
  const largest = summary.nodes.reduce((most, node) => node.gpus.reduce((m, gpu) => Math.max(m, gpu[1]), most), 1);
  groups.forEach(([, nodes], at) => {
    const group = state.groups[at];
    Object.assign(group, { nodes, cells, largest });
    describe(group);
    layOut(group);
    draw(group);
  });
  showLegend(cells);
  if (state.pointed) tellPointed();
}

function addGroup(title) {
  const box = make("div", undefined, "group");
  const note = make("p", "", "soft small");
  const canvas = make("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "map of GPUs");
  box.append(make("h3", title), note, canvas);
  by("map").append(box);
  const group = { title, note, canvas, nodes: [] };
  canvas.addEventListener("pointermove", (event) => point(group, hit(group, event)));
  canvas.addEventListener("pointerleave", () => point(group, null));
  canvas.addEventListener("click", (event) => { point(group, hit(group, event)); openNode(); });
  canvas.addEventListener("keydown", (event) => walk(group, event));
  canvas.addEventListener("focus", () => { if (!state.pointed && canvas.matches(":focus-visible")) point(group, { node: 0, gpu: 0 }); });
  canvas.addEventListener("blur", () => point(group, null));
  return group;
}

function describe(group) {
  let gpus = 0, used = 0, sum = 0;
  for (const node of group.nodes) for (const gpu of node.gpus) {
    gpus += 1;
    used += gpu[4].length > 0;
    sum += Math.min(booked(gpu).share, 1000);
  }
  const silent = group.nodes.filter((node) => node.state !== "reporting").length;
  const text = count(group.nodes.length, "node", "nodes") + ", " + count(gpus, "GPU", "GPUs") +
    (gpus ? ", " + number.format(gpus - used) + " empty, " + (sum / gpus / 10).toFixed(0) + " % of compute booked" : "") +
    (silent ? ", " + count(silent, "node does", "nodes do") + " not report" : "");
  group.note.textContent = text;
  group.canvas.setAttribute("aria-label", group.title + ": " + text + ". Arrow keys walk through the GPUs.");
}

// Where everything is. Positions are worked out, never looked up: drawing and pointing agree.
function layOut(group) {
  const most = group.nodes.reduce((most, node) => Math.max(most, node.gpus.length), 1);
  const room = by("map").clientWidth || 1000;
  let shape;
  if (group.cells) {
    const cell = 5, columns = Math.min(4, most), rows = Math.ceil(most / columns);
    shape = { cell, columns, w: cell - 1, h: cell - 1, stepX: columns * cell + 4, stepY: rows * cell + 4, label: 0 };
  } else {
    const memory = group.nodes.length && group.nodes[0].gpus.length ? group.nodes[0].gpus[0][1] : 0;
    const h = Math.round(24 + 44 * Math.sqrt(memory / group.largest)), w = 15, label = 16;
    shape = { cell: w + 3, columns: most, w, h, stepX: Math.max(most * (w + 3) + 18, 96), stepY: h + label + 10, label };
  }
  shape.perRow = Math.max(1, Math.floor(room / shape.stepX));
  group.shape = shape;
  const width = Math.min(room, Math.min(group.nodes.length, shape.perRow) * shape.stepX + 4);
  const height = Math.ceil(group.nodes.length / shape.perRow) * shape.stepY + 4;
  const scale = window.devicePixelRatio || 1;
  const [pixelsX, pixelsY] = [Math.round(width * scale), Math.round(height * scale)];
  if (group.canvas.width !== pixelsX || group.canvas.height !== pixelsY) {
    group.canvas.width = pixelsX;
    group.canvas.height = pixelsY;
    group.canvas.style.width = width + "px";
    group.canvas.style.height = height + "px";
  }
}

function place(shape, node, gpu) {
  return {
    x: 2 + (node % shape.perRow) * shape.stepX + (gpu % shape.columns) * shape.cell,
    y: 2 + Math.floor(node / shape.perRow) * shape.stepY + Math.floor(gpu / shape.columns) * shape.cell,
  };
}

function hit(group, event) {
  const shape = group.shape, box = group.canvas.getBoundingClientRect();
  const x = event.clientX - box.left - 2, y = event.clientY - box.top - 2;
  const column = Math.floor(x / shape.stepX), row = Math.floor(y / shape.stepY);
  if (x < 0 || y < 0 || column >= shape.perRow) return null;
  const at = row * shape.perRow + column, node = group.nodes[at];
  if (!node) return null;
  const inX = Math.floor((x - column * shape.stepX) / shape.cell);
  const inY = group.cells ? Math.floor((y - row * shape.stepY) / shape.cell) : 0;
  if (inX >= shape.columns) return null;
  const gpu = inY * shape.columns + inX;
  return gpu < node.gpus.length ? { node: at, gpu } : null;
}

function fillName(fullness) {
  return fullness <= 0 ? "--track" : "--fill" + Math.min(5, Math.max(1, Math.ceil(fullness / 200)));
}

function draw(group) {
  const pen = group.canvas.getContext("2d");
  const scale = window.devicePixelRatio || 1;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, group.canvas.width, group.canvas.height);
  if (group.cells) drawCells(group, pen); else drawBars(group, pen);
  const pointed = state.pointed;
  if (pointed && pointed.group === group && group.nodes[pointed.node]) {
    const { x, y } = place(group.shape, pointed.node, pointed.gpu);
    pen.strokeStyle = colour("--focus");
    pen.lineWidth = 2;
    pen.strokeRect(x - 1.5, y - 1.5, group.shape.w + 3, group.shape.h + 3);
  }
}

// One pass per colour: 40,000 changes of colour would take longer than all else.
function drawCells(group, pen) {
  const shape = group.shape, batches = new Map();
  group.nodes.forEach((node, at) => node.gpus.forEach((gpu, index) => {
    const name = gpu[2] & OVERBOOKED ? "--bad"
      : gpu[2] & UNHEALTHY || node.state !== "reporting" ? "--other" : fillName(booked(gpu).fullness);
    if (!batches.has(name)) batches.set(name, []);
    batches.get(name).push(place(shape, at, index));
  }));
  for (const [name, places] of batches) {
    pen.fillStyle = colour(name);
    for (const { x, y } of places) pen.fillRect(x, y, shape.w, shape.h);
  }
}

function drawBars(group, pen) {
  const shape = group.shape;
  const ink = { track: colour("--track"), edge: colour("--edge"), soft: colour("--soft"), bad: colour("--bad"), card: colour("--card"), other: colour("--other") };
  const teams = state.summary.namespaces.map((_, position) => colour(teamColour(position)));
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "top";
  group.nodes.forEach((node, at) => {
    node.gpus.forEach((gpu, index) => drawBar(pen, shape, place(shape, at, index), gpu, ink, teams));
    const { x, y } = place(shape, at, 0);
    const isWell = node.state === "reporting";
    pen.fillStyle = isWell ? ink.soft : ink.bad;
    const name = isWell ? node.name : node.name + " (" + node.state.replace("_", " ") + ")";
    pen.fillText(name, x, y + shape.h + 4, shape.stepX - 8);
  });
}

function drawBar(pen, shape, { x, y }, gpu, ink, teams) {
  const half = shape.w / 2;
  pen.fillStyle = ink.track;
  pen.fillRect(x, y, shape.w, shape.h);
  const top = [0, 0];
  for (const tenant of gpu[4]) {
    [tenant[1], tenant[2]].forEach((part, side) => {
      const from = y + shape.h * (1 - Math.min(1, top[side] / 1000));
      top[side] += part;
      const to = y + shape.h * (1 - Math.min(1, top[side] / 1000));
      pen.globalAlpha = tenant[3] ? 0.4 : 1;
      pen.fillStyle = teams[tenant[0]];
      pen.fillRect(x + side * half, to + 1, half, Math.max(0, from - to - 1));
    });
  }
  pen.globalAlpha = 1;
  if (gpu[3] > 0) {
    const from = shape.h * (1 - Math.min(1, top[1] / 1000)), high = shape.h * Math.min(1, gpu[3] / 1000);
    pen.fillStyle = ink.bad;
    for (let line = 0; line < high; line += 4) pen.fillRect(x + half, y + from - line - 2, half, 2);
  }
  if (gpu[2] & (UNHEALTHY | MIG_PARENT)) {
    pen.strokeStyle = gpu[2] & UNHEALTHY ? ink.bad : ink.edge;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x, y); pen.lineTo(x + shape.w, y + shape.h);
    pen.moveTo(x + shape.w, y); pen.lineTo(x, y + shape.h);
    pen.stroke();
  }
  if (gpu[2] & OVERBOOKED) {
    pen.strokeStyle = ink.bad;
    pen.lineWidth = 2;
    pen.strokeRect(x, y, shape.w, shape.h);
  }
}

function showLegend(cells) {
  const entries = cells
    ? [["empty", "--track"], ["up to 20 % full", "--fill1"], ["40 %", "--fill2"], ["60 %", "--fill3"], ["80 %", "--fill4"], ["100 %", "--fill5"],
      ["unhealthy, or its node does not report", "--other"], ["overbooked", "--bad"]]
    : [...[...state.teams].filter(([, place]) => place < TEAM_COLOURS).map(([name, place]) => [name || "unknown namespace", "--team" + place]),
      ...(state.teams.size > TEAM_COLOURS ? [["other namespaces", "--other"]] : []), ["free", "--track"], ["pale: pod ended, its processes may not have", null]];
  const key = JSON.stringify(entries) + matchMedia("(prefers-color-scheme: dark)").matches;
  if (state.legend === key) return;
  state.legend = key;
  by("legend").replaceChildren(...entries.map(([text, name]) => {
    const item = make("li");
    if (name) {
      const swatch = make("canvas");
      swatch.width = swatch.height = 1;
      swatch.setAttribute("aria-hidden", "true");
      swatch.getContext("2d").fillStyle = colour(name);
      swatch.getContext("2d").fillRect(0, 0, 1, 1);
      item.append(swatch);
    }
    item.append(make("span", text));
    return item;
  }));
}

// --- pointing ---------------------------------------------------------------------------------

const HINT = by("pointed").textContent;

function point(group, at) {
  const before = state.pointed;
  if (!at && (!before || before.group !== group)) return;
  if (at && before && before.group === group && before.node === at.node && before.gpu === at.gpu) return;
  state.pointed = at ? { group, ...at } : null;
  if (before && before.group !== group) draw(before.group);
  draw(group);
  tellPointed();
}

function tellPointed() {
  const pointed = state.pointed;
  const node = pointed && pointed.group.nodes[pointed.node], gpu = node && node.gpus[pointed.gpu];
  if (!gpu) { by("pointed").textContent = HINT; return; }
  const { share, memory } = booked(gpu);
  const tenants = gpu[4].map((tenant) => (state.summary.namespaces[tenant[0]] || "?") + " " + tenant[1] / 10 + " %" +
    (tenant[2] !== tenant[1] ? " and " + tenant[2] / 10 + " % of memory" : "") + (tenant[3] ? " (ended)" : ""));
  by("pointed").textContent = node.name + ", GPU " + pointed.gpu + ", " + state.summary.models[gpu[0]] + ", " + gib(gpu[1]) + ": " +
    "compute " + share / 10 + " % and memory " + memory / 10 + " % booked. " +
    (gpu[2] & OVERBOOKED ? "Overbooked. " : "") + (gpu[2] & UNHEALTHY ? "Unhealthy. " : "") + (gpu[2] & MIG_PARENT ? "Cut into MIG instances. " : "") +
    (gpu[3] ? gpu[3] / 10 + " % of memory is used by nobody that is booked. " : "") +
    (node.state !== "reporting" ? "Node: " + node.state.replace("_", " ") + ". " : "") +
    (tenants.length ? count(tenants.length, "tenant", "tenants") + ": " + tenants.join("; ") : "Empty.");
}

function walk(group, event) {
  const at = state.pointed && state.pointed.group === group ? state.pointed : { node: 0, gpu: 0 };
  let { node, gpu } = at;
  const of = (index) => (group.nodes[index] ? group.nodes[index].gpus.length : 0);
  switch (event.key) {
    case "ArrowRight": if (gpu + 1 < of(node)) gpu += 1; else if (of(node + 1)) { node += 1; gpu = 0; } break;
    case "ArrowLeft": if (gpu > 0) gpu -= 1; else if (node > 0 && of(node - 1)) { node -= 1; gpu = of(node) - 1; } break;
    case "ArrowDown": if (group.nodes[node + group.shape.perRow]) node += group.shape.perRow; break;
    case "ArrowUp": if (node >= group.shape.perRow) node -= group.shape.perRow; break;
    case "Home": node = 0; gpu = 0; break;
    case "End": node = group.nodes.length - 1; gpu = 0; break;
    case "Enter": case " ": event.preventDefault(); openNode(); return;
    default: return;
  }
  event.preventDefault();
  point(group, { node, gpu: Math.min(gpu, Math.max(0, of(node) - 1)) });
}

async function openNode() {
  const pointed = state.pointed;
  if (!pointed) return;
  const name = pointed.group.nodes[pointed.node].name;
  by("node-title").textContent = name;
  by("node-note").textContent = "Asking …";
  by("node-rows").replaceChildren();
  by("node").showModal();
  try {
    const node = await ask("v1/state?node=" + encodeURIComponent(name));
    by("node-note").textContent = node.state.replace("_", " ") + ", " + (node.free_cpu_milli / 1000).toFixed(1) + " cores and " + gib(node.free_memory_mib) + " of main memory free";
    by("node-rows").replaceChildren(...node.devices.flatMap(deviceRows));
  } catch (error) {
    by("node-note").textContent = "gpupack cannot be reached: " + error.message;
  }
}

function deviceRows(device) {
  const title = device.index + ": " + device.model + (device.profile ? " " + device.profile : "") + ", " + gib(device.capacity_mib) + (device.healthy ? "" : ", unhealthy" + (device.ailment ? " (" + device.ailment + (device.ailment === "xid" ? " " + device.last_xid : "") + ")" : "")) + (device.overbooked ? ", overbooked" : "");
  const row = (cells) => {
    const line = make("tr");
    cells.forEach(([text, className]) => line.append(make("td", text, className)));
    return line;
  };
  const rows = device.tenants.map((tenant, at) => row([[at ? "" : title], [tenant.pod, "wide"], [percent(tenant.share_millionths), "n"],
    [number.format(tenant.memory_mib) + " MiB", "n"], [tenant.state]]));
  const free = row([[rows.length ? "" : title], ["free", "soft"], [percent(device.free_share_millionths), "n"], [number.format(device.free_mib) + " MiB", "n"], [""]]);
  return [...rows, free];
}

// --- start ------------------------------------------------------------------------------------

const redraw = () => { if (state.summary) showMap(state.summary); };
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
poll();

// The page: the user's choices (kept in the address, so that it can be shared), and who draws them.
import { because, by, count, fetchJson, make, number, setText } from "./words.js";
import { apply, devices, fleet, groups, load, SORTS, tally, titles } from "./fleet.js";
import { listen } from "./stream.js";
import * as map from "./map.js";
import * as lists from "./lists.js";
import * as drawer from "./drawer.js";
import { showTrend, start as startTrend } from "./trend.js";
import * as waste from "./waste.js";

const CHOICES = { sort: "name", colors: "", model: "", namespace: "", request: "", view: "map", open: "" };
const chosen = { ...CHOICES };
const typing = { timer: 0 }; // runs while a typed request is not applied yet

// --- the address ------------------------------------------------------------------------------

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(CHOICES)) chosen[name] = given.get(name) ?? CHOICES[name];
  if (!Object.hasOwn(SORTS, chosen.sort)) chosen.sort = CHOICES.sort;
  if (!Object.hasOwn(map.COLORS, chosen.colors)) chosen.colors = "";
}

function writeAddress() {
  const set = new URLSearchParams(Object.entries(chosen).filter(([name, value]) => value !== CHOICES[name]));
  const address = "#" + set.toString();
  if (location.hash !== address && !(address === "#" && location.hash === "")) history.replaceState(null, "", address === "#" ? location.pathname + location.search : address);
}

function choose(changes) {
  const before = { ...chosen };
  Object.assign(chosen, changes);
  writeAddress();
  showControls();
  if (before.request !== chosen.request || before.open !== chosen.open && (waiting(before.open) || waiting(chosen.open))) fetchFit();
  if (before.sort !== chosen.sort && chosen.sort === "fragmented") fetchFragmentation();
  waste.choose(chosen.namespace);
  showFleet();
}

// --- controls ---------------------------------------------------------------------------------

function fillSelect(select, options, value) {
  const key = JSON.stringify(options);
  if (select.dataset.key !== key) {
    select.dataset.key = key;
    select.replaceChildren(...options.map(([name, text]) => Object.assign(make("option", text), { value: name })));
  }
  select.value = value;
}

function showControls() {
  fillSelect(by("sort"), Object.entries(SORTS).map(([name, [text]]) => [name, text]), chosen.sort);
  fillSelect(by("colors"), [["", "automatic"], ...Object.entries(map.COLORS)], chosen.colors);
  fillSelect(by("model"), [["", "all models"], ...titles().map((title) => [title, title])], chosen.model);
  if (!typing.timer && document.activeElement !== by("request")) by("request").value = chosen.request;
  by("namespace").hidden = chosen.namespace === "";
  setText(by("namespace-name"), "Only namespace " + chosen.namespace);
  const isTable = chosen.view === "table";
  setText(by("view"), isTable ? "Show as map" : "Show as table");
  by("view").setAttribute("aria-pressed", String(isTable));
  by("map-box").hidden = by("pointed").hidden = by("legend").hidden = isTable;
  by("table-box").hidden = !isTable;
}

function isBig() {
  let gpus = 0;
  for (const node of fleet.nodes.values()) gpus += node.gpus.length;
  return gpus > map.CELLS_ABOVE;
}

function showFleet() {
  if (!fleet.figures) return;
  const shown = groups(chosen.sort, chosen.model), nodes = shown.flatMap((group) => group.nodes);
  const found = tally(nodes), each = found.instances ? "GPU or a MIG instance" : "GPU";
  const colors = chosen.colors || (isBig() ? "full" : "team");
  if (chosen.view === "table") lists.showTable(nodes, chosen.namespace, openGpu);
  else {
    map.layOut(shown, colors, chosen.namespace);
    map.showLegend((namespace) => choose({ namespace }));
  }
  setText(by("fleet-note"), !nodes.length ? "No node with GPUs is known" + (fleet.figures.readiness === "Ready" ? ": nodes appear here once their agent reports." : " yet.")
    : count(nodes.length, "node", "nodes") + ", " + devices(found) + ". " + (chosen.view === "table" ? ""
      : map.isCells() ? "A cell is a " + each + ", a block a node." : "A bar is a " + each + ": left half compute, right half memory. Taller ones have more memory."));
}

// --- would it fit? ----------------------------------------------------------------------------

// "2 × 0.25 16Gi H100" in the words of /v1/fit.
function queryOf(text) {
  const query = {}, model = [];
  let rest = text.trim().replaceAll(",", " ");
  rest = rest.replace(/^(\d+)\s*[x×*]\s*/i, (_, times) => { query.count = times; return ""; });
  for (const word of rest.split(/\s+/).filter(Boolean)) {
    if (/^\d+(\.\d+)?%$/.test(word)) query.fraction = String(Number((parseFloat(word) / 100).toFixed(6)));
    else if (/^\d*\.?\d+(Ki|Mi|Gi|Ti|[kKMGT])i?B?$/.test(word)) query.memory = word.replace(/B$/, "");
    else if (/^\d*\.?\d+$/.test(word) && !("fraction" in query)) query.fraction = word;
    else if (/^\d+g\.\d+gb/i.test(word)) query.mig = word;
    else if (!/^(gpus?|whole|on|with|and)$/i.test(word)) model.push(word);
  }
  const whole = Number(query.fraction);
  if (Number.isInteger(whole) && whole > 1 && !query.count) [query.count, query.fraction] = [query.fraction, "1"];
  if (query.count && !query.fraction && !query.memory && !query.mig) query.fraction = "1";
  if (model.length) query.model = model.join(" ");
  return new URLSearchParams(query).toString();
}

const fit = { turn: 0, sent: 0, timer: 0 };

// The open pod, if it waits.
function waiting(open) {
  const named = fleet.figures && open.startsWith("pod:") ? open.slice(4) : "";
  return named && fleet.figures.waitingPods.some((pod) => pod.pod === named) ? named : "";
}

// The query for /v1/fit: the typed request, or else that of the open waiting pod.
function requested() {
  if (chosen.request.trim() !== "") return queryOf(chosen.request);
  const pod = waiting(chosen.open);
  return pod && new URLSearchParams({ pod }).toString();
}

// The devices on which it fits, in words. The server has counted them without their kind.
function fitting(found) {
  const nodes = Object.entries(found.gpusByNode).map(([name, indexes]) => [fleet.nodes.get(name), indexes]).filter(([node]) => node);
  const kinds = tally(nodes.map(([node, indexes]) => ({ state: node.state, gpus: indexes.map((index) => node.gpus[index]).filter(Boolean) })));
  return kinds.gpus + kinds.instances === found.gpus ? devices(kinds) : count(found.gpus, "GPU", "GPUs");
}

async function fetchFit() {
  const note = by("request-note"), turn = (fit.turn += 1);
  const isTyped = chosen.request.trim() !== "", search = requested();
  if (!search) {
    fleet.fits = null;
    note.textContent = "";
    by("request").classList.remove("refused");
    by("request").removeAttribute("aria-invalid");
    return showFleet();
  }
  fit.sent = Date.now();
  try {
    const found = await fetchJson("v1/fit?" + search);
    if (turn !== fit.turn) return;
    // Node names may be any text, so no prototype. For a pod that fits nowhere nothing is dimmed.
    fleet.fits = isTyped || found.gpus ? Object.assign(Object.create(null), found.gpusByNode) : null;
    note.className = "small";
    setText(note, found.gpus ? found.request + (isTyped ? "" : ", as " + waiting(chosen.open) + " requests,") + " would fit now on " + fitting(found) + " of " + count(found.nodes, "node", "nodes") + (found.gpus === 1 ? ": it is lit." : ": they are lit.")
      : found.request + " fits nowhere now.");
    by("request").classList.remove("refused");
    by("request").removeAttribute("aria-invalid");
  } catch (error) {
    if (turn !== fit.turn) return;
    fleet.fits = null;
    if (!isTyped) { note.textContent = ""; return showFleet(); } // the pod no longer waits
    note.className = "small bad";
    setText(note, because(error));
    by("request").classList.add("refused");
    by("request").setAttribute("aria-invalid", "true");
  }
  showFleet();
}

async function fetchFragmentation() {
  try {
    fleet.fragmented = (await fetchJson("v1/fragmentation")).shareMillionthsByNode;
    showFleet();
  } catch { /* the next round tries again; the page shows the connection elsewhere */ }
}

// The fleet has changed: repeats the queries about it, at a limited rate.
function fetchAgain() {
  const pause = isBig() ? 5000 : 2000;
  if (fit.timer || (!requested() && chosen.sort !== "fragmented")) return;
  fit.timer = setTimeout(() => {
    fit.timer = 0;
    if (requested()) fetchFit();
    if (chosen.sort === "fragmented") fetchFragmentation();
  }, Math.max(0, fit.sent + pause - Date.now()));
}

// --- opening ----------------------------------------------------------------------------------

function openGpu(name, index) {
  map.point(name, index);
  choose({ open: "gpu:" + name + "/" + index });
  return drawer.showGpu(name, index, openPod);
}

function openPod(pod) {
  choose({ open: "pod:" + pod });
  return drawer.showPod(pod, openNode);
}

function openNode(name, index = 0) {
  if (chosen.model !== "") choose({ model: "" });
  return openGpu(name, index);
}

function openChosen() {
  const [kind, rest] = [chosen.open.slice(0, 4), chosen.open.slice(4)], slash = rest.lastIndexOf("/");
  if (kind === "gpu:" && fleet.nodes.has(rest.slice(0, slash))) openGpu(rest.slice(0, slash), Number(rest.slice(slash + 1)) || 0);
  else if (kind === "pod:") openPod(rest);
}

// Shows the GPU itself to a user at the foot of the page.
function findGpu(name, index) {
  const found = openNode(name, index);
  by("fleet-title").scrollIntoView({ block: "start" });
  return found;
}

const showSorted = (sort) => choose({ sort, view: "map" });

// --- the state of the connection --------------------------------------------------------------

function showState(kind, words, fault) {
  by("live").className = "live " + kind;
  setText(by("live"), words + (kind === "good" ? ", version " + fleet.version : ""));
  by("page").classList.toggle("stale", kind === "bad" && fleet.loaded > 0);
  const readiness = fleet.figures ? fleet.figures.readiness : "Ready";
  const text = fault
    ? "gpupack cannot be reached (" + fault + "). " + (fleet.loaded ? "What you see is as of " + lists.asOf(fleet.heardAt) + " and may be out of date." : "There are no figures yet.") + " Trying again."
    : readiness === "NotListed" ? "gpupack is starting: pods and nodes are not listed yet, nothing is placed."
    : readiness === "AwaitingReports" ? "gpupack is starting: " + count(fleet.figures.awaitedNodes, "node that holds pods has", "nodes that hold pods have") + " not reported yet." : "";
  setText(by("alarm"), text);
  by("alarm").classList.toggle("shown", text !== "");
  if (fleet.figures) {
    lists.showTiles(showSorted);
    lists.showWaiting(openPod);
    lists.showRooms(openPod);
    lists.showTeams();
  }
}

const frame = { due: false, all: false, changed: new Set() };

// Combines many changes into one drawing.
function drawSoon(changed, isAll) {
  frame.all ||= isAll;
  changed.forEach((name) => frame.changed.add(name));
  if (frame.due) return;
  frame.due = true;
  requestAnimationFrame(() => {
    const isSorted = chosen.sort !== "name" || chosen.view === "table";
    if (frame.all || isSorted || !map.isCells()) { showControls(); showFleet(); } else if (frame.changed.size) {
      map.refreshNodes(frame.changed);
      map.draw(frame.changed);
    }
    showTrend();
    Object.assign(frame, { due: false, all: false, changed: new Set() });
  });
}

listen({
  load(snapshot) {
    const isFirst = fleet.loaded === 0;
    performance.mark("snapshot");
    load(snapshot);
    if (isFirst) {
      showControls();
      showFleet();
      showTrend();
      performance.mark("interactive");
      document.documentElement.dataset.ready = "yes";
      if (requested()) fetchFit();
      if (chosen.sort === "fragmented") fetchFragmentation();
      openChosen();
      waste.choose(chosen.namespace);
      waste.start({ pod: openPod, gpu: findGpu }, () => lists.showTiles(showSorted));
    } else {
      drawSoon([], true);
      fetchAgain();
    }
  },
  apply(delta) {
    const { changed, isOther } = apply(delta);
    drawSoon(changed, isOther || Boolean(delta.namespaces));
    if (changed.size) fetchAgain();
    const [kind, rest] = [drawer.shown().slice(0, 4), drawer.shown().slice(4)], slash = rest.lastIndexOf("/");
    if (kind === "gpu:" && changed.has(rest.slice(0, slash))) drawer.showGpu(rest.slice(0, slash), Number(rest.slice(slash + 1)), openPod);
  },
  state: showState,
});

readAddress();
showControls();
map.start(openGpu);
startTrend();
drawer.start(() => choose({ open: "" }));
lists.startSearch({
  node: openNode,
  namespace: (namespace) => choose({ namespace }),
  pod: (pod) => (pod.node === undefined ? openPod(pod.pod) : openGpu(pod.node, pod.gpus[0] ?? 0)),
});
by("sort").addEventListener("change", (event) => choose({ sort: event.target.value }));
by("colors").addEventListener("change", (event) => choose({ colors: event.target.value }));
by("model").addEventListener("change", (event) => choose({ model: event.target.value }));
by("namespace-off").addEventListener("click", () => choose({ namespace: "" }));
by("view").addEventListener("click", () => choose({ view: chosen.view === "table" ? "map" : "table" }));
for (const [id, pages] of [["before", -1], ["after", 1]]) by(id).addEventListener("click", () => { lists.turn(pages); showFleet(); });
function takeRequest() {
  clearTimeout(typing.timer);
  typing.timer = 0;
  choose({ request: by("request").value });
}
by("request").addEventListener("input", () => { clearTimeout(typing.timer); typing.timer = setTimeout(takeRequest, 250); });
by("request").addEventListener("change", takeRequest); // Enter, or leaving the field: at once
document.addEventListener("keydown", (event) => { // a letter on the map or in the table only
  if (event.key.toLowerCase() !== "t" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.activeElement !== by("map") && !by("table-box").contains(document.activeElement)) return;
  choose({ view: chosen.view === "table" ? "map" : "table" });
  (chosen.view === "table" ? by("gpus-scroll") : by("map")).focus();
});
by("gpus-scroll").tabIndex = 0;
window.addEventListener("hashchange", () => { if (location.hash.length > 1 && !location.hash.includes("=")) return; const before = chosen.open; readAddress(); showControls(); waste.choose(chosen.namespace); fetchFit(); if (chosen.open !== before) openChosen(); });
let wide = 0;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width === wide || chosen.view !== "map") return;
  wide = entry.contentRect.width;
  showFleet();
}).observe(by("map-box"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { map.forgetColors(); showFleet(); });

// The text parts: the headline, the waiting pods, the table of GPUs, the search results.
import { because, button, by, clock, count, fetchJson, gib, gpus, make, number, percent, setText, share, span } from "./words.js";
import { allocated, deviceName, devices, faults, fleet, isFitting, tally, teamName, BORROWED, GUEST } from "./fleet.js";
import { drawing, reclaimable } from "./waste.js";

const ROWS = 50;
const amount = (millionths) => (millionths / 1e6).toLocaleString("en", { maximumFractionDigits: 2 });

// --- headline ---------------------------------------------------------------------------------

function tileTexts(figures) {
  const packing = figures.packing, none = packing.devices === 0;
  const found = tally(fleet.nodes.values()), part = found.gpus ? " (" + (100 * found.emptyGpus / found.gpus).toFixed(0) + " %)" : "";
  const instances = found.instances ? "; " + number.format(found.emptyInstances) + " of " + count(found.instances, "MIG instance is", "MIG instances are") + " empty" : "";
  const wait = figures.waiting ? "the longest for " + span(figures.longestWaitSeconds + (Date.now() - fleet.figuresAt) / 1000) : "every pod is placed";
  const tiles = [
    ["Packing efficiency", packing.occupied === 0 ? "–" : share(packing.efficiencyMillionths), packing.occupied ? "mean fullness of the " + count(packing.occupied, found.instances ? "device" : "GPU", found.instances ? "GPUs and MIG instances" : "GPUs") + " in use; " + share(packing.allocationMillionths) + " of all compute is allocated" : "no GPU is in use"],
    ["Stranded", none ? "–" : gpus(figures.fragmentedShareMillionths) + " GPUs", none ? "no GPU is known" : share(packing.fragmentationMillionths) + " of the free compute cannot be used by typical requests", "", "sort=fragmented"],
    ["GPUs empty", none ? "–" : number.format(found.emptyGpus), none ? "no GPU is known" : "of " + number.format(found.gpus) + part + ": free for whole-GPU pods" + instances, "", "sort=empty"],
    ["Pods waiting", number.format(figures.waiting), wait, "", "#waiting-title"],
  ];
  const wasted = reclaimable();
  if (wasted) tiles.push(["Held without need", gpus(wasted.reclaimable.shareMillionths) + " GPUs", "of compute and " + gib(wasted.reclaimable.memoryMib) + " of memory; " + count(wasted.idlePods, "pod is", "pods are") + " idle", "", "#waste-title"]);
  if (packing.overallocated) tiles.push(["GPUs overallocated", number.format(packing.overallocated), "more is allocated than they have: nothing more is placed there", "bad", "sort=trouble"]);
  return tiles;
}

// `sort` is called with the order of a clicked tile.
export function showTiles(sort) {
  const texts = fleet.figures ? tileTexts(fleet.figures) : [], box = by("tiles");
  const key = texts.map(([title]) => title).join();
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.replaceChildren(...texts.map(([title, , , , target]) => {
      const tile = make("div", undefined, "tile"), figure = make("dd", undefined, "number");
      const shown = target ? make("a") : make("span");
      if (target) {
        shown.href = target.startsWith("#") ? target : "#fleet-title";
        shown.addEventListener("click", (event) => {
          event.preventDefault();
          if (!target.startsWith("#")) sort(target.split("=")[1]);
          const title = by(target.startsWith("#") ? target.slice(1) : "fleet-title");
          title.focus({ preventScroll: true });
          title.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
        });
      }
      figure.append(shown);
      tile.append(make("dt", title), figure, make("dd", "", "soft small"));
      return tile;
    }));
  }
  texts.forEach(([, figure, sentence, mood], at) => {
    const [, shown, said] = box.children[at].children;
    setText(shown.firstChild, figure);
    setText(said, sentence);
    shown.className = "number " + (mood || "");
  });
}

// --- waiting pods -----------------------------------------------------------------------------

let waitingKey = "";

// `open` is called with a chosen pod.
export function showWaiting(open) {
  const figures = fleet.figures, passed = (Date.now() - fleet.figuresAt) / 1000, table = by("waiting");
  const key = JSON.stringify(figures.waitingPods.map((pod) => [pod.pod, pod.request, pod.reason, pod.nodes, pod.suggestion]));
  if (key !== waitingKey) {
    waitingKey = key;
    const held = document.activeElement && document.activeElement.dataset.pod;
    table.tBodies[0].replaceChildren(...figures.waitingPods.map((pod) => {
      const row = make("tr"), name = make("td", undefined, "wide"), why = make("td", pod.reason, "wide");
      const choose = button(pod.pod, () => open(pod.pod), "plain");
      choose.dataset.pod = pod.pod;
      name.append(choose);
      if (pod.nodes) why.append(make("span", " on " + count(pod.nodes, "node", "nodes"), "soft"));
      if (typeof pod.suggestion === "string" && pod.suggestion) why.append(make("span", pod.suggestion, "suggestion"));
      row.append(name, make("td", pod.request, "wide"), make("td", "", "n"), why);
      return row;
    }));
    if (held) [...table.querySelectorAll("button")].find((it) => it.dataset.pod === held)?.focus();
  }
  figures.waitingPods.forEach((pod, at) => setText(table.tBodies[0].rows[at].cells[2], span(pod.ageSeconds + passed)));
  table.hidden = figures.waitingPods.length === 0;
  by("waiting-scroll").tabIndex = table.hidden ? -1 : 0;
  by("nobody").hidden = !table.hidden;
  setText(by("nobody"), figures.readiness === "Ready" ? "No pod waits for a GPU." : "It is not known yet which pods wait: gpupack is starting.");
  const unnamed = figures.waiting - figures.waitingPods.length;
  setText(by("waiting-note"), unnamed > 0 ? "the first " + figures.waitingPods.length + " of " + number.format(figures.waiting) + " by priority and age" : "by priority, then age");
}

// --- kept room --------------------------------------------------------------------------------

const KEPT = { FirstOfLine: "it has waited longest in its line", PodsLeave: "other pods leave for it", Group: "its group starts together" };
let roomsKey = "";

// `open` is called with a chosen pod.
export function showRooms(open) {
  const rooms = fleet.figures.keptRooms, key = JSON.stringify(rooms);
  by("rooms-section").hidden = rooms.length === 0;
  if (key === roomsKey) return;
  roomsKey = key;
  by("rooms").tBodies[0].replaceChildren(...rooms.map((room) => {
    const row = make("tr"), name = make("td", undefined, "wide");
    name.append(button(room.pod, () => open(room.pod), "plain"));
    const lacks = room.lacksMillionths ? amount(room.lacksMillionths) + (room.lacksMillionths > 1e6 ? " GPUs" : " GPU") : "nothing: the pod is about to be bound";
    row.append(name, make("td", room.node, "wide"), make("td", lacks, "n"), make("td", KEPT[room.reason] ?? room.reason, "wide"));
    return row;
  }));
}

// --- teams --------------------------------------------------------------------------------------

let teamsKey = "";

// What is guaranteed as a pale bar, what the team has as a dark bar in it, and a line at its limit.
function teamBar(team, most) {
  const wide = (millionths) => 100 * millionths / most;
  const rects = [["held", 0, wide(team.guaranteedMillionths), 0, 10], ["used", 0, wide(team.usedMillionths), 3, 4]];
  if (team.atMostMillionths !== undefined) rects.push(["enough", wide(team.atMostMillionths) - 1.5, 1.5, 0, 10]);
  return drawing(rects);
}

export function showTeams() {
  const teams = fleet.figures.teams, key = JSON.stringify(teams);
  by("teams-section").hidden = teams.length === 0;
  if (key === teamsKey) return;
  teamsKey = key;
  const most = Math.max(1, ...teams.map((team) => Math.max(team.guaranteedMillionths, team.usedMillionths, team.atMostMillionths ?? 0)));
  by("teams").tBodies[0].replaceChildren(...teams.map((team) => {
    const row = make("tr"), drawn = make("td", undefined, "bar"), isOwed = team.waiting > 0 && team.usedMillionths < team.guaranteedMillionths;
    drawn.append(teamBar(team, most));
    row.append(make("td", team.team, "wide"), make("td", amount(team.guaranteedMillionths), "n"),
      make("td", team.atMostMillionths === undefined ? "no limit" : amount(team.atMostMillionths), "n"), make("td", amount(team.usedMillionths), "n"),
      make("td", amount(team.overQuotaMillionths), "n"), make("td", number.format(team.pods), "n"), make("td", number.format(team.waiting), isOwed ? "n warn" : "n"), drawn);
    return row;
  }));
  const over = teams.reduce((sum, team) => sum + team.overQuotaMillionths, 0);
  setText(by("teams-note"), "in GPUs; " + (over ? amount(over) + " over quota: a team within its guarantee may get these back" : "no team is over quota") + ". The line is the limit.");
}

// --- the table of GPUs ------------------------------------------------------------------------

const rows = { from: 0 };

export function turn(pages) { rows.from = pages === 0 ? 0 : rows.from + pages * ROWS; }

export function showRow(at) { rows.from = Math.floor(at / ROWS) * ROWS; }

// `nodes` are in the order of the map; `open` is called with a chosen GPU.
export function showTable(nodes, namespace, open) {
  const isShown = (gpu) => namespace === "" || gpu[4].some((tenant) => fleet.namespaces[tenant[0]] === namespace);
  const all = nodes.flatMap((node) => node.gpus.flatMap((gpu, index) => (isShown(gpu) && (fleet.fits === null || isFitting(node, index)) ? [[node, gpu, index]] : [])));
  rows.from = Math.max(0, Math.min(rows.from, Math.floor((all.length - 1) / ROWS) * ROWS));
  const held = document.activeElement && document.activeElement.dataset.gpu;
  const body = by("gpus").tBodies[0];
  body.replaceChildren(...all.slice(rows.from, rows.from + ROWS).map(([node, gpu, index]) => {
    const row = make("tr"), name = make("td"), { share: compute, memory } = allocated(gpu);
    const choose = button(node.name, () => open(node.name, index), "plain");
    choose.dataset.gpu = node.name + "/" + index;
    choose.setAttribute("aria-label", node.name + ", " + deviceName(node.name, index));
    name.append(choose);
    row.className = isFitting(node, index) ? "fits" : "";
    const tenants = gpu[4].map((tenant) => teamName(tenant[0]) + (tenant[3] & GUEST ? " (guest)" : tenant[3] & BORROWED ? " (borrows memory)" : ""));
    const counted = [...new Set(tenants)].map((team) => team + (tenants.filter((it) => it === team).length > 1 ? " × " + tenants.filter((it) => it === team).length : ""));
    const state = faults(node, gpu);
    if (isFitting(node, index)) state.unshift("would take your request");
    row.append(name, make("td", String(index)), make("td", fleet.models[gpu[0]]), make("td", percent(compute), "n"), make("td", percent(memory), "n"),
      make("td", gpu[5] === null || gpu[5] === undefined ? "unknown" : "about " + (gpu[5] / 10).toFixed(0) + " %", "n"),
      make("td", counted.join(", ") || "none"), make("td", state.join(", ") || "ok"));
    return row;
  }));
  if (held) [...body.querySelectorAll("button")].find((it) => it.dataset.gpu === held)?.focus();
  setText(by("rows"), all.length ? number.format(rows.from + 1) + " to " + number.format(Math.min(all.length, rows.from + ROWS)) + " of " + devices(tally(all.map(([node, gpu]) => ({ state: node.state, gpus: [gpu] })))) : "No GPU matches.");
  by("before").disabled = rows.from === 0;
  by("after").disabled = rows.from + ROWS >= all.length;
}

// --- search -----------------------------------------------------------------------------------

// `choose` has: node(name), namespace(name), pod(name, node, gpus).
export function startSearch(choose) {
  const input = by("search"), box = by("found");
  let timer = 0, sent = 0;
  const hide = () => { box.hidden = true; };
  const item = (text, side, does) => {
    const line = make("li");
    line.append(button(text, () => { hide(); does(); }, "plain"), make("span", side, "soft small"));
    return line;
  };
  const part = (title, all, items) => {
    if (!items.length) return [];
    const list = make("ul");
    list.append(...items);
    return [make("h3", title + (all > items.length ? ": the first " + items.length + " of " + number.format(all) : "")), list];
  };
  async function find() {
    const text = input.value.trim(), turn = (sent += 1);
    if (!text) return hide();
    try {
      const found = await fetchJson("v1/search?q=" + encodeURIComponent(text));
      if (turn !== sent) return;
      box.replaceChildren(
        ...part("Namespaces", found.totals.namespaces, found.namespaces.map((name) => item(name, "", () => choose.namespace(name)))),
        ...part("Nodes", found.totals.nodes, found.nodes.map((name) => item(name, "", () => choose.node(name)))),
        ...part("Pods", found.totals.pods, found.pods.map((pod) => item(pod.pod, pod.node || "waits", () => choose.pod(pod)))),
      );
      const all = found.totals.namespaces + found.totals.nodes + found.totals.pods;
      if (!all) box.replaceChildren(make("p", "Nothing has “" + text + "” in its name.", "soft"));
      setText(by("search-note"), count(all, "result", "results"));
    } catch (error) {
      if (turn !== sent) return;
      box.replaceChildren(make("p", "No search: " + because(error), "bad"));
    }
    box.hidden = false;
  }
  input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(find, 200); });
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") { clearTimeout(timer); find(); } });
  input.parentElement.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { hide(); input.focus(); return; }
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const stops = [input, ...box.querySelectorAll("button")], at = stops.indexOf(document.activeElement);
    const next = stops[at + (event.key === "ArrowDown" ? 1 : -1)];
    if (next && !box.hidden) { event.preventDefault(); next.focus(); }
  });
  input.parentElement.addEventListener("focusout", (event) => { if (!input.parentElement.contains(event.relatedTarget)) hide(); });
}

export const asOf = (milliseconds) => clock(milliseconds / 1000);

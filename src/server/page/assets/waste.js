// Waste: which pods hold GPU memory without need, what would have been enough, how finely pools could
// be shared. Loaded after the page is usable, and again periodically while it is visible.
import { ask, because, button, by, clock, count, gib, gpus, make, number, share, span, tell } from "./words.js";
import { fleet } from "./fleet.js";

const NAMED = 50, EVERY_MS = 30000;
const waste = { told: null, namespace: "", turn: 0, key: "", open: null, changed: () => {} };

// The sum for the headline; null before it is known, and if a namespace is selected.
export const reclaimable = () => (waste.told && waste.told.watched_pods && !waste.namespace ? waste.told : null);

function said(told) {
  const whose = waste.namespace ? " of namespace " + waste.namespace : "";
  if (!told.watched_pods) return "No pod" + whose + " has been watched for " + span(told.watched_for_seconds) + " yet: until then nothing is said.";
  const of = fleet.figures ? fleet.figures.packing.devices : 0;
  const part = of ? " (" + share(told.reclaimable_share_millionths / of) + " of the fleet)" : "";
  const idle = told.idle_pods ? count(told.idle_pods, "is", "are") + " idle: no GPU of theirs has been busy for " + span(told.idle_after_seconds) + " or more." : "none is idle.";
  return "Of " + count(told.watched_pods, "pod", "pods") + whose + " that " + (told.watched_pods === 1 ? "was" : "were") + " watched, " + idle + " " +
    (told.wasteful_pods ? gib(told.reclaimable_mib) + " of GPU memory and " + gpus(told.reclaimable_share_millionths) + " GPUs of compute" + part + " could be given back." : "Nobody holds much more than is used.");
}

function drawing(rects) {
  const box = make("div", undefined, "meter"), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 10" })) svg.setAttribute(key, value);
  for (const [name, x, width, y, height] of rects) {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ class: name, x: Math.max(0, x), y, width, height })) rect.setAttribute(key, value);
    svg.append(rect);
  }
  box.append(svg);
  return box;
}

// Held memory as a pale bar, its highest use as a dark bar in it, and a line at what would be enough.
function bar(pod, most) {
  const wide = (mib) => 100 * Math.min(mib, pod.booked_mib) / most, rects = [["held", 0, wide(pod.booked_mib), 0, 10], ["used", 0, wide(pod.peak_mib), 3, 4]];
  if (!pod.is_idle) rects.push(["enough", wide(pod.enough_mib) - 1.5, 1.5, 0, 10]);
  return drawing(rects);
}

function legend() {
  const marks = [["held", [["held", 0, 100, 0, 10]]], ["highest use", [["used", 0, 100, 3, 4]]], ["what would be enough", [["enough", 45, 10, 0, 10]]]];
  return marks.map(([words, rects]) => {
    const item = make("li");
    item.append(drawing(rects), make("span", words));
    return item;
  });
}

function podRow(pod, most) {
  const row = make("tr"), name = make("td", undefined, "wide"), place = make("td", undefined, "wide"), drawn = make("td", undefined, "bar");
  const choose = button(pod.pod, () => waste.open.pod(pod.pod), "plain"), where = pod.node + (pod.gpus.length ? ", GPU " + pod.gpus.join(", ") : "");
  const find = button(where, () => waste.open.gpu(pod.node, pod.gpus[0] ?? 0), "plain");
  choose.dataset.held = "pod:" + pod.pod;
  find.dataset.held = "gpu:" + pod.pod;
  find.setAttribute("aria-label", "Show on the map: " + where + ", of " + pod.pod);
  name.append(choose);
  place.append(find);
  drawn.append(bar(pod, most));
  const load = pod.mean_load_millionths;
  row.append(name, place, make("td", gib(pod.booked_mib), "n"), make("td", gib(pod.peak_mib), "n"), drawn, make("td", Math.round(pod.p95_use_millionths / 10000) + " %", "n"),
    make("td", load === null ? "not told" : share(load), "n"), make("td", pod.is_idle ? "nothing" : gib(pod.enough_mib), "n"),
    make("td", gib(pod.reclaimable_mib), "n"), make("td", pod.is_idle ? "idle for " + span(pod.idle_seconds) : "asks for too much", pod.is_idle ? "warn" : ""));
  return row;
}

function poolRow(pool) {
  const row = make("tr"), of = (slots) => (slots === null ? "not told" : number.format(slots));
  row.append(make("td", pool.pool || "no pool", "wide"), make("td", number.format(pool.tenants), "n"), make("td", number.format(pool.bearable_replicas), "n"),
    make("td", of(pool.replicas_by_memory), "n"), make("td", of(pool.replicas_by_load), "n"), make("td", pool.limited_by || "nothing: no GPU is cut finer"));
  return row;
}

// Fills a table that the user may be reading, and keeps the focus. Called only after a change.
function fill(table, rows) {
  const held = document.activeElement && table.contains(document.activeElement) && document.activeElement.dataset.held;
  table.tBodies[0].replaceChildren(...rows);
  if (held) [...table.querySelectorAll("button")].find((it) => it.dataset.held === held)?.focus();
}

function show() {
  const told = waste.told;
  if (!told) return;
  tell(by("waste-said"), said(told));
  tell(by("waste-note"), "as of " + clock(waste.at / 1000) + (told.wasteful_pods > told.pods.length ? "; the first " + told.pods.length + " of " + number.format(told.wasteful_pods) + " pods" : ""));
  by("waste").hidden = by("waste-legend").hidden = told.pods.length === 0;
  if (!by("waste-legend").children.length) by("waste-legend").replaceChildren(...legend());
  by("waste-scroll").tabIndex = told.pods.length ? 0 : -1;
  by("sharing").hidden = told.pools.length === 0;
  by("sharing-scroll").tabIndex = told.pools.length ? 0 : -1;
  const key = JSON.stringify([told.pods, told.pools]);
  if (key === waste.key) return;
  waste.key = key;
  const most = Math.max(1, ...told.pods.map((pod) => pod.booked_mib));
  fill(by("waste"), told.pods.map((pod) => podRow(pod, most)));
  fill(by("pools"), told.pools.map(poolRow));
}

export async function look() {
  const turn = (waste.turn += 1), namespace = waste.namespace;
  try {
    const told = await ask("v1/advise?limit=" + NAMED + (namespace ? "&namespace=" + encodeURIComponent(namespace) : ""));
    if (turn !== waste.turn) return;
    Object.assign(waste, { told, at: Date.now() });
    by("waste-said").classList.remove("bad");
    show();
    waste.changed();
  } catch (error) {
    if (turn !== waste.turn) return;
    by("waste-said").classList.add("bad");
    tell(by("waste-said"), "Who holds without need is not known: " + because(error) + (waste.told ? ". What you see is of " + clock(waste.at / 1000) + "." : "."));
  }
}

// Selects the pods of this namespace, or all.
export function choose(namespace) {
  if (namespace === waste.namespace) return;
  Object.assign(waste, { namespace, told: null });
  if (waste.open) look();
}

// `open` has: pod(name), gpu(node, position). `changed` is called after new figures.
export function start(open, changed) {
  Object.assign(waste, { open, changed });
  (window.requestIdleCallback || ((does) => setTimeout(does, 200)))(look, { timeout: 3000 });
  setInterval(() => { if (document.visibilityState === "visible") look(); }, EVERY_MS);
}

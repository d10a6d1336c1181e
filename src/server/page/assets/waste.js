// Waste: which pods hold GPU memory without need, what would have been enough, how finely pools could
// be shared. Loaded after the page is usable, and again periodically while it is visible.
import { because, button, by, clock, count, fetchJson, gib, gpus, make, number, setText, share, span } from "./words.js";
import { fleet } from "./fleet.js";

const NAMED = 50, EVERY_MS = 30000;
const waste = { advice: null, namespace: "", turn: 0, key: "", open: null, changed: () => {} };

// The sum for the headline; null before it is known, and if a namespace is selected.
export const reclaimable = () => (waste.advice && waste.advice.watchedPods && !waste.namespace ? waste.advice : null);

function said(advice) {
  const whose = waste.namespace ? " of namespace " + waste.namespace : "";
  if (!advice.watchedPods) return "No pod" + whose + " has been watched for " + span(advice.watchedForSeconds) + " yet. Until then there is no advice.";
  const of = fleet.figures ? fleet.figures.packing.devices : 0;
  const part = of ? " (" + share(advice.reclaimable.shareMillionths / of) + " of the fleet)" : "";
  const idle = advice.idlePods ? count(advice.idlePods, "is", "are") + " idle: no GPU of theirs has been busy for " + span(advice.idleAfterSeconds) + " or more." : "none is idle.";
  return "Of " + count(advice.watchedPods, "pod", "pods") + whose + " that " + (advice.watchedPods === 1 ? "was" : "were") + " watched, " + idle + " " +
    (advice.wastefulPods ? gib(advice.reclaimable.memoryMib) + " of GPU memory and " + gpus(advice.reclaimable.shareMillionths) + " GPUs of compute" + part + " could be given back." : "No pod holds much more than it uses.");
}

// A small horizontal picture of rectangles: class, x, width, y, height, of 100 by 10.
export function drawing(rects) {
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
  const wide = (mib) => 100 * Math.min(mib, pod.allocated.memoryMib) / most, rects = [["held", 0, wide(pod.allocated.memoryMib), 0, 10], ["used", 0, wide(pod.peakMib), 3, 4]];
  if (!pod.idle) rects.push(["enough", wide(pod.sufficientMib) - 1.5, 1.5, 0, 10]);
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
  const load = pod.meanLoadMillionths;
  row.append(name, place, make("td", gib(pod.allocated.memoryMib), "n"), make("td", gib(pod.peakMib), "n"), drawn, make("td", Math.round(pod.p95UseMillionths / 10000) + " %", "n"),
    make("td", load === undefined ? "not reported" : share(load), "n"), make("td", pod.idle ? "nothing" : gib(pod.sufficientMib), "n"),
    make("td", gib(pod.reclaimableMib), "n"), make("td", pod.idle ? "idle for " + span(pod.idleSeconds) : "requests too much", pod.idle ? "warn" : ""));
  return row;
}

function poolRow(pool) {
  const row = make("tr"), of = (slots) => (slots === undefined ? "not reported" : number.format(slots));
  row.append(make("td", pool.pool || "no pool", "wide"), make("td", number.format(pool.tenants), "n"), make("td", number.format(pool.replicas), "n"),
    make("td", of(pool.replicasByMemory), "n"), make("td", of(pool.replicasByLoad), "n"), make("td", pool.limitedBy || "nothing: no GPU can be divided further"));
  return row;
}

// Fills a table that the user may be reading, and keeps the focus. Called only after a change.
function fill(table, rows) {
  const held = document.activeElement && table.contains(document.activeElement) && document.activeElement.dataset.held;
  table.tBodies[0].replaceChildren(...rows);
  if (held) [...table.querySelectorAll("button")].find((it) => it.dataset.held === held)?.focus();
}

function show() {
  const advice = waste.advice;
  if (!advice) return;
  setText(by("waste-said"), said(advice));
  setText(by("waste-note"), "as of " + clock(waste.at / 1000) + (advice.wastefulPods > advice.pods.length ? "; the first " + advice.pods.length + " of " + number.format(advice.wastefulPods) + " pods" : ""));
  by("waste").hidden = by("waste-legend").hidden = advice.pods.length === 0;
  if (!by("waste-legend").children.length) by("waste-legend").replaceChildren(...legend());
  by("waste-scroll").tabIndex = advice.pods.length ? 0 : -1;
  by("sharing").hidden = advice.pools.length === 0;
  by("sharing-scroll").tabIndex = advice.pools.length ? 0 : -1;
  const key = JSON.stringify([advice.pods, advice.pools]);
  if (key === waste.key) return;
  waste.key = key;
  const most = Math.max(1, ...advice.pods.map((pod) => pod.allocated.memoryMib));
  fill(by("waste"), advice.pods.map((pod) => podRow(pod, most)));
  fill(by("pools"), advice.pools.map(poolRow));
}

export async function look() {
  const turn = (waste.turn += 1), namespace = waste.namespace;
  try {
    const advice = await fetchJson("v1/advise?limit=" + NAMED + (namespace ? "&namespace=" + encodeURIComponent(namespace) : ""));
    if (turn !== waste.turn) return;
    Object.assign(waste, { advice, at: Date.now() });
    by("waste-said").classList.remove("bad");
    show();
    waste.changed();
  } catch (error) {
    if (turn !== waste.turn) return;
    by("waste-said").classList.add("bad");
    setText(by("waste-said"), "Which pods hold GPUs without need is not known: " + because(error) + (waste.advice ? ". What you see is of " + clock(waste.at / 1000) + "." : "."));
  }
}

// Selects the pods of this namespace, or all.
export function choose(namespace) {
  if (namespace === waste.namespace) return;
  Object.assign(waste, { namespace, advice: null });
  if (waste.open) look();
}

// `open` has: pod(name), gpu(node, position). `changed` is called after new figures.
export function start(open, changed) {
  Object.assign(waste, { open, changed });
  (window.requestIdleCallback || ((does) => setTimeout(does, 200)))(look, { timeout: 3000 });
  setInterval(() => { if (document.visibilityState === "visible") look(); }, EVERY_MS);
}

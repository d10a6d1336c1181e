// The drawer: one GPU with its tenants, or one pod with the reason why it waits.
import { ask, because, button, by, colour, command, count, gib, make, number, share } from "./words.js";
import { fleet, teamColour } from "./fleet.js";

const drawer = { shown: "", returnTo: null, onClose: () => {} };
const HELD = {
  none: "nothing: time slicing alone", mps: "limits of MPS", driver: "a limit of the driver", mig: "its own MIG instance", whole: "no neighbours: it has the whole GPU",
};

export const shown = () => drawer.shown;

export function close() {
  if (by("drawer").hidden) return;
  by("drawer").hidden = true;
  drawer.shown = "";
  drawer.onClose();
  if (drawer.returnTo && drawer.returnTo.isConnected) drawer.returnTo.focus();
}

export function start(onClose) {
  drawer.onClose = onClose;
  by("close").addEventListener("click", close);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && by("found").hidden) close(); });
}

function open(key, title) {
  if (by("drawer").hidden) drawer.returnTo = document.activeElement;
  const isNew = drawer.shown !== key;
  drawer.shown = key;
  by("drawer").hidden = false;
  by("drawer-title").textContent = title;
  if (isNew) {
    by("drawer-body").replaceChildren(make("p", "Asking …", "soft"));
    by("drawer-title").focus();
  }
}

function facts(pairs) {
  const list = make("dl", undefined, "facts");
  for (const [name, value] of pairs) if (value !== null && value !== undefined && value !== "") list.append(make("dt", name), make("dd", value));
  return list;
}

async function fill(key, path, body) {
  try {
    const answer = await ask(path);
    if (drawer.shown === key) by("drawer-body").replaceChildren(...body(answer));
  } catch (error) {
    if (drawer.shown === key) by("drawer-body").replaceChildren(make("p", "No answer: " + because(error), "bad"));
  }
}

// --- a GPU ------------------------------------------------------------------------------------

export function showGpu(name, index, openPod) {
  const key = "gpu:" + name + "/" + index;
  open(key, name + ", GPU " + index);
  return fill(key, "v1/state?node=" + encodeURIComponent(name), (node) => {
    const device = node.devices[index];
    return device ? gpuBody(node, device, openPod) : [make("p", "This GPU is no longer there.")];
  });
}

function state(node, device) {
  const words = [node.state === "reporting" ? "" : "node " + node.state.replace("_", " "), device.overbooked ? "overbooked" : ""];
  if (!device.healthy) words.push("takes no tenants" + (device.ailment ? ": " + device.ailment.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase() + (device.ailment === "Xid" ? " " + device.last_xid : "") : ""));
  return words.filter(Boolean).join(", ") || "well";
}

const of = (mib, device) => gib(mib) + (device.capacity_mib ? " (" + (100 * mib / device.capacity_mib).toFixed(0) + " %)" : "");

function gpuBody(node, device, openPod) {
  const none = (mib) => (mib ? gib(mib) : null);
  const body = [facts([
    ["Model", device.model + (device.profile ? " " + device.profile : "")],
    ["UUID", device.id],
    ["State", state(node, device)],
    ["Memory", gib(device.capacity_mib) + ": " + of(device.booked_mib, device) + " booked, " + (device.used_mib === null ? "use unknown" : of(device.used_mib, device) + " in use, as its agent saw it")],
    ["Compute", share(device.booked_share_millionths) + " booked, " + share(device.free_share_millionths) + " can be placed on"],
    ["Held back", device.claimed_mib ? of(device.claimed_mib, device) + " for a pod that is being placed" : null],
    ["Nobody booked", none(device.unbooked_mib)],
    ["Foreign use", none(device.foreign_mib)],
    ["Slots", device.slots ? device.slots.free + " of " + device.slots.all + " free" : null],
    ["Node", number.format(Math.round(node.free_cpu_milli / 100) / 10) + " cores and " + gib(node.free_memory_mib) + " of main memory free" + (node.driver ? ", driver " + node.driver : "")],
  ])];
  body.push(make("h3", device.tenants.length ? count(device.tenants.length, "tenant", "tenants") : "No tenant"));
  const overs = new Set((device.over_users || []).map((it) => it.pod));
  return [...body, ...device.tenants.map((tenant) => tenantBox(tenant, device, overs, openPod))];
}

// Allocated memory as a pale bar, memory in use as a dark bar in it.
function meter(tenant, device, ink) {
  const box = make("div", undefined, "meter"), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("viewBox", "0 0 100 10");
  for (const [mib, y, high, opacity] of [[tenant.memory_mib, 0, 10, 0.4], [tenant.used_mib || 0, 3, 4, 1]]) {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const attributes = { x: 0, y, height: high, width: Math.min(100, 100 * mib / Math.max(1, device.capacity_mib)), fill: ink, "fill-opacity": opacity };
    for (const [name, value] of Object.entries(attributes)) bar.setAttribute(name, value);
    svg.append(bar);
  }
  box.append(svg);
  return box;
}

function tenantBox(tenant, device, overs, openPod) {
  const box = make("div", undefined, "tenant"), name = make("div", undefined, "name");
  const position = fleet.namespaces.indexOf(tenant.pod.split("/")[0]), ink = colour(position < 0 ? "--other" : teamColour(position));
  const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg"), dot = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  swatch.setAttribute("class", "swatch");
  swatch.setAttribute("aria-hidden", "true");
  dot.setAttribute("width", 12);
  dot.setAttribute("height", 12);
  dot.setAttribute("fill", ink);
  swatch.append(dot);
  name.append(swatch, button(tenant.pod || tenant.pod_uid, () => openPod(tenant.pod), "plain"));
  if (overs.has(tenant.pod)) name.append(make("span", "uses more than it may", "bad small"));
  const held = tenant.verified !== "none" ? HELD[tenant.verified] : tenant.intended === "none" ? HELD.none : HELD[tenant.intended] + " intended, not verified";
  box.append(name, meter(tenant, device, ink), facts([
    ["Booked", share(tenant.share_millionths) + " of compute, " + gib(tenant.memory_mib) + " of memory"],
    ["In use", tenant.used_mib === undefined ? "not known" : gib(tenant.used_mib) + " of memory"],
    ["Held to it by", held],
    ["State", { assumed: "being bound", confirmed: "placed", draining: "ended, its processes may not have" }[tenant.state] || tenant.state],
  ]));
  if (tenant.pod) box.append(command(tenant.pod));
  return box;
}

// --- a pod ------------------------------------------------------------------------------------

export function showPod(pod, openNode) {
  const key = "pod:" + pod;
  open(key, pod);
  return fill(key, "v1/explain?pod=" + encodeURIComponent(pod), (told) => podBody(told, openNode));
}

function list(title, items) {
  if (!items.length) return [];
  const all = make("ul");
  all.append(...items.map((text) => make("li", text)));
  return [make("h3", title), all];
}

function podBody(told, openNode) {
  const body = [make("p", told.verdict)];
  const waits = fleet.figures.waiting_pods.find((pod) => pod.pod === told.pod);
  if (waits) body.push(facts([["Asks for", waits.asks], ["Priority", String(waits.priority)], ["Mend", typeof waits.mend === "string" ? waits.mend : null]]));
  body.push(...list("What would help", (told.mends || []).filter((mend) => typeof mend === "string")));
  body.push(...list("Moves that would make room", (told.moves || []).map((move) => "move " + move.pod + " from " + where(move.from) + " to " + where(move.to))));
  body.push(...list("Why nodes refuse", (told.refusals || []).map((it) =>
    count(it.nodes, "node", "nodes") + ": " + it.reason + ". Closest is " + it.closest_node + ": " + it.missing + ".")));
  if (told.fits_on && told.fits_on.length) {
    body.push(make("h3", told.fitting_nodes > 1 ? "Nodes that would take it" : "Node"));
    const nodes = make("ul");
    for (const name of told.fits_on) {
      const item = make("li");
      item.append(button(name, () => openNode(name), "plain"));
      nodes.append(item);
    }
    body.push(nodes);
  }
  body.push(make("h3", "On a terminal"), command(told.pod));
  return body;
}

const where = (place) => (place && typeof place === "object" ? place.node || "" : String(place ?? ""));

// The drawer: one GPU with its tenants, or one pod with the reason why it waits.
import { because, button, by, color, command, count, fetchJson, gib, make, number, share, words } from "./words.js";
import { deviceName, fleet, teamColor } from "./fleet.js";

const drawer = { shown: "", returnTo: null, onClose: () => {} };
const HELD_BY = {
  Nobody: "nobody: time slicing only", Guard: "the guard: gpupack evicts it if it uses more than it may", Mps: "limits of MPS", Driver: "a limit of the driver", Mig: "its own MIG instance", Whole: "no neighbors: it has the whole GPU",
};
const CONFIGURED = { Mps: "; limits of MPS are configured and not verified", Driver: "; a limit of the driver is configured and not verified" };

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
    by("drawer-body").replaceChildren(make("p", "Loading …", "soft"));
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
    const answer = await fetchJson(path);
    if (drawer.shown === key) by("drawer-body").replaceChildren(...body(answer));
  } catch (error) {
    if (drawer.shown === key) by("drawer-body").replaceChildren(make("p", "No answer: " + because(error), "bad"));
  }
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const teamInk = (pod) => {
  const position = fleet.namespaces.indexOf((pod || "").split("/")[0]);
  return color(position < 0 ? "--other" : teamColor(position));
};

// --- a GPU ------------------------------------------------------------------------------------

export function showGpu(name, index, openPod) {
  const key = "gpu:" + name + "/" + index;
  open(key, name + ", " + deviceName(name, index));
  return fill(key, "v1/state?node=" + encodeURIComponent(name), ({ nodes: [node] }) => {
    const device = node.devices[index];
    return device ? gpuBody(node, device, openPod) : [make("p", "This GPU is no longer there.")];
  });
}

function state(node, device) {
  const found = [node.state === "Reporting" ? "" : "node " + words(node.state), device.overallocated ? "overallocated" : ""];
  if (device.health !== "Healthy") found.push("takes no tenants" + (device.fault ? ": " + words(device.fault) + (device.fault.toLowerCase() === "xid" ? " " + device.lastXid : "") : ""));
  return found.filter(Boolean).join(", ") || "ok";
}

const of = (mib, device) => gib(mib) + (device.capacityMib ? " (" + (100 * mib / device.capacityMib).toFixed(0) + " %)" : "");

function gpuBody(node, device, openPod) {
  if (device.migUnits && device.kind === "MigParent") {
    const divided = gib(device.capacityMib) + ", divided into " + count(device.migUnits, "unit", "units");
    return [facts([["Model", device.model], ["UUID", device.id], ["State", state(node, device)], ["Memory", divided]]), ...layoutOf(node, device)];
  }
  const body = [facts([
    ["Model", device.model + (device.migProfile ? " " + device.migProfile : "")],
    ["UUID", device.id],
    ["State", state(node, device)],
    ["Memory", gib(device.capacityMib) + ": " + of(device.allocated.memoryMib, device) + " allocated, " + (device.usedMib === undefined ? "use unknown" : of(device.usedMib, device) + " in use, as its agent saw it")],
    ["Compute", share(device.allocated.shareMillionths) + " allocated, " + share(device.free.shareMillionths) + " free"],
    ["Held", device.held.memoryMib ? of(device.held.memoryMib, device) + " for a pod that is being placed" : null],
    ["Not allocated", device.usedBeyondAllocatedMib ? gib(device.usedBeyondAllocatedMib) + " in use" : null],
    ["Untracked", device.untrackedMib ? gib(device.untrackedMib) + " in use by processes of no tenant" : null],
    ["Slots", device.slots ? device.slots.free + " of " + device.slots.total + " free" : null],
    ["Node", number.format(Math.round(node.free.cpuMilli / 100) / 10) + " cores and " + gib(node.free.memoryMib) + " of host memory free" + (node.driver ? ", driver " + node.driver : "")],
  ])];
  body.push(...layoutOf(node, device));
  body.push(make("h3", device.tenants.length ? count(device.tenants.length, "tenant", "tenants") : "No tenant"));
  const overs = new Set((device.overLimitPods || []).map((it) => it.pod));
  body.push(...device.tenants.map((tenant) => tenantBox(tenant, device, overs, openPod)));
  const guests = device.guests || [];
  if (guests.length) body.push(make("h3", count(guests.length, "guest", "guests")), make("p", "They run here in free room, and go to the GPU that they are allocated when another pod needs it."));
  return [...body, ...guests.map((guest) => guestBox(guest, openPod))];
}

// --- the MIG instances of a GPU ----------------------------------------------------------------

const INSTANCE = { Promised: "promised, and made when its pod is bound", Made: "made for its pod", Leaving: "being removed" };

// The units of a GPU as a bar, with an instance from its first unit to its last one. What is not there yet,
// or about to go, is pale.
function layoutOf(node, device) {
  const gpu = device.kind === "MigInstance" ? node.devices.find((it) => it.kind !== "MigInstance" && it.index === device.index) : device;
  const units = gpu && gpu.migUnits;
  if (!units) return [];
  const instances = node.devices.filter((it) => it.kind === "MigInstance" && it.index === gpu.index && it.migPlacement);
  instances.sort((one, other) => one.migPlacement.start - other.migPlacement.start);
  const bar = svg("svg", { class: "layout", viewBox: "0 0 " + 100 * units + " 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (let unit = 0; unit < units; unit++) bar.append(svg("rect", { class: "unit", x: 100 * unit + 2, y: 2, width: 96, height: 96 }));
  const all = make("ul", undefined, "plain");
  for (const instance of instances) {
    const { start, size } = instance.migPlacement, [tenant] = instance.tenants, isThere = !instance.instance || instance.instance === "Made";
    bar.append(svg("rect", { class: isThere ? "there" : "coming", x: 100 * start + 6, y: 6, width: 100 * size - 12, height: 88, fill: tenant ? teamInk(tenant.pod) : color("--other") }));
    const where = size === 1 ? "unit " + start : "units " + start + " to " + (start + size - 1);
    const whose = tenant ? tenant.pod || tenant.podUid || "another team" : "no tenant";
    all.append(make("li", instance.migProfile + ", " + where + ": " + whose + ", " + (INSTANCE[instance.instance] || "made by others")));
  }
  const more = gpu.placeable.filter((it) => it.count).map((it) => it.count + " \u00d7 " + it.profile);
  const title = make("h3", "MIG instances"), isWhole = gpu.kind === "Gpu" && !instances.length;
  if (isWhole && !more.length) return [title, make("p", "None now. It can be divided once nothing uses it.")];
  const fits = isWhole ? "Out of MIG mode now. If it is switched, one profile at a time fits: " : "Fits now, one profile at a time: ";
  const free = more.length ? fits + more.join(", ") : "No more instance fits.";
  return [title, bar, ...(instances.length ? [all] : []), make("p", free)];
}

function guestBox(guest, openPod) {
  const box = make("div", undefined, "tenant"), name = make("div", undefined, "name");
  name.append(guest.pod ? button(guest.pod, () => openPod(guest.pod), "plain") : make("span", guest.podUid || "another team"));
  box.append(name, facts([
    ["Borrows", share(guest.borrowed.shareMillionths) + " of compute, " + gib(guest.borrowed.memoryMib) + " of memory"],
    ["In use", guest.usedMib === undefined ? "not known" : gib(guest.usedMib) + " of memory"],
    ["State", guest.leaving ? "on its way to the GPU that it is allocated" : "stays while the room is free"],
  ]));
  return box;
}

// Allocated memory as a pale bar, memory in use as a dark bar in it.
function meter(tenant, device, ink) {
  const box = make("div", undefined, "meter"), bars = svg("svg", { "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 100 10" });
  for (const [mib, y, height, opacity] of [[tenant.allocated.memoryMib, 0, 10, 0.4], [tenant.usedMib || 0, 3, 4, 1]]) {
    bars.append(svg("rect", { x: 0, y, height, width: Math.min(100, 100 * mib / Math.max(1, device.capacityMib)), fill: ink, "fill-opacity": opacity }));
  }
  box.append(bars);
  return box;
}

function tenantBox(tenant, device, overs, openPod) {
  const box = make("div", undefined, "tenant"), name = make("div", undefined, "name");
  const ink = teamInk(tenant.pod), swatch = svg("svg", { class: "swatch", "aria-hidden": "true" });
  swatch.append(svg("rect", { width: 12, height: 12, fill: ink }));
  name.append(swatch, tenant.pod ? button(tenant.pod, () => openPod(tenant.pod), "plain") : make("span", tenant.podUid || "another team"));
  if (tenant.pod && overs.has(tenant.pod)) name.append(make("span", "uses more than it may", "bad small"));
  const { configured, verified, heldBy } = tenant.isolation;
  const held = HELD_BY[heldBy] + (configured === verified ? "" : CONFIGURED[configured] || "");
  box.append(name, meter(tenant, device, ink), facts([
    ["Allocated", share(tenant.allocated.shareMillionths) + " of compute, " + gib(tenant.allocated.memoryMib) + " of memory"],
    ["In use", tenant.usedMib === undefined ? "not known" : gib(tenant.usedMib) + " of memory"],
    ["May use", tenant.limitMib === undefined ? null : "up to " + gib(tenant.limitMib) + " of memory" + (tenant.usedMib > tenant.allocated.memoryMib ? "; it borrows " + gib(tenant.usedMib - tenant.allocated.memoryMib) + ", until another pod needs it" : "")],
    ["Runs on", tenant.runsOn ? tenant.runsOn + (tenant.comesHome ? "; it is being restarted here" : ", until another pod needs that GPU") : null],
    ["Memory held by", held],
    ["State", { Assumed: "being bound", Confirmed: "placed", Draining: "ended; its processes may still run" }[tenant.state] || tenant.state],
  ]));
  if (tenant.pod) box.append(command(tenant.pod));
  return box;
}

// --- a pod ------------------------------------------------------------------------------------

export function showPod(pod, openNode) {
  const key = "pod:" + pod;
  open(key, pod);
  return fill(key, "v1/explain?pod=" + encodeURIComponent(pod), (found) => podBody(found, openNode));
}

function list(title, items) {
  if (!items.length) return [];
  const all = make("ul");
  all.append(...items.map((text) => make("li", text)));
  return [make("h3", title), all];
}

function podBody(found, openNode) {
  const body = [make("p", found.verdict)];
  if (found.protection) body.push(make("p", found.protection));
  const waits = fleet.figures.waitingPods.find((pod) => pod.pod === found.pod);
  if (waits) body.push(facts([["Requests", waits.request], ["Priority", String(waits.priority)], ["Suggestion", waits.suggestion]]));
  body.push(...list("What would help", found.suggestions));
  body.push(...list("Moves that would make room", found.moves.map((move) => "move " + (move.pod || "a pod of another team") + (move.from.node === move.to.node ? " to another device of " + move.to.node : " from " + move.from.node + " to " + move.to.node))));
  body.push(...list("Why nodes refuse", found.refusals.map((it) =>
    count(it.nodes, "node", "nodes") + ": " + it.reason + ". Closest is " + it.closestNode + (it.missing === it.reason ? "." : ", missing: " + it.missing + "."))));
  if (found.fitsOn.length) {
    body.push(make("h3", found.fittingNodes > 1 ? "Nodes that would take it" : "Node"));
    const nodes = make("ul");
    for (const name of found.fitsOn) {
      const item = make("li");
      item.append(button(name, () => openNode(name), "plain"));
      nodes.append(item);
    }
    body.push(nodes);
  }
  body.push(make("h3", "On a terminal"), command(found.pod));
  return body;
}

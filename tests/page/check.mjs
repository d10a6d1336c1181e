// The page in a real browser, against a running demo. Started by `tests/page/main.rs`, which gives the
// program and the browser in GPUPACK and CHROMIUM. With SHOTS=FOLDER pictures are left there.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createServer } from "node:net";
import { axe, children, launch, live, open, shot, sleep, step, text, until } from "./browser.mjs";

const HOSTILE = '"><img src=x onerror=window.hacked=1><script>window.hacked=2</script>';

const TEAM = '"><img src=x onerror=window.hacked=3>'; // a slash would end it

function freePort() {
  return new Promise((found) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => found(port));
    });
  });
}

async function startDemo(port, flags, filledMillionths = 600_000) {
  const child = spawn(process.env.GPUPACK, ["demo", "--listen", "127.0.0.1:" + port, ...flags], { stdio: "ignore" });
  children.add(child);
  child.on("exit", () => children.delete(child));
  const base = "http://127.0.0.1:" + port + "/";
  await until("the demo is filled", async () => {
    const answer = await fetch(base + "v1/summary").catch(() => null);
    const summary = answer && await answer.json();
    return summary && summary.figures.readiness === "Ready" && summary.figures.packing.allocationMillionths > filledMillionths;
  }, 60_000);
  return { child, base };
}

async function stop(demo) {
  const started = Date.now();
  demo.child.kill("SIGTERM");
  await until("the demo has ended", () => demo.child.exitCode !== null || demo.child.signalCode !== null, 15_000);
  return Date.now() - started;
}

async function post(base, path, body) {
  const answer = await fetch(base + path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  assert.equal(answer.status, 200, path);
  return answer.json();
}

// A pod whose every name is hostile, placed; and one that waits.
async function sendHostilePods(base, nodes) {
  // The names of pods that are bound are those of Kubernetes: no Binding is posted for others.
  const pod = (name, namespace, annotations) => ({
    metadata: { name, namespace, uid: "uid-" + name.length, annotations, creationTimestamp: "2020-01-01T00:00:00Z" },
    spec: { schedulerName: "gpupack", containers: [{ name: "c", resources: {} }] },
  });
  const placed = pod("placed-here", "hostile", { "gpu-fraction": "0.05" });
  const found = await post(base, "v1/filter", { Pod: placed, NodeNames: nodes });
  assert.ok(found.NodeNames.length > 0, JSON.stringify(found).slice(0, 300));
  const { name, namespace, uid } = placed.metadata;
  const bound = await post(base, "v1/bind", { PodName: name, PodNamespace: namespace, PodUID: uid, Node: found.NodeNames[0] });
  assert.equal(bound.Error, "");
  const waits = pod("waits" + HOSTILE + "!", TEAM, { "gpu-fraction": "0.5", "gpupack.dev/gpu-model": "Pascal (X)" });
  await post(base, "v1/filter", { Pod: waits, NodeNames: nodes });
  return { placed: namespace + "/" + name, node: found.NodeNames[0], waits: TEAM + "/" + waits.metadata.name };
}

// Advice as after hours, of pods with hostile names; the questions for it are noted in `asked`.
async function advised(base, asked) {
  const { nodes } = await (await fetch(base + "v1/summary")).json();
  const pod = (at) => ({
    pod: at === 1 ? TEAM + "/" + HOSTILE : "team/trainer-" + at, node: nodes[at % nodes.length].name, gpus: at === 2 ? [0, 1] : [1], allocated: { memoryMib: 40960 - 400 * at, shareMillionths: 500_000 },
    peakMib: 9000 + 300 * at, medianUseMillionths: 125_000, p95UseMillionths: 250_000 + 20_000 * at, ...(at % 3 ? { meanLoadMillionths: 80_000 } : {}), watchedSeconds: 90_000,
    idleSeconds: at < 3 ? 15_000 : 5, idle: at < 3, sufficientMib: 9984 + 256 * at, reclaimableMib: at < 3 ? 40960 - 400 * at : 30976 - 700 * at,
  });
  const pool = (name, replicas, replicasByMemory, replicasByLoad, limitedBy) => ({ pool: name, tenants: 40, replicas, replicasByMemory, replicasByLoad, limitedBy });
  const advice = {
    watchedPods: 120, idlePods: 3, watchedForSeconds: 600, idleAfterSeconds: 600, reclaimable: { memoryMib: 412_000, shareMillionths: 6_200_000 }, wastefulPods: 61,
    pools: [pool("", 4, 4, 9, "Memory"), pool(HOSTILE, 3, 8, 3, "Load"), pool("mig", 64, 64)], pods: Array.from({ length: 12 }, (_, at) => pod(at)),
  };
  return (page) => page.route("**/v1/advise*", (route) => { asked.push(route.request().url()); return route.fulfill({ json: advice }); });
}

const port = await freePort();
const FLAGS = ["--nodes", "6", "--seed", "7"];
let demo = await startDemo(port, FLAGS);
const browser = await launch();
const { page, faults, context } = await open(browser, demo.base, "light");
let hostile = null;

await step("it loads, is live, and shows figures", async () => {
  await live(page, "Live");
  assert.match(await text(page, "#tiles"), /Packing efficiency\s+\d+\.\d %/);
  assert.match(await text(page, "#fleet-note"), /6 nodes, 48 GPUs/);
  assert.match(await page.locator("#map").getAttribute("aria-label"), /48 GPUs on 6 nodes/);
});
await step("no finding of axe in light", () => axe(page, "light"));
await step("changes come by themselves", async () => {
  const seen = async () => (await page.evaluate(() => performance.getEntriesByType("resource").filter((it) => it.name.includes("v1/summary")).length));
  const before = await text(page, "#tiles");
  await until("other figures", async () => (await text(page, "#tiles")) !== before);
  assert.equal(await seen(), 1, "one snapshot, the rest by events");
});
await step("a request lights up what the server says, and a bad one is refused in words", async () => {
  await page.fill("#request", "2 × 0.5");
  await until("an answer", async () => /2 × 0\.5 GPU/.test(await text(page, "#request-note")));
  const asked = await (await fetch(demo.base + "v1/fit?fraction=0.5&count=2")).json();
  assert.ok(asked.gpus >= 0 && Object.keys(asked.gpusByNode).length === asked.nodes);
  assert.match(page.url(), /request=2/);
  await page.fill("#request", "1.5");
  await until("a refusal", async () => /up to 1/.test(await text(page, "#request-note")));
  assert.equal(await page.getAttribute("#request", "aria-invalid"), "true");
  await page.fill("#request", "16Gi");
  await until("an answer", async () => /16384 MiB|16 GiB/.test(await text(page, "#request-note")));
  await shot(page, "request");
});
await step("keys walk the map, open a GPU and show a table", async () => {
  await page.fill("#request", "");
  await page.locator("#map").focus();
  await page.keyboard.press("Home");
  const first = await text(page, "#pointed");
  await page.keyboard.press("ArrowRight");
  assert.notEqual(await text(page, "#pointed"), first);
  assert.ok(await page.locator("#ring").isVisible());
  await page.keyboard.press("Enter");
  await until("the drawer", async () => /UUID/.test(await text(page, "#drawer")));
  assert.match(await text(page, "#drawer-title"), /GPU 1$/);
  assert.match(page.url(), /open=gpu/);
  await axe(page, "drawer");
  await shot(page, "drawer");
  await page.keyboard.press("Escape");
  assert.ok(!await page.locator("#drawer").isVisible());
  assert.equal(await page.evaluate(() => document.activeElement.id), "map", "focus comes back");
  await page.keyboard.press("t");
  await until("rows", async () => (await text(page, "#rows")) === "1 to 48 of 48 GPUs");
  await axe(page, "table");
  await shot(page, "table");
  await page.keyboard.press("t");
  assert.ok(await page.locator("#map").isVisible());
});
await step("the MIG instances of a GPU are drawn where they lie", async () => {
  const divided = (state) => {
    const [device] = state.nodes[0].devices, none = { overLimitPods: [], usedMib: 0, usedBeyondAllocatedMib: 0 };
    const instance = (migProfile, start, size, more) => ({ ...device, ...none, id: "MIG-" + start, kind: "MigInstance", migProfile, migPlacement: { start, size }, tenants: [], ...more });
    const tenant = { ...device.tenants[0], pod: "team/" + HOSTILE };
    const placeable = [{ profile: "1g.10gb", count: 2 }, { profile: "2g.20gb", count: 1 }, { profile: "7g.80gb", count: 0 }];
    const gpu = { ...device, ...none, kind: "MigParent", tenants: [], migUnits: 8, placeable };
    state.nodes[0].devices = [
      gpu, instance("3g.40gb", 0, 4, { instance: "Made", tenants: [tenant] }), instance("1g.10gb", 4, 1, { instance: "Promised" }),
      instance("1g.10gb+me", 7, 1), ...state.nodes[0].devices.slice(1),
    ];
    return state;
  };
  await page.route("**/v1/state*", async (route) => route.fulfill({ json: divided(await (await route.fetch()).json()) }));
  await page.locator("#map").focus();
  await page.keyboard.press("Home");
  await page.keyboard.press("Enter");
  await until("the instances", async () => /MIG instances/.test(await text(page, "#drawer")));
  const drawer = await text(page, "#drawer");
  for (const line of ["3g.40gb, units 0 to 3: team/" + HOSTILE + ", made for its pod", "1g.10gb, unit 4: no tenant, promised", "1g.10gb+me, unit 7: no tenant, made by others", "2 × 1g.10gb, 1 × 2g.20gb"]) {
    assert.ok(drawer.includes(line), line + " in " + drawer);
  }
  assert.ok(!drawer.includes("7g.80gb"), drawer);
  assert.deepEqual(await Promise.all([".unit", ".there", ".coming"].map((part) => page.locator("#drawer .layout " + part).count())), [8, 2, 1]);
  await axe(page, "MIG instances");
  await shot(page, "mig");
  await page.unrouteAll({ behavior: "wait" });
  await page.keyboard.press("Escape");
});
await step("a click opens the GPU under the pointer", async () => {
  const box = await page.locator("#map").boundingBox();
  await page.mouse.click(box.x + 8, box.y + 45);
  await until("the drawer", async () => /UUID/.test(await text(page, "#drawer")));
  await page.click("#close");
});
await step("the address brings the same view to somebody else", async () => {
  await page.selectOption("#sort", "empty");
  await page.selectOption("#colors", "idle");
  const other = await open(browser, page.url(), "dark");
  assert.equal(await other.page.inputValue("#sort"), "empty");
  assert.equal(await other.page.inputValue("#colors"), "idle");
  await axe(other.page, "dark");
  await shot(other.page, "dark");
  assert.deepEqual(other.faults, []);
  await other.context.close();
  await page.selectOption("#colors", "team");
});
await step("the last hour is told by keys", async () => {
  await page.locator("#trend").focus();
  await page.keyboard.press("End");
  const last = await text(page, "#trend-note");
  assert.match(last, /\d.*efficiency \d+\.\d %.*waiting \d+/);
  await page.keyboard.press("Home");
  assert.notEqual(await text(page, "#trend-note"), last);
  assert.equal(await page.locator("#trend .hair[visibility=visible]").count(), 2);
  await page.keyboard.press("Tab");
  await until("the hint", async () => /arrow keys/.test(await text(page, "#trend-note")) || /since gpupack started/.test(await text(page, "#trend-note")));
});
await step("waste is requested when the page can be used, and says when nobody knows", async () => {
  await until("an answer", async () => /No pod has been watched for 10 min yet/.test(await text(page, "#waste-said")));
  assert.ok(!await page.locator("#waste").isVisible() && !await page.locator("#sharing").isVisible());
  const [usable, asked] = await page.evaluate(() => [performance.getEntriesByName("interactive")[0].startTime,
    performance.getEntriesByType("resource").find((it) => it.name.includes("v1/advise")).startTime]);
  assert.ok(asked > usable, asked + " is after " + usable);
});
await step("waste is named, shown on the map, by keys, and hostile names are text", async () => {
  for (const scheme of ["light", "dark"]) {
    const asked = [], { page, faults, context } = await open(browser, demo.base, scheme, {}, await advised(demo.base, asked));
    await until("the sums", async () => /402 GiB of GPU memory and 6\.2 GPUs/.test(await text(page, "#waste-said")));
    assert.match(await text(page, "#waste-said"), /3 are idle.*12\.9 % of the fleet/s);
    assert.match(await text(page, "#tiles"), /Held without need\s+6\.2 GPUs/);
    assert.match(await text(page, "#waste-note"), /the first 12 of 61 pods/);
    assert.ok((await text(page, "#waste")).includes(TEAM + "/" + HOSTILE));
    const pools = await page.locator("#pools tbody tr").allInnerTexts();
    assert.match(pools[0], /no pool\s+40\s+4\s+4\s+9\s+Memory/);
    assert.ok(pools[1].includes(HOSTILE) && /3\s+8\s+3\s+Load$/.test(pools[1]), pools[1]);
    assert.match(pools[2], /64\s+64\s+not reported\s+nothing/);
    await axe(page, "waste, " + scheme);
    await shot(page, "waste-" + scheme);
    await page.locator("#waste tbody button").first().focus();
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    await until("the GPU", async () => /GPU 1$/.test(await text(page, "#drawer-title")));
    assert.ok(await page.locator("#ring").isVisible(), "it is pointed at on the map");
    await page.keyboard.press("Escape");
    assert.equal(await page.evaluate(() => document.activeElement.dataset.held), "gpu:team/trainer-0", "focus comes back");
    await page.locator("#waste button", { hasText: "onerror" }).first().click();
    await until("in words", async () => /not known/.test(await text(page, "#drawer")));
    await page.click("#close");
    await page.locator("#legend button").first().click();
    await until("only that namespace", () => asked.some((url) => url.includes("&namespace=")));
    await until("its pods", async () => /of namespace/.test(await text(page, "#waste-said")));
    assert.ok(asked.every((url) => url.includes("limit=50")));
    await page.route("**/v1/advise*", (route) => route.fulfill({ status: 500, body: "<b>no" }));
    await page.click("#namespace-off");
    await until("the fault", async () => /is not known: it answers with status 500/.test(await text(page, "#waste-said")));
    assert.equal(await page.evaluate(() => window.hacked), undefined);
    assert.deepEqual(faults, []);
    await context.close();
  }
});
await step("forced colors and less motion are honoured", async () => {
  const more = { forcedColors: "active", reducedMotion: "reduce" }, { page, faults, context } = await open(browser, demo.base, "dark", more, await advised(demo.base, []));
  await until("the sums", async () => /could be given back/.test(await text(page, "#waste-said")));
  assert.ok(await page.evaluate(() => matchMedia("(forced-colors: active)").matches && matchMedia("(prefers-reduced-motion: reduce)").matches));
  const style = (selector, name) => page.evaluate(([at, key]) => getComputedStyle(document.querySelector(at))[key], [selector, name]);
  assert.equal(await style("#map", "forcedColorAdjust"), "none", "the map keeps the colors that mean something");
  assert.equal(await style("#waste .meter svg", "forcedColorAdjust"), "none");
  assert.equal(await style(".tile .number", "transitionDuration"), "0s", "nothing moves");
  await page.locator("#tiles a", { hasText: "6.2" }).click();
  await until("at once", () => page.evaluate(() => document.activeElement.id === "waste-title" && document.activeElement.getBoundingClientRect().top < innerHeight));
  await axe(page, "forced colors");
  await shot(page, "forced");
  assert.deepEqual(faults, []);
  await context.close();
});
await step("the GPUs that a waiting pod could get are lit while it is open", async () => {
  const { nodes } = await (await fetch(demo.base + "v1/summary")).json(), small = await (await fetch(demo.base + "v1/fit?fraction=0.05")).json();
  assert.ok(small.gpus > 0 && small.nodes < nodes.length * 8, JSON.stringify(small).slice(0, 200));
  // It was asked about a node that nobody knows, so it waits although it would fit elsewhere.
  const metadata = { name: "lost", namespace: "team", uid: "uid-lost", annotations: { "gpu-fraction": "0.05" }, creationTimestamp: "2020-01-01T00:00:00Z" };
  await post(demo.base, "v1/filter", { Pod: { metadata, spec: { schedulerName: "gpupack", containers: [{ name: "c", resources: {} }] } }, NodeNames: ["nowhere"] });
  await until("it waits", async () => (await text(page, "#waiting-scroll")).includes("team/lost"));
  await page.locator("#waiting button", { hasText: "team/lost" }).click();
  await until("they are lit", async () => /0\.05 GPU, as team\/lost requests, would fit now on \d+ GPUs?.*lit/.test(await text(page, "#request-note")));
  await shot(page, "candidates");
  await page.click("#close");
  await until("they are lit no more", async () => (await text(page, "#request-note")) === "");
});
await step("hostile names are text", async () => {
  const summary = await (await fetch(demo.base + "v1/summary")).json();
  hostile = await sendHostilePods(demo.base, summary.nodes.map((node) => node.name));
  await until("the waiting pod", async () => (await text(page, "#waiting")).includes("waits" + HOSTILE));
  assert.ok((await text(page, "#waiting")).includes("on Pascal (X)"), "the model it requests");
  await until("the namespace", async () => (await text(page, "#legend")).includes("hostile") || /other namespace/.test(await text(page, "#legend")));
  await page.fill("#search", "placed-here");
  await until("found", async () => (await text(page, "#found")).includes(hostile.placed));
  await shot(page, "search");
  await page.locator("#found button", { hasText: "placed" }).first().click();
  await until("the drawer", async () => (await text(page, "#drawer")).includes(hostile.placed));
  await axe(page, "hostile");
  await page.locator("#drawer .tenant button.plain", { hasText: "placed" }).first().click();
  await until("its explanation", async () => (await text(page, "#drawer")).includes("placed on node " + hostile.node));
  await page.click("#close");
  await page.locator("#waiting button", { hasText: "waits" }).first().click();
  await until("why it waits", async () => /Why nodes refuse/.test(await text(page, "#drawer")));
  await until("where it would fit", async () => /fits nowhere now/.test(await text(page, "#request-note")));
  assert.ok(await page.locator("#request-note").evaluate((note) => !note.classList.contains("bad")));
  await shot(page, "waiting");
  await page.click("#close");
  await page.locator("#map").focus();
  await page.keyboard.press("t");
  await until("rows", async () => (await page.locator("#gpus tbody tr").count()) > 0);
  await page.goto(demo.base + "#open=" + encodeURIComponent("pod:" + HOSTILE) + "&namespace=" + encodeURIComponent(TEAM) + "&sort=" + encodeURIComponent(HOSTILE));
  await page.reload();
  await live(page, "Live");
  await until("an unknown pod in words", async () => /not known|name the pod/.test(await text(page, "#drawer")));
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  assert.equal(await page.locator("img, script:not([src])").count(), 0);
  await page.goto(demo.base);
  await page.reload();
  await live(page, "Live");
});
await step("without events it polls", async () => {
  const other = await browser.newContext();
  const asking = await other.newPage();
  await asking.route("**/v1/events*", (route) => route.fulfill({ status: 503, body: "{}" }));
  await asking.goto(demo.base);
  await live(asking, "Polling every 10 s");
  await other.close();
});
await step("a stopped server is told, and one that is back is found", async () => {
  const took = await stop(demo);
  assert.ok(took < 5_000, "an open page held the end up for " + took + " ms");
  await live(page, "Not connected");
  await until("the alarm", async () => /cannot be reached.*may be out of date/s.test(await text(page, "#alarm")));
  await axe(page, "not connected");
  await shot(page, "lost");
  demo = await startDemo(port, FLAGS);
  await live(page, "Live");
  await until("no alarm", async () => !(await page.locator("#alarm").isVisible()));
  assert.ok(!(await text(page, "#waiting-scroll")).includes("waits" + HOSTILE), "what the old server knew is gone");
});
await step("nothing went wrong on the way", async () => assert.deepEqual(faults, []));
await context.close();
await stop(demo);
demo = await startDemo(port, [...FLAGS, "--pools", "--teams"], 300_000);
await step("MIG instances are counted beside the GPUs, and the marks are explained", async () => {
  const { page, faults, context } = await open(browser, demo.base, "light");
  assert.match(await text(page, "#fleet-note"), /6 nodes, 48 GPUs, 32 MIG instances\. A bar is a GPU or a MIG instance/);
  assert.match(await text(page, "#tiles"), /GPUs empty\s+\d+\s+of 48 \(\d+ %\): free for whole-GPU pods; \d+ of 32 MIG instances are empty/);
  assert.match(await page.locator("#map").getAttribute("aria-label"), /48 GPUs, 32 MIG instances on 6 nodes/);
  const legend = await text(page, "#legend");
  for (const mark of ["hatched: no verified memory limit", "crossed: takes no tenants", "red edge: overallocated"]) assert.ok(legend.includes(mark), legend);
  await page.fill("#request", "1g.5gb");
  await until("an answer", async () => /would fit now on \d+ MIG instances? of|fits nowhere now/.test(await text(page, "#request-note")));
  await page.fill("#request", "");
  await page.locator("#map").focus();
  await page.keyboard.press("t");
  await until("rows", async () => (await text(page, "#rows")) === "1 to 50 of 48 GPUs, 32 MIG instances");
  await axe(page, "MIG");
  assert.deepEqual(faults, []);
  await context.close();
});
await step("teams are listed with what they may have and have", async () => {
  for (const scheme of ["light", "dark"]) {
    const { page, faults, context } = await open(browser, demo.base, scheme);
    await until("the teams", async () => (await page.locator("#teams tbody tr").count()) === 8);
    const [batch] = await page.locator("#teams tbody tr").allInnerTexts();
    assert.match(batch, /^batch\s+[\d.]+\s+no limit\s+[\d.]+\s+[\d.]+\s+\d+\s+\d+/);
    assert.match(await text(page, "#teams-note"), /over quota/);
    assert.equal(await page.locator("#teams .meter .enough").count(), 1, "one team has a limit");
    await axe(page, "teams, " + scheme);
    await shot(page, "teams-" + scheme);
    assert.deepEqual(faults, []);
    await context.close();
  }
});
await stop(demo);
await step("a cluster without pods says so", async () => {
  const empty = spawn(process.env.GPUPACK, ["demo", "--listen", "127.0.0.1:" + port, "--nodes", "2", "--fill", "0", "--arrival-rate", "0"], { stdio: "ignore" });
  children.add(empty);
  await until("the demo answers", () => fetch(demo.base + "readyz").then((it) => it.ok, () => false));
  const { page, faults } = await open(browser, demo.base, "light");
  await until("no pod waits", async () => /No pod waits/.test(await text(page, "#nobody")));
  assert.match(await text(page, "#tiles"), /no GPU is in use/);
  await axe(page, "empty");
  await shot(page, "empty");
  assert.deepEqual(faults, []);
  await stop({ child: empty });
});
await browser.close();
process.exit(0);

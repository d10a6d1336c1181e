// The page in a real browser, against a running demo. Started by `tests/page/main.rs`, which gives the
// program and the browser in GPUPACK and CHROMIUM. With SHOTS=FOLDER pictures are left there.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createServer } from "node:net";
import { AxeBuilder } from "@axe-core/playwright";
import { chromium } from "playwright-core";

const LIMIT_MS = 240_000;
const HOSTILE = '"><img src=x onerror=window.hacked=1><script>window.hacked=2</script>';

const TEAM = '"><img src=x onerror=window.hacked=3>'; // a slash would end it

const children = new Set();
process.on("exit", () => children.forEach((child) => child.kill("SIGKILL")));
process.stdin.on("end", () => process.exit(3)).resume(); // whoever started this is gone
setTimeout(() => { console.error("the page was not checked within " + LIMIT_MS / 1000 + " s"); process.exit(4); }, LIMIT_MS).unref();

function freePort() {
  return new Promise((found) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => found(port));
    });
  });
}

const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

async function until(what, isSo, withinMs = 20_000) {
  const end = Date.now() + withinMs;
  for (;;) {
    const found = await isSo();
    if (found) return found;
    if (Date.now() > end) throw new Error("not within " + withinMs / 1000 + " s: " + what);
    await sleep(100);
  }
}

async function startDemo(port, flags) {
  const child = spawn(process.env.GPUPACK, ["demo", "--listen", "127.0.0.1:" + port, ...flags], { stdio: "ignore" });
  children.add(child);
  child.on("exit", () => children.delete(child));
  const base = "http://127.0.0.1:" + port + "/";
  await until("the demo is filled", async () => {
    const answer = await fetch(base + "v1/summary").catch(() => null);
    const summary = answer && await answer.json();
    return summary && summary.readiness === "ready" && summary.packing.allocation_millionths > 600_000;
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
  const answer = await fetch(base + path, { method: "POST", body: JSON.stringify(body) });
  assert.equal(answer.status, 200, path);
  return answer.json();
}

// A pod whose every name is hostile, placed; and one that waits, with a hostile model.
async function sendHostilePods(base, nodes) {
  const pod = (name, annotations) => ({
    metadata: { name, namespace: TEAM, uid: "uid-" + name.length, annotations, creationTimestamp: "2020-01-01T00:00:00Z" },
    spec: { schedulerName: "gpupack", containers: [{ name: "c", resources: {} }] },
  });
  const placed = pod("placed" + HOSTILE, { "gpu-fraction": "0.05" });
  const found = await post(base, "v1/filter", { Pod: placed, NodeNames: nodes });
  assert.ok(found.NodeNames.length > 0, JSON.stringify(found).slice(0, 300));
  const { name, namespace, uid } = placed.metadata;
  const bound = await post(base, "v1/bind", { PodName: name, PodNamespace: namespace, PodUID: uid, Node: found.NodeNames[0] });
  assert.equal(bound.Error, "");
  const waits = pod("waits" + HOSTILE + "!", { "gpu-fraction": "0.5", "gpupack.dev/gpu-model": HOSTILE });
  await post(base, "v1/filter", { Pod: waits, NodeNames: nodes });
  return { placed: namespace + "/" + name, node: found.NodeNames[0], waits: namespace + "/" + waits.metadata.name };
}

async function step(name, does) {
  const started = Date.now();
  try { await does(); } catch (error) { error.message = name + ": " + error.message; throw error; }
  console.log("ok", name, Date.now() - started, "ms");
}

async function axe(page, what) {
  const { violations } = await new AxeBuilder({ page }).analyze();
  const found = violations.map((it) => it.id + ": " + it.nodes.map((node) => node.target + " " + node.failureSummary).join(" | "));
  assert.deepEqual(found, [], what);
}

async function shot(page, name) {
  if (process.env.SHOTS) await page.screenshot({ path: process.env.SHOTS + "/" + name + ".png", fullPage: true });
}

async function open(browser, url, colorScheme) {
  const context = await browser.newContext({ colorScheme, viewport: { width: 1360, height: 1000 } });
  const page = await context.newPage(), faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => { if (message.text().includes("Content Security Policy")) faults.push(message.text()); });
  page.on("dialog", (dialog) => { faults.push("a dialog"); dialog.dismiss(); });
  await page.goto(url);
  await page.waitForFunction(() => document.documentElement.dataset.ready === "yes");
  return { page, faults, context };
}

const text = (page, selector) => page.locator(selector).innerText();
const live = (page, words) => until("the page says " + words, async () => (await text(page, "#live")).includes(words), 45_000);

const port = await freePort();
const FLAGS = ["--nodes", "6", "--seed", "7"];
let demo = await startDemo(port, FLAGS);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-quic"] });
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
  assert.ok(asked.gpus >= 0 && Object.keys(asked.on).length === asked.nodes);
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
await step("a click opens the GPU under the pointer", async () => {
  const box = await page.locator("#map").boundingBox();
  await page.mouse.click(box.x + 8, box.y + 45);
  await until("the drawer", async () => /UUID/.test(await text(page, "#drawer")));
  await page.click("#close");
});
await step("the address brings the same view to somebody else", async () => {
  await page.selectOption("#sort", "empty");
  await page.selectOption("#colours", "idle");
  const other = await open(browser, page.url(), "dark");
  assert.equal(await other.page.inputValue("#sort"), "empty");
  assert.equal(await other.page.inputValue("#colours"), "idle");
  await axe(other.page, "dark");
  await shot(other.page, "dark");
  assert.deepEqual(other.faults, []);
  await other.context.close();
  await page.selectOption("#colours", "team");
});
await step("hostile names are text", async () => {
  const summary = await (await fetch(demo.base + "v1/summary")).json();
  hostile = await sendHostilePods(demo.base, summary.nodes.map((node) => node.name));
  await until("the waiting pod", async () => (await text(page, "#waiting")).includes("waits" + HOSTILE));
  assert.ok((await text(page, "#waiting")).includes("on " + HOSTILE), "the model it asks for");
  await until("the namespace", async () => (await text(page, "#legend")).includes(TEAM) || /other namespace/.test(await text(page, "#legend")));
  await page.fill("#search", "placed\">");
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
  await shot(page, "waiting");
  await page.click("#close");
  await page.locator("#map").focus();
  await page.keyboard.press("t");
  await until("rows", async () => (await page.locator("#gpus tbody tr").count()) > 0);
  await page.goto(demo.base + "#open=" + encodeURIComponent("pod:" + HOSTILE) + "&namespace=" + encodeURIComponent(TEAM) + "&sort=" + encodeURIComponent(HOSTILE));
  await page.reload();
  await live(page, "Live");
  await until("an unknown pod in words", async () => /not known|say which pod/.test(await text(page, "#drawer")));
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  assert.equal(await page.locator("img, script:not([src])").count(), 0);
  await page.goto(demo.base);
  await page.reload();
  await live(page, "Live");
});
await step("without events it asks now and then", async () => {
  const other = await browser.newContext();
  const asking = await other.newPage();
  await asking.route("**/v1/events*", (route) => route.fulfill({ status: 503, body: "{}" }));
  await asking.goto(demo.base);
  await live(asking, "Asking every 10 s");
  await other.close();
});
await step("a stopped server is told, and one that is back is found", async () => {
  const took = await stop(demo);
  assert.ok(took < 5_000, "an open page held the end up for " + took + " ms");
  await live(page, "Not connected");
  await until("the alarm", async () => /cannot be reached.*no longer true/s.test(await text(page, "#alarm")));
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

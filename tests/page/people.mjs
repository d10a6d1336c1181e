// The page through the API server, as two users see it: an operator, who may list all pods, and a tenant,
// who may list those of one namespace. Started by `tests/e2e/scenarios/identities.rs`, which gives the
// address in PAGE, tokens in OPERATOR and TENANT, the tenant's namespace in OWN, and in HIDDEN words that
// the tenant may read nowhere, separated by commas. With SHOTS=FOLDER pictures are left there.
import assert from "node:assert/strict";
import { axe, launch, live, open, step, text, until } from "./browser.mjs";

const { PAGE, OPERATOR, TENANT, OWN } = process.env, HIDDEN = process.env.HIDDEN.split(",");
const browser = await launch();

// The page of one user, and every answer that it got.
async function as(token, colorScheme) {
  const answers = [], user = { extraHTTPHeaders: { Authorization: "Bearer " + token }, ignoreHTTPSErrors: true, viewport: { width: 1360, height: 640 } };
  const opened = await open(browser, PAGE, colorScheme, user, async (page) => {
    page.on("response", (answer) => { if (!answer.url().includes("/v1/events")) answers.push(answer.text().catch(() => "")); });
  });
  await live(opened.page, "Live");
  return { ...opened, answers };
}

// Opens the first GPU whose drawer says all of this; what it says.
async function opened(page, words) {
  await page.locator("#map").focus();
  await page.keyboard.press("Home");
  for (let gpu = 0; gpu < 16; gpu += 1) {
    await page.keyboard.press("Enter");
    await until("the drawer", async () => /UUID/.test(await text(page, "#drawer")));
    const drawer = await text(page, "#drawer");
    if (words.every((word) => drawer.includes(word))) return drawer;
    await page.keyboard.press("Escape");
    await page.keyboard.press("ArrowRight");
  }
  throw new Error("no GPU has " + words.join(" and "));
}

// How many pixels of the map have the color of another team.
const ofOthers = (page) => page.evaluate(() => {
  const canvas = document.querySelector("#map"), pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--other").trim();
  const wanted = [1, 3, 5].map((at) => parseInt(pen.fillStyle.slice(at, at + 2), 16));
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) if (wanted.every((part, of) => data[at + of] === part)) found += 1;
  return found;
});

const picture = (page, name) => process.env.SHOTS && page.screenshot({ path: process.env.SHOTS + "/" + name + ".png" });

const legend = (page) => text(page, "#legend");

await step("an operator sees every pod by its name", async () => {
  const { page, faults, context } = await as(OPERATOR, "light");
  const shown = await legend(page), drawer = await opened(page, [OWN + "/", "speech/"]);
  assert.ok([OWN, "speech", "research"].every((team) => shown.includes(team)) && !shown.includes("another team"), shown);
  assert.ok(!drawer.includes("another team"), drawer);
  assert.match(await text(page, "#waiting"), /speech\/night-run/);
  assert.equal(await ofOthers(page), 0, "nothing on the map is of another team");
  await picture(page, "page-operator");
  assert.deepEqual(faults, []);
  await context.close();
});

await step("a tenant sees its own pods, and blocks of another team", async () => {
  const { page, faults, context, answers } = await as(TENANT, "light");
  const shown = await legend(page);
  await opened(page, [OWN + "/", "another team"]);
  assert.ok(shown.includes(OWN) && shown.includes("another team"), shown);
  assert.match(await text(page, "#waiting"), /vision\/labeler/);
  assert.ok(await ofOthers(page) > 1000, "another team is not drawn as free, or as the tenant's own");
  await axe(page, "a tenant");
  await picture(page, "page-tenant");
  await page.click("#close");
  // Not in the waiting pods, the search, the table, or any answer either.
  await page.fill("#search", HIDDEN[0]);
  await until("a search", async () => /Nothing has/.test(await text(page, "#found")));
  await page.fill("#search", "detector");
  await until("its own pods", async () => (await text(page, "#found")).includes(OWN + "/detector"));
  await page.locator("#map").focus();
  await page.keyboard.press("t");
  await until("rows", async () => (await page.locator("#gpus tbody tr").count()) > 0);
  const all = await page.content(), sent = (await Promise.all(answers)).join("\n");
  assert.ok(sent.includes(OWN + "/") || sent.includes('"' + OWN + '"'), "the answers were read");
  for (const name of HIDDEN) assert.ok(!all.includes(name) && !sent.includes(name), name);
  assert.deepEqual(faults, []);
  await context.close();
});

await browser.close();
process.exit(0);

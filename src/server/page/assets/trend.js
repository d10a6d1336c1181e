// The last hour as lines, drawn as SVG. Pointing at them, or the arrow keys, shows values at a time.
import { by, clock, count, make } from "./words.js";
import { fleet } from "./fleet.js";

const WIDE = 600, LEFT = 44, RIGHT = 10;
const SPANS = [300, 900, 1800, 3600]; // lengths of the axis, in seconds
const SVG = "http://www.w3.org/2000/svg";
const CHARTS = [
  { title: "Packing", unit: "%", high: 150, lines: [["efficiency", "efficiency", 1], ["fragmentation", "fragmentation", 2], ["allocation", "allocation", 3]] },
  { title: "Pods waiting", unit: "pods", high: 84, lines: [["waiting", "waiting", 4]] },
];
const trend = { shown: null, hairs: [] };

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// The smallest of 1, 2, 5, 10, 20 … that is not below `value`.
function nice(value) {
  let step = 1;
  for (let at = 0; step < value; at += 1) step = [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3);
  return step;
}

const value = (point, at) => (at < 4 ? (point[at] === null ? null : point[at] / 10) : point[at]);
const shown = (point, line, unit) => (value(point, line[2]) === null ? "–" : value(point, line[2]).toFixed(unit === "%" ? 1 : 0));

function chart({ title, unit, high, lines }, points, end) {
  const begin = points.length ? points[0][0] : end, axis = SPANS.find((seconds) => end - begin <= seconds) || SPANS[3];
  const top = unit === "%" ? 100 : nice(Math.max(1, ...points.map((point) => point[4])));
  const figure = draw("svg", { viewBox: `0 0 ${WIDE} ${high + 26}`, role: "img" });
  const last = points[points.length - 1];
  figure.setAttribute("aria-label", title + " over the last hour. Now: " + (last ? lines.map((line) => line[1] + " " + shown(last, line, unit) + " " + unit).join(", ") : "nothing known"));
  const x = (time) => LEFT + (WIDE - LEFT - RIGHT) * (1 - (end - time) / axis), y = (at) => 8 + (high - 8) * (1 - at / top);
  for (const part of high > 100 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1]) {
    const at = top * part;
    if (unit !== "%" && !Number.isInteger(at)) continue;
    figure.append(draw("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y(at), y2: y(at) }),
      draw("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, at + (unit === "%" ? " %" : "")));
  }
  for (let minutes = axis / 60; minutes >= 0; minutes -= axis / 60 / (axis === 300 || axis === 1800 ? 5 : axis === 900 ? 3 : 4)) {
    const at = x(end - minutes * 60);
    figure.append(draw("text", { x: at, y: high + 18, "text-anchor": minutes === 0 ? "end" : minutes === axis / 60 ? "start" : "middle" }, minutes === 0 ? "now" : "−" + minutes + " min"));
  }
  for (const [name, , column] of lines) {
    let path = "", isDown = false;
    for (const point of points) {
      const at = value(point, column);
      if (at === null || end - point[0] > axis) { isDown = false; continue; }
      path += (isDown ? "L" : "M") + x(point[0]).toFixed(1) + " " + y(Math.min(at, top)).toFixed(1);
      isDown = true;
    }
    figure.append(draw("path", { class: name, d: path || "M0 0" }));
  }
  const hair = draw("line", { class: "hair", y1: 8, y2: high, x1: 0, x2: 0, visibility: "hidden" });
  figure.append(hair);
  trend.hairs.push({ hair, x });
  figure.addEventListener("pointermove", (event) => {
    const box = figure.getBoundingClientRect(), time = end - axis * (1 - ((event.clientX - box.left) / box.width * WIDE - LEFT) / (WIDE - LEFT - RIGHT));
    const near = points.reduce((best, point) => (!best || Math.abs(point[0] - time) < Math.abs(best[0] - time) ? point : best), null);
    if (near) tellPoint(near);
  });
  figure.addEventListener("pointerleave", () => tellPoint(null));
  return figure;
}

// The arrow keys step through the points, Home and End go to the first and last.
function walk(event) {
  const points = fleet.trend, at = trend.shown ? points.indexOf(trend.shown) : points.length;
  const next = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 12, PageDown: at + 12, Home: 0, End: points.length - 1 }[event.key];
  if (event.key === "Escape" && trend.shown) { event.stopPropagation(); tellPoint(null); }
  if (next === undefined || !points.length) return;
  event.preventDefault();
  tellPoint(points[Math.max(0, Math.min(points.length - 1, next))]);
}

export function start() {
  by("trend").addEventListener("keydown", walk);
  by("trend").addEventListener("blur", () => tellPoint(null));
}

function tellPoint(point) {
  trend.shown = point;
  for (const { hair, x } of trend.hairs) {
    hair.setAttribute("visibility", point ? "visible" : "hidden");
    if (point) for (const end of ["x1", "x2"]) hair.setAttribute(end, Math.max(LEFT, x(point[0])));
  }
  by("trend-note").textContent = point
    ? clock(point[0]) + ": " + CHARTS.flatMap((kind) => kind.lines.map((line) => line[1] + " " + shown(point, line, kind.unit) + (kind.unit === "%" ? " %" : ""))).join(", ")
    : "one point every 5 s; point at a line, or walk with the arrow keys, for its values";
}

export function showTrend() {
  if (trend.shown) return; // the user reads a value
  const points = fleet.trend, end = points.length ? points[points.length - 1][0] : Math.floor(Date.now() / 1000);
  const keys = make("ul", undefined, "legend");
  for (const line of CHARTS[0].lines) {
    const item = make("li"), swatch = draw("svg", { width: 22, height: 10, "aria-hidden": "true" });
    swatch.append(draw("path", { class: line[0], d: "M0 5L22 5" }));
    item.append(swatch, make("span", line[1]));
    keys.append(item);
  }
  trend.hairs = [];
  by("trend").replaceChildren(keys, chart(CHARTS[0], points, end), make("h3", "Pods waiting"), chart(CHARTS[1], points, end));
  if (!points.length) by("trend-note").textContent = "no point yet";
  else if (points.length < 12) by("trend-note").textContent = count(points.length, "point", "points") + " since gpupack started, one every 5 s";
  else tellPoint(null);
}

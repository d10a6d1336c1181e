// Elements and words. Text from the cluster is never written as markup, only as `textContent`.

export const by = (id) => document.getElementById(id);
export const number = new Intl.NumberFormat("en");

export function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

export function button(text, does, className) {
  const element = make("button", text, className);
  element.type = "button";
  element.addEventListener("click", does);
  return element;
}

// Writes a text if it differs: screen readers do not repeat what has not changed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const percent = (thousandths) => (thousandths / 10).toFixed(1) + " %";
export const share = (millionths) => (millionths / 10000).toFixed(1) + " %";
export const gpus = (millionths) => (millionths / 1e6).toLocaleString("en", { maximumFractionDigits: millionths < 1e7 ? 1 : 0 });
export const gib = (mib) => (mib / 1024).toFixed(mib < 10240 ? 1 : 0) + " GiB";
export const count = (amount, one, many) => number.format(amount) + " " + (amount === 1 ? one : many);
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function span(seconds) {
  if (seconds < 120) return Math.max(0, Math.floor(seconds)) + " s";
  if (seconds < 7200) return Math.floor(seconds / 60) + " min";
  if (seconds < 172800) return Math.floor(seconds / 3600) + " h";
  return Math.floor(seconds / 86400) + " days";
}

const TIMEOUT_MS = 15000;

// Queries gpupack. Paths are relative: behind the API server's proxy the page is below a prefix.
export async function fetchJson(path) {
  const answer = await fetch(path, { cache: "no-cache", signal: AbortSignal.timeout(TIMEOUT_MS) });
  const text = await answer.text();
  let body = null;
  try { body = JSON.parse(text); } catch { /* a proxy may answer with its own page */ }
  if (answer.ok && body) return body;
  throw new Error((body && body.error) || "it answers with status " + answer.status);
}

export function because(error) {
  if (error instanceof TypeError) return "no connection";
  return error.name === "TimeoutError" ? "no answer in time" : error.message;
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A name such as `NeverReported` in plain words.
export const words = (name) => name.replace(/(?<=[a-z])(?=[A-Z])|_/g, " ").toLowerCase();

// The command for the same query on a terminal, with a button that copies it.
export function command(pod) {
  const box = make("div", undefined, "command"), line = "kubectl gpupack explain " + pod;
  const text = make("code", line);
  box.append(text, button("Copy", async (event) => {
    try {
      await navigator.clipboard.writeText(line);
    } catch { // no clipboard without HTTPS: leave it selected, for Ctrl-C
      const range = document.createRange();
      range.selectNodeContents(text);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      event.target.textContent = document.execCommand("copy") ? "Copied" : "Selected";
      return;
    }
    event.target.textContent = "Copied";
  }));
  return box;
}

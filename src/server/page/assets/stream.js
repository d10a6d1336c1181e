// The connection to the server: a snapshot, then events; without events, periodic requests.
import { because, fetchJson } from "./words.js";

const SILENT_MS = 30000;   // a stream without messages for this time is closed
const LATE_MS = 9000;      // the server sends something every 5 s
const POLL_MS = 10000;     // between two requests without a stream
const POLLS = 6;           // requests before the next try of a stream
const HIDDEN_MS = 60000;   // a hidden page closes its stream after this time

// `page` has: load(snapshot), apply(delta), state(kind, words).
export function listen(page) {
  const line = { source: null, heard: 0, at: "", timer: 0, hidden: 0, fault: "", known: false, polled: 0 };

  async function refresh() {
    clearTimeout(line.timer);
    try {
      const snapshot = await fetchJson("v1/summary");
      line.heard = Date.now();
      line.fault = "";
      if (snapshot.at !== line.at || !line.known) page.load(snapshot);
      [line.at, line.known] = [snapshot.at, true];
      if (line.polled > 0) poll(line.polled - 1); else open();
    } catch (error) {
      line.fault = because(error);
      line.timer = setTimeout(refresh, line.known ? 2000 + Math.random() * 1000 : 1000);
    }
    show();
  }

  function open() {
    close();
    const source = new EventSource("v1/events?after=" + encodeURIComponent(line.at));
    line.source = source;
    source.addEventListener("open", () => { line.heard = Date.now(); line.fault = ""; show(); });
    source.addEventListener("delta", (event) => {
      const delta = JSON.parse(event.data);
      line.heard = Date.now();
      line.fault = "";
      line.at = delta.at;
      page.apply(delta);
      show();
    });
    source.addEventListener("reload", () => { close(); refresh(); });
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) { // refused: the browser does not reconnect
        close();
        line.polled = POLLS;
        refresh();
        return;
      }
      line.fault = "the connection broke";
      show();
    });
  }

  function close() {
    if (line.source) line.source.close();
    line.source = null;
  }

  // No stream, for instance because a proxy delays answers: `times` requests before the next try.
  function poll(times) {
    close();
    line.polled = times;
    clearTimeout(line.timer);
    line.timer = setTimeout(refresh, POLL_MS);
  }

  function show() {
    const late = Date.now() - line.heard;
    if (!line.known) page.state("bad", line.fault ? "Not connected" : "Loading …", line.fault);
    else if (line.fault) page.state("bad", "Not connected", line.fault);
    else if (!line.source) page.state("late", "Polling every " + POLL_MS / 1000 + " s: events do not come through", "");
    else if (late > LATE_MS) page.state("late", "Delayed " + Math.round(late / 1000) + " s", "");
    else page.state("good", "Live", "");
  }

  setInterval(() => {
    if (document.hidden) {
      line.hidden ||= Date.now();
      if (line.source && Date.now() - line.hidden > HIDDEN_MS) close();
      return;
    }
    if (line.source && Date.now() - Math.max(line.heard, line.hidden) > SILENT_MS) poll(POLLS);
    show();
  }, 1000);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    line.hidden = 0;
    if (!line.source && line.known) refresh();
  });
  refresh();
}

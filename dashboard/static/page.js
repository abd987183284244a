// Wires the feed to what is drawn. The newest frame wins: drawing happens once per animation frame at most.

import {drawCharts} from "./charts.js";
import {$, count, legend, make, percent} from "./dom.js";
import {watch} from "./feed.js";
import {History} from "./history.js";
import {drawPages, pageLegend} from "./pages.js";
import {SeatGrid, drawQueue, readSeats, seatTable} from "./seats.js";
import {Timeline} from "./timeline.js";
import {setUp} from "./tryit.js";

const STALE_MS = 3000;
const POLICY = {continuous: "continuous (in-flight)", static: "static", dynamic: "dynamic"};

const grid = new SeatGrid($("seats"), $("seat-read"));
const timeline = new Timeline($("timeline"), $("time-read"));
let hello = null, frame = null, rows = [], pages = null, history = null;
let heardAt = performance.now(), drawn = true, chartedAt = 0, trouble = "";

function onEvent(name, data) {
  heardAt = performance.now();
  trouble = "";
  if (name === "hello") greet(data);
  if (name === "key") take(data);
  if (name === "bye") trouble = data.reason;
}

function greet(news) {
  if (hello && hello.run !== news.run) location.reload();  // another server: its times and steps start anew
  hello = news;
  $("hz").textContent = news.hz;
  $("try").hidden = news.keys || !news.info;
  if (!news.info) return;
  showFacts(news.info);
  $("curl").textContent = curlLine(news.info.model, news.keys);
}

function take(news) {
  const fresh = !history || (frame && news.t - frame.t > 2);
  frame = news;
  if (news.seats) {
    rows = readSeats(news.seats, hello.states);
    timeline.add(rows, news.t, news.s.waiting);
  } else if (news.state === "loading") rows = [];  // who sat in an engine that is gone has been sent home
  pages = news.pages ?? pages;
  if (fresh) startHistory(news);
  history.add(news, busy());
  drawn = false;
  requestAnimationFrame(draw);
}

/** The minute before this frame comes from the engine's step records, the rest from the feed. */
async function startHistory(base) {
  const mine = history = new History(Object.keys(base.s.rows));
  const answer = await fetch("frames").catch(() => null);
  if (answer?.ok) mine.fill((await answer.json()).columns, base);
}

const seatCount = () => hello?.info?.seats ?? rows.length;
const seated = () => rows.filter((row) => row.state !== "free").length;

/** Seats taken. A seat that was left a moment ago looks free until the next plan fills it from the queue: while
 *  somebody waits, the last step's own count tells better how full the engine is. */
const busy = () => !frame ? 0 : !frame.seats ? frame.s.seats_busy
  : frame.s.waiting ? Math.max(seated(), frame.s.seats_busy) : seated();

function draw() {
  if (drawn || !frame) return;
  drawn = true;
  const waiting = frame.s.waiting;
  showState();
  $("headline").textContent = headline(busy(), seatCount(), waiting);
  showFigures(waiting);
  $("empty").hidden = !(frame.state === "ready" && total(frame.s.steps) === 0 && busy() === 0);
  $("queue-text").textContent = waiting ? `${count(waiting)} waiting` : "nobody waits";
  drawQueue($("queue"), waiting);
  grid.show(rows);
  $("seats").setAttribute("aria-label", `Seats: ${busy()} of ${seatCount()} taken`);
  timeline.draw();
  if (pages) showPages();
  if ($("seat-details").open) seatTable($("seat-table"), rows);
  if ($("time-details").open) timeline.fillTable($("time-table"));
  if (performance.now() - chartedAt > 950) {
    chartedAt = performance.now();
    drawCharts(history, frame.t, seatCount());
  }
}

/** What a person wants to know in five seconds: is it full, and does anybody wait? */
function headline(taken, seats, waiting) {
  if (frame.state === "dead") return "The engine is dead";
  if (frame.state === "loading") {
    const news = frame.progress;
    if (!news) return "Loading";
    const done = news.total > 1000 ? percent(news.done, news.total) : `${count(news.done)} of ${count(news.total)}`;
    return `Loading: ${news.stage} ${done}`;
  }
  const queue = waiting ? `${count(waiting)} waiting` : "nobody waits";
  if (!taken && !waiting) return `Idle: all ${seats} seats are free`;
  if (taken === seats) return `Full: all ${seats} seats taken, ${queue}`;
  return `${taken} of ${seats} seats taken, ${queue}`;
}

function showFigures(waiting) {
  const output = history.rate("decode"), prompt = history.rate("prefill"), seats = seatCount();
  const counts = pages?.counts, all = counts ? total(counts) : 0, used = counts ? counts.held + counts.shared : 0;
  const figure = (value) => value === null ? "–" : count(value);
  const tiles = [["Output tok/s", figure(output)], ["Prompt tok/s", figure(prompt)],
                 ["Seats taken", `${busy()} of ${seats}`, busy() / seats, busy() === seats ? "full" : ""],
                 ["Waiting", count(waiting), null, waiting ? "waits" : ""],
                 ["Pages used", percent(used, all), all ? used / all : null]];
  $("figures").replaceChildren(...tiles.map(([name, value, share, mark]) => {
    const tile = make("div", {class: `figure ${mark ?? ""}`}, make("dt", {}, name), make("dd", {}, value));
    if (share !== null && share !== undefined) tile.append(make("meter", {value: share, "aria-label": name}));
    return tile;
  }));
}

function showFacts(info) {
  const facts = [["model", info.model], ["device", info.device], ["kernels", info.kernels],
                 ["policy", POLICY[info.policy] ?? info.policy]];
  $("facts").replaceChildren(...facts.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  document.title = `Jitney: ${info.model}`;
}

function showPages() {
  const {page_size: size, pages: all} = hello.info ?? {};
  const grouped = pages.per_cell > 1 ? ` One cell is ${pages.per_cell} pages in the state most of them have.` : "";
  if (all) $("page-sub").textContent = `${count(all)} pages of ${size} tokens each.${grouped}`;
  drawPages($("pages"), pages, hello.page_states);
  pageLegend($("page-legend"), pages.counts, hello.page_states);
}

function showState() {
  const silent = performance.now() - heardAt, quiet = frame?.state === "ready" && frame.age * 1000 > STALE_MS;
  const stale = silent > STALE_MS || quiet;
  const state = !frame ? "connecting" : frame.state === "dead" ? "dead" : stale ? "stale"
    : frame.state === "ready" ? "live" : frame.state;
  document.body.dataset.state = state;
  $("state").textContent = state;
  const last = frame ? " The last values are shown." : "";
  const text = trouble || (silent > STALE_MS ? `No news from the server for ${count(silent / 1000)} s.${last}`
    : quiet ? `The engine has been silent for ${count(frame.age)} s.` : "");
  $("trouble").hidden = !text;
  $("trouble").textContent = text;
  const news = frame?.progress;
  $("progress").hidden = !news;
  if (news?.total) { $("progress").max = news.total; $("progress").value = news.done; }
  else $("progress").removeAttribute("value");
}

function curlLine(model, keys) {
  const key = keys ? ' -H "authorization: Bearer $JITNEY_API_KEY"' : "";
  const body = JSON.stringify({model, prompt: "Once upon a time", max_tokens: 64}).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/completions -H 'content-type: application/json'${key} -d '${body}'`;
}

const total = (counts) => Object.values(counts).reduce((sum, value) => sum + value, 0);

function redraw() {
  drawn = false;
  chartedAt = 0;
  requestAnimationFrame(draw);
}

$("copy").addEventListener("click", async () => {
  getSelection().selectAllChildren($("curl"));  // what is left to do by hand where the clipboard is refused
  const copied = () => { $("copy").textContent = "Copied"; };
  await navigator.clipboard?.writeText($("curl").textContent).then(copied, () => {});
});
for (const id of ["seat-details", "time-details"]) $(id).addEventListener("toggle", redraw);
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
legend($("seat-legend"), [["decode", "● generating"], ["prefill", "» reading its prompt"], ["free", "free"],
                          ["waiting", "waiting for a seat"]]);
legend($("time-legend"), [["rides", "one sequence, generating"], ["rides-read", "reading its prompt"],
                          ["idle", "idle"], ["unknown", "not seen by this page"]]);
setUp(() => hello.info.model, (id) => grid.mine.add(id), (id) => grid.mine.delete(id));
setInterval(showState, 500);
watch({event: onEvent, trouble: (text) => { trouble = text; showState(); }});

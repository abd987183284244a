// Connects the data to what is drawn. Drawing happens once per animation frame at most, from the newest frame.

import {Band, figuresNow, figuresThen, pricePerHour, setPricePerHour} from "./band.js";
import {Charts, chartTable} from "./charts.js";
import {Chat, placeInWords} from "./chat.js";
import {asCurl} from "./completion.js";
import {$, count, legend, reducedMotion, say, sum} from "./dom.js";
import {showDevice} from "./device.js";
import {Drawer} from "./drawer.js";
import {setUpEngines} from "./engines.js";
import {KeptIncidents} from "./kept.js";
import {Lab} from "./lab.js";
import {Memory} from "./memory.js";
import {Incidents, showNotes} from "./notes.js";
import {PageMap, pageLegend} from "./pages.js";
import {Programs} from "./programs.js";
import {QueueList} from "./queue.js";
import {IDLE, UNKNOWN, WASTE, WHILE_READING} from "./raster.js";
import {Requests} from "./requests.js";
import {SeatGrid, goneMoment, momentOf, seatLegend, seatTable} from "./seats.js";
import {Settings} from "./settings.js";
import {headline, showCanary, showFacts, showState, stateOf, whyIdle} from "./status.js";
import {Tenants} from "./tenants.js";
import {offerHours, setUpBar, showBar} from "./timebar.js";
import {Timeline, steer} from "./timeline.js";
import {View} from "./view.js";
import {Views} from "./views.js";
import {Watcher} from "./watcher.js";
import {Work} from "./work.js";

/** Milliseconds between two drawings with reduced motion. */
const STILL_MS = 950;
/** Milliseconds that seats must be free while requests wait before the page says why: each boarding takes a moment. */
const IDLE_MS = 1000;
/** Height of a seat's row, CSS pixels, where there are few seats. */
const HIGHEST_ROW = 72;

let watcher = null;
let moment = null;
let scheduled = false;
let shownAt = 0;
let playedAt = 0;
let standalone = false;
let idleSince = null;
let isFollowed = false;
let pointed = null; // moment of the band at the pointer; null: none

const view = new View(schedule);
const views = new Views({
  shown: (name) => {
    if (name === "chat") {
      chat.open();
    }
    schedule();
  },
  request: (id, index) => pick(id, index),
  moment: (time) => view.seek(time - view.origin),
});
const drawer = new Drawer($("drawer"), () => watcher.base, showStay);
const band = new Band($("figures"), (t) => {
  pointed = t;
  schedule();
});
const chat = new Chat({
  place: (id) => placeInWords(watcher.waiting, id, watcher.engine.frame?.t ?? 0, predictedWait()),
  began: (id) => named(id, (request) => grid.mine.add(request)),
  ended: (id) => named(id, (request) => grid.mine.delete(request)),
  tell: (id) => named(id, (request) => pick(request, 0)),
});
const queue = new QueueList($("queue"), $("queue-text"), pick);
const grid = new SeatGrid($("seats"), $("seat-read"), pick);
const pages = new PageMap($("pages"), $("page-read"));
const charts = new Charts();
const incidents = new Incidents();
const pastIncidents = new KeptIncidents(() => watcher.base);
const requests = new Requests($("requests"), () => watcher.base, pick, {
  clock: (t) => view.clock(t),
  place: ({state, request, index}) => (state === "waiting" ? watcher.waiting.placeInWords(request, index) : ""),
});
const lab = new Lab($("lab"), () => watcher.base);
const tenants = new Tenants(() => watcher.base, (text) => {
  requests.find(text);
  views.go("requests");
});
const work = new Work(() => watcher.base);
const memory = new Memory(() => watcher.base);
const programs = new Programs(() => watcher.base);
const settings = new Settings(() => watcher.base);
let timeline = null;

/** Open a sequence: show its detail, and frame its stays. */
function pick(request, index) {
  timeline.chosen = request;
  drawer.open(request, index);
  views.note(`${encodeURIComponent(request)}/${index}`, "requests");
  schedule();
}

/** Call `then` with the engine's id of the request that the page sent under an x-request-id, if already known. */
function named(id, then) {
  const request = watcher.waiting.names.get(id);
  if (request) {
    then(request);
  }
}

const predictedWait = () => watcher.engine.frame?.metrics.predicted_wait_s ?? null;

/** Show a sequence (as `request/{id}` describes it) on the timeline. */
function showStay({arrival, finished}) {
  view.span = Math.max(view.span, 1.2 * ((finished ?? view.now) - arrival));
  if (finished === null) {
    view.resume();
  } else {
    view.scrub(finished + 0.1 * (finished - arrival));
  }
  views.show("overview");
  $("timeline").focus({preventScroll: true});
}

/** Data embedded in the page, see `Dashboard._first`; null: none. */
const first = JSON.parse($("first")?.textContent ?? "null");

/** Watch the engine at `base` from now on. alone: there is no engine behind this page's own server. */
function start(base, alone) {
  standalone = alone;
  watcher?.stop();
  watcher = new Watcher(base, {greet, change: schedule, trouble: schedule}, first);
  view.resume();
  timeline ??= new Timeline({
    canvas: $("timeline"),
    reading: $("time-read"),
    stays: watcher.stays,
    view,
    onPick: pick,
    describe: (t, ago) => view.name(t, ago),
    highest: HIGHEST_ROW,
  });
  timeline.isMine = (request) => grid.mine.has(request);
  timeline.stays = watcher.stays;
  for (const name of ["report", "trace"]) {
    $(name).href = `${base}${name}`;
  }
  $("facts").replaceChildren();
  requests.reset();
  lab.reset();
  schedule();
}

function greet(hello) {
  view.origin = hello.unix_time - hello.t;
  offerHours(view, hello.history_h ?? 0);
  const isAdmin = hello.role !== "user";
  for (const name of ["report", "trace"]) {
    $(name).hidden = !isAdmin;
  }
  views.offer("lab", isAdmin);
  views.offer("chat", !standalone && Boolean(hello.info) && !hello.info.encoder);
  work.greet(hello, !standalone);
  programs.greet(hello);
  settings.greet(hello);
  if (!hello.info) {
    return;
  }
  showFacts(hello.info);
  chat.greet(hello);
  const example = {model: hello.info.model, prompt: "Once upon a time", max_tokens: 64};
  say($("curl"), asCurl(example, hello.needs_key, "v1/completions"));
}

function schedule() {
  if (scheduled) {
    return;
  }
  scheduled = true;
  requestAnimationFrame(frame);
}

function frame(now) {
  scheduled = false;
  const {engine} = watcher;
  if (engine.frame) {
    view.tick(engine.frame.t);
  }
  play(now);
  updateState();
  if (!engine.frame) {
    return say($("headline"), headline(null));
  }
  if (isFollowed) {
    noteMoment();
  } else {
    isFollowed = true;
    views.follow(); // from now on the page can show the address's moment
  }
  if (reducedMotion.matches && view.mode === "live" && now - shownAt < STILL_MS) {
    return;
  }
  shownAt = now;
  show();
  requestAnimationFrame(() => charts.frame(chartMoment, document.hidden));
}

/** Write the displayed moment into the address, so that the reader can share it. */
function noteMoment() {
  if (!drawer.dialog.open) {
    views.note(view.mode === "paused" ? `at=${(view.t + view.origin).toFixed(1)}` : "");
  }
}

function play(now) {
  if (view.mode === "replay" && playedAt) {
    view.play((now - playedAt) / 1000);
  }
  playedAt = view.mode === "replay" ? now : 0;
  if (view.mode === "replay") {
    schedule();
  }
}

const past = () => view.mode !== "live";
const chartMoment = () => ({
  history: watcher.history,
  t: view.t,
  span: Math.max(10, view.span),
  seats: watcher.engine.seatCount,
  rowKinds: watcher.engine.hello.row_kinds,
  metrics: watcher.engine.frame.metrics,
  histograms: watcher.engine.frame.histograms,
  windows: Object.keys(watcher.engine.pages?.windows ?? {}),
  memory: memory.answer,
});

const counted = (name) =>
  moment.state.reduce((all, state) => all + (moment.states[state] === name), 0);

/** Seats taken now. While requests wait, a seat that was just left counts as taken, since the step's own count shows
 *  better how full the engine is. null: there is no engine. */
function taken() {
  if (view.isOld) {
    return Math.round(watcher.history.at(view.t)?.busy ?? NaN);
  }
  if (moment.gone) {
    return null;
  }
  const {metrics} = watcher.engine.frame;
  const seated = moment.count - counted("free");
  return !past() && metrics.waiting ? Math.max(seated, metrics.seats_busy) : seated;
}

/** Sequences that wait at the displayed moment; null if not known. */
function waitingThen() {
  if (!past()) {
    return watcher.engine.frame.metrics.waiting;
  }
  return moment.waiting ?? watcher.history.at(view.t)?.waiting ?? null;
}

/** Values for the headline and the figures at the displayed moment. */
function summary() {
  const {engine} = watcher;
  return {
    taken: taken(),
    held: view.isOld ? 0 : counted("held"),
    seats: engine.seatCount,
    waiting: waitingThen(),
    policy: engine.info?.policy,
    ago: view.ago,
  };
}

/** Show the figures of the displayed moment, or of the moment at the pointer. */
function showBand() {
  const {engine, history} = watcher;
  const {t, metrics} = engine.frame;
  const then = pointed ?? (past() ? view.t : null);
  const shown = {history, allPages: engine.info?.pages};
  const figures = then === null ? figuresNow({...shown, metrics, t}) : figuresThen({...shown, t: then});
  watcher.loadHours(view.reach);
  band.show(figures, history, {t: then ?? t, newest: t, reach: view.reach});
}

/** Why seats are free now while requests wait. */
function idleReason(now) {
  const {engine} = watcher;
  const free = past() || moment.gone ? 0 : now.seats - now.taken;
  if (!free || !now.waiting) {
    return "";
  }
  const reading = [];
  moment.state.forEach((state, i) => {
    if (moment.states[state] === "prefill") {
      reading.push([moment.end(i) - moment.reached(i), moment.end(i)]);
    }
  });
  const pages = engine.pages?.counts ?? null;
  return whyIdle({free, waiting: now.waiting, reading, policy: now.policy, pages});
}

function showWhy(now, t) {
  const reason = idleReason(now);
  idleSince = reason ? (idleSince ?? t) : null;
  const shown = reason && t - idleSince >= IDLE_MS;
  $("why").hidden = !shown;
  if (shown) {
    say($("why"), reason);
  }
}

/** How the idle seats of a second are painted. */
function idleKind(second) {
  if (view.isOld) {
    return watcher.history?.at(second) ? IDLE : UNKNOWN;
  }
  const {waited, read} = watcher.history?.waits(second) ?? {};
  if (!waited) {
    return IDLE;
  }
  return read ? WHILE_READING : WASTE;
}

/** The seats' sequences at the displayed moment. */
function shownMoment() {
  const {engine, recorder, stays, oldStays} = watcher;
  if (!past() || !recorder) {
    return momentOf(engine);
  }
  if (engine.goneAt(view.t)) {
    return goneMoment(engine);
  }
  return recorder.moment(view.t, view.isOld ? oldStays : stays);
}

function show() {
  const {engine} = watcher;
  const {state, metrics} = engine.frame;
  moment = shownMoment();
  const now = summary();
  const untouched = state === "ready" && sum(metrics.steps) === 0 && now.taken === 0;
  say($("headline"), headline(engine.frame, now));
  showBand();
  showWhy(now, performance.now());
  incidents.show(engine.notes, engine.hello.run, (t) => view.clock(t));
  $("empty").hidden = !untouched;
  queue.show(watcher.waiting, {
    count: now.waiting ?? 0,
    now: engine.frame.t,
    predicted: predictedWait(),
    mine: timeline.isMine,
    live: !past(),
  });
  chat.frame();
  grid.show(moment);
  const seated = now.taken === null ? "no engine" : `${now.taken} of ${now.seats} taken`;
  $("seats").setAttribute("aria-label", `Seats: ${seated}`);
  if (view.isOld) {
    watcher.loadOldStays(view.t, view.span);
  }
  timeline.stays = view.isOld ? watcher.oldStays : watcher.stays;
  timeline.version = view.isOld ? -1 - watcher.pastLoads : watcher.pastLoads;
  timeline.origin = view.origin;
  timeline.idleKind = idleKind;
  timeline.outages = engine.outages;
  timeline.incidents = view.isOld ? pastIncidents.notesAt(view.origin) : engine.notes;
  timeline.moment = moment;
  timeline.draw(engine.seatCount, engine.frame.t);
  if (timeline.moving) {
    schedule();
  }
  showBar(view);
  showPages();
  showNotes($("notes"), engine.notes, engine.frame.t);
  pastIncidents.frame(views.shown === "incidents" || view.isOld, engine.notes);
  showCanary(engine.info, metrics.canary);
  showDevice($("device"), metrics.device);
  requests.frame(past(), engine.serving);
  tenants.frame(views.shown === "tenants");
  work.frame(views.shown === "work");
  memory.frame(views.shown === "memory", engine.pages, engine.hello.page_states);
  programs.frame(views.shown === "performance");
  settings.frame(views.shown === "settings");
  lab.frame();
  fillTables();
}

function showPages() {
  const {engine} = watcher;
  const {page_size: size, pages: all} = engine.info ?? {};
  if (!engine.pages) {
    return;
  }
  const {per_cell: each} = engine.pages;
  const grouped = each > 1 ? ` One cell is ${each} pages in the state most of them have.` : "";
  if (engine.info?.encoder) {
    say($("page-sub"), "This model keeps no keys and values: the page of its pool is never held.");
  } else if (all) {
    const when = past() ? " As of now." : "";
    say($("page-sub"), `${count(all)} pages of ${size} tokens each.${grouped}${when}`);
  }
  pages.draw(engine.pages, engine.hello.page_states);
  pageLegend($("page-legend"), engine.pages.counts, engine.hello.page_states);
}

/** Milliseconds between two updates of an open table. */
const FILL_MS = 450;
let filledAt = 0;

/** Update table twins that are open. */
function fillTables() {
  if (performance.now() - filledAt < FILL_MS && !past()) {
    return;
  }
  filledAt = performance.now();
  if ($("seat-details").open) {
    seatTable($("seat-table"), moment);
  }
  if ($("time-details").open) {
    timeline.fillTable($("time-table"));
  }
  if ($("page-details").open && pages.pages) {
    pages.fillTable($("page-table"));
  }
  if ($("chart-details").open) {
    chartTable($("chart-table"), chartMoment());
  }
}

function updateState() {
  if (!watcher) {
    return; // the list of engines is still loading
  }
  const {engine, silent, trouble} = watcher;
  const {frame, notes} = engine;
  showState(stateOf(frame, view.mode, silent), frame && {...frame, notes}, silent, trouble);
}

function restyle() {
  for (const part of [grid, timeline, pages]) {
    part.restyle();
  }
  lab.restyle();
  band.restyle();
  charts.refresh();
  schedule();
}

/** Show the snapshot before (by = -1) or after (by = 1) the one on the screen. */
function step(by) {
  const t = watcher.recorder?.neighbour(view.t, by);
  if (t !== null && t !== undefined) {
    view.scrub(t);
  }
}

$("copy").addEventListener("click", async () => {
  getSelection().selectAllChildren($("curl")); // so that the reader can copy where the clipboard is refused
  const copied = () => say($("copy"), "Copied");
  await navigator.clipboard?.writeText($("curl").textContent).then(copied, () => {});
});
for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => {
    filledAt = 0;
    schedule();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
legend($("seat-legend"), seatLegend);
legend($("time-legend"), [
  ["stays", "one sequence, generating"],
  ["stays-read", "reading its prompt"],
  ["idle", "idle, none waiting"],
  ["idle-read", "free while prompts are read"],
  ["idle-waste", "idle while requests wait: waste"],
  ["unknown", "not known"],
]);
setUpBar(view, step);
$("price").value = pricePerHour() ?? "";
$("price").addEventListener("change", ({target}) => {
  setPricePerHour(target.value);
  schedule();
});
setInterval(updateState, 500);
await setUpEngines($("engine"), start, first?.engines);
steer($("timeline"), timeline, view);
views.show(views.named[0]);

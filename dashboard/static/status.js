// The top of the page: what a person wants to know in five seconds. Is it full, who waits, which policy is on?

import {$, count, make, percent, say, sum} from "./dom.js";

const STALE_MS = 3000;
const POLICY = {continuous: "continuous (in-flight) batching", static: "static batching", dynamic: "dynamic batching"};
const QUIET = {connecting: "Connecting to the engine", dead: "The engine is dead"};

/** The state of the page: connecting | loading | live | paused | stale | draining | dead. silent: ms without news. */
export function stateOf(frame, mode, silent) {
  if (!frame) return "connecting";
  if (frame.state === "dead") return "dead";
  if (silent > STALE_MS || quiet(frame)) return "stale";
  if (frame.state !== "ready") return frame.state;
  return mode === "live" ? "live" : mode === "replay" ? "replay" : "paused";
}

const quiet = (frame) => frame.state === "ready" && frame.age * 1000 > STALE_MS;

/** now: {taken, held (of them, by a batch whose slowest is not done), seats, waiting (null: not known), policy,
 *  ago (seconds; 0: now)}. */
export function headline(frame, now) {
  if (!frame) return QUIET.connecting;
  if (frame.state === "dead") return QUIET.dead;
  if (frame.state === "loading") return loading(frame.progress);
  const tail = `${now.policy ? `, ${now.policy}` : ""}${now.ago > 0.05 ? ` (${ago(now.ago)})` : ""}`;
  const queue = now.waiting === null ? "" : now.waiting ? `, ${count(now.waiting)} waiting` : ", nobody waits";
  if (!now.taken && !now.waiting) return `Idle: all ${now.seats} seats free${tail}`;
  if (now.taken === now.seats && !now.held) return `Full: all ${now.seats} seats taken${queue}${tail}`;
  if (now.held) return `${now.taken} of ${now.seats} seats taken (${now.held} held idle)${queue}${tail}`;
  return `${now.taken} of ${now.seats} seats taken${queue}${tail}`;
}

export const ago = (value) => value < 60 ? `${value.toFixed(1)} s ago`
  : `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s ago`;

function loading(news) {
  if (!news) return "Loading";
  const done = news.total > 1000 ? percent(news.done, news.total) : `${count(news.done)} of ${count(news.total)}`;
  return `Loading: ${news.stage} ${done}`;
}

/** The pill, the line of trouble and the progress bar. */
export function showState(state, frame, silent, trouble) {
  if (document.body.dataset.state !== state) document.body.dataset.state = state;
  say($("state"), state);
  const last = frame ? " The last values are shown." : "";
  const text = trouble || (silent > STALE_MS ? `No news from the server for ${count(silent / 1000)} s.${last}`
    : frame && quiet(frame) ? `The engine has been silent for ${count(frame.age)} s.` : deadWhy(frame));
  $("trouble").hidden = !text;
  say($("trouble"), text);
  const news = frame?.state === "loading" ? frame.progress : null;
  $("progress").hidden = frame?.state !== "loading";
  if (news?.total) { $("progress").max = news.total; $("progress").value = news.done; }
  else $("progress").removeAttribute("value");
}

function deadWhy(frame) {
  if (frame?.state !== "dead") return "";
  const note = frame.notes?.findLast((one) => one.code === "dead");
  return `Error engine_dead: ${note?.msg ?? "the core process is gone; the server's log says why."}`;
}

let tiles = null;

/** The figures under the headline: {output, prompt, taken, seats, waiting, pages (counts or null), past}. */
export function showFigures(now) {
  const all = now.pages ? sum(now.pages) : 0, used = all ? now.pages.held + now.pages.shared : 0;
  const figure = (value) => value === null ? "–" : count(value);
  const full = now.taken === now.seats ? "full" : "";
  const values = [["Output tok/s", figure(now.output)], ["Prompt tok/s", figure(now.prompt)],
                  ["Seats taken", `${now.taken} of ${now.seats}`, now.taken / now.seats, full],
                  ["Waiting", figure(now.waiting), undefined, now.waiting ? "waits" : ""],
                  ["KV pages", percent(used, all), all ? used / all : 0]];
  tiles ??= values.map(([name, , share]) => makeTile(name, share !== undefined));
  values.forEach(([, value, share, mark], i) => setTile(tiles[i], value, share, mark));
}

function makeTile(name, metered) {
  const value = make("dd"), tile = make("div", {class: "figure"}, make("dt", {}, name), value);
  const meter = metered ? make("meter", {value: 0, "aria-label": name}) : null;
  if (meter) tile.append(meter);
  $("figures").append(tile);
  return {tile, value, meter};
}

function setTile({tile, value, meter}, text, share, mark) {
  say(value, text);
  if (meter && Number.isFinite(share)) meter.value = share;
  const kind = `figure ${mark ?? ""}`.trim();
  if (tile.className !== kind) tile.className = kind;
}

export function showFacts(info) {
  const narrow = [["weights", info.weights], ["KV", info.kv_dtype]].filter(([, kept]) => kept && kept !== info.dtype);
  const facts = [["model", info.model], ["device", info.device], ["kernels", info.kernels, "minor"],
                 ...narrow.map(([name, kept]) => [name, kept, "minor"]),
                 ...samplingFact(info.sampling_defaults),
                 ["policy", POLICY[info.policy] ?? info.policy], ["order", info.order, "minor"]];
  $("facts").replaceChildren(...facts.map(([name, value, kind = ""]) =>
    make("div", {class: kind}, make("dt", {}, name), make("dd", {}, value))));
  document.title = `Jitney: ${info.model}`;
  const out = kernelsOut(info);
  $("kernels-out").hidden = !out;
  say($("kernels-out"), out);
}

/** What came of the requests that were computed again; found: [checked, of them wrong]. */
export function showCanary(info, found) {
  $("canary").hidden = !info?.canary_every;
  if (!info?.canary_every || !found) return;
  const [checked, wrong] = found;
  const result = wrong ? `${count(wrong)} of ${count(checked)} came out otherwise` : `${count(checked)} checked, all came out alike`;
  say($("canary"), `Canary: one request in ${count(info.canary_every)} is computed again with the reference kernels; ${result}.`);
}

/** What the proof at start found wrong. An error of null is one that is infinite: the kernel could not run. */
function kernelsOut({kernels, proofs = []}) {
  const wrong = proofs.filter(({error, limit}) => error === null || error > limit);
  if (!wrong.length) return "";
  const told = wrong.map(({kernel, error, reason}) =>
    error === null ? `${kernel} could not run${reason ? ` (${reason})` : ""}` : `${kernel} is off by ${error.toPrecision(2)}`);
  return `Kernels taken out: of the ${kernels} kernels ${told.join(", ")} on this machine. ` +
    "The slower reference serves in their place; answers are right.";
}

function samplingFact(defaults) {
  const told = Object.entries(defaults ?? {}).map(([name, value]) => `${name} ${value}`);
  return told.length ? [["sampling", told.join(", "), "minor"]] : [];
}

export function curlLine(model, keys) {
  const key = keys ? ' -H "authorization: Bearer $JITNEY_API_KEY"' : "";
  const body = JSON.stringify({model, prompt: "Once upon a time", max_tokens: 64}).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/completions -H 'content-type: application/json'${key} -d '${body}'`;
}

// The top of the page: is the engine full, how many requests wait, which policy is used?

import {$, count, make, mark, percent, say, seconds, sum} from "./dom.js";

const STALE_MS = 3000;
const POLICY = {
  continuous: "continuous (in-flight) batching",
  static: "static batching",
  dynamic: "dynamic batching",
};
const QUIET = {connecting: "Connecting to the engine", dead: "The engine is dead"};
/** States in which programs are compiled and weights loaded. */
const LOADING = ["loading", "restarting"];

/** The state of the page: connecting, loading, live, paused, replay, stale, sleeping, draining or dead. silent: ms without news. */
export function stateOf(frame, mode, silent) {
  if (!frame) {
    return "connecting";
  }
  if (frame.state === "dead") {
    return "dead";
  }
  if (silent > STALE_MS || quiet(frame)) {
    return "stale";
  }
  if (frame.state !== "ready") {
    return frame.state;
  }
  return mode; // live, paused or replay
}

const quiet = (frame) => frame.state === "ready" && frame.last_step_age_s * 1000 > STALE_MS;

/** now: {taken, held (taken seats that a batch holds until its slowest sequence ends), seats, waiting (null:
 *  not known), policy, ago (seconds; 0: now)}. */
export function headline(frame, now) {
  if (!frame) {
    return QUIET.connecting;
  }
  if (frame.state === "dead") {
    return QUIET.dead;
  }
  if (frame.state === "restarting") {
    return restarting(frame);
  }
  if (frame.state === "loading") {
    return loading(frame.progress);
  }
  if (frame.state === "sleeping") {
    return "Asleep: its memory is free until it is woken";
  }
  const policy = now.policy ? `, ${now.policy}` : "";
  const when = now.ago > 0.05 ? ` (${ago(now.ago)})` : "";
  return `${seatsInWords(now)}${policy}${when}`;
}

function seatsInWords({taken, held, seats, waiting}) {
  if (taken === null) {
    return "No engine served";
  }
  if (Number.isNaN(taken)) {
    return "No step was computed, or it is not known";
  }
  if (!taken && !waiting) {
    return `Idle: all ${seats} seats free`;
  }
  const queue = queueInWords(waiting);
  if (taken === seats && !held) {
    return `Full: all ${seats} seats taken${queue}`;
  }
  const idle = held ? ` (${held} held idle)` : "";
  return `${taken} of ${seats} seats taken${idle}${queue}`;
}

function queueInWords(waiting) {
  if (waiting === null) {
    return "";
  }
  return waiting ? `, ${count(waiting)} waiting` : ", none waiting";
}

export function ago(value) {
  if (value < 60) {
    return `${value.toFixed(1)} s ago`;
  }
  if (value < 3600) {
    return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s ago`;
  }
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min ago`;
}

/** progress: stage, done, total. */
export function loading(progress) {
  if (!progress) {
    return "Loading";
  }
  const {stage, done, total} = progress;
  const far = total > 1000 ? percent(done, total) : `${count(done)} of ${count(total)}`;
  return `Loading: ${stage} ${far}`;
}

function restarting(frame) {
  const outage = frame.outages?.at(-1);
  if (!outage) {
    return "The engine died and is started again";
  }
  const far = frame.progress ? loading(frame.progress).toLowerCase() : "starting";
  return `The engine died ${ago(Math.max(0, frame.t - outage.began))}. Restart ${outage.restart}: ${far}`;
}

/** An outage in a few words: it is over when streams flow again, not when another engine is ready. */
export function restartInWords({began, restart, ready, flowing, n_streams: all, n_flowing: some}) {
  if (ready === null) {
    return `restart ${restart} under way`;
  }
  const back = `engine back after ${seconds(ready - began)}`;
  if (flowing === null) {
    return `restart ${restart}: ${back}, ${some} of ${all} streams go on`;
  }
  return `restart ${restart}: streams flowed again after ${seconds(flowing - began)} (${back})`;
}

/** An outage in one sentence. */
export function outageInWords(outage) {
  const {cause, n_resumed: resumed, n_lost: lost} = outage;
  const back = restartInWords(outage);
  return (
    `No engine: ${cause}; ${back}. ` +
    `Requests that went on: ${count(resumed)}; that were lost: ${count(lost)}.`
  );
}

/** Whether an engine is back, but some of its streams do not flow yet. */
const recovers = (frame) => {
  const outage = frame?.outages?.at(-1);
  return frame?.state === "ready" && outage && outage.ready !== null && outage.flowing === null;
};

/** Why so many seats are free while so many requests wait; "" if not known. reading: [tokens left, all tokens] of each
 *  prompt that is being computed; policy; pages: counts by state, or null. */
export function whyIdle({free, waiting, reading, policy, pages}) {
  const seats = free === 1 ? "A seat is free" : `${count(free)} seats are free`;
  const head = `${seats} while ${count(waiting)} wait: `;
  if (policy && policy !== "continuous") {
    return `${head}under ${policy} batching a batch boards together.`;
  }
  if (reading.length) {
    return `${head}${readingInWords(reading)} That is no waste.`;
  }
  const left = pages ? pages.free + pages.cached : Infinity;
  if (left < 0.05 * sum(pages ?? {})) {
    return `${head}KV pages are short, ${count(left)} of ${count(sum(pages))} are left.`;
  }
  return "";
}

function readingInWords(reading) {
  const [left, all] = reading.reduce((most, one) => (one[0] > most[0] ? one : most));
  const size = all ? ` of ${count(all)} tokens (${count(left)} to go)` : "";
  const others = reading.length > 1 ? `, and ${count(reading.length - 1)} more` : "";
  return `the steps are full with reading a prompt${size}${others}.`;
}

/** The pill, the line of trouble and the progress bar. */
export function showState(state, frame, silent, trouble) {
  mark(document.body, "data-state", state);
  say($("state"), state);
  const text = trouble || troubleOf(frame, silent);
  $("trouble").hidden = !text;
  say($("trouble"), text);
  showProgress(frame);
}

function troubleOf(frame, silent) {
  if (silent > STALE_MS) {
    const last = frame ? " The last values are shown." : "";
    return `No news from the server for ${count(silent / 1000)} s.${last}`;
  }
  if (frame && quiet(frame)) {
    return `The engine has been silent for ${count(frame.last_step_age_s)} s.`;
  }
  if ((frame?.state === "restarting" && frame.outages?.length) || recovers(frame)) {
    return outageInWords(frame.outages.at(-1));
  }
  return deadWhy(frame);
}

function showProgress(frame) {
  const loads = LOADING.includes(frame?.state);
  const bar = $("progress");
  bar.hidden = !loads;
  if (loads && frame.progress?.total) {
    bar.max = frame.progress.total;
    bar.value = frame.progress.done;
  } else {
    bar.removeAttribute("value");
  }
}

function deadWhy(frame) {
  if (frame?.state !== "dead") {
    return "";
  }
  const note = frame.notes?.findLast((one) => one.code === "dead");
  return `Error engine_dead: ${note?.message ?? "the core process is gone; the server's log says why."}`;
}

export function showFacts(info) {
  const narrow = [
    ["weights", info.weights],
    ["KV", info.kv_dtype],
  ].filter(([, dtype]) => dtype && dtype !== info.dtype);
  const facts = [
    ["model", info.model],
    ["device", info.device],
    ["kernels", info.kernels],
    ...narrow,
    ...samplingFact(info.sampling_defaults),
    ["policy", POLICY[info.policy] ?? info.policy],
    ["order", info.order],
  ];
  $("facts").replaceChildren(
    ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    ...configFact(info.config_digest),
  );
  document.title = `Jitney: ${info.model}`;
  say($("model"), info.model);
  const out = kernelsOut(info);
  $("kernels-out").hidden = !out;
  say($("kernels-out"), out);
}

/** Show the results of requests that were computed again. */
export function showCanary(info, {checked, mismatched}) {
  $("canary").hidden = !info?.canary_every;
  if (!info?.canary_every) {
    return;
  }
  const result = mismatched
    ? `${count(mismatched)} of ${count(checked)} came out otherwise`
    : `${count(checked)} checked, all came out alike`;
  say(
    $("canary"),
    `Canary: one request in ${count(info.canary_every)} is computed again with the reference kernels; ${result}.`,
  );
}

/** Kernels that failed the proof at start. An error of null is infinite: the kernel could not run. */
function kernelsOut({kernels, proofs = []}) {
  const wrong = proofs.filter(({error, limit}) => error === null || error > limit);
  if (!wrong.length) {
    return "";
  }
  const list = wrong.map(proofInWords).join(", ");
  return (
    `Kernels taken out: of the ${kernels} kernels ${list} on this machine. ` +
    "The slower reference serves in their place; answers are right."
  );
}

function proofInWords({kernel, error, reason}) {
  if (error !== null) {
    return `${kernel} is off by ${error.toPrecision(2)}`;
  }
  return `${kernel} could not run${reason ? ` (${reason})` : ""}`;
}

/** The configuration's digest: its beginning, and all of it on hover or focus. */
function configFact(digest) {
  if (!digest) {
    return [];
  }
  const whole = make("span", {class: "whole", role: "tooltip", id: "config-digest"}, digest);
  const cut = make("code", {tabindex: 0, "aria-describedby": "config-digest"}, digest.slice(0, 12));
  return [make("div", {class: "config"}, make("dt", {}, "config"), make("dd", {}, cut, whole))];
}

function samplingFact(defaults) {
  const values = Object.entries(defaults ?? {}).map(([name, value]) => `${name} ${value}`);
  return values.length ? [["sampling", values.join(", ")]] : [];
}

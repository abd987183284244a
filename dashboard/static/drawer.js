// One request in full: the causes of its latency in plain words, its waterfall, the gaps between its tokens.

import {$, make, percent, seconds, short, table, twin} from "./dom.js";
import {ask} from "./feed.js";
import {drawCadence} from "./cadence.js";
import {stateInWords} from "./requests.js";

const EVERY_MS = 1000;
const CAUSE = {
  queue: "waiting for a seat",
  preemption: "giving up its seat and starting again",
  compile: "a program that had to be compiled",
  prefill: "reading its own prompt",
  shared_prefill: "steps that read the prompts of others",
  decode: "generating its tokens",
  host_gap: "the device waiting for the host",
};
/** Most lines of a waterfall; further chunks of a prompt are only in the table. */
const LINES = 60;
const PHASE = {queue: "waiting", prefill: "prompt", decode: "generating"};

export class Drawer {
  /** onShow(detail): called when the reader wants to see the request on the timeline. */
  constructor(dialog, base, onShow) {
    Object.assign(this, {dialog, base, timer: null, detail: null});
    dialog.querySelector(".show").addEventListener("click", () => {
      dialog.close();
      if (this.detail) {
        onShow(this.detail);
      }
    });
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => clearTimeout(this.timer));
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) {
        dialog.close();
      }
    });
  }

  open(request, index) {
    this.what = {request, index};
    this.detail = null;
    this.body.replaceChildren(make("p", {class: "faint"}, "Asking the engine."));
    $("drawer-name").textContent = index ? `${request} (choice ${index})` : request;
    if (!this.dialog.open) {
      this.dialog.showModal();
    }
    this.refresh(this.what);
  }

  get body() {
    return this.dialog.querySelector(".body");
  }

  /** Load the request, and again every second while it runs. */
  async refresh(what) {
    clearTimeout(this.timer);
    let detail = null;
    try {
      const id = encodeURIComponent(what.request);
      detail = await ask(`${this.base()}request/${id}?index=${what.index}`);
    } catch (error) {
      if (what === this.what) {
        this.body.replaceChildren(make("p", {class: "trouble"}, error.message));
      }
      return;
    }
    if (what !== this.what || !this.dialog.open) {
      return;
    }
    this.detail = detail;
    this.show(detail);
    if (detail.finished === null) {
      this.timer = setTimeout(() => this.refresh(what), EVERY_MS);
    }
  }

  show(detail) {
    const opened = [...this.body.querySelectorAll("details[open]")].map((one) => one.className);
    if (detail.state === "refused") {
      return this.body.replaceChildren(make("p", {class: "verdict"}, refusal(detail)), facts(detail));
    }
    this.body.replaceChildren(
      make("p", {class: "verdict"}, verdict(detail)),
      facts(detail),
      make("h3", {}, "Where its time went"),
      causes(detail),
      make("h3", {}, "From queue to last token"),
      waterfall(detail),
      cadence(detail),
      pauses(detail),
      chunks(detail),
      ...texts(detail),
    );
    for (const name of opened) {
      this.body.querySelector(`details.${name}`).open = true;
    }
    drawCadence(this.body.querySelector("canvas"), detail);
  }
}

/** Why a sequence never boarded, in the words that its client got. */
function refusal({status, message, code, e2e_s: after}) {
  return `Refused (${status}) after ${seconds(after)}: ${message || code}.`;
}

const total = (detail) => detail.causes.reduce((all, cause) => all + cause.seconds, 0);

/** A summary in one sentence. */
function verdict(detail) {
  const all = total(detail);
  const [most, next] = detail.causes;
  const done = detail.finished !== null;
  if (!most || !all) {
    return done ? "It ended before it could board." : "It has only just come.";
  }
  const share = (cause) => percent(cause.seconds, all);
  const name = (cause) => CAUSE[cause.code] ?? cause.code;
  const rest = next && next.seconds > all / 5 ? `, and ${share(next)} on ${name(next)}` : "";
  return `${done ? "It took" : "So far it has taken"} ${seconds(all)}: ${share(most)} went on ${name(most)}${rest}.`;
}

function company({mean, max}) {
  return mean === null ? "–" : `${mean.toFixed(1)} others (at most ${max})`;
}

function facts(detail) {
  const {shared} = detail;
  const {padding_share: padding} = shared;
  const cached = detail.cached_tokens ? `, ${detail.cached_tokens} from the cache` : "";
  const pairs = [
    ["State", detail.finish ? `${stateInWords(detail)}: ${detail.code || detail.finish}` : detail.state],
    ["Waited", seconds(detail.queued_s)],
    ["First token after", seconds(detail.ttft_s)],
    ["In all", seconds(detail.e2e_s)],
    ["Prompt tokens", `${detail.n_prompt}${cached}`],
    ["Output tokens", `${detail.n_output} of at most ${detail.max_tokens}`],
    ["Shared a step with", company(shared)],
    ["Padding in its steps", padding === null ? "–" : percent(padding, 1)],
    ["Preempted", detail.preemptions],
    ["Compiles it met", shared.compiles],
  ];
  for (const [name, value] of [
    ["Route", detail.route],
    ["User or key", detail.user || detail.account],
    ["Adapter", detail.adapter],
    ["Parameters", detail.parameters],
    ["In its seat before", sitters(detail)],
  ]) {
    if (value) {
      pairs.push([name, value]);
    }
  }
  const drafts = detail.accepted + detail.rejected;
  if (drafts) {
    const right = `${detail.accepted} of ${drafts} right`;
    pairs.push(["Drafts checked", `${right} (${percent(detail.accepted, drafts)})`]);
  }
  const entries = pairs.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value)),
  );
  return make("dl", {class: "facts wide"}, ...entries);
}

/** Requests that had the seat while this one waited for it. */
function sitters({sitters: occupants, arrival}) {
  const words = ({request, to}) => `${request ? short(request, 14) : "another user's"} until ${seconds(to - arrival)}`;
  return occupants?.map(words).join(", ");
}

function causes(detail) {
  const all = total(detail);
  const spent = detail.causes.filter((cause) => cause.seconds > 0);
  return make("ul", {class: "causes"}, ...spent.map((cause) => causeLine(cause, all)));
}

/** all: total seconds of all causes. */
function causeLine(cause, all) {
  const bar = make("span", {class: `bar cause-${cause.code}`, "aria-hidden": "true"});
  bar.style.width = `${(100 * cause.seconds) / all}%`;
  const amount = `${seconds(cause.seconds)} (${percent(cause.seconds, all)})`;
  return make(
    "li",
    {},
    make("span", {class: "amount"}, amount),
    make("span", {class: "track"}, bar),
    make("span", {}, cause.message),
  );
}

/** A line per phase and prompt chunk, each at its time. */
function waterfall(detail) {
  const end = detail.finished ?? detail.arrival + total(detail);
  const phases = detail.phases.map((phase) => {
    return {...phase, name: PHASE[phase.kind], text: phaseText(phase)};
  });
  const recorded = detail.chunks.filter((chunk) => chunk.from !== null);
  const chunks = recorded.map((chunk) => {
    return {...chunk, kind: "chunk", name: `chunk of ${chunk.count}`, text: chunkText(chunk)};
  });
  const lines = [...phases, ...chunks];
  lines.sort((a, b) => a.from - b.from || (a.kind === "chunk") - (b.kind === "chunk"));
  const shown = lines.slice(0, LINES);
  return make(
    "ol",
    {class: "waterfall"},
    ...shown.map((line) => waterfallLine(line, detail.arrival, end)),
  );
}

/** start, end: of the whole waterfall. */
function waterfallLine(line, start, end) {
  const whole = Math.max(1e-6, end - start);
  const to = line.to ?? end;
  const bar = make("span", {class: `bar ${line.kind}`, title: line.text});
  bar.style.left = `${(100 * (line.from - start)) / whole}%`;
  bar.style.width = `${Math.max(0.4, (100 * (to - line.from)) / whole)}%`;
  return make(
    "li",
    {},
    make("span", {class: "label"}, line.name),
    make("span", {class: "track"}, bar),
    make("span", {class: "amount"}, seconds(to - line.from)),
  );
}

function phaseText({kind, steps}) {
  return steps ? `${PHASE[kind]}, ${steps} steps` : PHASE[kind];
}

function chunkText(chunk) {
  const again = chunk.recomputed ? ", computed again" : "";
  const compiled = chunk.compiled ? ", compiled on the way" : "";
  return (
    `${chunk.count} prompt tokens in a step of ${chunk.rows} rows ` +
    `shared with ${chunk.shared_with}${again}${compiled}`
  );
}

function rhythm({gap_p50: half, gap_p95: most, slowest}) {
  if (half === null) {
    return "Too few tokens for a rhythm.";
  }
  const slow = slowest ? ` The longest pause was ${seconds(slowest.gap)} (${slowest.cause}).` : "";
  return `A token every ${seconds(half)}; 95 % within ${seconds(most)}.${slow}`;
}

function cadence(detail) {
  const text = rhythm(detail.cadence);
  const canvas = make("canvas", {role: "img", "aria-label": `Pauses between tokens. ${text}`});
  return make(
    "div",
    {},
    make("h3", {}, "Rhythm of its tokens"),
    make("p", {class: "sub"}, text),
    make("div", {class: "stage"}, canvas),
  );
}

/** The longest gaps between tokens as text, for readers who cannot see the bars. */
function pauses({cadence: {t}, arrival}) {
  const all = t.slice(1).map((time, i) => ({token: i + 2, at: time - arrival, gap: time - t[i]}));
  const element = make("table", {});
  const longest = all.toSorted((a, b) => b.gap - a.gap).slice(0, 20);
  table(
    element,
    ["Token", "Came after", "Pause before it"],
    longest.map(({token, at, gap}) => [token, seconds(at), seconds(gap)]),
  );
  return twin("pauses", "Longest pauses as a table", element);
}

function chunks(detail) {
  const element = make("table", {});
  table(
    element,
    [
      "Step",
      "From",
      "Tokens",
      "Computed again",
      "Rows in the step",
      "Shared with",
      "Padding",
      "Took",
    ],
    detail.chunks.map((chunk) => [
      chunk.step,
      chunk.start,
      chunk.count,
      chunk.recomputed,
      chunk.rows,
      chunk.shared_with,
      chunk.padding,
      chunk.from === null ? "" : seconds(chunk.to - chunk.from),
    ]),
  );
  return twin("chunks", "Prompt chunks as a table", element);
}

function texts(detail) {
  if (!detail.text) {
    return [];
  }
  return [
    make("h3", {}, "Prompt"),
    make("pre", {}, detail.text.prompt),
    make("h3", {}, "Answer"),
    make("pre", {}, detail.text.answer),
  ];
}

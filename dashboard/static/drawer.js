// One request in full: why it was slow in plain words, its waterfall, the rhythm of its tokens.

import {$, make, percent, seconds, table} from "./dom.js";
import {ask} from "./feed.js";
import {drawCadence} from "./cadence.js";

const EVERY_MS = 1000;
const CAUSE = {queue: "waiting for a seat", preemption: "giving up its seat and starting again",
               compile: "a program that had to be compiled", prefill: "reading its own prompt",
               shared_prefill: "steps that read the prompts of others", decode: "generating its tokens",
               host_gap: "the device waiting for the host"};
/** Lines of a waterfall; a prompt of more chunks goes on in the table. */
const LINES = 60;
const PHASE = {queue: "waiting", prefill: "prompt", decode: "generating"};

export class Drawer {
  /** onShow(story): the reader wants to see it on the timeline. */
  constructor(dialog, base, onShow) {
    Object.assign(this, {dialog, base, timer: null, news: null});
    dialog.querySelector(".show").addEventListener("click", () => {
      dialog.close();
      if (this.news) onShow(this.news);
    });
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => clearTimeout(this.timer));
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }

  open(request, index) {
    this.what = {request, index};
    this.news = null;
    this.body.replaceChildren(make("p", {class: "faint"}, "Asking the engine."));
    $("drawer-name").textContent = index ? `${request} (choice ${index})` : request;
    if (!this.dialog.open) this.dialog.showModal();
    this.refresh(this.what);
  }

  get body() { return this.dialog.querySelector(".body"); }

  /** Again every second while it is under way. */
  async refresh(what) {
    clearTimeout(this.timer);
    let news = null;
    try {
      news = await ask(`${this.base()}request/${encodeURIComponent(what.request)}?index=${what.index}`);
    } catch (error) {
      if (what === this.what) this.body.replaceChildren(make("p", {class: "trouble"}, error.message));
      return;
    }
    if (what !== this.what || !this.dialog.open) return;
    this.news = news;
    this.show(news);
    if (news.finished === null) this.timer = setTimeout(() => this.refresh(what), EVERY_MS);
  }

  show(news) {
    const opened = new Set([...this.body.querySelectorAll("details[open]")].map((one) => one.className));
    this.body.replaceChildren(
      make("p", {class: "verdict"}, verdict(news)), facts(news), make("h3", {}, "Where its time went"), causes(news),
      make("h3", {}, "From queue to last token"), waterfall(news), cadence(news), pauses(news), chunks(news),
      ...texts(news));
    for (const name of opened) this.body.querySelector(`details.${name}`).open = true;
    drawCadence(this.body.querySelector("canvas"), news);
  }
}

const total = (news) => news.why.reduce((all, cause) => all + cause.seconds, 0);

/** The answer in one sentence. */
function verdict(news) {
  const all = total(news), [most, next] = news.why, done = news.finished !== null;
  if (!most || !all) return done ? "It ended before it could board." : "It has only just come.";
  const share = (cause) => percent(cause.seconds, all), name = (cause) => CAUSE[cause.code] ?? cause.code;
  const rest = next && next.seconds > all / 5 ? `, and ${share(next)} on ${name(next)}` : "";
  return `${done ? "It took" : "So far it has taken"} ${seconds(all)}: ${share(most)} went on ${name(most)}${rest}.`;
}

function facts(news) {
  const {shared} = news, cached = news.cached_tokens ? `, ${news.cached_tokens} from the cache` : "";
  const pairs = [
    ["State", news.finish ? `${news.state}: ${news.code || news.finish}` : news.state],
    ["Waited", seconds(news.queued_s)], ["First token after", seconds(news.ttft_s)], ["In all", seconds(news.e2e_s)],
    ["Prompt tokens", `${news.n_prompt}${cached}`], ["Output tokens", `${news.n_output} of at most ${news.max_tokens}`],
    ["Shared a step with", shared.mean === null ? "–" : `${shared.mean.toFixed(1)} others (at most ${shared.max})`],
    ["Padding in its steps", shared.padding_share === null ? "–" : percent(shared.padding_share, 1)],
    ["Preempted", news.preemptions], ["Compiles it met", shared.compiles]];
  return make("dl", {class: "facts wide"},
              ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function causes(news) {
  const all = total(news);
  return make("ul", {class: "causes"}, ...news.why.filter((cause) => cause.seconds > 0).map((cause) => {
    const bar = make("span", {class: `bar cause-${cause.code}`, "aria-hidden": "true"});
    bar.style.width = `${100 * cause.seconds / all}%`;
    return make("li", {}, make("span", {class: "amount"}, `${seconds(cause.seconds)} (${percent(cause.seconds, all)})`),
                make("span", {class: "track"}, bar), make("span", {}, cause.msg));
  }));
}

/** A line a phase and a prompt chunk, each as far along as it happened. */
function waterfall(news) {
  const end = news.finished ?? news.arrival + total(news);
  const spans = [...news.phases.map((phase) => ({...phase, name: PHASE[phase.kind], text: phaseText(phase)})),
                 ...news.chunks.filter((chunk) => chunk.from !== null).map((chunk) => (
                   {...chunk, kind: "chunk", name: `chunk of ${chunk.count}`, text: chunkText(chunk)}))];
  spans.sort((a, b) => a.from - b.from || (a.kind === "chunk") - (b.kind === "chunk"));
  const span = Math.max(1e-6, end - news.arrival);
  return make("ol", {class: "waterfall"}, ...spans.slice(0, LINES).map((one) => {
    const bar = make("span", {class: `bar ${one.kind}`, title: one.text}), to = one.to ?? end;
    bar.style.left = `${100 * (one.from - news.arrival) / span}%`;
    bar.style.width = `${Math.max(0.4, 100 * (to - one.from) / span)}%`;
    return make("li", {}, make("span", {class: "label"}, one.name), make("span", {class: "track"}, bar),
                make("span", {class: "amount"}, seconds(to - one.from)));
  }));
}

const phaseText = (phase) => `${PHASE[phase.kind]}${phase.steps ? `, ${phase.steps} steps` : ""}`;
const chunkText = (chunk) => `${chunk.count} prompt tokens in a step of ${chunk.rows} rows shared with ${chunk.sharers}`
  + `${chunk.recomputed ? ", computed again" : ""}${chunk.compiled ? ", compiled on the way" : ""}`;

function cadence(news) {
  const {gap_p50: half, gap_p95: most, slowest} = news.cadence, slow = slowest
    ? ` The longest pause was ${seconds(slowest.gap)} (${slowest.why}).` : "";
  const text = half === null ? "Too few tokens for a rhythm."
    : `A token every ${seconds(half)}; 95 % within ${seconds(most)}.${slow}`;
  const canvas = make("canvas", {role: "img", "aria-label": `Pauses between tokens. ${text}`});
  return make("div", {}, make("h3", {}, "Rhythm of its tokens"), make("p", {class: "sub"}, text),
              make("div", {class: "stage"}, canvas));
}

/** The longest pauses between tokens, for those who cannot see the bars. */
function pauses({cadence: {t}, arrival}) {
  const all = t.slice(1).map((time, i) => ({token: i + 2, at: time - arrival, gap: time - t[i]}));
  const element = make("table", {}), longest = all.toSorted((a, b) => b.gap - a.gap).slice(0, 20);
  table(element, ["Token", "Came after", "Pause before it"],
        longest.map(({token, at, gap}) => [token, seconds(at), seconds(gap)]));
  return make("details", {class: "pauses"}, make("summary", {}, "Longest pauses as a table"),
              make("div", {class: "scroll"}, element));
}

function chunks(news) {
  const element = make("table", {});
  table(element, ["Step", "From", "Tokens", "Computed again", "Rows in the step", "Shared with", "Padding", "Took"],
        news.chunks.map((chunk) => [
          chunk.step, chunk.start, chunk.count, chunk.recomputed, chunk.rows, chunk.sharers, chunk.padding,
          chunk.from === null ? "" : seconds(chunk.to - chunk.from)]));
  return make("details", {class: "chunks"}, make("summary", {}, "Prompt chunks as a table"),
              make("div", {class: "scroll"}, element));
}

function texts(news) {
  if (!news.text) return [];
  return [make("h3", {}, "Prompt"), make("pre", {}, news.text.prompt),
          make("h3", {}, "Answer"), make("pre", {}, news.text.answer)];
}

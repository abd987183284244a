// Candidates beside their models: each figure of both arms, the comparison with its interval drawn, and the possible
// actions. The fields are those of docs/rollout.md.

import {count, make, percent, say, seconds} from "./dom.js";
import {ask} from "./feed.js";

const EVERY_MS = 5000;
const SVG = "http://www.w3.org/2000/svg";
/** Size of a drawn interval, in SVG units. */
const WIDTH = 240;
const HEIGHT = 34;
const MIDDLE = 15;
const HEAD = ["Figure", "Stable", "Candidate", "Candidate to stable", "So far"];

const perSecond = (value) => (value < 10 ? value.toFixed(2) : count(value));
/** Figures by name: label, and the value in words. */
const FIGURES = {
  tokens_per_s: ["Tokens a second, of a request", perSecond],
  first_token_s: ["First token", seconds],
  token_cost: ["A million useful tokens", (value) => (1e6 * value).toPrecision(3)],
  errors: ["Failed requests", (value) => percent(value, 1)],
};
const ACTIONS = {
  promote: ["Promote", (one) => `Give ${one.candidate} every request for ${one.model}?`],
  roll_back: ["Roll back", (one) => `Give ${one.candidate} no more requests for ${one.model}?`],
  restart: [
    "Begin anew",
    (one) =>
      `Give ${one.candidate} ${percent(one.rule.share, 1)} of the keys again, and forget what was measured?`,
  ],
};
const STATES = {running: "running", promoted: "promoted", rolled_back: "rolled back"};

const clock = (t) => new Date(1000 * t).toLocaleTimeString("en-GB");

/** An interval in words: 0.90 times (0.86 to 0.94). */
function intervalInWords({kind, estimate, low, high}) {
  if (estimate === null) {
    return "not known yet";
  }
  if (kind === "ratio") {
    return `${estimate.toFixed(3)} times (${low.toFixed(3)} to ${high.toFixed(3)})`;
  }
  const points = (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(2)}`;
  return `${points(estimate)} points (${points(low)} to ${points(high)})`;
}

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  return element;
}

/** The values at both ends of the drawing: it always includes equal and the worst allowed, and the interval unless that
 *  is much wider than what is allowed. */
function ends({equal, worst_allowed: worst, low, high, estimate}) {
  const margin = Math.abs((worst ?? equal) - equal) || 0.1;
  const furthest = Math.max(4 * margin, 1.5 * Math.abs((estimate ?? equal) - equal));
  const reach = Math.max(2 * margin, Math.abs((low ?? equal) - equal), Math.abs((high ?? equal) - equal));
  const shown = 1.15 * Math.min(furthest, reach);
  return [equal - shown, equal + shown];
}

/** The interval as a bar, equal as a line, and values worse than allowed as a hatched area. */
function drawing(figure, label) {
  const picture = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    class: "interval",
    role: "img",
    "aria-label": label,
  });
  const [from, to] = ends(figure);
  const at = (value) => Math.max(2, Math.min(WIDTH - 2, (WIDTH * (value - from)) / (to - from)));
  if (figure.worst_allowed !== null) {
    const edge = at(figure.worst_allowed);
    const [left, right] = figure.better === "more" ? [0, edge] : [edge, WIDTH];
    picture.append(shape("rect", {class: "forbidden", x: left, y: 3, width: right - left, height: 24}));
  }
  picture.append(shape("line", {class: "equal", x1: at(figure.equal), x2: at(figure.equal), y1: 1, y2: 29}));
  if (figure.estimate !== null) {
    const {low, high, estimate} = figure;
    const kind = figure.verdict.split(" ")[0];
    const bar = {class: `range ${kind}`, x1: at(low), x2: at(high), y1: MIDDLE, y2: MIDDLE};
    picture.append(shape("line", bar));
    for (const end of [low, high]) {
      if (end > from && end < to) {
        picture.append(
          shape("line", {class: `end ${kind}`, x1: at(end), x2: at(end), y1: MIDDLE - 6, y2: MIDDLE + 6}),
        );
      }
    }
    picture.append(shape("circle", {class: `estimate ${kind}`, cx: at(estimate), cy: MIDDLE, r: 4.5}));
  }
  return picture;
}

/** One row of the table. */
function row(figure) {
  const [name, inWords] = FIGURES[figure.name] ?? [figure.unit, (value) => value.toPrecision(3)];
  const value = (one) => (one === null ? "–" : inWords(one));
  const words = intervalInWords(figure);
  const kind = figure.estimate === null ? "no" : figure.verdict.split(" ")[0];
  return make(
    "tr",
    {},
    make("th", {scope: "row", title: figure.unit}, name),
    make("td", {"data-name": "Stable"}, value(figure.stable)),
    make("td", {"data-name": "Candidate"}, value(figure.candidate)),
    make("td", {class: "drawn"}, drawing(figure, `${name}: ${words}`), make("span", {}, words)),
    make("td", {class: `verdict-${kind}`}, figure.verdict),
  );
}

function situation(one) {
  const {stable, candidate} = one.arms;
  const keys = `${percent(one.share, 1)} of the keys`;
  const requests = `${count(candidate.requests)} requests of the candidate and ${count(stable.requests)} of the stable arm compared since ${clock(one.since)}`;
  return `It gets ${keys}; ${requests}.`;
}

function ruleInWords({rule, confidence}) {
  const who = (by) => (by === "rule" ? "the rule" : "a person");
  const back = `Once a whole interval lies in the field that is worse than allowed, ${who(rule.roll_back)} rolls the candidate back`;
  const after = rule.promote === "rule" ? ` and ${count(rule.min_requests)} requests are answered` : "";
  const on = `once all of them lie outside${after}, ${who(rule.promote)} promotes it`;
  return `${back}; ${on}. All intervals together hold at all times with ${percent(confidence, 1)}, however often one looks.`;
}

function decisionInWords({decision}) {
  if (!decision) {
    return "";
  }
  const what = decision.state === "running" ? "Begun anew" : STATES[decision.state];
  const by = decision.by === "rule" ? "the rule" : "hand";
  return `${what[0].toUpperCase()}${what.slice(1)} at ${clock(decision.at)} by ${by}: ${decision.reason}`;
}

class Comparison {
  /** choose(report, action): called when the viewer chooses an action. */
  constructor(report, choose) {
    this.word = make("span", {class: "pill"});
    this.share = make("p", {class: "sub"});
    this.decision = make("p", {class: "reading"});
    this.body = make("tbody");
    this.rule = make("p", {class: "sub"});
    this.buttons = Object.entries(ACTIONS).map(([action, [name]]) => {
      const kind = action === "promote" ? {} : {class: "plain"};
      const button = make("button", {type: "button", ...kind}, name);
      button.addEventListener("click", () => choose(this.report, action));
      return button;
    });
    const head = HEAD.map((name) => make("th", {scope: "col"}, name));
    const title = make("h3", {}, `Candidate ${report.candidate} of ${report.model}`);
    this.element = make(
      "div",
      {class: "rollout"},
      make("div", {class: "title"}, title, this.word, this.share),
      make(
        "div",
        {class: "scroll wide", tabindex: "0", role: "region", "aria-label": `Figures of ${report.candidate}`},
        make("table", {class: "figures-of-arms"}, make("thead", {}, make("tr", {}, ...head)), this.body),
      ),
      this.decision,
      this.rule,
      make("div", {class: "buttons"}, ...this.buttons),
    );
  }

  show(report) {
    this.report = report;
    this.element.dataset.state = report.state;
    say(this.word, STATES[report.state] ?? report.state);
    say(this.share, situation(report));
    say(this.rule, ruleInWords(report));
    say(this.decision, decisionInWords(report));
    this.decision.hidden = !report.decision;
    this.body.replaceChildren(...report.figures.map(row));
    const [promote, back, anew] = this.buttons;
    promote.disabled = report.state === "promoted";
    back.disabled = report.state === "rolled_back";
    anew.disabled = !report.decision;
  }
}

export class Rollouts {
  /** section: of the page; dialog: asks for confirmation; onArms(names by arm): gets the candidates' replicas. */
  constructor(section, list, dialog, onArms) {
    Object.assign(this, {section, list, dialog, onArms});
    this.rollouts = new Map(); // by model
    this.asking = null;
    this.note = dialog.querySelector(".question");
    this.trouble = section.querySelector(".trouble");
    dialog.querySelector(".cancel").addEventListener("click", () => dialog.close());
    dialog.querySelector(".sure").addEventListener("click", () => this.decide());
  }

  /** Start loading; further calls do nothing. */
  start() {
    if (this.asking === null) {
      this.asking = setInterval(() => this.load("rollouts"), EVERY_MS);
      this.load("rollouts");
    }
  }

  async load(path, options) {
    try {
      this.show((await ask(path, options)).rollouts);
      this.say("");
    } catch (error) {
      this.section.hidden = false;
      this.say(error.message);
    }
  }

  say(text) {
    this.trouble.hidden = !text;
    say(this.trouble, text);
  }

  show(reports) {
    this.section.hidden = !reports.length && this.trouble.hidden;
    const names = JSON.stringify(reports.map((one) => [one.model, one.candidate]));
    if (names !== this.names) {
      this.names = names;
      this.rollouts = new Map(
        reports.map((one) => [one.model, new Comparison(one, (...what) => this.askAgain(...what))]),
      );
      this.list.replaceChildren(...[...this.rollouts.values()].map((one) => one.element));
    }
    for (const report of reports) {
      this.rollouts.get(report.model).show(report);
    }
    this.onArms(reports.flatMap((one) => one.arms.candidate.replicas));
  }

  askAgain(report, action) {
    this.chosen = {model: report.model, action};
    say(this.note, ACTIONS[action][1](report));
    say(this.dialog.querySelector(".sure"), ACTIONS[action][0]);
    this.dialog.showModal();
  }

  async decide() {
    const {model, action} = this.chosen;
    this.dialog.close();
    await this.load(`rollouts/${encodeURIComponent(model)}`, {
      method: "POST",
      headers: {"content-type": "application/json"},
      body: JSON.stringify({action}),
    });
  }
}

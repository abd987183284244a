// The policy lab: the last minutes of traffic, replayed in the simulator under each policy, side by side.

import {$, make, watchVisible} from "./dom.js";
import {showFigures, showTimelines} from "./labshow.js";
import {Polled} from "./listing.js";

const EVERY_MS = 1000;
/** Settings that are a choice from a list. */
const ORDERS = {order: ["fcfs", "priority", "shortest", "fair"]};

export class Lab {
  constructor(section, base) {
    Object.assign(this, {section, timelines: [], shown: null, visible: watchVisible([section], "0px")});
    this.polled = new Polled(base, "lab", {
      note: $("lab-note"),
      show: (status) => this.show(status),
      every: EVERY_MS,
      words: () => (this.status ? progressInWords(this.status) : ""),
    });
    $("lab-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    $("lab-stop").addEventListener("click", () => this.polled.refresh("", {method: "DELETE"}));
  }

  /** The newest status; null before it is known. */
  get status() {
    return this.polled.answer;
  }

  /** Show another engine. */
  reset() {
    this.polled.reset();
    this.shown = null; // id of the experiment whose result is shown
    this.timelines = [];
    $("lab-result").replaceChildren();
    $("lab-settings").replaceChildren();
  }

  /** Ask once when the section comes into view, and again while an experiment runs. */
  frame() {
    const isAsked = this.polled.shownBase !== null;
    this.polled.frame(isAsked ? this.status?.state === "running" : this.visible(this.section));
  }

  restyle() {
    for (const timeline of this.timelines) {
      timeline.restyle();
    }
  }

  run() {
    const boxes = [...document.querySelectorAll("[name=lab-policy]:checked")];
    const experiment = {
      minutes: Number($("lab-minutes").value),
      speed: Number($("lab-speed").value),
      policies: boxes.map((box) => box.value),
      settings: this.settings(),
      price_per_hour: Number($("lab-price").value) || null,
    };
    const options = {
      method: "POST",
      headers: {"content-type": "application/json"},
      body: JSON.stringify(experiment),
    };
    this.polled.refresh("", options);
  }

  /** Settings that differ from the engine's own. */
  settings() {
    const fields = [...$("lab-settings").querySelectorAll("input, select")];
    const changed = fields.filter((field) => field.value !== field.dataset.now);
    return Object.fromEntries(changed.map((field) => [field.name, valueOf(field)]));
  }

  show(status) {
    const running = status.state === "running";
    $("lab-run").disabled = running;
    $("lab-stop").hidden = !running;
    if (!$("lab-settings").children.length) {
      this.offerSettings(status.settings);
    }
    if (status.result && this.shown !== status.id) {
      this.showResult(status);
    }
  }

  /** A field for each setting; an empty number turns the setting off. */
  offerSettings(settings) {
    const fields = Object.entries(settings).map(([name, value]) => {
      const label = make("span", {}, name.replaceAll("_", " "));
      return make("label", {}, label, fieldOf(name, value));
    });
    $("lab-settings").replaceChildren(...fields);
  }

  showResult(status) {
    this.shown = status.id;
    const {result} = status;
    const names = Object.keys(result.policies);
    const verdict = result.verdict || `${result.requests} requests were played again.`;
    const figures = make("table", {id: "lab-figures", class: "compare"});
    const pictures = make("div", {class: "pictures"});
    $("lab-result").replaceChildren(
      make("p", {class: "verdict"}, verdict),
      make("p", {class: "reading"}, basis(result)),
      make("div", {class: "scroll wide"}, figures),
      pictures,
    );
    showFigures(figures, result, names);
    this.timelines = showTimelines(pictures, result, names);
  }
}

/** A setting's value in the engine's form; an empty number turns the setting off. */
function valueOf(field) {
  if (field.type !== "number") {
    return field.value;
  }
  return field.value === "" ? null : Number(field.value);
}

/** The state of the newest experiment, in a sentence. */
function progressInWords({state, progress, error, arrivals, minutes}) {
  if (state === "running") {
    const done = progress === null ? "" : `, ${Math.round(100 * progress)} %`;
    return `Simulating${done}. The engine goes on undisturbed.`;
  }
  if (state === "failed") {
    return `It failed: ${error}`;
  }
  if (!arrivals) {
    return "No traffic has been recorded yet.";
  }
  return `${arrivals} requests of the last ${minutes.toFixed(1)} minutes can be played again.`;
}

function fieldOf(name, value) {
  const now = value ?? "";
  if (ORDERS[name]) {
    return orders(name, now);
  }
  const kind = typeof value === "string" ? {type: "text"} : {type: "number", step: "any"};
  return make("input", {...kind, name, value: now, "data-now": now});
}

function orders(name, now) {
  const options = ORDERS[name].map((one) => make("option", {value: one}, one));
  const select = make("select", {name, "data-now": now}, ...options);
  select.value = now;
  return select;
}

/** The basis of the comparison: which requests count, when they arrive, and the assumptions. */
function basis(result) {
  const counted = Object.entries(result.counted ?? {}).filter(([, count]) => count);
  const whom = counted.map(([state, count]) => `${count} ${state}`).join(", ");
  const when = whom ? ` (when the record ended: ${whom})` : "";
  const said = [`${result.requests} requests were played again${when}.`];
  if (result.closed_loop) {
    said.push(
      `They came as ${result.closed_loop} clients do that wait for each answer, and do so again.`,
    );
  } else {
    said.push("They come at their recorded times, however slow a policy is.");
  }
  if (result.cached_tokens) {
    said.push(`${result.cached_tokens} prompt tokens are found cached, as they were.`);
  }
  if (result.on_board_before) {
    said.push(`${result.on_board_before} that were on board when the record begins are left out.`);
  }
  return said.join(" ");
}

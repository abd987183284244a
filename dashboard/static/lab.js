// The policy lab: the last minutes of traffic, played again in the simulator under each policy, side by side.

import {$, make, say} from "./dom.js";
import {ask} from "./feed.js";
import {showFigures, showTimelines} from "./labshow.js";

const EVERY_MS = 1000;
/** Settings that are a choice of words. */
const ORDERS = {order: ["fcfs", "priority", "shortest", "fair"]};

export class Lab {
  constructor(section, base) {
    Object.assign(this, {section, base, timer: null, timelines: [], shown: null});
    $("lab-form").addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    $("lab-stop").addEventListener("click", () => this.stop());
    const seen = ([entry]) => { if (entry.isIntersecting && !this.known) this.refresh(); };
    new IntersectionObserver(seen).observe(section);
  }

  /** Another engine is being watched. */
  reset() {
    clearTimeout(this.timer);
    this.known = this.shown = null;
    this.timelines = [];
    $("lab-result").replaceChildren();
    $("lab-settings").replaceChildren();
  }

  frame() { if (this.known?.state === "running" && !this.timer) this.later(); }
  restyle() { for (const timeline of this.timelines) timeline.restyle(); }

  later() { this.timer = setTimeout(() => { this.timer = null; this.refresh(); }, EVERY_MS); }

  async refresh() {
    const base = this.base();
    await this.take(ask(`${base}lab`), base);
  }

  async run() {
    const policies = [...document.querySelectorAll("[name=lab-policy]:checked")].map((box) => box.value);
    const body = {minutes: Number($("lab-minutes").value), speed: Number($("lab-speed").value), policies,
                  settings: this.settings(), price_per_hour: Number($("lab-price").value) || null};
    const wish = {method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body)};
    await this.take(ask(`${this.base()}lab`, wish), this.base());
  }

  async stop() { await this.take(ask(`${this.base()}lab`, {method: "DELETE"}), this.base()); }

  /** Settings that were changed from what the engine runs with. */
  settings() {
    const fields = [...$("lab-settings").querySelectorAll("input, select")];
    const changed = fields.filter((field) => field.value !== field.dataset.now);
    return Object.fromEntries(changed.map((field) => [field.name, field.type !== "number" ? field.value
      : field.value === "" ? null : Number(field.value)]));
  }

  async take(answer, base) {
    try {
      const news = await answer;
      if (base !== this.base()) return;
      this.known = news;
      this.show(news);
    } catch (error) {
      say($("lab-note"), error.message);
    }
  }

  show(news) {
    const running = news.state === "running";
    const done = news.progress === null ? "" : `, ${Math.round(100 * news.progress)} %`;
    $("lab-run").disabled = running;
    $("lab-stop").hidden = !running;
    if (!$("lab-settings").children.length) this.offerSettings(news.settings);
    say($("lab-note"), running ? `Simulating${done}. The engine goes on undisturbed.`
      : news.state === "failed" ? `It failed: ${news.error}`
      : news.arrivals
        ? `${news.arrivals} requests of the last ${(+news.minutes).toFixed(1)} minutes can be played again.`
      : "No traffic has been recorded yet.");
    if (running && !this.timer) this.later();
    if (news.result && this.shown !== news.id) this.showResult(news);
  }

  /** A field for each setting; an empty number means that it is off. */
  offerSettings(settings) {
    $("lab-settings").replaceChildren(...Object.entries(settings ?? {}).map(([name, value]) => {
      const now = value ?? "", kind = typeof value === "string" ? {type: "text"} : {type: "number", step: "any"};
      return make("label", {}, make("span", {}, name.replaceAll("_", " ")), ORDERS[name] ? orders(name, now)
        : make("input", {...kind, name, value: now, "data-now": now}));
    }));
  }

  showResult(news) {
    this.shown = news.id;
    const {result} = news, names = Object.keys(result.policies);
    const figures = make("table", {id: "lab-figures", class: "compare"}), pictures = make("div", {class: "pictures"});
    $("lab-result").replaceChildren(
      make("p", {class: "verdict"}, result.verdict || `${result.requests} requests were played again.`),
      make("p", {class: "reading"}, basis(result)), make("div", {class: "scroll wide"}, figures), pictures);
    showFigures(figures, result, names);
    this.timelines = showTimelines(pictures, result, names);
  }
}

function orders(name, now) {
  const options = ORDERS[name].map((one) => make("option", {value: one}, one));
  const select = make("select", {name, "data-now": now}, ...options);
  select.value = now;
  return select;
}

/** What the comparison rests on: whom it counts, how they come, and what is taken for granted. */
function basis(result) {
  const counted = Object.entries(result.counted ?? {}).filter(([, count]) => count);
  const whom = counted.map(([state, count]) => `${count} ${state}`).join(", ");
  const said = [`${result.requests} requests were played again${whom ? ` (when the record ended: ${whom})` : ""}.`];
  if (result.closed_loop) said.push(
    `They came as ${result.closed_loop} clients do that wait for each answer, and do so again.`);
  else said.push("They come at their recorded times, however slow a policy is.");
  if (result.cached_tokens) said.push(`${result.cached_tokens} prompt tokens are found cached, as they were.`);
  if (result.on_board_before) said.push(
    `${result.on_board_before} that were on board when the record begins are left out.`);
  return said.join(" ");
}

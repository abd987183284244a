// The replicas: a card each, in the order of the feed.

import {count, make, mark, onWidth, percent, say, seconds, shareInWords} from "./dom.js";
import {loading} from "./status.js";
import {SeatMap, forgetSheets} from "./seatmap.js";

/** Card sizes, by the most replicas that have them. tallest: of the seat maps, in CSS pixels; beside: width of the
 *  card's borders and paddings. */
const SIZES = [
  {most: 12, name: "roomy", tallest: 92, beside: 29},
  {most: 40, name: "middle", tallest: 66, beside: 29},
  {most: Infinity, name: "dense", tallest: 40, beside: 21},
];

/** Predicted wait in readable units. */
export const waitInWords = (wait) => (wait === null ? "–" : seconds(wait));
export const priceInWords = (price) => (price === null ? "–" : price.toLocaleString("en"));
/** Duration of a continuing state, in whole seconds. */
const lasting = (time) => (time < 60 ? `${Math.max(0, Math.round(time))} s` : seconds(time));
const SILENT = ["gone", "connecting", "starting"];

/** The text below a card's figures; t: the feed's clock. */
export function noteOf(card, t) {
  const restarts = card.restarts
    ? `Restarted ${card.restarts === 1 ? "once" : `${count(card.restarts)} times`}.`
    : "";
  if (card.state === "gone") {
    const since = new Date(1000 * card.since).toLocaleTimeString("en-GB");
    return `Gone since ${since}, ${lasting(t - card.since)}: ${card.trouble}. ${restarts}`;
  }
  if (card.state === "starting") {
    return `Its process was started, and does not answer yet. ${restarts}`;
  }
  if (card.progress) {
    return `${loading(card.progress)}. ${restarts}`;
  }
  if (card.state === "silent") {
    return `Its engine says nothing. ${restarts}`;
  }
  return restarts;
}

/** A card's figures: [name, value, mark]; "more": hidden on small cards. */
function figuresOf(card, priced) {
  const seats = card.seats.length;
  return [
    ["Seats", seats ? `${card.taken} of ${seats}` : "–", ""],
    ["Waiting", count(card.waiting), card.waiting ? "waits" : ""],
    ["Predicted wait", waitInWords(card.predicted_wait_s), "more"],
    ["Output tok/s", count(card.output_rate), ""],
    ["KV pages", percent(card.pages_used, card.pages), "more"],
    ["Prefix hits", shareInWords(card.hits), "more"],
    ...(priced ? [["Price / M tok", priceInWords(card.price), "more"]] : []),
  ];
}

class ReplicaCard {
  /** hello: of the feed. */
  constructor(card, hello) {
    this.hello = hello;
    const isAdmin = hello.role !== "user";
    const path = `r/${encodeURIComponent(card.name)}/`;
    const name = isAdmin ? make("a", {href: path}, card.name) : make("span", {}, card.name);
    this.link = name;
    this.arm = make("span", {class: "arm", hidden: ""}, "candidate");
    this.title = make("h3", {}, name);
    this.word = make("span", {class: "word"});
    this.canvas = make("canvas", {role: "img", "aria-label": "Seats"});
    this.figures = make("dl");
    this.note = make("p", {class: "note"});
    this.element = make(
      "li",
      {class: "replica"},
      make("div", {class: "top"}, this.title, this.arm, this.word),
      make("div", {class: "map"}, this.canvas),
      this.figures,
      this.note,
    );
    this.map = new SeatMap(this.canvas, {
      states: hello.seat_states,
      letters: hello.seat_letters,
      levels: hello.levels,
    });
    this.shown = [];
  }

  show(card, t, width, tallest) {
    mark(this.element, "data-state", card.state);
    mark(this.title, "title", card.url);
    say(this.word, card.state);
    this.map.show(card.seats, width, tallest);
    const seats = card.seats.length;
    const last = SILENT.includes(card.state) ? ", as it was heard of last" : "";
    const label = seats ? `${card.taken} of ${seats} seats taken${last}` : "No seats are known";
    mark(this.canvas, "aria-label", label);
    this.showFigures(figuresOf(card, this.hello.price_per_hour !== null));
    const note = noteOf(card, t).trim();
    say(this.note, note);
    this.note.hidden = !note;
  }

  showFigures(figures) {
    figures.forEach(([name, value, kind], i) => {
      if (!this.shown[i]) {
        this.shown[i] = {value: make("dd"), row: make("div")};
        this.shown[i].row.append(make("dt", {}, name), this.shown[i].value);
        this.figures.append(this.shown[i].row);
      }
      const {value: place, row} = this.shown[i];
      say(place, value);
      mark(row, "class", kind);
    });
  }
}

export class Replicas {
  constructor(list, found) {
    Object.assign(this, {list, found});
    this.cards = new Map(); // by name, in the list's order
    this.width = 0; // of a card's content, CSS pixels
    onWidth(list, () => this.measure());
    list.addEventListener("keydown", (event) => this.key(event));
  }

  /** Replace all cards by those of these replicas. */
  reset(replicas, hello) {
    this.hello = hello;
    this.cards = new Map(replicas.map((card) => [card.name, new ReplicaCard(card, hello)]));
    this.size = SIZES.find(({most}) => replicas.length <= most);
    this.list.dataset.size = this.size.name;
    this.list.replaceChildren(...[...this.cards.values()].map((one) => one.element));
    this.measure();
  }

  /** Read the width here, never while drawing. */
  measure() {
    const first = [...this.cards.values()].find((one) => !one.element.hidden);
    if (first) {
      this.width = Math.max(20, Math.floor(first.element.clientWidth - this.size.beside + 4));
      this.onMeasured?.();
    }
  }

  show(replicas, t) {
    for (const card of replicas) {
      const one = this.cards.get(card.name);
      if (!one.element.hidden) {
        one.show(card, t, this.width, this.size.tallest);
      }
    }
  }

  /** Hide replicas that do not match these words in name, state or model. */
  find(text, replicas) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let matches = 0;
    for (const card of replicas) {
      const about = `${card.name} ${card.state} ${card.model}`.toLowerCase();
      const hidden = !words.every((word) => about.includes(word));
      this.cards.get(card.name).element.hidden = hidden;
      matches += !hidden;
    }
    say(this.found, words.length ? `${count(matches)} of ${count(replicas.length)} shown` : "");
  }

  /** Mark the replicas that are candidates' engines. */
  markCandidates(names) {
    for (const [name, one] of this.cards) {
      one.arm.hidden = !names.includes(name);
    }
  }

  restyle() {
    forgetSheets();
    for (const one of this.cards.values()) {
      one.map.restyle();
    }
  }

  key(event) {
    const shown = [...this.cards.values()].filter((one) => !one.element.hidden);
    const at = shown.findIndex((one) => one.link === document.activeElement);
    const to = at < 0 ? undefined : neighbour(shown, at, event.key);
    if (to !== undefined) {
      event.preventDefault();
      shown[to]?.link.focus();
    }
  }
}

/** The card index that a key moves to; undefined for other keys. */
function neighbour(shown, at, key) {
  const tops = () => shown.map((one) => one.element.offsetTop);
  switch (key) {
    case "ArrowRight":
      return Math.min(shown.length - 1, at + 1);
    case "ArrowLeft":
      return Math.max(0, at - 1);
    case "Home":
      return 0;
    case "End":
      return shown.length - 1;
    case "ArrowDown":
    case "ArrowUp": {
      const columns = tops().filter((top, _, all) => top === all[0]).length;
      const to = key === "ArrowDown" ? at + columns : at - columns;
      return shown[to] ? to : at;
    }
  }
  return undefined;
}

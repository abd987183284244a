// The sequences without a seat, in the order in which they came: at the left edge of the timeline, and for the chat.

import {make, say, seconds} from "./dom.js";

/** CSS pixels of a line of the list. */
const LINE = 22;
/** Names of requests that are kept. */
const MOST_NAMES = 1000;

const nameOf = ({request, index}) => `${request} ${index}`;

/** Follows the feed's events. Sequences of others, of which a user is told nothing, are only counted. */
export class Waiting {
  constructor() {
    this.since = new Map(); // sequence -> {request, index, t: when it began to wait}
    this.names = new Map(); // x-request-id -> request, of the newest requests
  }

  /** rows: the newest first, of `requests?state=waiting`. */
  load(rows) {
    this.since.clear();
    for (const {request, index, arrival} of rows.toReversed()) {
      this.since.set(nameOf({request, index}), {request, index, t: arrival});
    }
  }

  /** One of the feed's events. */
  apply(event) {
    if (!event.request) {
      return;
    }
    if (event.event === "queued") {
      this.names.set(event.reason, event.request);
      if (this.names.size > MOST_NAMES) {
        this.names.delete(this.names.keys().next().value);
      }
    }
    if (event.event === "queued" || event.event === "preempted") {
      this.since.set(nameOf(event), {request: event.request, index: event.index, t: event.t});
    } else if (event.event !== "first_token") {
      this.since.delete(nameOf(event));
    }
  }

  /** {place (from 1), since} of the first sequence that waits of the request with an x-request-id; null: none does. */
  find(id) {
    const request = this.names.get(id);
    let place = 0;
    for (const one of this.since.values()) {
      place++;
      if (one.request === request) {
        return {place, since: one.t};
      }
    }
    return null;
  }

  /** ", place 3" of a sequence that waits; "" where that is not known. */
  placeInWords(request, index) {
    const place = [...this.since.keys()].indexOf(nameOf({request, index})) + 1;
    return place ? `, place ${place}` : "";
  }

  /** Seconds after which the sequence at a place should board; null: not known. predicted: of a newcomer, seconds. */
  expected(place, predicted) {
    return predicted ? (predicted * place) / Math.max(place, this.since.size) : null;
  }
}

export class QueueList {
  /** onPick(request, index): the reader wants to know more of one. */
  constructor(list, text, onPick) {
    Object.assign(this, {list, text, high: 0});
    list.addEventListener("click", (event) => {
      const {request, index} = event.target.closest("button")?.dataset ?? {};
      if (request) {
        onPick(request, Number(index));
      }
    });
    new ResizeObserver(([entry]) => {
      this.high = entry.contentRect.height;
    }).observe(list);
  }

  /** count: sequences that wait; now: the engine's clock; predicted: see `Waiting.expected`; mine: requests of this
   *  reader. live: false while a moment of the past is shown, of which only the count is known. */
  show(waiting, {count, now, predicted, mine, live}) {
    const newcomer = live && predicted ? `; a new request should wait ${seconds(predicted)}` : "";
    say(this.text, (count ? `${count.toLocaleString("en")} waiting` : "none waiting") + newcomer);
    // The core counts those that it has admitted: no more are listed, though more may be on their way to it.
    const fits = live ? Math.min(count, Math.max(1, Math.floor(this.high / LINE))) : 0;
    const shown = [...waiting.since.values()].slice(0, fits);
    while (this.list.children.length > shown.length) {
      this.list.lastChild.remove();
    }
    shown.forEach((one, i) => {
      const line = this.list.children[i] ?? this.newLine();
      const button = line.firstChild;
      Object.assign(button.dataset, {request: one.request, index: one.index});
      const expected = waiting.expected(i + 1, predicted);
      say(button, `${i + 1} · ${seconds(Math.max(0, now - one.t))}${expected ? ` · in ${seconds(expected)}` : ""}`);
      button.classList.toggle("mine", mine(one.request));
    });
  }

  newLine() {
    const title = "Place, time waited, estimated time to a seat";
    const line = make("li", {}, make("button", {type: "button", class: "plain", title}));
    this.list.append(line);
    return line;
  }
}

// The sequences without a seat, in order of arrival: at the left edge of the timeline, and for the chat.

import {make, say, seconds} from "./dom.js";

/** CSS pixels of a line of the list. */
const LINE = 22;
/** Most x-request-ids to remember. */
const MOST_NAMES = 1000;

const nameOf = ({request, index}) => `${request} ${index}`;

/** Follows the feed's events. Other users' sequences, whose names a user may not see, are only counted. */
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

  /** {place (from 1), since} of the first waiting sequence of a request, by its x-request-id; null: none waits. */
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

  /** ", place 3" for a waiting sequence; "" if not known. */
  placeInWords(request, index) {
    const place = [...this.since.keys()].indexOf(nameOf({request, index})) + 1;
    return place ? `, place ${place}` : "";
  }

  /** Seconds until the sequence at a place should board; null: not known. predicted: seconds, of a new request. */
  expected(place, predicted) {
    return predicted ? (predicted * place) / Math.max(place, this.since.size) : null;
  }
}

export class QueueList {
  /** onPick(request, index): called when the reader selects a sequence. */
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

  /** count: waiting sequences; now: the engine's clock; predicted: see `Waiting.expected`; mine(request): whether it is
   *  this reader's. live: false while a past moment is shown, of which only the count is known. */
  show(waiting, {count, now, predicted, mine, live}) {
    const newcomer = live && predicted ? `; a new request should wait ${seconds(predicted)}` : "";
    say(this.text, (count ? `${count.toLocaleString("en")} waiting` : "none waiting") + newcomer);
    // The core counts only admitted requests: list no more than these, though more may be on their way to it.
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

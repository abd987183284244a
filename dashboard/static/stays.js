// Which sequence was in which seat, and when: the stays of the last ten minutes in flat arrays, without garbage.

export const KEPT_S = 600;
export const HUES = 8;
const CAPACITY = 65536;
/** Newest stays from the server that live events may repeat. */
const MOST_REPEATED = 4096;
/** Most preempted sequences whose hue is remembered. */
const MOST_PREEMPTED = 4096;
/** Largest difference in seconds between the server's times and those of events. */
const ROUNDING_S = 0.002;
const ENDS = ["finished", "aborted", "preempted"];

const nameOf = (request, index) => `${request} ${index}`;

/** A stay is a sequence in a seat. Times are seconds of the engine's clock; `to` is Infinity while the stay continues,
 *  `first` (its first token) while the prompt is being computed. */
export class Stays {
  constructor(capacity = CAPACITY) {
    this.capacity = capacity;
    this.from = new Float64Array(capacity);
    this.first = new Float64Array(capacity);
    this.to = new Float64Array(capacity);
    this.seat = new Int32Array(capacity);
    this.hue = new Uint8Array(capacity);
    this.index = new Int32Array(capacity);
    this.n_prompt = new Int32Array(capacity);
    this.n_output = new Int32Array(capacity);
    this.request = new Array(capacity).fill("");
    this.end = new Array(capacity).fill("");
    this.clear();
  }

  clear() {
    this.begun = 0; // stays begun so far; the newest `capacity` are stored
    this.open = new Map(); // seat -> number of its stay
    this.preemptedHues = new Map(); // preempted sequence -> its hue, until it boards again
    this.loaded = new Map(); // sequence -> start of its last stay from the server
    this.turn = 0;
    this.lastHue = []; // by seat
    this.knownFrom = Infinity; // nothing is recorded before this time
  }

  get oldest() {
    return Math.max(0, this.begun - this.capacity);
  }

  /** Fill from the server's route `timeline`; later live events may repeat some of it. */
  load({stays, kept_from: keptFrom, stays_left_out: leftOut}) {
    this.clear();
    this.knownFrom = leftOut ? stays.from[0] : keptFrom;
    for (let i = 0; i < stays.seat.length; i++) {
      this.loadOne(stays, i);
    }
    for (let n = Math.max(this.oldest, this.begun - MOST_REPEATED); n < this.begun; n++) {
      const i = n % this.capacity;
      this.loaded.set(nameOf(this.request[i], this.index[i]), this.from[i]);
    }
  }

  loadOne(stays, i) {
    const to = stays.to[i] ?? Infinity;
    const place = this.begin({
      seat: stays.seat[i],
      request: stays.request[i],
      index: stays.index[i],
      t: stays.from[i],
      n_prompt: stays.n_prompt[i],
    });
    this.first[place] = stays.first_token[i] ?? to;
    this.to[place] = to;
    this.end[place] = stays.end[i] ?? "";
    this.n_output[place] = stays.n_output[i];
    if (to !== Infinity) {
      this.open.delete(stays.seat[i]);
    }
  }

  /** Begin a stay; returns its index in the arrays. */
  begin({seat, request, index, t, n_prompt: nPrompt}) {
    const number = this.begun++;
    const i = number % this.capacity;
    const name = nameOf(request, index);
    this.from[i] = t;
    this.first[i] = Infinity;
    this.to[i] = Infinity;
    this.seat[i] = seat;
    this.request[i] = request;
    this.index[i] = index;
    this.n_prompt[i] = nPrompt;
    this.n_output[i] = 0;
    this.end[i] = "";
    this.hue[i] = this.preemptedHues.get(name) ?? this.nextHue(seat);
    this.lastHue[seat] = this.hue[i];
    this.preemptedHues.delete(name);
    this.open.set(seat, number);
    return i;
  }

  /** Sequences take the colours in turn, but never that of the seat's previous sequence. */
  nextHue(seat) {
    if (this.turn % HUES === this.lastHue[seat]) {
      this.turn++;
    }
    return this.turn++ % HUES;
  }

  /** Apply one of the feed's events: {t, event, request, index, seat, n_prompt, n_output, reason}. */
  apply(event) {
    if (event.seat < 0) {
      return;
    }
    const number = this.open.get(event.seat);
    if (event.event === "seated") {
      this.seated(event, number);
      return;
    }
    const i = number % this.capacity;
    if (number === undefined || !this.isOf(i, event)) {
      return;
    }
    this.n_output[i] = event.n_output;
    if (event.event === "first_token") {
      this.first[i] = event.t;
    } else if (ENDS.includes(event.event)) {
      this.leave(i, event);
    }
  }

  isOf(i, {request, index}) {
    return this.request[i] === request && this.index[i] === index;
  }

  /** before: number of the seat's previous stay, if it has not ended. */
  seated(event, before) {
    const {t, request, index} = event;
    if (t < this.loaded.get(nameOf(request, index)) + ROUNDING_S) {
      return;
    }
    if (before !== undefined) {
      const i = before % this.capacity;
      this.to[i] = Math.min(this.to[i], t);
    }
    this.knownFrom = Math.min(this.knownFrom, t);
    this.begin(event);
  }

  /** Note first tokens by the seats' states: resumed sequences send no such event. decoding(seat): it generates. */
  settle(t, decoding) {
    for (const [seat, number] of this.open) {
      const i = number % this.capacity;
      if (this.first[i] === Infinity && decoding(seat)) {
        this.first[i] = t;
      }
    }
  }

  leave(i, {t, event, request, index, seat, reason}) {
    this.to[i] = t;
    this.first[i] = Math.min(this.first[i], t);
    this.end[i] = event === "finished" ? reason : event;
    this.open.delete(seat);
    if (event !== "preempted") {
      return;
    }
    this.preemptedHues.set(nameOf(request, index), this.hue[i]);
    if (this.preemptedHues.size > MOST_PREEMPTED) {
      this.preemptedHues.delete(this.preemptedHues.keys().next().value);
    }
  }

  /** Call visit(i) for each stay that touches [from, to), oldest first. */
  each(from, to, visit) {
    for (let number = this.oldest; number < this.begun; number++) {
      const i = number % this.capacity;
      if (this.from[i] < to && this.to[i] > from) {
        visit(i);
      }
    }
  }

  /** Indices of the stays under way at time t, by seat. */
  at(t) {
    const places = new Map();
    this.each(t, t + 1e-9, (i) => places.set(this.seat[i], i));
    return places;
  }

  phase(i, t) {
    return t < this.first[i] ? "prefill" : "decode";
  }

  /** Indices of the newest stays that had begun by t, newest first. */
  newest(count, t = Infinity) {
    const places = [];
    for (let number = this.begun - 1; number >= this.oldest && places.length < count; number--) {
      if (this.from[number % this.capacity] <= t) {
        places.push(number % this.capacity);
      }
    }
    return places;
  }
}

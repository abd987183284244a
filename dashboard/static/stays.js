// Who sat where, and when: the stays of the last ten minutes in flat arrays, so that a million of them make no garbage.

export const KEPT_S = 600;
export const HUES = 8;
const CAPACITY = 65536;
/** Newest stays of the server's account that live events may repeat. */
const MOST_REPEATED = 4096;
/** Preempted sequences whose hue is kept. */
const MOST_PREEMPTED = 4096;
/** Seconds by which the account's times and those of events may differ. */
const ROUNDING_S = 0.002;
const ENDS = ["finished", "aborted", "preempted"];

const nameOf = (request, index) => `${request} ${index}`;

/** A stay is a sequence in a seat. Its times are seconds of the engine's clock; `to` of one that still goes on is
 *  Infinity, `first` (its first token) of one that still reads its prompt too. */
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
    this.begun = 0; // stays ever begun; the newest `capacity` are kept
    this.open = new Map(); // seat -> number of its stay
    this.preemptedHues = new Map(); // preempted sequence -> its hue, until it boards again
    this.loaded = new Map(); // sequence -> when its last stay of the server's account began
    this.turn = 0;
    this.lastHue = []; // by seat
    this.knownFrom = Infinity; // nothing is known of the time before
  }

  get oldest() {
    return Math.max(0, this.begun - this.capacity);
  }

  /** Fill from the server's own account (`timeline`); live events may follow that repeat some of it. */
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

  /** A stay begins; returns its place in the arrays. */
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

  /** Passengers take the colours in turn, but never that of who sat there before. */
  nextHue(seat) {
    if (this.turn % HUES === this.lastHue[seat]) {
      this.turn++;
    }
    return this.turn++ % HUES;
  }

  /** One of the feed's events, as {t, event, request, index, seat, n_prompt, n_output, reason}. */
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

  /** before: number of the stay that the seat's last passenger was on, if it has not ended. */
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

  /** A sequence that boards again tells no first token: its seat's state does. decoding(seat): it generates. */
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

  /** Places of the stays under way at time t, by seat. */
  at(t) {
    const places = new Map();
    this.each(t, t + 1e-9, (i) => places.set(this.seat[i], i));
    return places;
  }

  phase(i, t) {
    return t < this.first[i] ? "prefill" : "decode";
  }

  /** Places of the newest stays that had begun by t, newest first. */
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

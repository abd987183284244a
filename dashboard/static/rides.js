// Who sat where, and when: the rides of the last ten minutes in flat arrays, so that a million of them make no garbage.

export const KEPT_S = 600;
export const HUES = 8;
const CAPACITY = 65536;
/** Newest rides of the server's account that live events may repeat. */
const SEEDED = 4096;
/** Places of a life event in the feed (hello.life_columns). */
const [T, , EV, REQUEST, INDEX, SEAT, N_IN, N_OUT, REASON] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

/** A ride is one stay of a sequence in a seat. Its times are seconds of the engine's clock; `to` of one that still goes
 *  on is Infinity, `first` (its first token) of one that still reads its prompt too. */
export class Rides {
  constructor(capacity = CAPACITY) {
    this.capacity = capacity;
    this.from = new Float64Array(capacity);
    this.first = new Float64Array(capacity);
    this.to = new Float64Array(capacity);
    this.seat = new Int32Array(capacity);
    this.hue = new Uint8Array(capacity);
    this.index = new Int32Array(capacity);
    this.n_in = new Int32Array(capacity);
    this.n_out = new Int32Array(capacity);
    this.request = new Array(capacity).fill("");
    this.end = new Array(capacity).fill("");
    this.clear();
  }

  clear() {
    this.made = 0;  // rides ever begun; the newest `capacity` are kept
    this.open = new Map();  // seat -> number of its ride
    this.homeless = new Map();  // preempted sequence -> its hue, until it boards again
    this.seeded = new Map();
    this.turn = 0;
    this.lastHue = [];  // by seat
    this.knownFrom = Infinity;  // nothing is known of the time before
  }

  get oldest() { return Math.max(0, this.made - this.capacity); }

  /** Fill from the server's own account; live events may follow that repeat some of it. */
  seed({rides, kept_from: keptFrom, rides_left_out: leftOut}) {
    this.clear();
    this.knownFrom = leftOut ? rides.from[0] : keptFrom;
    for (let i = 0; i < rides.seat.length; i++) {
      const to = rides.to[i] ?? Infinity;
      const at = this.begin(rides.seat[i], rides.request[i], rides.index[i], rides.from[i], rides.n_in[i]);
      this.first[at] = rides.first_token[i] ?? to;
      this.to[at] = to;
      this.end[at] = rides.end[i] ?? "";
      this.n_out[at] = rides.n_out[i];
      if (to !== Infinity) this.open.delete(rides.seat[i]);
    }
    this.seeded = new Map();  // sequence -> when its last ride of the account began
    for (let n = Math.max(this.oldest, this.made - SEEDED); n < this.made; n++) {
      const i = n % this.capacity;
      this.seeded.set(`${this.request[i]} ${this.index[i]}`, this.from[i]);
    }
  }

  begin(seat, request, index, from, nIn) {
    const number = this.made++, i = number % this.capacity, key = `${request} ${index}`;
    this.from[i] = from;
    this.first[i] = this.to[i] = Infinity;
    this.seat[i] = seat;
    this.request[i] = request;
    this.index[i] = index;
    this.n_in[i] = nIn;
    this.n_out[i] = 0;
    this.end[i] = "";
    this.hue[i] = this.homeless.get(key) ?? this.nextHue(seat);
    this.lastHue[seat] = this.hue[i];
    this.homeless.delete(key);
    this.open.set(seat, number);
    return i;
  }

  /** Passengers take the colours in turn, but never that of who sat there before. */
  nextHue(seat) {
    if (this.turn % HUES === this.lastHue[seat]) this.turn++;
    return this.turn++ % HUES;
  }

  /** One life event of the feed. */
  live(event) {
    const seat = event[SEAT], t = event[T], number = this.open.get(seat);
    if (seat < 0) return;
    if (event[EV] === "seated") return this.seated(event, number);
    const i = number % this.capacity;
    if (number === undefined || this.request[i] !== event[REQUEST] || this.index[i] !== event[INDEX]) return;
    this.n_out[i] = event[N_OUT];
    if (event[EV] === "first_token") this.first[i] = t;
    else if (["finished", "aborted", "preempted"].includes(event[EV])) this.alight(i, event);
  }

  seated(event, before) {
    const [t, seat] = [event[T], event[SEAT]];
    if (t < this.seeded.get(`${event[REQUEST]} ${event[INDEX]}`) + 0.002) return;
    if (before !== undefined) this.to[before % this.capacity] = Math.min(this.to[before % this.capacity], t);
    this.knownFrom = Math.min(this.knownFrom, t);
    this.begin(seat, event[REQUEST], event[INDEX], t, event[N_IN]);
  }

  /** A sequence that boards again tells no first token: its seat's state does. decoding(seat): it generates. */
  settle(t, decoding) {
    for (const [seat, number] of this.open) {
      const i = number % this.capacity;
      if (this.first[i] === Infinity && decoding(seat)) this.first[i] = t;
    }
  }

  alight(i, event) {
    this.to[i] = event[T];
    this.first[i] = Math.min(this.first[i], event[T]);
    this.end[i] = event[EV] === "finished" ? event[REASON] : event[EV];
    this.open.delete(event[SEAT]);
    if (event[EV] !== "preempted") return;
    this.homeless.set(`${event[REQUEST]} ${event[INDEX]}`, this.hue[i]);
    if (this.homeless.size > 4096) this.homeless.delete(this.homeless.keys().next().value);
  }

  /** Call visit(i) for each ride that touches [from, to), oldest first. */
  each(from, to, visit) {
    for (let number = this.oldest; number < this.made; number++) {
      const i = number % this.capacity;
      if (this.from[i] < to && this.to[i] > from) visit(i);
    }
  }

  /** Places of the rides under way at time t, by seat. */
  at(t) {
    const found = new Map();
    this.each(t, t + 1e-9, (i) => found.set(this.seat[i], i));
    return found;
  }

  phase(i, t) { return t < this.first[i] ? "prefill" : "decode"; }

  /** Places of the newest rides that had begun by t, newest first. */
  newest(count, t = Infinity) {
    const found = [];
    for (let number = this.made - 1; number >= this.oldest && found.length < count; number--) {
      if (this.from[number % this.capacity] <= t) found.push(number % this.capacity);
    }
    return found;
  }
}

// Looks at all seats during the last ten minutes, to scrub back to: how far each sequence was. Who it was, the rides
// know.

import {KEPT_S} from "./rides.js";

/** Looks kept, and bytes they may take (five a seat). */
const MOST_LOOKS = 6000;
const MOST_BYTES = 8e6;

export class Recorder {
  constructor(seats, states) {
    this.seats = seats;
    this.states = states;
    this.capacity = Math.max(60, Math.min(MOST_LOOKS, Math.floor(MOST_BYTES / (5 * Math.max(1, seats)))));
    this.every = KEPT_S / this.capacity;
    this.t = new Float64Array(this.capacity);
    this.waiting = new Int32Array(this.capacity);
    this.state = new Uint8Array(this.capacity * seats);
    this.reached = new Uint16Array(this.capacity * seats);
    this.end = new Uint16Array(this.capacity * seats);
    this.made = 0;
  }

  /** Keep a moment (see seats.js) if the last one lies far enough back. */
  look(t, moment, waiting) {
    const last = this.made ? this.t[(this.made - 1) % this.capacity] : -Infinity;
    if (moment.count !== this.seats || t - last < this.every * 0.9) return;
    const slot = this.made++ % this.capacity, base = slot * this.seats;
    this.t[slot] = t;
    this.waiting[slot] = waiting;
    for (let i = 0; i < this.seats; i++) {
      this.state[base + i] = moment.state[i];
      this.reached[base + i] = moment.reached(i);
      this.end[base + i] = moment.end(i);
    }
  }

  /** Slot of the last look at or before t, or -1 if that is not known or longer than two looks ago. */
  find(t) {
    let low = Math.max(0, this.made - this.capacity), high = this.made;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.t[middle % this.capacity] <= t) low = middle + 1; else high = middle;
    }
    const slot = (low - 1 + this.capacity) % this.capacity;
    return low > Math.max(0, this.made - this.capacity) && t - this.t[slot] < Math.max(2, 3 * this.every) ? slot : -1;
  }

  /** The time of the look before (or after, by = 1) the one that t shows; null if there is none. */
  neighbour(t, by) {
    const oldest = Math.max(0, this.made - this.capacity);
    for (let n = by < 0 ? this.made - 1 : oldest; n >= oldest && n < this.made; n += by) {
      const time = this.t[n % this.capacity];
      if (by < 0 ? time < t - 1e-6 : time > t + 1e-6) return time;
    }
    return null;
  }

  /** The moment t as the seat grid shows it. Before this page looked, the rides alone tell who sat where. */
  moment(t, rides) {
    const slot = this.find(t), base = slot * this.seats, riders = rides.at(t), {states, seats} = this;
    const state = slot >= 0 ? this.state.subarray(base, base + seats) : this.statesOf(riders, rides, t);
    const rider = (i) => states[state[i]] === "free" ? undefined : riders.get(i);
    const read = (column) => (i) => slot >= 0 ? column[base + i] : 0;
    return {count: seats, states, state, waiting: slot >= 0 ? this.waiting[slot] : null,
            request: (i) => rider(i) === undefined ? null : rides.request[rider(i)],
            index: (i) => rider(i) === undefined ? 0 : rides.index[rider(i)],
            reached: read(this.reached), end: read(this.end)};
  }

  statesOf(riders, rides, t) {
    const state = new Uint8Array(this.seats);
    for (const [seat, i] of riders) if (seat < this.seats) state[seat] = this.states.indexOf(rides.phase(i, t));
    return state;
  }
}

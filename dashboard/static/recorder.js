// Snapshots of all seats during the last ten minutes, for scrubbing back: the progress of each sequence. The stays have
// the sequences' names.

import {KEPT_S} from "./stays.js";

/** Most snapshots, and most bytes of them (five per seat). */
const MOST_SNAPSHOTS = 6000;
const MOST_BYTES = 8e6;

export class Recorder {
  constructor(seats, states) {
    this.seats = seats;
    this.states = states;
    const fits = Math.floor(MOST_BYTES / (5 * Math.max(1, seats)));
    this.capacity = Math.max(60, Math.min(MOST_SNAPSHOTS, fits));
    this.every = KEPT_S / this.capacity;
    this.t = new Float64Array(this.capacity);
    this.waiting = new Int32Array(this.capacity);
    this.state = new Uint8Array(this.capacity * seats);
    this.reached = new Uint16Array(this.capacity * seats);
    this.end = new Uint16Array(this.capacity * seats);
    this.count = 0; // snapshots recorded so far; the newest `capacity` are stored
  }

  get oldest() {
    return Math.max(0, this.count - this.capacity);
  }

  /** Record a moment (see seats.js) if the last one is old enough. */
  record(t, moment, waiting) {
    const last = this.count ? this.t[(this.count - 1) % this.capacity] : -Infinity;
    if (moment.gone || moment.count !== this.seats || t - last < this.every * 0.9) {
      return;
    }
    const place = this.count++ % this.capacity;
    const base = place * this.seats;
    this.t[place] = t;
    this.waiting[place] = waiting;
    for (let i = 0; i < this.seats; i++) {
      this.state[base + i] = moment.state[i];
      this.reached[base + i] = moment.reached(i);
      this.end[base + i] = moment.end(i);
    }
  }

  /** Index of the last snapshot at or before t; -1 if there is none or it is too old. */
  find(t) {
    let low = this.oldest;
    let high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.t[middle % this.capacity] <= t) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const place = (low - 1 + this.capacity) % this.capacity;
    const near = t - this.t[place] < Math.max(2, 3 * this.every);
    return low > this.oldest && near ? place : -1;
  }

  /** The time of the snapshot before (by = -1) or after (by = 1) the one shown at t; null if there is none. */
  neighbour(t, by) {
    const start = by < 0 ? this.count - 1 : this.oldest;
    for (let n = start; n >= this.oldest && n < this.count; n += by) {
      const time = this.t[n % this.capacity];
      if ((time - t) * by > 1e-6) {
        return time;
      }
    }
    return null;
  }

  /** The moment t as the seat grid shows it. Before the page was open, only the stays tell whose seat it was. */
  moment(t, stays) {
    const {states, seats} = this;
    const place = this.find(t);
    const seated = stays.at(t);
    if (place < 0) {
      const state = this.statesOf(seated, stays, t);
      const none = () => 0;
      return {
        count: seats,
        waiting: null,
        ...named({states, state, seated, stays}),
        reached: none,
        end: none,
      };
    }
    const base = place * seats;
    const state = this.state.subarray(base, base + seats);
    return {
      count: seats,
      waiting: this.waiting[place],
      ...named({states, state, seated, stays}),
      reached: (i) => this.reached[base + i],
      end: (i) => this.end[base + i],
    };
  }

  statesOf(seated, stays, t) {
    const state = new Uint8Array(this.seats);
    for (const [seat, i] of seated) {
      if (seat < this.seats) {
        state[seat] = this.states.indexOf(stays.phase(i, t));
      }
    }
    return state;
  }
}

/** The sequences in the seats, as part of a moment. seated: seat -> index of its stay. */
function named({states, state, seated, stays}) {
  const stayIn = (seat) => (states[state[seat]] === "free" ? undefined : seated.get(seat));
  return {
    states,
    state,
    request: (seat) => stays.request[stayIn(seat)] ?? null,
    index: (seat) => stays.index[stayIn(seat)] ?? 0,
  };
}

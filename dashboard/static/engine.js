// The engine's state on the page: the last key frame with every later delta applied to it. The feed's fields are
// explained in dashboard/sse.py.

import {bytes} from "./dom.js";

/** A seat's numbers, in the order of a delta. */
const NUMBERS = ["index", "n_prompt", "n_computed", "n_output", "max_tokens"];
const MOST_NOTES = 50;
/** Least milliseconds for which the page shows that a seat got several tokens at once. */
const LEAP_MS = 150;
/** States in which no engine serves. */
const GONE = ["loading", "restarting", "dead"];

/** The seats as arrays with one entry per seat: state (index into hello.seat_states), request, NUMBERS, and leapt:
 *  performance.now() at which it got more than one token a step; 0 some time later. */
export class Seats {
  constructor(count) {
    this.count = count;
    this.state = new Uint8Array(count);
    this.request = new Array(count).fill(null);
    this.leapt = new Float64Array(count);
    for (const name of NUMBERS) {
      this[name] = new Int32Array(count);
    }
  }

  /** columns: "seats" of a key frame. */
  static from(columns) {
    const state = bytes(columns.state);
    const seats = new Seats(state.length);
    seats.state.set(state);
    seats.request = [...columns.request];
    for (const name of NUMBERS) {
      seats[name].set(columns[name]);
    }
    return seats;
  }

  /** One row of a delta's "seats". */
  set([seat, state, request, ...numbers]) {
    const goesOn = this.state[seat] === state && this.request[seat] === request;
    const before = goesOn ? this.n_output[seat] : Infinity;
    this.state[seat] = state;
    this.request[seat] = request;
    NUMBERS.forEach((name, i) => {
      this[name][seat] = numbers[i];
    });
    if (this.n_output[seat] > before) {
      this.leapt[seat] = performance.now();
    }
  }

  /** Add one token a step to every generating sequence; deltas name the seats that differ. */
  advance(steps, decode) {
    const since = performance.now() - LEAP_MS;
    for (let i = 0; i < this.count; i++) {
      if (this.leapt[i] < since) {
        this.leapt[i] = 0;
      }
      if (this.state[i] === decode) {
        this.n_output[i] += steps;
        this.n_computed[i] = this.n_prompt[i] + this.n_output[i] - 1;
      }
    }
  }
}

export class Engine {
  constructor() {
    this.hello = null;
    this.frame = null; // fields of the newest key frame, overwritten by later deltas
    this.seats = null;
    this.pages = null; // per_cell, cells (Uint8Array), counts, windows
    this.notes = [];
  }

  get info() {
    return this.hello?.info ?? null;
  }

  get states() {
    return this.hello?.seat_states ?? [];
  }

  get seatCount() {
    return this.info?.seats ?? this.seats?.count ?? 0;
  }

  /** Whether an engine that served is gone. */
  get gone() {
    return this.outages.at(-1)?.ready === null;
  }

  /** Outages (times without an engine), oldest first: {began, cause, restart, n_resumed, n_lost, n_streams, n_flowing,
   *  ready, flowing}. */
  get outages() {
    return this.frame?.outages ?? [];
  }

  /** Whether there was no engine at time t. */
  goneAt(t) {
    return this.outages.some(({began, ready}) => began <= t && t < (ready ?? Infinity));
  }

  /** Whether the engine serves requests. */
  get serving() {
    return this.frame?.state === "ready" || this.frame?.state === "draining";
  }

  code(name) {
    return this.states.indexOf(name);
  }

  applyKeyFrame(frame) {
    this.frame = {...frame, histograms: frame.histograms ?? this.frame?.histograms ?? null};
    if (frame.seats) {
      this.seats = Seats.from(frame.seats);
    } else if (GONE.includes(frame.state)) {
      this.seats = null; // without an engine no seat is taken
      this.pages = null;
    }
    if (frame.pages) {
      this.pages = {...frame.pages, cells: bytes(frame.pages.cells)};
    }
    this.notes = frame.notes ?? this.notes;
  }

  /** Apply a delta; false if there is no key frame to apply it to. */
  applyDelta(delta) {
    const before = this.frame;
    if (!before) {
      return false;
    }
    const metrics = {...before.metrics, ...delta.metrics};
    this.frame = {...before, ...delta, metrics};
    this.seats?.advance(delta.step - before.step, this.code("decode"));
    for (const row of delta.seats ?? []) {
      this.seats?.set(row);
    }
    if (delta.pages && this.pages) {
      this.applyPages(delta.pages);
    }
    return true;
  }

  applyPages({runs, counts, windows}) {
    for (const [first, count, state] of runs) {
      this.pages.cells.fill(state, first, first + count);
    }
    Object.assign(this.pages, {counts, windows});
  }

  /** Add a note; it replaces an earlier one of the same code and time. */
  addNote(note) {
    const at = this.notes.findIndex(({code, t}) => code === note.code && t === note.t);
    const notes = at < 0 ? [...this.notes, note] : this.notes.with(at, note);
    this.notes = notes.slice(-MOST_NOTES);
  }

  /** Number of seats in this state. */
  count(name) {
    const code = this.code(name);
    let seats = 0;
    for (const state of this.seats?.state ?? []) {
      if (state === code) {
        seats++;
      }
    }
    return seats;
  }

  /** Number of taken seats. */
  get taken() {
    if (!this.seats) {
      return this.frame?.metrics.seats_busy ?? 0;
    }
    return this.seats.count - this.count("free");
  }
}

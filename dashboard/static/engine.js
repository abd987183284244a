// What the page knows of the engine: the last key frame with every delta since applied to it.

import {bytes} from "./dom.js";

const NUMBERS = ["index", "n_prompt", "n_computed", "n_output", "max_tokens"];
const DECODE = "decode";

/** The seats as arrays with one entry a seat: state (its place in hello.states), request, and NUMBERS. */
export class Seats {
  constructor(count) {
    this.count = count;
    this.state = new Uint8Array(count);
    this.request = new Array(count).fill(null);
    for (const name of NUMBERS) this[name] = new Int32Array(count);
  }

  static from(columns) {
    const state = bytes(columns.state), seats = new Seats(state.length);
    seats.state.set(state);
    seats.request = [...columns.request];
    for (const name of NUMBERS) seats[name].set(columns[name]);
    return seats;
  }

  set([seat, state, request, ...numbers]) {
    this.state[seat] = state;
    this.request[seat] = request;
    NUMBERS.forEach((name, i) => { this[name][seat] = numbers[i]; });
  }

  /** Every generating sequence made one token a step; what differs from that comes by name. */
  advance(steps, decode) {
    for (let i = 0; i < this.count; i++) {
      if (this.state[i] !== decode) continue;
      this.n_output[i] += steps;
      this.n_computed[i] = this.n_prompt[i] + this.n_output[i] - 1;
    }
  }
}

export class Engine {
  constructor() {
    this.hello = null;
    this.frame = null;  // t, step, state, age, progress, s, hist of the newest event
    this.seats = null;
    this.pages = null;  // per_cell, cells (Uint8Array), counts
    this.notes = [];
    this.life = 0;  // life events that have been made known
  }

  get info() { return this.hello?.info ?? null; }
  get states() { return this.hello?.states ?? []; }
  get seatCount() { return this.info?.seats ?? this.seats?.count ?? 0; }
  get live() { return this.frame?.state === "ready" || this.frame?.state === "draining"; }

  code(name) { return this.states.indexOf(name); }

  key(news) {
    this.frame = {...news, hist: news.hist ?? this.frame?.hist ?? null};
    if (news.seats) this.seats = Seats.from(news.seats);
    else if (news.state === "loading") this.seats = null;  // who sat in an engine that is gone has been sent home
    if (news.pages) this.pages = {...news.pages, cells: bytes(news.pages.cells)};
    this.notes = news.notes ?? this.notes;
  }

  /** Apply a delta; false if there is no key frame it could stand on. */
  delta(news) {
    const before = this.frame;
    if (!before) return false;
    this.frame = {...before, ...news, s: {...before.s, ...news.s}, hist: before.hist};
    this.seats?.advance(news.step - before.step, this.code(DECODE));
    for (const row of news.seats ?? []) this.seats?.set(row);
    if (news.pages && this.pages) this.movePages(news.pages);
    return true;
  }

  movePages({runs, counts}) {
    for (const [first, count, state] of runs ?? []) this.pages.cells.fill(state, first, first + count);
    this.pages.counts = counts ?? this.pages.counts;
  }

  note(news) { this.notes = [...this.notes, news].slice(-50); }

  count(name) {
    const code = this.code(name);
    let found = 0;
    for (const state of this.seats?.state ?? []) if (state === code) found++;
    return found;
  }

  /** Seats that somebody sits in. */
  get taken() { return this.seats ? this.seats.count - this.count("free") : this.frame?.s.seats_busy ?? 0; }
}

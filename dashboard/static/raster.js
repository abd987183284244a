// Paints stays into pixels. A canvas call for each stay would cost a frame; filling rows of an array costs nearly
// nothing, and a timeline that moves on is one copyWithin and a narrow strip.

import {HUES} from "./stays.js";
import {pixel} from "./dom.js";

/** Pixels between two sequences of a seat. */
const APART = 1;
/** Share of a hue in the painted colour. */
const QUIET = 0.62;
/** Seconds before the last painting that may still change: ends are reported a little late. */
const UNSETTLED_S = 1.2;
/** Kinds of idle seats: no requests wait; requests wait while prompts are computed; requests wait without a reason;
 *  the second is not recorded. */
export const IDLE = 0;
export const WHILE_READING = 1;
export const WASTE = 2;
export const UNKNOWN = 3;

export class Raster {
  constructor() {
    this.width = this.height = 0;
    this.painted = null; // {what, edge}: key of the picture; edge: column number of the right end since time 0
  }

  size(width, height) {
    if (width === this.width && height === this.height) {
      return;
    }
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.width = width;
    this.height = height;
    this.painted = null;
  }

  /** Read the colours of the current scheme. */
  readColours() {
    const hues = Array.from({length: HUES}, (_, i) => `hue-${i}`);
    // Less saturated than the colours of states: they only distinguish one sequence from the next.
    this.decode = hues.map((name) => pixel(name, "idle", QUIET));
    this.stripe = hues.map((name) => pixel(name, "stripe", 0.45 * QUIET));
    this.idle = ["idle", "idle-read", "idle-waste"].map((name) => pixel(name));
    this.hatch = pixel("waiting", "idle-waste", 0.6);
    this.grid = pixel("idle-line");
    this.unknown = [pixel("idle"), pixel("line")];
    this.painted = null;
  }

  /** Paint `stays` in [right - span, right] seconds of the engine's clock, which is at `now`. row: pixels per seat.
   *  idleKind(second): kind of its idle seats; null: none waiting. A new `key` means that past stays have changed:
   *  all is painted again. */
  paint(stays, {right, span, row, seats, now, key, idleKind = null}) {
    const scale = this.width / span;
    const edge = Math.floor(right * scale);
    const what = `${key} ${scale} ${row} ${seats}`;
    const shift = this.painted ? edge - this.painted.edge : 0;
    const moved = this.painted?.what === what && shift >= 0 && shift < this.width / 2;
    if (moved && shift) {
      this.pixels.copyWithin(0, shift);
    }
    const start = moved ? this.width - shift - Math.ceil(UNSETTLED_S * scale) - APART : 0;
    this.paintColumns(stays, Math.max(0, start), {
      left: edge - this.width + 1,
      edge,
      scale,
      row,
      seats,
      now,
      idleKind,
    });
    this.painted = {what, edge};
  }

  /** Paint all columns from `start` on. left, edge: column numbers of both ends since time 0. */
  paintColumns(stays, start, {left, edge, scale, row, seats, now, idleKind}) {
    const firstColumn = Math.floor(stays.knownFrom * scale) - left;
    const kinds = Uint8Array.from({length: this.width}, (_, x) =>
      x >= start && idleKind ? idleKind(Math.floor((left + x) / scale)) : IDLE,
    );
    this.paintIdle(start, Math.max(start, Math.min(this.width, firstColumn)), {left, row, seats, kinds});
    const column = (t) => Math.floor(t * scale) - left;
    stays.each((left + start - 1) / scale, (edge + 1) / scale, (i) => {
      if (stays.seat[i] >= seats) {
        return;
      }
      const ended = stays.to[i] !== Infinity;
      const from = column(stays.from[i]);
      const to = Math.max(from + 1, column(Math.min(stays.to[i], now)) + (ended ? 0 : 1));
      const first = Math.min(to, column(Math.min(stays.first[i], now + 1)));
      const gap = ended && to - from > 3 ? APART : 0;
      const shown = {from: Math.max(start, from), to: Math.min(this.width, to - gap), first};
      this.paintStay(stays.seat[i], stays.hue[i], shown, {left, row});
    });
  }

  /** Paint idle seats from `firstColumn` on; before it nothing was recorded, which looks different. kinds: per column. */
  paintIdle(start, firstColumn, {left, row, seats, kinds}) {
    for (let y = 0; y < this.height; y++) {
      const line = y * this.width;
      const seat = Math.floor(y / row);
      const lowest = row > 5 && y % row === row - 1;
      for (let x = firstColumn; x < this.width; x++) {
        const kind = kinds[x];
        const hatched = kind === WASTE && (x + left + y) % 8 === 0;
        this.pixels[line + x] = hatched ? this.hatch : (this.idle[kind] ?? this.unknownAt(x + left + y));
      }
      if (firstColumn < this.width && seat < seats && lowest) {
        this.pixels.fill(this.grid, line + firstColumn, line + this.width);
      }
      for (let x = start; x < firstColumn; x++) {
        this.pixels[line + x] = this.unknownAt(x + left + y);
      }
    }
  }

  unknownAt(place) {
    return this.unknown[place % 6 < 2 ? 1 : 0];
  }

  /** Paint columns `from` to `to` of a seat; those before `first` are striped: the prompt is being computed. */
  paintStay(seat, hue, {from, to, first}, {left, row}) {
    const top = seat * row + (row > 5 ? 1 : 0);
    const bottom = (seat + 1) * row - (row > 3 ? 1 : 0);
    const split = Math.max(from, Math.min(to, first));
    for (let y = top; y < bottom; y++) {
      const line = y * this.width;
      if (split < to) {
        this.pixels.fill(this.decode[hue], line + split, line + to);
      }
      for (let x = from; x < split; x++) {
        const striped = (x + left + y) % 6 < 3;
        this.pixels[line + x] = striped ? this.stripe[hue] : this.decode[hue];
      }
    }
  }
}

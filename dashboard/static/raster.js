// Paints rides into pixels. A canvas call for each ride would cost a frame; filling rows of an array costs nearly
// nothing, and a timeline that moves on is one copyWithin and a narrow strip.

import {HUES} from "./rides.js";
import {pixel} from "./dom.js";

/** Pixels between two passengers of a seat. */
const APART = 1;
/** Seconds before the last painting that may still change: news of an end comes a little after it. */
const UNSETTLED_S = 0.8;

export class Raster {
  constructor() {
    this.width = this.height = 0;
    this.painted = null;  // {what, edge}: what the pixels show; edge: column number of the right end since time 0
  }

  size(width, height) {
    if (width === this.width && height === this.height) return;
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.width = width;
    this.height = height;
    this.painted = null;
  }

  /** Colours of the current scheme. */
  readColours() {
    const hues = Array.from({length: HUES}, (_, i) => `hue-${i}`);
    this.decode = hues.map((name) => pixel(name));
    this.stripe = hues.map((name) => pixel(name, "stripe", 0.45));
    this.idle = pixel("idle");
    this.grid = pixel("idle-line");
    this.unknown = [pixel("idle"), pixel("line")];
    this.painted = null;
  }

  /** Make the pixels show `rides` in [right - span, right] seconds of the engine's clock, which is at `now`.
   *  row: pixels a seat. Another `key` says that rides of the past have changed. */
  paint(rides, {right, span, row, seats, now, key}) {
    const scale = this.width / span, edge = Math.floor(right * scale);
    const what = `${key} ${scale} ${row} ${seats}`, shift = this.painted ? edge - this.painted.edge : 0;
    const moved = this.painted?.what === what && shift >= 0 && shift < this.width / 2;
    if (moved && shift) this.pixels.copyWithin(0, shift);
    const start = moved ? this.width - shift - Math.ceil(UNSETTLED_S * scale) - APART : 0;
    this.columns(rides, Math.max(0, start), edge, scale, row, seats, now);
    this.painted = {what, edge};
  }

  columns(rides, start, edge, scale, row, seats, now) {
    const left = edge - this.width + 1, known = Math.floor(rides.knownFrom * scale) - left;
    this.blank(start, Math.max(start, Math.min(this.width, known)), left, row, seats);
    rides.each((left + start - 1) / scale, (edge + 1) / scale, (i) => {
      if (rides.seat[i] >= seats) return;
      const from = Math.floor(rides.from[i] * scale) - left, ended = rides.to[i] !== Infinity;
      const to = Math.max(from + 1, Math.floor(Math.min(rides.to[i], now) * scale) - left + (ended ? 0 : 1));
      const first = Math.min(to, Math.floor(Math.min(rides.first[i], now + 1) * scale) - left);
      const gap = ended && to - from > 3 ? APART : 0;
      this.ride(i, rides, Math.max(start, from), Math.min(this.width, to - gap), first, left, row);
    });
  }

  /** Idle seats from `known` on; before it nobody looked, which is not the same. */
  blank(start, known, left, row, seats) {
    for (let y = 0; y < this.height; y++) {
      const line = y * this.width, seat = Math.floor(y / row);
      const base = seat < seats && row > 5 && y % row === row - 1 ? this.grid : this.idle;
      if (known < this.width) this.pixels.fill(base, line + known, line + this.width);
      for (let x = start; x < known; x++) this.pixels[line + x] = this.unknown[(x + left + y) % 6 < 2 ? 1 : 0];
    }
  }

  ride(i, rides, from, to, first, left, row) {
    const hue = rides.hue[i], top = rides.seat[i] * row + (row > 5 ? 1 : 0);
    const bottom = (rides.seat[i] + 1) * row - (row > 3 ? 1 : 0);
    const split = Math.max(from, Math.min(to, first));
    for (let y = top; y < bottom; y++) {
      const line = y * this.width;
      if (split < to) this.pixels.fill(this.decode[hue], line + split, line + to);
      for (let x = from; x < split; x++) {
        this.pixels[line + x] = ((x + left + y) % 6 < 3 ? this.stripe : this.decode)[hue];
      }
    }
  }
}

// A small map of seats: a cell per seat, in the colours and signs of an engine's own page. Cells are as small as all
// seats need to fit, and only changed cells are drawn.

import {LEVELS, Sheet} from "./cells.js";
import {resize} from "./dom.js";

/** Cell and gap in CSS pixels, the largest first. */
const SIZES = [
  [16, 3],
  [13, 3],
  [10, 2],
  [8, 2],
  [6, 1],
  [4, 1],
  [3, 1],
];
/** Sheets of cell pictures by states, size and pixel ratio. */
const sheets = new Map();

/** Pictures of all cells of this size, shared by all maps. */
function sheetOf(states, size, ratio) {
  const key = `${states} ${size} ${ratio}`;
  if (!sheets.has(key)) {
    sheets.set(key, new Sheet(states, size, size, ratio));
  }
  return sheets.get(key);
}

/** Drop all pictures after a change of the colours. */
export const forgetSheets = () => sheets.clear();

export class SeatMap {
  /** code: {states, letters, levels} of the feed's hello. */
  constructor(canvas, code) {
    Object.assign(this, {canvas, code});
    this.drawn = "";
    this.layout = "";
  }

  /** seats: a letter each; width, tallest: room for the map, in CSS pixels. */
  show(seats, width, tallest) {
    const ratio = devicePixelRatio || 1;
    const [size, gap] = sizeOf(seats.length, width, tallest);
    const columns = Math.max(1, Math.floor((width + gap) / (size + gap)));
    const rows = Math.ceil(seats.length / columns);
    const layout = `${seats.length} ${columns} ${size} ${ratio}`;
    const wide = Math.min(columns, seats.length || 1) * (size + gap) - gap;
    const resized = resize(this.canvas, wide, Math.max(1, rows * (size + gap) - gap));
    if (resized || layout !== this.layout) {
      this.drawn = "";
      this.layout = layout;
    }
    this.draw(seats, {columns, step: size + gap, size, ratio});
  }

  draw(seats, {columns, step, size, ratio}) {
    const {letters, levels, states} = this.code;
    const sheet = sheetOf(states, size, ratio);
    const context = this.canvas.getContext("2d");
    for (let seat = 0; seat < seats.length; seat++) {
      if (seats[seat] === this.drawn[seat]) {
        continue;
      }
      const place = letters.indexOf(seats[seat]);
      const level = Math.round(((place % levels) * LEVELS) / (levels - 1));
      const x = Math.round((seat % columns) * step * ratio);
      const y = Math.round(Math.floor(seat / columns) * step * ratio);
      sheet.stamp(context, Math.floor(place / levels), level, x, y);
    }
    this.drawn = seats;
  }

  /** Draw all cells at the next call of `show`. */
  restyle() {
    this.drawn = "";
    this.layout = "";
  }
}

function sizeOf(count, width, tallest) {
  const fits = ([size, gap]) => {
    const columns = Math.max(1, Math.floor((width + gap) / (size + gap)));
    return Math.ceil(count / columns) * (size + gap) - gap <= tallest;
  };
  return SIZES.find(fits) ?? SIZES.at(-1);
}

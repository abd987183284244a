// The seats: one cell a seat; colour and glyph say the state, the bar says how far its sequence has come.

import {bytes, canvas2d, colour, make, short, stripes, table} from "./dom.js";

const GLYPH = {prefill: "»", decode: "●", free: ""};
export const VERB = {prefill: "reading its prompt", decode: "generating", free: "free"};

/** Rows of a key frame's seats: state name, request, and the numbers; `done` is 0..1. */
export function readSeats(seats, states) {
  return Array.from(bytes(seats.state), (code, i) => {
    const state = states[code], prefill = state === "prefill";
    const reached = prefill ? seats.n_computed[i] : seats.n_output[i];
    const end = prefill ? seats.n_prompt[i] : seats.max_tokens[i];
    return {seat: i, state, request: seats.request[i], index: seats.index[i], reached, end,
            done: end ? Math.min(1, reached / end) : 0, prompt: seats.n_prompt[i], output: seats.n_output[i],
            limit: seats.max_tokens[i], pages: seats.pages[i]};
  });
}

export class SeatGrid {
  constructor(canvas, reading) {
    this.canvas = canvas;
    this.reading = reading;
    this.rows = [];
    this.mine = new Set();  // requests to outline, without the engine's "-0" at the end
    this.chosen = -1;
    this.cell = {columns: 1, width: 1, height: 1, gap: 4};
    canvas.addEventListener("pointermove", (event) => this.choose(this.at(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.choose(-1));
    canvas.addEventListener("blur", () => this.choose(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(rows) {
    this.rows = rows;
    this.draw();
    if (this.chosen >= 0) this.read();
  }

  layout(width) {
    const seats = this.rows.length, gap = seats > 256 ? 2 : 5;
    const [least, height] = seats <= 64 ? [76, 50] : seats <= 256 ? [36, 26] : [12, 12];
    const columns = Math.max(1, Math.min(seats, Math.floor((width + gap) / (least + gap))));
    // Few seats should not stretch over the whole page.
    this.cell = {columns, gap, height, width: Math.min(least * 2.4, (width + gap) / columns - gap)};
    return Math.ceil(seats / columns) * (height + gap);
  }

  draw() {
    const {context, width} = canvas2d(this.canvas, this.layout(this.canvas.parentElement.clientWidth));
    context.textBaseline = "middle";
    for (const row of this.rows) this.drawCell(context, row);
  }

  place(seat) {
    const {columns, width, height, gap} = this.cell;
    return [(seat % columns) * (width + gap), Math.floor(seat / columns) * (height + gap), width, height];
  }

  drawCell(context, row) {
    const [x, y, width, height] = this.place(row.seat), free = row.state === "free";
    const outline = new Path2D();
    outline.roundRect(x + 1, y + 1, width - 2, height - 2, Math.min(6, height / 4));
    context.save();
    context.clip(outline);
    if (!free) {
      context.fillStyle = colour(`${row.state}-soft`);
      context.fillRect(x, y, width, height);
      context.fillStyle = colour(row.state);
      context.fillRect(x, y, width * row.done, height);
      if (row.state === "prefill") {
        context.fillStyle = stripes(context, colour("cell-line"));
        context.fillRect(x, y, width, height);
      }
    }
    this.write(context, row, x, y, width, height, colour(free ? "faint" : "ink"));
    context.beginPath();
    context.rect(x, y, width * row.done, height);
    context.clip();
    if (!free) this.write(context, row, x, y, width, height, colour(`on-${row.state}`));
    context.restore();
    context.save();
    const strong = row.seat === this.chosen || (row.request && this.mine.has(row.request.replace(/-\d+$/, "")));
    context.lineWidth = strong ? 3 : 1.2;
    context.strokeStyle = strong ? colour("ink") : colour(free ? "line" : row.state);
    if (free) context.setLineDash([4, 3]);
    context.stroke(outline);
    context.restore();
  }

  write(context, row, x, y, width, height, ink) {
    context.fillStyle = ink;
    if (height >= 40) {
      context.font = "600 13px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText(row.seat, x + 9, y + 15);
      context.textAlign = "right";
      context.fillText(GLYPH[row.state], x + width - 9, y + 15);
      context.font = "12px system-ui, sans-serif";
      context.textAlign = "left";
      const text = row.state === "free" ? "free" : `${row.reached} / ${row.end}`;
      context.fillText(text, x + 9, y + height - 14, width - 14);
    } else if (height >= 20) {
      context.font = "600 11px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillText(GLYPH[row.state] || row.seat, x + width / 2, y + height / 2);
    }
  }

  at(x, y) {
    const {columns, width, height, gap} = this.cell;
    const column = Math.floor(x / (width + gap)), seat = Math.floor(y / (height + gap)) * columns + column;
    return column < columns && seat < this.rows.length ? seat : -1;
  }

  key(event) {
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.cell.columns, ArrowUp: -this.cell.columns}[event.key];
    if (event.key === "Escape") this.choose(-1);
    if (!step) return;
    event.preventDefault();
    this.choose(this.chosen < 0 ? 0 : Math.max(0, Math.min(this.rows.length - 1, this.chosen + step)));
  }

  choose(seat) {
    if (seat === this.chosen) return;
    this.chosen = seat;
    this.draw();
    this.read();
  }

  /** The chosen seat in words. */
  read() {
    const row = this.rows[this.chosen];
    if (!row) this.reading.textContent = "Point at a seat, or use the arrow keys, to see who sits there.";
    else if (row.state === "free") this.reading.textContent = `Seat ${row.seat} is free.`;
    else {
      const numbers = `${row.prompt} prompt tokens, ${row.output} of at most ${row.limit} output tokens, `
        + `${row.pages} pages.`;
      this.reading.replaceChildren(`Seat ${row.seat}, ${VERB[row.state]}: request `,
        make("code", {}, short(row.request ?? "", 60)), row.index ? ` (choice ${row.index})` : "", `, ${numbers}`);
    }
  }
}

export function seatTable(element, rows) {
  table(element, ["Seat", "State", "Request", "Choice", "Prompt", "Output", "At most", "Pages"], rows.map((row) =>
    row.state === "free" ? [row.seat, "free"]
      : [row.seat, row.state, row.request, row.index, row.prompt, row.output, row.limit, row.pages]));
}

/** The queue: a small square for each waiting sequence, as far as there is room. */
export function drawQueue(canvas, waiting) {
  const fits = Math.floor(canvas.parentElement.clientWidth / 13), rows = Math.min(3, Math.ceil(waiting / fits));
  const {context} = canvas2d(canvas, rows * 13);
  for (let i = 0; i < Math.min(waiting, fits * rows); i++) {
    context.fillStyle = colour("waiting");
    context.beginPath();
    context.roundRect((i % fits) * 13 + 1, Math.floor(i / fits) * 13 + 1, 10, 10, 5);
    context.fill();
  }
}

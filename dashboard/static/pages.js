// The pool of KV pages: one small cell per page (or per several pages of a large pool), painted as pixels.

import {colour, count, legend, onWidth, pixel, resize, table} from "./dom.js";

const TEXT = {
  free: "free",
  held: "held by one sequence",
  shared: "shared by several",
  cached: "cached, free to reuse",
};
/** Preferred height of the map in CSS pixels; the size of a cell may change it. */
const HIGH = 190;

export class PageMap {
  constructor(canvas, reading) {
    Object.assign(this, {canvas, reading, width: 0, image: null, pages: null, states: []});
    this.note = reading.textContent;
    onWidth(canvas.parentElement, (width) => {
      this.width = width;
      this.restyle();
    });
    canvas.addEventListener("pointermove", (event) => this.read(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => {
      reading.textContent = this.note;
    });
  }

  restyle() {
    this.image = null;
    if (this.pages) {
      this.draw(this.pages, this.states);
    }
  }

  draw(pages, states) {
    Object.assign(this, {pages, states});
    const {cells} = pages;
    if (!this.width || !cells.length) {
      return;
    }
    const size = Math.max(
      3,
      Math.min(14, Math.floor(Math.sqrt((this.width * HIGH) / cells.length))),
    );
    const columns = Math.max(1, Math.floor(this.width / size));
    const rows = Math.ceil(cells.length / columns);
    if (!this.image || this.image.width !== columns || this.image.height !== rows) {
      this.start(size, columns, rows);
    }
    this.paint(cells);
    const summary = states.map((name) => `${pages.counts[name]} ${name}`).join(", ");
    this.canvas.setAttribute("aria-label", `KV pages: ${summary}`);
  }

  /** One pixel per cell, drawn enlarged; the grid over it is drawn once. */
  start(size, columns, rows) {
    Object.assign(this, {size, columns});
    this.image = new ImageData(columns, rows);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.paints = this.states.map((state) => pixel(`page-${state}`));
    this.shown = new Uint8Array(columns * rows).fill(255);
    this.small = Object.assign(document.createElement("canvas"), {width: columns, height: rows});
    resize(this.canvas, columns * size, rows * size);
  }

  paint(cells) {
    let changed = false;
    for (let i = 0; i < cells.length; i++) {
      if (cells[i] === this.shown[i]) {
        continue;
      }
      this.shown[i] = cells[i];
      this.pixels[i] = this.paints[cells[i]];
      changed = true;
    }
    if (!changed) {
      return;
    }
    this.small.getContext("2d").putImageData(this.image, 0, 0);
    const context = this.canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    const cell = this.size * ratio;
    const {width, height} = this.canvas;
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, width, height);
    context.drawImage(this.small, 0, 0, width, height);
    context.fillStyle = colour("panel");
    for (let x = 1; x <= this.columns; x++) {
      context.fillRect(Math.round(x * cell) - 1, 0, 1, height);
    }
    for (let y = 1; y <= this.image.height; y++) {
      context.fillRect(0, Math.round(y * cell) - 1, width, 1);
    }
  }

  read(x, y) {
    const cell = Math.floor(y / this.size) * this.columns + Math.floor(x / this.size);
    const {pages, states} = this;
    if (!pages || x >= this.columns * this.size || cell >= pages.cells.length) {
      return;
    }
    const first = cell * pages.per_cell + 1;
    const last = first + pages.per_cell - 1;
    const state = states[pages.cells[cell]];
    this.reading.textContent =
      pages.per_cell === 1
        ? `Page ${first}: ${TEXT[state] ?? state}.`
        : `Pages ${first} to ${last}: most of them ${TEXT[state] ?? state}.`;
  }

  fillTable(element) {
    const all = Object.values(this.pages.counts).reduce((one, other) => one + other, 0);
    table(
      element,
      ["State", "Pages", "Share"],
      this.states.map((name) => [
        TEXT[name] ?? name,
        this.pages.counts[name],
        `${((100 * this.pages.counts[name]) / all).toFixed(1)} %`,
      ]),
    );
  }
}

export function pageLegend(element, counts, states) {
  legend(
    element,
    states.map((name) => [`page-${name}`, `${count(counts[name])} ${TEXT[name] ?? name}`]),
  );
}

// The heart of the page: who sat in which seat. Rows are seats, x is time, a change of colour is a change of passenger.

import {$, colour, make, onWidth, pen, resize, seconds, short, table} from "./dom.js";
import {Raster} from "./raster.js";

const GUTTER = 34;
const AXIS = 20;
const HIGH = 420;
const TICKS = [0.2, 0.5, 1, 2, 5, 10, 20, 60, 120];

export class Timeline {
  /** describe(t): a moment as a short text. onPick(request, index): somebody wants to know more. view: a View, or null
   *  for a picture that stands still. high: CSS pixels, as far as the height of a row can keep to it. */
  constructor({canvas, reading, rides, view, onPick, describe, high = HIGH}) {
    Object.assign(this, {canvas, reading, rides, view, onPick, describe, high});
    this.raster = new Raster();
    this.note = [...reading.childNodes];
    this.seats = this.row = this.width = this.version = 0;
    this.axis = "";
    this.origin = 0;  // added to the rides' times, gives those that `describe` tells
    this.chosen = null;
    onWidth(canvas.parentElement, (width) => { this.width = width; this.restyle(); });
    canvas.addEventListener("pointermove", (event) => this.read(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.reading.replaceChildren(...this.note));
    canvas.addEventListener("click", (event) => this.pick(event));
  }

  /** Draw all of it again: another colour scheme, another width, another past. */
  restyle() {
    this.raster.readColours();
    this.version++;
    this.axis = "";
    if (this.now) this.draw(this.seats, this.now);
  }

  /** The rides around the moment of the view, or all of the first `span` seconds. */
  draw(seats, now, {right = this.view?.t ?? now, span = this.view?.span ?? now} = {}) {
    if (!this.width || !seats) return;
    const ratio = devicePixelRatio || 1;
    const row = Math.round(Math.max(1, Math.min(18, Math.floor(this.high / seats))) * ratio);
    this.row = row / ratio;
    Object.assign(this, {seats, now, right, span});
    if (resize(this.canvas, this.width, seats * this.row + AXIS)) this.axis = "";
    this.drawAxes();
    this.raster.size(Math.round((this.width - GUTTER) * ratio), seats * row);
    this.raster.paint(this.rides, {right, span, row, seats, now, key: this.version});
    this.canvas.getContext("2d").putImageData(this.raster.image, Math.round(GUTTER * ratio), 0);
    this.outline();
  }

  x(t) { return GUTTER + (this.width - GUTTER) * (1 - (this.right - t) / this.span); }
  time(x) { return this.right - this.span * (1 - (x - GUTTER) / (this.width - GUTTER)); }

  drawAxes() {
    const live = !this.view || this.view.mode === "live";
    const wanted = `${this.seats} ${this.span} ${this.row} ${live ? "live" : this.right}`;
    if (wanted === this.axis) return;
    this.axis = wanted;
    const context = pen(this.canvas), bottom = this.seats * this.row, every = Math.max(1, Math.ceil(14 / this.row));
    context.clearRect(0, 0, GUTTER, bottom + AXIS);
    context.clearRect(0, bottom, this.width, AXIS);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("faint");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let seat = 0; seat < this.seats; seat += every) {
      context.fillText(seat, GUTTER - 6, Math.max(6, (seat + 0.5) * this.row));
    }
    this.drawTimes(context, bottom + 12);
  }

  drawTimes(context, y) {
    const least = (this.width < 500 ? 110 : 90) * this.span / (this.width - GUTTER);
    const step = TICKS.find((tick) => tick >= least) ?? 120;
    // Ticks stand at round numbers of seconds: before now while time moves on, of the clock while it stands.
    const past = this.view?.mode === "live" ? 0 : (this.right + this.origin) % step;
    for (let ago = past; ago <= this.span; ago += step) {
      const x = this.x(this.right - ago);
      context.textAlign = x > this.width - 30 ? "right" : x < GUTTER + 30 ? "left" : "center";
      context.fillText(this.describe(this.right - ago, ago), x, y);
    }
  }

  /** Frame the rides of the chosen request. */
  outline() {
    if (!this.chosen) return;
    const context = pen(this.canvas);
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    this.rides.each(this.right - this.span, this.right, (i) => {
      if (this.rides.request[i] !== this.chosen) return;
      const from = Math.max(GUTTER, this.x(this.rides.from[i])), to = this.x(Math.min(this.right, this.rides.to[i]));
      context.strokeRect(from + 1, this.rides.seat[i] * this.row + 1, Math.max(2, to - from - 2),
                         Math.max(2, this.row - 2));
    });
  }

  /** Place of the ride at a point of the canvas, or -1. */
  at(x, y) {
    const seat = Math.floor(y / this.row), t = this.time(x);
    let found = -1;
    if (x >= GUTTER) this.rides.each(t, t + 1e-9, (i) => { if (this.rides.seat[i] === seat) found = i; });
    return found;
  }

  read(x, y) {
    const i = this.at(x, y), {rides} = this;
    if (i < 0) return this.reading.replaceChildren(...this.note);
    const rode = Math.min(rides.to[i], this.now) - rides.from[i];
    const reading = Math.min(rides.first[i], this.now) - rides.from[i];
    this.reading.replaceChildren(`Seat ${rides.seat[i]}: request `, make("code", {}, short(rides.request[i], 60)),
      `${rides.index[i] ? ` (choice ${rides.index[i]})` : ""}, ${rides.n_in[i]} prompt tokens, `,
      `on board for ${seconds(rode)}, of which ${seconds(reading)} until its first token`,
      rides.end[i] ? `; ended: ${rides.end[i]}.` : ".");
  }

  pick(event) {
    const i = this.at(event.offsetX, event.offsetY);
    if (i >= 0) this.onPick?.(this.rides.request[i], this.rides.index[i]);
  }

  fillTable(element) {
    const {rides, right} = this;
    table(element, ["Request", "Choice", "Seat", "Boarded", "First token", "On board", "End"],
      rides.newest(40, right).map((i) => [
        rides.request[i], rides.index[i], rides.seat[i], `${seconds(right - rides.from[i])} ago`,
        rides.first[i] <= right ? `after ${seconds(rides.first[i] - rides.from[i])}` : "not yet",
        seconds(Math.min(rides.to[i], right) - rides.from[i]), rides.to[i] <= right ? rides.end[i] : "on board"]));
  }
}

/** Dragging moves through time, Ctrl and the wheel zoom, and so do arrow keys, + and -. */
export function steer(canvas, timeline, view) {
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => { dragged = {x: event.clientX, at: view.t, moved: false}; });
  canvas.addEventListener("pointermove", (event) => {
    if (!dragged || !event.buttons || Math.abs(event.clientX - dragged.x) < 4 && !dragged.moved) return;
    if (!dragged.moved) canvas.setPointerCapture(event.pointerId);
    dragged.moved = true;
    view.scrub(dragged.at - (event.clientX - dragged.x) * view.span / (timeline.width - GUTTER));
  });
  const click = (event) => { if (dragged?.moved) event.stopImmediatePropagation(); };
  canvas.addEventListener("click", click, {capture: true});
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    view.zoom(Math.exp(event.deltaY / 300), (event.offsetX - GUTTER) / (timeline.width - GUTTER));
  }, {passive: false});
  canvas.addEventListener("keydown", (event) => {
    const action = {ArrowLeft: () => view.pan(-view.span / 20), ArrowRight: () => view.pan(view.span / 20),
                    "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2),
                    Home: () => view.scrub(0), End: () => view.resume()}[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  $("zoom-in").addEventListener("click", () => view.zoom(0.5));
  $("zoom-out").addEventListener("click", () => view.zoom(2));
}

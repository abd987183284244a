// The heart of the page: who sat where during the last minute. Rows are seats, x is time.

import {canvas2d, colour, make, short, stripes, table} from "./dom.js";
import {WINDOW} from "./history.js";
import {VERB} from "./seats.js";

const HUES = 8;
const GUTTER = 34;
const AXIS = 20;
/** Two looks at the engine that lie further apart (seconds) say nothing about the time between them. */
const APART = 1.5;

export class Timeline {
  constructor(canvas, reading) {
    this.canvas = canvas;
    this.reading = reading;
    this.note = [...reading.childNodes];
    this.rides = [];  // {seat, request, index, phase, from, to, hue}, oldest first
    this.open = new Map();  // seat -> its ride
    this.left = new Map();  // seat -> when it was seen empty, just left, while somebody waited
    this.seen = [];  // {from, to}: the times we know about
    this.hues = new Map();
    this.next = 0;
    this.seats = 0;
    this.now = 0;
    canvas.addEventListener("pointermove", (event) => this.read(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.reading.replaceChildren(...this.note));
  }

  /** One look at all seats at time t (seconds), with `waiting` sequences in the queue. */
  add(rows, t, waiting) {
    const near = this.seen.length > 0 && t - this.now < APART;
    this.seats = rows.length;
    for (const ride of this.open.values()) if (near) ride.to = t;
    if (near) this.seen.at(-1).to = t;
    else { this.seen.push({from: t, to: t}); this.open.clear(); this.left.clear(); }
    for (const row of rows) this.addRow(row, t, waiting);
    this.now = t;
    this.forget();
  }

  /** The engine is looked at between two steps, when a seat that was just left is empty until the next plan fills it:
   *  if somebody waited and it is taken at the next look, it was not idle in between. */
  addRow(row, t, waiting) {
    const ride = this.open.get(row.seat), from = this.left.get(row.seat) ?? t;
    if (ride && ride.request === row.request && ride.index === row.index && ride.phase === row.state) return;
    this.open.delete(row.seat);
    this.left.delete(row.seat);
    if (row.state === "free") {
      if (ride && waiting) this.left.set(row.seat, t);
      return;
    }
    const next = {seat: row.seat, request: row.request, index: row.index, phase: row.state, from, to: t,
                  hue: this.hue(`${row.request} ${row.index}`)};
    this.open.set(row.seat, next);
    this.rides.push(next);
  }

  /** Sequences take the colours in turn, so that those on board together differ as long as they can. */
  hue(sequence) {
    if (!this.hues.has(sequence)) this.hues.set(sequence, this.next++ % HUES);
    return this.hues.get(sequence);
  }

  forget() {
    const start = this.now - WINDOW;
    this.rides = this.rides.filter((ride) => ride.to >= start);
    this.seen = this.seen.filter((span) => span.to >= start);
    if (this.hues.size > 4096) this.hues = new Map([...this.hues].slice(-2048));
  }

  x(t) { return GUTTER + (this.width - GUTTER) * (1 - (this.now - t) / WINDOW); }

  draw() {
    const wide = this.canvas.parentElement.clientWidth;
    this.row = Math.max(1, Math.min(18, Math.floor(420 / Math.max(1, this.seats))));
    const {context, width} = canvas2d(this.canvas, this.seats * this.row + AXIS);
    this.width = wide;
    context.fillStyle = colour("empty");
    context.fillRect(GUTTER, 0, width - GUTTER, this.seats * this.row);
    this.drawUnknown(context);
    for (const ride of this.rides) this.drawRide(context, ride);
    this.drawAxes(context);
    this.canvas.setAttribute("aria-label", `Seat timeline: ${this.rides.length} phases in ${this.seats} seats`);
  }

  /** Before the page came, and while it heard nothing: that is not the same as idle. */
  drawUnknown(context) {
    let from = this.now - WINDOW;
    for (const span of [...this.seen, {from: this.now, to: this.now}]) {
      if (span.from > from) {
        context.fillStyle = colour("panel");
        context.fillRect(this.x(from), 0, this.x(span.from) - this.x(from), this.seats * this.row);
        context.fillStyle = stripes(context, colour("line"));
        context.fillRect(this.x(from), 0, this.x(span.from) - this.x(from), this.seats * this.row);
      }
      from = Math.max(from, span.to);
    }
  }

  drawRide(context, ride) {
    const from = Math.max(GUTTER, this.x(ride.from)), y = ride.seat * this.row, pad = this.row > 5 ? 1 : 0;
    const width = Math.max(1, this.x(ride.to) - from - (ride.phase === "decode" ? 1 : 0));
    context.fillStyle = colour(`hue-${ride.hue}`);
    context.fillRect(from, y + pad, width, this.row - pad * 2);
    if (ride.phase === "prefill") {
      context.fillStyle = stripes(context, colour("prefill-line"));
      context.fillRect(from, y + pad, width, this.row - pad * 2);
    }
  }

  drawAxes(context) {
    const every = Math.max(1, Math.ceil(14 / this.row)), bottom = this.seats * this.row;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("faint");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let seat = 0; seat < this.seats; seat += every) context.fillText(seat, GUTTER - 6, (seat + 0.5) * this.row);
    for (let ago = WINDOW, step = this.width < 500 ? 20 : 10; ago >= 0; ago -= step) {
      context.textAlign = ago === 0 ? "right" : ago === WINDOW ? "left" : "center";
      context.fillText(ago ? `${ago} s ago` : "now", this.x(this.now - ago), bottom + 12);
    }
  }

  read(x, y) {
    const seat = Math.floor(y / this.row), t = this.now - WINDOW * (1 - (x - GUTTER) / (this.width - GUTTER));
    const ride = this.rides.findLast((one) => one.seat === seat && one.from <= t && one.to >= t);
    if (!ride) return this.reading.replaceChildren(...this.note);
    this.reading.replaceChildren(`Seat ${seat}, ${VERB[ride.phase]}: request `,
      make("code", {}, short(ride.request ?? "", 60)), `, ${(ride.to - ride.from).toFixed(1)} s in this phase.`);
  }

  fillTable(element) {
    const newest = this.rides.slice(-40).reverse();
    table(element, ["Request", "Choice", "Seat", "Phase", "Began", "Lasted"], newest.map((ride) =>
      [ride.request, ride.index, ride.seat, ride.phase, `${(this.now - ride.from).toFixed(1)} s ago`,
       `${(ride.to - ride.from).toFixed(1)} s`]));
  }
}

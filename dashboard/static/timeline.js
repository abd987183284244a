// The seat timeline. Rows are seats, x is time; a change of colour is a change of sequence.

import {GLYPH} from "./cells.js";
import {$, colour, make, onSize, pen, reducedMotion, resize, seconds, short, table} from "./dom.js";
import {Raster} from "./raster.js";
import {outageInWords, restartInWords} from "./status.js";

const GUTTER = 34;
const AXIS = 20;
const HIGHEST_ROW = 18;
/** Width of the cells at the right end that name each seat's sequence; shown where rows are high and wide enough. */
const CELL = 104;
const LEAST_ROW = 12;
const LEAST_WIDTH = 640;
/** Milliseconds of the animation in which a sequence boards or leaves. */
const MOVE_MS = 150;
/** Most stays in the table twin. */
const IN_TABLE = 40;
/** Size of a mark, in CSS pixels. */
const MARK = 10;
const TICKS = [0.2, 0.5, 1, 2, 5, 10, 20, 60, 120];

/** Possible titles of an outage, the longest first. */
function outageTitles(outage) {
  const back = restartInWords(outage);
  return [`${outage.cause}; ${back}`, back, `restart ${outage.restart}`, "no engine"];
}

export class Timeline {
  /** describe(t): a moment as a short text. onPick(request, index): called when the reader selects a sequence. view: a
   *  View, or null for a still picture. high: preferred height in CSS pixels, which the height of a row may change;
   *  null: that of the canvas's parent. highest: of a row. */
  constructor({canvas, reading, stays, view, onPick, describe, high = null, highest = HIGHEST_ROW}) {
    Object.assign(this, {canvas, reading, stays, view, onPick, describe, high, highest});
    this.raster = new Raster();
    this.note = [...reading.childNodes];
    this.seats = this.row = this.width = this.version = 0;
    this.axis = "";
    this.origin = 0; // added to the stays' times before `describe` gets them
    this.chosen = null;
    this.outages = []; // see Engine.outages
    this.idleKind = null; // (second) => how idle seats of that second are painted, see Raster
    this.incidents = []; // notes of the feed: {t, level, code, message}
    this.moment = null; // see seats.js; null: no cells at the right end
    this.isMine = () => false; // (request) => whether it is this reader's own
    this.moved = []; // by seat: {request, at: performance.now() of the change}
    const fills = high === null;
    onSize(canvas.parentElement, (width, height) => {
      this.width = width;
      this.high = fills ? height - AXIS : high;
      this.restyle();
    });
    canvas.addEventListener("pointermove", (event) => this.read(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.reading.replaceChildren(...this.note));
    canvas.addEventListener("click", (event) => this.pick(event));
  }

  /** Draw everything again, after a change of the colours, the width or the past. */
  restyle() {
    this.raster.readColours();
    this.version++;
    this.axis = "";
    if (this.now) {
      this.draw(this.seats, this.now);
    }
  }

  /** The stays around the view's moment; without a view, all of the first `now` seconds. */
  draw(seats, now) {
    if (!this.width || !seats) {
      return;
    }
    const right = this.view?.t ?? now;
    const span = this.view?.span ?? now;
    const ratio = devicePixelRatio || 1;
    const fits = Math.floor(this.high / seats);
    const row = Math.round(Math.max(1, Math.min(this.highest, fits)) * ratio);
    this.row = row / ratio;
    const roomy = this.row >= LEAST_ROW && this.width >= LEAST_WIDTH;
    this.cell = this.moment && roomy ? CELL : 0;
    Object.assign(this, {seats, now, right, span});
    if (resize(this.canvas, this.width, seats * this.row + AXIS)) {
      this.axis = "";
    }
    this.drawAxes();
    this.raster.size(Math.round(this.wide * ratio), seats * row);
    const {idleKind} = this;
    this.raster.paint(this.stays, {right, span, row, seats, now, idleKind, key: this.version});
    this.canvas.getContext("2d").putImageData(this.raster.image, Math.round(GUTTER * ratio), 0);
    this.outline();
    this.drawOutages();
    this.drawIncidents();
    if (this.cell) {
      this.drawCells();
    }
  }

  /** Width of the displayed time in CSS pixels. */
  get wide() {
    return this.width - GUTTER - (this.cell ?? 0);
  }

  x(t) {
    return GUTTER + this.wide * (1 - (this.right - t) / this.span);
  }
  time(x) {
    return this.right - this.span * (1 - (x - GUTTER) / this.wide);
  }

  drawAxes() {
    const live = !this.view || this.view.mode === "live";
    const axis = `${this.seats} ${this.span} ${this.row} ${this.wide} ${live ? "live" : this.right}`;
    if (axis === this.axis) {
      return;
    }
    this.axis = axis;
    const context = pen(this.canvas);
    const bottom = this.seats * this.row;
    const every = Math.max(1, Math.ceil(14 / this.row));
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
    const least = ((this.width < 500 ? 110 : 90) * this.span) / this.wide;
    const step = TICKS.find((tick) => tick >= least) ?? 120;
    // Ticks are at round numbers of seconds: before now while time moves on, of the clock while it stands still.
    const past = this.view?.mode === "live" ? 0 : (this.right + this.origin) % step;
    for (let ago = past; ago <= this.span; ago += step) {
      const x = this.x(this.right - ago);
      context.textAlign = this.alignmentAt(x);
      context.fillText(this.describe(this.right - ago, ago), x, y);
    }
  }

  /** The alignment that keeps a label at x inside the canvas. */
  alignmentAt(x) {
    if (x > GUTTER + this.wide - 30) {
      return "right";
    }
    return x < GUTTER + 30 ? "left" : "center";
  }

  /** Outline the stays of the selected request, and those of the reader's own. */
  outline() {
    const context = pen(this.canvas);
    context.lineWidth = 2;
    this.stays.each(this.right - this.span, this.right, (i) => {
      const request = this.stays.request[i];
      const isMine = this.isMine(request);
      if (!request || (request !== this.chosen && !isMine)) {
        return;
      }
      context.strokeStyle = colour(isMine ? "you" : "ink");
      const from = Math.max(GUTTER, this.x(this.stays.from[i]));
      const to = this.x(Math.min(this.right, this.stays.to[i]));
      context.strokeRect(
        from + 1,
        this.stays.seat[i] * this.row + 1,
        Math.max(2, to - from - 2),
        Math.max(2, this.row - 2),
      );
    });
  }

  /** Draw times without an engine in red over all seats. */
  drawOutages() {
    const context = pen(this.canvas);
    for (const outage of this.outages) {
      const [from, to] = this.extent(outage);
      if (to <= from) {
        continue;
      }
      context.fillStyle = colour("bad-soft");
      context.fillRect(from, 0, to - from, this.seats * this.row);
      context.fillStyle = colour("bad");
      context.fillRect(from, 0, 2, this.seats * this.row);
      context.textAlign = "left";
      context.textBaseline = "top";
      context.font = "600 12px system-ui, sans-serif";
      const fits = (text) => context.measureText(text).width <= to - from - 12;
      context.fillText(outageTitles(outage).find(fits) ?? "", from + 8, 6);
    }
  }

  /** Left and right end of an outage on the canvas. */
  extent({began, ready}) {
    const left = Math.max(GUTTER, this.x(began));
    return [left, Math.min(GUTTER + this.wide, this.x(ready ?? this.now))];
  }

  /** Draw a mark over the time axis for each incident. */
  drawIncidents() {
    const context = pen(this.canvas);
    const y = this.seats * this.row;
    for (const note of this.incidents) {
      const x = this.x(note.t);
      if (x < GUTTER || x > GUTTER + this.wide) {
        continue;
      }
      context.fillStyle = colour(note.level === "error" ? "bad" : "waiting");
      context.beginPath();
      context.moveTo(x, y - MARK);
      context.lineTo(x + MARK / 2, y);
      context.lineTo(x - MARK / 2, y);
      context.fill();
    }
  }

  /** A cell at the end of each row: the seat's sequence and its progress. A sequence that boards slides in from the
   *  right; one that leaves fades. */
  drawCells() {
    const context = pen(this.canvas);
    const left = this.width - CELL + 8;
    const now = performance.now();
    this.moving = false;
    for (let seat = 0; seat < this.seats; seat++) {
      const top = seat * this.row;
      context.clearRect(left - 8, top, CELL, this.row);
      const request = this.moment.request(seat);
      const move = this.moveOf(seat, request, now);
      const state = this.moment.states[this.moment.state[seat]] ?? "free";
      context.globalAlpha = move;
      const x = left + (request ? (1 - move) * CELL : 0);
      this.drawCell(context, {seat, state, request}, {x, y: top + 1, width: CELL - 8, height: this.row - 2});
      context.globalAlpha = 1;
    }
    context.clearRect(left - 8, this.seats * this.row, CELL, AXIS);
  }

  /** Progress of the animation of a seat's newest change, from 0 to 1. */
  moveOf(seat, request, now) {
    const last = this.moved[seat];
    if (!last || last.request !== request) {
      this.moved[seat] = {request, at: last ? now : -Infinity};
    }
    const share = (now - this.moved[seat].at) / MOVE_MS;
    if (share >= 1 || reducedMotion.matches || this.view?.mode !== "live") {
      return 1;
    }
    this.moving = true;
    return Math.max(0, share);
  }

  drawCell(context, {seat, state, request}, {x, y, width, height}) {
    const seated = state === "decode" || state === "prefill";
    const end = this.moment.end(seat);
    const reached = this.moment.reached(seat);
    context.fillStyle = colour(seated ? `${state}-soft` : state === "held" ? "held-soft" : "empty");
    context.fillRect(x, y, width, height);
    if (seated && end) {
      context.fillStyle = colour(`${state}-mid`);
      context.fillRect(x, y, Math.min(1, reached / end) * width, height);
    }
    if (request && this.isMine(request)) {
      context.strokeStyle = colour("you");
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, width - 2, height - 2);
    }
    context.fillStyle = colour(seated ? "ink" : "faint");
    context.font = `${Math.min(12, height)}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    context.textAlign = "left";
    const text = seated ? `${GLYPH[state]} ${reached}${end ? ` / ${end}` : ""}` : state;
    context.fillText(text, x + 6, y + height / 2, width - 10);
  }

  /** Outages and incidents at a point of the canvas, in words; "" for none. */
  story(x, y) {
    const bottom = this.seats * this.row;
    const near = ({t}) => Math.abs(this.x(t) - x) <= MARK;
    const note = y >= bottom - 1.5 * MARK ? this.incidents.findLast(near) : null;
    if (note) {
      return `${this.describe(note.t, this.right - note.t)}: ${note.message}.`;
    }
    const outage = this.outages.find((one) => {
      const [from, to] = this.extent(one);
      return x >= from && x <= to;
    });
    return outage ? outageInWords(outage) : "";
  }

  /** Index of the stay at a point of the canvas, or -1. */
  at(x, y) {
    const seat = Math.floor(y / this.row);
    const t = Math.min(this.right, this.time(x));
    return x < GUTTER ? -1 : (this.stays.at(t).get(seat) ?? -1);
  }

  read(x, y) {
    const story = this.story(x, y);
    if (story) {
      return this.reading.replaceChildren(story);
    }
    const i = this.at(x, y);
    const {stays} = this;
    if (i < 0) {
      return this.reading.replaceChildren(...this.note);
    }
    const stayed = Math.min(stays.to[i], this.now) - stays.from[i];
    const reading = Math.min(stays.first[i], this.now) - stays.from[i];
    const choice = stays.index[i] ? ` (choice ${stays.index[i]})` : "";
    const request = stays.request[i];
    const who = request
      ? ["request ", make("code", {}, short(request, 60)), `${choice}, ${stays.n_prompt[i]} prompt tokens, `]
      : ["another user's request, "];
    this.reading.replaceChildren(
      `Seat ${stays.seat[i]}: `,
      ...who,
      `on board for ${seconds(stayed)}, of which ${seconds(reading)} until its first token`,
      stays.end[i] ? `; ended: ${stays.end[i]}.` : ".",
    );
  }

  pick(event) {
    const i = this.at(event.offsetX, event.offsetY);
    if (i >= 0 && this.stays.request[i]) {
      this.onPick?.(this.stays.request[i], this.stays.index[i]);
    }
  }

  fillTable(element) {
    const newest = this.stays.newest(IN_TABLE, this.right);
    table(
      element,
      ["Request", "Choice", "Seat", "Boarded", "First token", "On board", "End"],
      newest.map((i) => this.tableRow(i)),
    );
  }

  tableRow(i) {
    const {stays, right} = this;
    const from = stays.from[i];
    const first = stays.first[i];
    const to = stays.to[i];
    return [
      stays.request[i] || "another user's",
      stays.index[i],
      stays.seat[i],
      `${seconds(right - from)} ago`,
      first <= right ? `after ${seconds(first - from)}` : "not yet",
      seconds(Math.min(to, right) - from),
      to <= right ? stays.end[i] : "on board",
    ];
  }
}

/** Dragging moves through time; Ctrl and the wheel zoom; so do arrow keys, + and -. */
export function steer(canvas, timeline, view) {
  drag(canvas, timeline, view);
  zoomByWheel(canvas, timeline, view);
  canvas.addEventListener("keydown", (event) => {
    const action = KEYS[event.key];
    if (action) {
      event.preventDefault();
      action(view);
    }
  });
  $("zoom-in").addEventListener("click", () => view.zoom(0.5));
  $("zoom-out").addEventListener("click", () => view.zoom(2));
}

const KEYS = {
  ArrowLeft: (view) => view.pan(-view.span / 20),
  ArrowRight: (view) => view.pan(view.span / 20),
  "+": (view) => view.zoom(0.5),
  "=": (view) => view.zoom(0.5),
  "-": (view) => view.zoom(2),
  Home: (view) => view.scrub(0),
  End: (view) => view.resume(),
};
/** Pixels that a pointer must move before it drags. */
const LEAST_DRAG = 4;

function drag(canvas, timeline, view) {
  let dragged = null; // {x, t, moved}: position and displayed moment at pointer down
  canvas.addEventListener("pointerdown", (event) => {
    dragged = {x: event.clientX, t: view.t, moved: false};
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!dragged || !event.buttons) {
      return;
    }
    const distance = event.clientX - dragged.x;
    if (!dragged.moved && Math.abs(distance) < LEAST_DRAG) {
      return;
    }
    if (!dragged.moved) {
      canvas.setPointerCapture(event.pointerId);
    }
    dragged.moved = true;
    view.scrub(dragged.t - (distance * view.span) / timeline.wide);
  });
  const noClick = (event) => {
    if (dragged?.moved) {
      event.stopImmediatePropagation();
    }
  };
  canvas.addEventListener("click", noClick, {capture: true});
}

function zoomByWheel(canvas, timeline, view) {
  const zoom = (event) => {
    if (!event.ctrlKey && !event.metaKey) {
      return;
    }
    event.preventDefault();
    const share = (event.offsetX - GUTTER) / timeline.wide;
    view.zoom(Math.exp(event.deltaY / 300), share);
  };
  canvas.addEventListener("wheel", zoom, {passive: false});
}

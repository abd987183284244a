// The seats: one cell per seat; colour and sign show the state, the bar or the brightness its sequence's progress. Only
// changed cells are drawn.

import {GLYPH, LEVELS, Sheet, VERB, drawLarge} from "./cells.js";
import {colour, make, onWidth, pen, resize, short, table} from "./dom.js";

/** Most seats whose cells have words. */
const ROOMY = 64;

/** Cells in CSS pixels, by the most seats that have them. least: smallest width. */
const SIZES = [
  {most: ROOMY, gap: 5, least: 76, height: 50},
  {most: 256, gap: 5, least: 26, height: 26},
  {most: Infinity, gap: 2, least: 14, height: 14},
];

/** The grid's data of a moment: state[i] (index into states), request(i), index(i), reached(i) of end(i), and for the
 *  present moment leapt(i), see engine.js. */
export function momentOf(engine) {
  const {seats, states} = engine;
  if (!seats) {
    return engine.gone ? goneMoment(engine) : emptyMoment(engine.seatCount, states);
  }
  const prefill = engine.code("prefill");
  const reading = (i) => seats.state[i] === prefill;
  return {
    count: seats.count,
    states,
    state: seats.state,
    request: (i) => seats.request[i],
    index: (i) => seats.index[i],
    reached: (i) => (reading(i) ? seats.n_computed[i] : seats.n_output[i]),
    end: (i) => (reading(i) ? seats.n_prompt[i] : seats.max_tokens[i]),
    leapt: (i) => seats.leapt[i],
  };
}

const GONE = ["gone"];
/** A moment without an engine. */
export const goneMoment = (engine) => ({...emptyMoment(engine.seatCount, GONE), gone: true});

/** A moment with all seats in the first of the states. */
function emptyMoment(count, states) {
  const none = () => 0;
  const free = () => null;
  const state = new Uint8Array(count);
  return {count, states, state, request: free, index: none, reached: none, end: none};
}

export class SeatGrid {
  constructor(canvas, reading, onPick) {
    Object.assign(this, {canvas, reading, onPick});
    this.note = reading.textContent;
    this.mine = new Set(); // requests to outline
    this.chosen = -1;
    this.moment = null;
    this.width = 0;
    this.drawn = []; // appearance of each cell on the screen
    this.cell = {columns: 1, width: 1, height: 1, gap: 4};
    onWidth(canvas.parentElement, (width) => {
      this.width = width;
      this.restyle();
    });
    canvas.addEventListener("pointermove", (event) =>
      this.choose(this.at(event.offsetX, event.offsetY)),
    );
    canvas.addEventListener("pointerleave", () => this.choose(-1));
    canvas.addEventListener("blur", () => this.choose(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("click", () => this.pick());
  }

  restyle() {
    this.sheet = null;
    this.drawn = [];
    if (this.moment) {
      this.show(this.moment);
    }
  }

  show(moment) {
    this.moment = moment;
    if (!this.width || !moment.count) {
      return;
    }
    if (resize(this.canvas, this.width, this.layout(moment.count))) {
      this.drawn = [];
    }
    this.draw();
    if (this.chosen >= 0) {
      this.read();
    }
  }

  layout(seats) {
    const {gap, least, height} = SIZES.find(({most}) => seats <= most);
    const columns = Math.max(1, Math.min(seats, Math.floor((this.width + gap) / (least + gap))));
    // Few seats do not stretch over the whole page, and small cells are whole pixels.
    const width = Math.floor(Math.min(least * 2.4, (this.width + gap) / columns - gap));
    this.cell = {columns, gap, height, width};
    return Math.ceil(seats / columns) * (height + gap);
  }

  draw() {
    const context = pen(this.canvas);
    const {count, states} = this.moment;
    const large = count <= ROOMY;
    const ratio = devicePixelRatio || 1;
    if (!large && this.sheet?.states !== states) {
      this.sheet = new Sheet(states, this.cell.width, this.cell.height, ratio);
      this.drawn = [];
    }
    for (let seat = 0; seat < count; seat++) {
      const appearance = this.appearance(seat, large);
      if (appearance === this.drawn[seat]) {
        continue;
      }
      this.drawn[seat] = appearance;
      this.drawCell(context, seat, large, ratio);
    }
  }

  drawCell(context, seat, large, ratio) {
    const [x, ground] = this.place(seat);
    const {width, height, gap} = this.cell;
    const y = ground - (this.jumps(seat) ? gap : 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(x, ground - gap, width, height + gap);
    if (large) {
      this.drawWords(context, seat, x * ratio, y * ratio, ratio);
    } else {
      const state = this.moment.state[seat];
      context.setTransform(1, 0, 0, 1, 0, 0);
      this.sheet.stamp(
        context,
        state,
        this.level(seat),
        Math.round(x * ratio),
        Math.round(y * ratio),
      );
    }
    if (this.marked(seat)) {
      this.frame(context, x, y, ratio);
    }
  }

  /** Whether a step gave several tokens, from accepted drafts: its cell is drawn higher for a moment. */
  jumps(seat) {
    return this.moment.leapt?.(seat) > 0;
  }

  level(seat) {
    const end = this.moment.end(seat);
    return end ? Math.min(LEVELS, Math.floor((LEVELS * this.moment.reached(seat)) / end)) : 0;
  }

  /** All values that decide a cell's appearance, as a number (or text, where the cell has words). */
  appearance(seat, large) {
    const {state, gone} = this.moment;
    const code = gone ? -1 : state[seat];
    const looks = (code * (LEVELS + 1) + this.level(seat)) * 2 + this.marked(seat);
    const rough = looks * 2 + this.jumps(seat);
    return large ? `${rough} ${this.moment.reached(seat)} ${this.moment.end(seat)}` : rough;
  }

  marked(seat) {
    if (seat === this.chosen || !this.mine.size) {
      return seat === this.chosen;
    }
    return this.mine.has(this.moment.request(seat));
  }

  drawWords(context, seat, x, y, ratio) {
    const {moment} = this;
    const state = moment.states[moment.state[seat]] ?? "free";
    const level = this.level(seat);
    const text = this.cellText(seat, state);
    context.setTransform(ratio, 0, 0, ratio, x, y);
    drawLarge(context, this.cell.width, this.cell.height, {state, level, name: seat, text});
  }

  cellText(seat, state) {
    if (state === "free" || state === "held") {
      return state;
    }
    if (state === "gone") {
      return "no engine";
    }
    const end = this.moment.end(seat);
    return end ? `${this.moment.reached(seat)} / ${end}` : "";
  }

  frame(context, x, y, ratio) {
    const {width, height} = this.cell;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.strokeStyle = colour("ink");
    context.lineWidth = 3;
    context.strokeRect(x + 1.5, y + 1.5, width - 3, height - 3);
  }

  place(seat) {
    const {columns, width, height, gap} = this.cell;
    return [(seat % columns) * (width + gap), Math.floor(seat / columns) * (height + gap) + gap];
  }

  at(x, y) {
    const {columns, width, height, gap} = this.cell;
    const column = Math.floor(x / (width + gap));
    const seat = Math.floor((y - gap) / (height + gap)) * columns + column;
    const inRow = column >= 0 && column < columns;
    const inGrid = seat >= 0 && seat < (this.moment?.count ?? 0);
    return inRow && inGrid ? seat : -1;
  }

  key(event) {
    const {columns} = this.cell;
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns}[event.key];
    if (event.key === "Escape") {
      this.choose(-1);
    }
    if (event.key === "Enter") {
      event.preventDefault(); // otherwise the key presses a button of the dialog that opens
      this.pick();
    }
    if (!step) {
      return;
    }
    event.preventDefault();
    const last = this.moment.count - 1;
    this.choose(this.chosen < 0 ? 0 : Math.max(0, Math.min(last, this.chosen + step)));
  }

  choose(seat) {
    if (seat === this.chosen) {
      return;
    }
    this.chosen = seat;
    if (this.moment) {
      this.draw();
    }
    this.read();
  }

  pick() {
    const request = this.chosen >= 0 ? this.moment?.request(this.chosen) : null;
    if (request) {
      this.onPick(request, this.moment.index(this.chosen));
    }
  }

  /** The selected seat in words. */
  read() {
    const {moment, chosen} = this;
    if (chosen < 0 || !moment) {
      return this.reading.replaceChildren(this.note);
    }
    const state = moment.states[moment.state[chosen]];
    const request = moment.request(chosen);
    if (!request) {
      return this.reading.replaceChildren(`Seat ${chosen} is ${VERB[state] ?? state}.`);
    }
    const choice = moment.index(chosen) ? ` (choice ${moment.index(chosen)})` : "";
    const end = moment.end(chosen);
    const what = state === "prefill" ? "prompt" : "output";
    const far = end ? `, ${moment.reached(chosen)} of at most ${end} ${what} tokens.` : ".";
    this.reading.replaceChildren(
      `Seat ${chosen}, ${VERB[state] ?? state}: request `,
      make("code", {}, short(request, 60)),
      choice,
      far,
    );
  }
}

export function seatTable(element, moment) {
  const rows = Array.from({length: moment.count}, (_, i) => {
    const state = moment.states[moment.state[i]];
    if (!moment.request(i)) {
      return [i, state];
    }
    return [i, state, moment.request(i), moment.index(i), moment.reached(i), moment.end(i)];
  });
  table(element, ["Seat", "State", "Request", "Choice", "Tokens", "At most"], rows);
}

export const seatLegend = [
  ["decode", `${GLYPH.decode} generating`],
  ["prefill", `${GLYPH.prefill} reading its prompt`],
  ["held", `${GLYPH.held} held until its batch is done`],
  ["free", "free"],
];

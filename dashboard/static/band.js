// The band above the seats: the main figures for an operator, each with a line of its last minutes or hours.

import {colour, count, make, mark, onWidth, pen, percent, recall, remember, resize, say, seconds, shareInWords as share} from "./dom.js";
import {limitOf} from "./history.js";
import {KEPT_S} from "./stays.js";

/** A span of time in the past, in words. */
const inWords = (reach) => (reach > KEPT_S ? `${count(reach / 3600)} hours` : "ten minutes");
/** Height of a chart in CSS pixels. */
const HIGH = 38;
const EVERY_MS = 1000;
/** Seconds over which hits of the prefix cache, refusals and the price are counted. */
const MINUTE_S = 60;
const STORE = "jitney-price";

const whole = (value) => (Number.isFinite(value) ? count(value) : "–");

/** The three percentiles of a latency as curves. */
const points = (name) => [
  [(bin) => bin[name]?.p99, "line"],
  [(bin) => bin[name]?.p95, "decode-mid"],
  [(bin) => bin[name]?.p50, "decode"],
];
const latency = (value) =>
  value
    ? [seconds(value.p50), `p95 ${seconds(value.p95)}, p99 ${seconds(value.p99)}`]
    : ["–", "no tokens lately"];
const largest = (values) => Math.max(...values);
const mean = (values) => values.reduce((all, value) => all + value, 0) / values.length;

/** The figures: name; curves as [value of a bin, colour], the main one last; pool: combines several bins into a point;
 *  words(now) returns [value, details, class]. now: see `Band.show`. */
const FIGURES = [
  {name: "First token", curves: points("ttft"), pool: largest, words: ({ttft}) => latency(ttft)},
  {name: "Between tokens", curves: points("itl"), pool: largest, words: ({itl}) => latency(itl)},
  {
    name: "Output tok/s",
    curves: [
      [(bin) => bin.rows.prefill, "prefill"],
      [(bin) => bin.rows.decode + bin.rows.accepted, "decode"],
    ],
    pool: mean,
    words: ({output, prompt}) => [whole(output), `prompt ${whole(prompt)} tok/s`],
  },
  {
    name: "Waiting",
    curves: [[(bin) => bin.waiting, "waiting"]],
    pool: largest,
    words: ({waiting, predicted}) => [
      whole(waiting),
      predicted ? `estimated wait ${seconds(predicted)}` : "no wait expected",
      waiting ? "waits" : "",
    ],
  },
  {
    name: "KV pages",
    curves: [[(bin) => bin.pages, "decode"]],
    pool: largest,
    words: ({pages, allPages, hits}) => [
      Number.isFinite(pages) && allPages ? percent(pages, allPages) : "–",
      `prefix hits ${share(hits)}`,
    ],
  },
  {
    name: "Device",
    curves: [[(bin) => bin.limit, "good"]],
    pool: mean,
    words: ({limit, busy}) => [share(limit), `of its limit, busy ${share(busy)}`],
  },
  {
    name: "Refused",
    curves: [[(bin) => bin.refused, "bad"]],
    pool: largest,
    words: ({refused}) => [whole(refused), "in the last minute", refused ? "full" : ""],
  },
  {
    name: "Price",
    curves: [[(bin) => useful(bin), "faint"]],
    pool: mean,
    words: ({price}) =>
      Number.isFinite(price) ? [price.toPrecision(3), "a million useful tokens"] : ["–", "set one in Settings"],
  },
];

const useful = (bin) => bin.rows.prefill + bin.rows.decode + bin.rows.accepted;
const hitShare = (cached, read) => (cached + read ? cached / (cached + read) : null);

/** The price of this engine for an hour, as the reader entered it; null: none. */
let price = Number(recall(STORE)) || null;
export const pricePerHour = () => price;

export function setPricePerHour(text) {
  price = Number(text) || null;
  remember(STORE, price);
}

export class Band {
  /** element: a dl. onPoint(t): the reader points at the moment t of a line; null: at none. */
  constructor(element, onPoint) {
    this.drawnAt = -Infinity;
    this.now = 0;
    this.reach = KEPT_S;
    this.tiles = FIGURES.map((figure) => this.tile(element, figure, onPoint));
  }

  tile(element, figure, onPoint) {
    const canvas = make("canvas", {role: "img"});
    const value = make("dd", {class: "value"}, "–");
    const details = make("dd", {class: "details"});
    const chart = make("dd", {class: "spark"}, canvas);
    const box = make("div", {class: "figure"}, make("dt", {}, figure.name), value, details, chart);
    element.append(box);
    const tile = {figure, box, value, details, canvas, width: 0};
    onWidth(chart, (width) => {
      tile.width = width;
      this.drawnAt = -Infinity;
    });
    canvas.addEventListener("pointermove", ({offsetX}) =>
      onPoint(this.now - this.reach * (1 - offsetX / tile.width)),
    );
    canvas.addEventListener("pointerleave", () => onPoint(null));
    return tile;
  }

  restyle() {
    this.drawnAt = -Infinity;
  }

  /** now: {ttft, itl (percentiles or null), output, prompt (tok/s), waiting, predicted (seconds), pages, allPages,
   *  hits, limit, busy (shares), refused, price}. t: the moment of these figures; newest: the newest recorded second;
   *  reach: seconds that the lines go back. */
  show(now, history, {t, newest, reach}) {
    const drawn = performance.now() - this.drawnAt < EVERY_MS && this.marked === t && this.reach === reach;
    this.now = newest;
    this.reach = reach;
    const bins = drawn ? [] : history.series(newest, reach);
    for (const tile of this.tiles) {
      const [value, details, kind = ""] = tile.figure.words(now);
      say(tile.value, value);
      say(tile.details, details);
      mark(tile.box, "class", `figure ${kind}`.trim());
      if (!drawn && tile.width) {
        this.draw(tile, bins, t);
        mark(tile.canvas, "aria-label", `${tile.figure.name}, ${inWords(reach)}: ${value}, ${details}`);
      }
    }
    if (!drawn) {
      this.drawnAt = performance.now();
      this.marked = t;
    }
  }

  draw({figure, canvas, width}, bins, t) {
    const lines = figure.curves.map(([value]) => pooled(bins, value, figure.pool, width >> 1));
    const most = Math.max(1e-9, ...lines.flat().filter(Number.isFinite));
    resize(canvas, width, HIGH);
    const context = pen(canvas);
    context.clearRect(0, 0, width, HIGH);
    lines.forEach((line, i) => {
      const isMain = i === lines.length - 1;
      stroke(context, line, {width, most, ink: colour(figure.curves[i][1]), isMain});
    });
    if (t < this.now) {
      context.fillStyle = colour("ink");
      context.fillRect(Math.round(width * (1 - (this.now - t) / this.reach)), 0, 1, HIGH);
    }
  }
}

/** The bins combined into at most `most` points; null where nothing is recorded. */
function pooled(bins, value, pool, most) {
  const each = Math.ceil(bins.length / Math.max(1, most));
  const line = [];
  for (let i = 0; i < bins.length; i += each) {
    const values = bins.slice(i, i + each).map((bin) => (bin ? value(bin) : null));
    const numbers = values.filter(Number.isFinite);
    line.push(numbers.length ? pool(numbers) : null);
  }
  return line;
}

function stroke(context, line, {width, most, ink, isMain}) {
  const x = (i) => (i / Math.max(1, line.length - 1)) * width;
  const y = (value) => HIGH - 1 - (HIGH - 3) * (value / most);
  context.beginPath();
  let pausing = true;
  line.forEach((value, i) => {
    if (value === null) {
      pausing = true;
      return;
    }
    pausing ? context.moveTo(x(i) - 1, y(value)) : null;
    context.lineTo(x(i), y(value));
    pausing = false;
  });
  context.strokeStyle = ink;
  context.lineWidth = isMain ? 1.6 : 1;
  context.stroke();
}

/** The live figures, from the feed's metrics. */
export function figuresNow({metrics, history, t, allPages}) {
  const cached = history.total((bin) => bin.cached_tokens, t, MINUTE_S);
  const read = history.total((bin) => bin.rows.prefill, t, MINUTE_S);
  const rate = history.total(useful, t, MINUTE_S) / MINUTE_S;
  return {
    ...metrics.latency,
    output: history.rate("decode"),
    prompt: history.rate("prefill"),
    waiting: metrics.waiting,
    predicted: metrics.predicted_wait_s,
    pages: metrics.pages_used,
    allPages,
    hits: hitShare(cached, read),
    limit: limitOf(metrics.device),
    busy: metrics.device?.busy ?? null,
    refused: history.total((bin) => bin.refused, t, MINUTE_S),
    price: price && rate ? ((price / 3600) * 1e6) / rate : null,
  };
}

/** The figures of a past moment, from its bin. */
export function figuresThen({history, t, allPages}) {
  const bin = history.at(t);
  return {
    ttft: bin?.ttft,
    itl: bin?.itl,
    output: history.rate("decode", t),
    prompt: history.rate("prefill", t),
    waiting: bin?.waiting,
    predicted: null,
    pages: bin?.pages,
    allPages,
    hits: bin ? hitShare(bin.cached_tokens, bin.rows.prefill) : null,
    limit: bin?.limit,
    busy: null,
    refused: history.total((one) => one.refused, t, MINUTE_S),
    price: null,
  };
}

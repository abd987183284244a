// The lab's results: figures beside the measured ones, and the seat timelines below one another on one time scale.

import {heading, make, seconds, shareInWords as share, twin} from "./dom.js";
import {Stays} from "./stays.js";
import {Timeline} from "./timeline.js";

/** Approximate height of one picture in CSS pixels. */
const HIGH = 150;

const rate = (value) => (Number.isFinite(value) ? value.toFixed(value < 10 ? 2 : 0) : "–");
/** [name, figure, text, whether more is better]. */
const FIGURES = [
  ["Output tok/s", (f) => f.output_tok_s, rate, true],
  ["Requests/s", (f) => f.req_s, rate, true],
  ["First token, p50", (f) => f.ttft_s?.p50, seconds, false],
  ["First token, p99", (f) => f.ttft_s?.p99, seconds, false],
  ["Between tokens, p50", (f) => f.itl_s?.p50, seconds, false],
  ["Between tokens, p99", (f) => f.itl_s?.p99, seconds, false],
  ["End to end, p99", (f) => f.e2e_s?.p99, seconds, false],
  ["Wait for a seat, p99", (f) => f.queue_s?.p99, seconds, false],
  ["Seats filled", (f) => f.seat_fill, share, true],
  ["Padding", (f) => f.padding_share, share, false],
  ["Cost per million tokens", (f) => f.cost_per_million_tokens, rate, false],
];

export function showFigures(element, result, names) {
  const {measured} = result;
  const headings = names.map((name) => `${name}, predicted`);
  if (measured) {
    headings.push(`${measured.policy}, measured`);
  }
  element.createTHead().append(heading(["", ...headings]));
  const body = element.createTBody();
  for (const figure of FIGURES) {
    const read = figure[1];
    const values = names.map((policy) => read(result.policies[policy].figures));
    const seen = measured ? [read(measured.figures ?? {})] : [];
    if ([...values, ...seen].some(Number.isFinite)) {
      body.append(figureRow(figure, values, seen));
    }
  }
}

/** values: predictions, of which the best is marked; seen: measured values. */
function figureRow([name, , text, more], values, seen) {
  const numbers = values.filter(Number.isFinite);
  const best = text(more ? Math.max(...numbers) : Math.min(...numbers));
  const differ = new Set(values.map(text)).size > 1; // equal texts count as equal
  const cells = values.map((value) => {
    const mark = differ && text(value) === best ? {class: "best"} : {};
    return make("td", mark, text(value));
  });
  const measured = seen.map((value) => make("td", {}, text(value)));
  return make("tr", {}, make("th", {scope: "row"}, name), ...cells, ...measured);
}

/** A timeline for each policy, all as long as the longest. */
export function showTimelines(element, result, names) {
  const {measured} = result;
  const runs = names.map((name) => [`${name}, predicted`, result.policies[name]]);
  if (measured?.stays?.seat.length) {
    runs.push([`${measured.policy}, measured`, measured]);
  }
  const ends = runs.map(([, run]) => run.stays.to.reduce((end, t) => Math.max(end, t ?? 0), 0));
  const span = Math.max(1, ...ends);
  const seats = Math.max(1, ...runs.map(([, run]) => run.seats));
  return runs.map(([name, run], i) =>
    picture(element, name, run.stays, {end: ends[i], seats, now: span}),
  );
}

/** One timeline with its table twin; end: seconds until its last sequence ended. */
function picture(element, name, columns, {end, seats, now}) {
  const done = `done after ${seconds(end)}`;
  const rows = make("table");
  const box = twin("stays", "Newest stays as a table", rows);
  const canvas = make("canvas", {role: "img", "aria-label": `Seat timeline, ${name}: ${done}`});
  const reading = make("p", {class: "reading"}, "Blank is an idle seat.");
  element.append(
    make(
      "figure",
      {},
      make("figcaption", {}, `${name}: ${done}`),
      make("div", {class: "stage"}, canvas),
      reading,
      box,
    ),
  );
  const timeline = new Timeline({
    canvas,
    reading,
    stays: staysOf(columns, end),
    view: null,
    high: HIGH,
    describe: (t) => `${+t.toFixed(1)} s`,
  });
  box.addEventListener("toggle", () => timeline.fillTable(rows));
  return Object.assign(timeline, {seats, now});
}

/** end: time at which sequences still on board are cut off. */
function staysOf(columns, end) {
  const to = columns.to.map((t) => t ?? end);
  const none = new Array(to.length).fill(0);
  const stays = new Stays(Math.max(1, to.length));
  stays.load({
    kept_from: 0,
    stays: {index: none, n_prompt: none, n_output: none, end: [], ...columns, to},
  });
  return stays;
}

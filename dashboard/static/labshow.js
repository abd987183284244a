// What the lab found: figures beside those measured, and the seat timelines under one another on one scale of time.

import {heading, make, percent, seconds} from "./dom.js";
import {Rides} from "./rides.js";
import {Timeline} from "./timeline.js";

/** CSS pixels of one picture, more or less. */
const HIGH = 150;

const rate = (value) => value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 2 : 0);
const share = (value) => value === null || value === undefined ? "–" : percent(value, 1);
/** [name, figure, text, whether more is better]. */
const FIGURES = [
  ["Output tok/s", (f) => f.output_tok_s, rate, true], ["Requests/s", (f) => f.req_s, rate, true],
  ["First token, p50", (f) => f.ttft_s?.p50, seconds, false],
  ["First token, p99", (f) => f.ttft_s?.p99, seconds, false],
  ["Between tokens, p50", (f) => f.itl_s?.p50, seconds, false],
  ["Between tokens, p99", (f) => f.itl_s?.p99, seconds, false],
  ["End to end, p99", (f) => f.e2e_s?.p99, seconds, false],
  ["Wait for a seat, p99", (f) => f.queue_s?.p99, seconds, false],
  ["Seats filled", (f) => f.seat_fill, share, true], ["Padding", (f) => f.padding_share, share, false],
  ["Cost per million tokens", (f) => f.cost_per_million_tokens, rate, false],
];

export function showFigures(element, result, names) {
  const {measured} = result, told = (value) => value !== null && value !== undefined;
  element.createTHead().append(heading(["", ...names.map((name) => `${name}, predicted`),
                                        ...(measured ? [`${measured.policy}, measured`] : [])]));
  const body = element.createTBody();
  for (const [name, read, text, more] of FIGURES) {
    const values = names.map((policy) => read(result.policies[policy].figures));
    const seen = measured ? [read(measured.figures ?? {})] : [];
    if (![...values, ...seen].some(told)) continue;
    const best = more ? Math.max(...values.filter(told)) : Math.min(...values.filter(told));
    const known = new Set(values.map(text));  // what looks the same is the same
    const mark = (value) => text(value) === text(best) && known.size > 1 ? {class: "best"} : {};
    const cells = values.map((value) => make("td", mark(value), text(value)));
    body.append(make("tr", {}, make("th", {scope: "row"}, name), ...cells,
                     ...seen.map((value) => make("td", {}, text(value)))));
  }
}

/** A timeline a policy, all as long as the longest. */
export function showTimelines(element, result, names) {
  const {measured} = result, runs = names.map((name) => [`${name}, predicted`, result.policies[name]]);
  if (measured?.rides?.seat.length) runs.push([`${measured.policy}, measured`, measured]);
  const ends = runs.map(([, run]) => run.rides.to.reduce((end, t) => Math.max(end, t ?? 0), 0));
  const span = Math.max(1, ...ends), seats = Math.max(1, ...runs.map(([, run]) => run.seats));
  return runs.map(([name, run], i) => picture(element, name, run.rides, {end: ends[i], seats, now: span}));
}

/** One timeline with its table twin; end: seconds until its last sequence was done. */
function picture(element, name, columns, {end, seats, now}) {
  const done = `done after ${seconds(end)}`, rows = make("table"), twin = make(
    "details", {}, make("summary", {}, "Newest rides as a table"), make("div", {class: "scroll"}, rows));
  const canvas = make("canvas", {role: "img", "aria-label": `Seat timeline, ${name}: ${done}`});
  const reading = make("p", {class: "reading"}, "Blank is an idle seat.");
  element.append(make("figure", {}, make("figcaption", {}, `${name}: ${done}`), make("div", {class: "stage"}, canvas),
                      reading, twin));
  const timeline = new Timeline({canvas, reading, rides: ridesOf(columns, end), view: null, high: HIGH,
                                 describe: (t) => `${+t.toFixed(1)} s`});
  twin.addEventListener("toggle", () => timeline.fillTable(rows));
  return Object.assign(timeline, {seats, now});
}

/** end: when those that are still on board are cut off. */
function ridesOf(columns, end) {
  const to = columns.to.map((t) => t ?? end), none = new Array(to.length).fill(0);
  const rides = new Rides(Math.max(1, to.length));
  rides.seed({kept_from: 0, rides: {index: none, n_in: none, n_out: none, end: [], ...columns, to}});
  return rides;
}

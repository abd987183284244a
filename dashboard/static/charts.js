// The Plotly charts. Each is drawn once a second at most, one an animation frame, and only where it can be seen. Plotly
// is large, so it comes after the seats.

import {$, colour, isDark, table, watchVisible} from "./dom.js";

const ENDS = [["stop", "finished: end"], ["length", "finished: length"], ["deadline", "deadline"],
              ["abort", "client left"], ["error", "error"]];
/** Lines of what is only known where somebody boarded or spoke. */
const CONNECTED = new Set(["wait for a seat", "first token", "between tokens"]);
const CONFIG = {displayModeBar: false, responsive: true};
const EVERY_MS = 1000;
/** Milliseconds between two drawings of any charts: under 5 % of the frames hold one, however many can be seen. */
const APART_MS = 350;
/** Points of a line, however long the span. */
const MOST_POINTS = 600;

let loading = null;

/** Plotly, once; the promise is shared. */
function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "assets/plotly.min.js";
    script.onload = () => resolve(globalThis.Plotly);
    script.onerror = () => reject(new Error("plotly.min.js did not load"));
    document.head.append(script);
  });
  return loading;
}

/** What a chart draws, by the id of its element: (moment) -> [traces, unit, more layout]. */
const CHARTS = {
  "chart-rate": ({x, series}) => [[
    line(x, series((bin) => bin.rows.decode), "generated", "decode"),
    line(x, series((bin) => bin.rows.prefill), "prompt", "prefill", "dot")], "tok/s"],
  "chart-queue": ({x, series, seats}) => [[
    line(x, series((bin) => bin.busy), "seats taken", "decode"),
    line(x, series((bin) => bin.waiting), "waiting", "waiting", "dot"),
    line(x, x.map(() => seats), "all seats", "faint", "dash")], "sequences"],
  "chart-latency": ({x, series}) => [[
    line(x, series((bin) => bin.wait), "wait for a seat", "waiting", "dot"),
    line(x, series((bin) => bin.ttft), "first token", "prefill"),
    line(x, series((bin) => bin.itl), "between tokens", "decode", "dash")], "s, p95", {yaxis: {type: "log"}}],
  "chart-step": ({x, series}) => {
    const ms = (value) => series((bin) => bin.steps ? 1000 * value(bin) : null);
    return [[line(x, ms((bin) => bin.step_s / bin.steps), "mean", "decode"),
             line(x, ms((bin) => bin.worst), "longest", "waiting", "dot"),
             line(x, ms((bin) => bin.gap_s / bin.steps), "host gap", "prefill", "dash"),
             {...line(x, series((bin) => bin.compiled ? 1000 * bin.worst : null), "compiled", "bad"), mode: "markers",
              marker: {symbol: "diamond", size: 10, color: colour("bad")}}], "ms"];
  },
  // Areas, not bars: six paths instead of 360 make it three times as fast to draw.
  "chart-ledger": ({x, series, rowKinds}) => [rowKinds.map((kind) => ({
    x, y: series((bin) => bin.rows[kind.name]), name: kind.label, mode: "none", stackgroup: "rows",
    line: {shape: "hv"}, fillcolor: isDark() ? kind.dark : kind.light, hovertemplate: "%{y}",
    fillpattern: {shape: kind.pattern, fillmode: "overlay", solidity: 0.3, fgcolor: colour("panel")}})), "rows/s"],
  "chart-ttft": ({hist}) => distribution(hist, [["wait", "wait for a seat", "waiting"],
                                                      ["ttft", "first token", "prefill"]]),
  "chart-itl": ({hist}) => distribution(hist, [["itl", "between tokens", "decode"]]),
  "chart-ends": ({s}) => {
    const ends = ENDS.filter(([reason]) => reason === "stop" || reason === "length" || s.finished?.[reason]);
    const refused = Object.entries(s.rejected ?? {}).filter(([, number]) => number);
    const names = [...ends.map(([, name]) => name), ...refused.map(([code]) => `refused: ${plain(code)}`)];
    const values = [...ends.map(([reason]) => s.finished?.[reason] ?? 0), ...refused.map(([, number]) => number)];
    const inks = [...ends.map(([reason]) => colour(reason === "stop" || reason === "length" ? "decode" : "waiting")),
                  ...refused.map(() => colour("bad"))];
    return [[{type: "bar", orientation: "h", x: values, y: names, text: values.map(String), textposition: "auto",
              marker: {color: inks}, hoverinfo: "none"}], "", {
      showlegend: false, margin: {l: 130, r: 16, t: 8, b: 30},
      xaxis: {gridcolor: colour("grid"), fixedrange: true, rangemode: "tozero",
              title: {text: "sequences since the start"}},
      yaxis: {autorange: "reversed", fixedrange: true}}];
  },
};

export class Charts {
  constructor() {
    this.drawnAt = {};
    this.lastAt = -Infinity;
    this.visible = watchVisible(Object.keys(CHARTS).map($));
    this.ready = null;
    addEventListener("resize", () => { this.drawnAt = {}; });
  }

  /** Call in each animation frame; draws at most one chart. moment(): {history, t, span, seats, rowKinds, s, hist}. */
  frame(moment, still) {
    if (still) return;
    const now = performance.now(), age = (id) => now - (this.drawnAt[id] ?? -Infinity);
    const resting = now - this.lastAt < APART_MS;
    const due = Object.keys(CHARTS).filter((id) => age(id) >= (resting ? Infinity : EVERY_MS) && this.visible($(id)));
    // The one that waited longest: where frames are slow, the first in the list must not take all turns.
    if (due.length) this.draw(due.reduce((a, b) => age(b) > age(a) ? b : a), moment(), now);
  }

  /** Draw all of them again as soon as they can be seen. */
  refresh() { this.drawnAt = {}; }

  draw(id, moment, now) {
    this.drawnAt[id] = this.lastAt = now;
    if (!this.ready) {
      this.ready = plotly().then((Plotly) => { this.Plotly = Plotly; this.refresh(); });
      return;
    }
    if (!this.Plotly) return;
    const [traces, unit, extra] = CHARTS[id](prepared(moment));
    this.Plotly.react($(id), traces, layout(unit, extra, moment.span), CONFIG);
  }
}

/** x: seconds before the moment; series(value): one number a bin, or null where nothing is known. */
function prepared(moment) {
  const seconds = moment.history.seconds(moment.t, Math.min(MOST_POINTS, moment.span));
  const series = (value) => seconds.map(([, bin]) => bin ? value(bin) : null);
  return {...moment, x: seconds.map(([ago]) => ago), series};
}

function line(x, y, name, ink, dash = "solid") {
  return {x, y, name, mode: "lines", connectgaps: CONNECTED.has(name), line: {color: colour(ink), width: 2, dash}};
}

/** Counts by bucket; bounds are upper ends in seconds. */
function distribution(hist, kinds) {
  const traces = kinds.filter(([kind]) => hist?.[kind]).map(([kind, name, ink]) => ({
    type: "bar", name, y: hist[kind].counts, marker: {color: colour(ink)},
    x: [...hist[kind].bounds.map((bound) => `≤ ${short(bound)}`), `> ${short(hist[kind].bounds.at(-1))}`]}));
  return [traces, "in the last minute", {
    bargap: 0.1, xaxis: {type: "category", fixedrange: true, tickangle: -45, nticks: 12},
    margin: {l: 52, r: 10, t: 8, b: 50}, legend: {orientation: "h", y: 1.15}}];
}

const short = (seconds) => seconds < 1 ? `${+(seconds * 1000).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`;
/** Plotly reads tags in texts; what comes from the engine must not hold any. */
const plain = (text) => text.replace(/[<>&]/g, "·");

function layout(unit, extra = {}, span) {
  const grid = {gridcolor: colour("grid"), zerolinecolor: colour("grid"), fixedrange: true, automargin: true};
  return {
    height: 230, margin: {l: 52, r: 10, t: 8, b: 30}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: colour("faint"), size: 12, family: "system-ui, sans-serif"}, hovermode: "x unified",
    hoverlabel: {bgcolor: colour("panel")}, showlegend: true,
    legend: {orientation: "h", y: -0.16, yanchor: "top", traceorder: "normal"}, ...extra,
    xaxis: {...grid, range: [-span + 0.5, 0.5], ticksuffix: " s", nticks: 6, showgrid: false, ...extra?.xaxis,
            ...(extra?.xaxis ? {range: undefined, ticksuffix: ""} : {})},
    yaxis: {...grid, rangemode: "tozero", title: {text: unit, standoff: 6}, ...extra?.yaxis},
  };
}

/** The charts' numbers as a table: the newest sixty seconds before t. */
export function chartTable(element, {history, t}) {
  const ms = (value, bin) => bin.steps ? (1000 * value / bin.steps).toFixed(1) : "";
  const rows = history.seconds(t, 60).reverse().map(([ago, bin]) => !bin ? [`${-ago} s ago`] : [
    `${-ago} s ago`, bin.rows.decode, bin.rows.prefill, bin.busy, bin.waiting, bin.wait?.toFixed(3),
    bin.ttft?.toFixed(3), bin.itl?.toFixed(4), bin.steps, ms(bin.step_s, bin), (1000 * bin.worst).toFixed(1),
    ms(bin.gap_s, bin), bin.rows.padding, bin.rows.recomputed, bin.rows.past_end, bin.rows.cancelled, bin.compiled]);
  table(element, ["Second", "Generated", "Prompt", "Seats taken", "Waiting", "Wait p95, s", "First token p95, s",
                  "Between tokens p95, s", "Steps", "Step, ms", "Longest, ms", "Host gap, ms", "Padding", "Recomputed",
                  "Past the end", "Cancelled", "Compiles"], rows);
}

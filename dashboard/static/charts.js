// The Plotly charts. Each is drawn at most once a second, one per animation frame, and only while visible. Plotly is
// large, so it is loaded when the first chart becomes visible.

import {$, colour, isDark, table, watchVisible} from "./dom.js";
import {depthInWords} from "./memory.js";

const ENDS = [
  ["stop", "finished: end"],
  ["length", "finished: length"],
  ["deadline", "deadline"],
  ["abort", "client left"],
  ["error", "error"],
];
/** Finish reasons of served requests; shown even where their count is 0. */
const SERVED = ["stop", "length"];
/** Lines that are drawn across bins without a value. */
const CONNECTED = new Set(["wait for a seat", "first token", "between tokens"]);
const CONFIG = {displayModeBar: false, responsive: true};
const EVERY_MS = 1000;
/** Milliseconds between drawings of any two charts: under 5 % of the frames draw one, however many are visible. */
const APART_MS = 350;
/** Points of a line, however long the span. */
const MOST_POINTS = 600;

let loading = null;

/** Load Plotly once; all callers share the promise. */
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

/** Lines of the charts over time: [name, value of a bin, colour, dash]. */
const RATE = [
  ["generated", (bin) => bin.rows.decode + bin.rows.accepted, "decode"],
  ["prompt", (bin) => bin.rows.prefill, "prefill", "dot"],
];
const LATENCY = [
  ["wait for a seat", (bin) => bin.wait?.p95 ?? null, "waiting", "dot"],
  ["first token", (bin) => bin.ttft?.p95 ?? null, "prefill"],
  ["between tokens", (bin) => bin.itl?.p95 ?? null, "decode", "dash"],
];
const SEATED = [
  ["seats taken", (bin) => bin.busy, "decode"],
  ["waiting", (bin) => bin.waiting, "waiting", "dot"],
];
const PAGES = [["held", (bin) => bin.pages, "decode"]];
const HITS = [
  ["computed", (bin) => bin.rows.prefill, "prefill"],
  ["found in the cache", (bin) => bin.cached_tokens, "good", "dash"],
];
const LIMIT = [
  ["memory bandwidth", (bin) => share(bin.device?.bandwidth), "decode"],
  ["arithmetic", (bin) => share(bin.device?.operations), "prefill", "dot"],
  ["what limits a step", (bin) => share(bin.limit), "good", "dash"],
];
const share = (part) => (Number.isFinite(part) ? 100 * part : null);
const STEP_MS = [
  ["mean", (bin) => (1000 * bin.step_s) / bin.steps, "decode"],
  ["longest", (bin) => 1000 * bin.longest, "waiting", "dot"],
  ["host gap", (bin) => (1000 * bin.gap_s) / bin.steps, "prefill", "dash"],
];

/** The content of each chart, by its element's id: (moment) -> [traces, unit, more layout]. */
const CHARTS = {
  "chart-rate": (moment) => [lines(moment, RATE), "tok/s"],
  "chart-queue": (moment) => [
    [
      ...lines(moment, SEATED),
      line(
        moment.x,
        moment.x.map(() => moment.seats),
        "all seats",
        "faint",
        "dash",
      ),
    ],
    "sequences",
  ],
  "chart-latency": (moment) => [lines(moment, LATENCY), "s, p95", {yaxis: {type: "log"}}],
  "chart-step": (moment) => [
    [...lines(moment, STEP_MS, (bin) => bin.steps), compiles(moment)],
    "ms",
  ],
  "chart-pages": (moment) => [lines(moment, [...PAGES, ...moment.windows.map(windowLine)]), "pages"],
  "chart-tenant-pages": ({memory}) => [tenantAreas(memory), "pages", {xaxis: agoAxis(memory)}],
  "chart-depths": ({memory}) => depthBars(memory),
  "chart-limit": (moment) => [lines(moment, LIMIT), "%"],
  "chart-hits": (moment) => [lines(moment, HITS), "tok/s"],
  "chart-ledger": (moment) => [moment.rowKinds.map((kind) => area(moment, kind)), "rows/s"],
  "chart-ttft": ({histograms}) =>
    distribution(histograms, [
      ["wait", "wait for a seat", "waiting"],
      ["ttft", "first token", "prefill"],
    ]),
  "chart-itl": ({histograms}) => distribution(histograms, [["itl", "between tokens", "decode"]]),
  "chart-ends": ({metrics}) => [[endBars(metrics)], "", endLayout()],
};

export class Charts {
  constructor() {
    this.drawnAt = {};
    this.lastAt = -Infinity;
    this.visible = watchVisible(Object.keys(CHARTS).map($));
    this.ready = null;
    addEventListener("resize", () => {
      this.drawnAt = {};
    });
  }

  /** Call in each animation frame; draws at most one chart. moment(): {history, t, span, seats, rowKinds, metrics, histograms}. */
  frame(moment, still) {
    if (still) {
      return;
    }
    const now = performance.now();
    const age = (id) => now - (this.drawnAt[id] ?? -Infinity);
    const resting = now - this.lastAt < APART_MS;
    const least = resting ? Infinity : EVERY_MS;
    const due = Object.keys(CHARTS).filter((id) => age(id) >= least && this.visible($(id)));
    if (!due.length) {
      return;
    }
    // The chart that waited longest: with slow frames, the first one in the list must not take all turns.
    const oldest = due.reduce((a, b) => (age(b) > age(a) ? b : a));
    this.draw(oldest, moment(), now);
  }

  /** Draw all charts again as soon as they are visible. */
  refresh() {
    this.drawnAt = {};
  }

  /** Load Plotly once. */
  load() {
    this.ready ??= plotly().then(
      (Plotly) => {
        this.Plotly = Plotly;
        this.refresh();
      },
      () => Object.keys(CHARTS).forEach((id) => $(id).classList.add("failed")),
    );
  }

  draw(id, moment, now) {
    this.drawnAt[id] = now;
    this.lastAt = now;
    this.load();
    if (!this.Plotly) {
      return;
    }
    const [traces, unit, extra] = CHARTS[id](prepared(moment));
    this.Plotly.react($(id), traces, layout(unit, extra, moment.span), CONFIG);
  }
}

/** x: seconds before the moment; series(value): one number per bin, or null where nothing is recorded. */
function prepared(moment) {
  const seconds = moment.history.seconds(moment.t, Math.min(MOST_POINTS, moment.span));
  const series = (value) => seconds.map(([, bin]) => (bin ? value(bin) : null));
  return {...moment, x: seconds.map(([ago]) => ago), series};
}

/** hasValue(bin): false where the value is undefined. */
function lines({x, series}, table, hasValue = () => true) {
  return table.map(([name, value, ink, dash]) => {
    const y = series((bin) => (hasValue(bin) ? value(bin) : null));
    return line(x, y, name, ink, dash);
  });
}

function line(x, y, name, ink, dash = "solid") {
  return {
    x,
    y,
    name,
    mode: "lines",
    connectgaps: CONNECTED.has(name),
    line: {color: colour(ink), width: 2, dash},
  };
}

/** A mark at each second in which a program was compiled. */
function compiles({x, series}) {
  const y = series((bin) => (bin.compiled ? 1000 * bin.longest : null));
  const marker = {symbol: "diamond", size: 10, color: colour("bad")};
  return {...line(x, y, "compiled", "bad"), mode: "markers", marker};
}

/** Rows of one kind, stacked. Areas, not bars: six paths instead of 360 make it three times as fast to draw. */
function area({x, series}, kind) {
  return {
    x,
    y: series((bin) => bin.rows[kind.name]),
    name: kind.label,
    mode: "none",
    stackgroup: "rows",
    line: {shape: "hv"},
    fillcolor: isDark() ? kind.dark : kind.light,
    hovertemplate: "%{y}",
    fillpattern: {
      shape: kind.pattern,
      fillmode: "overlay",
      solidity: 0.3,
      fgcolor: colour("panel"),
    },
  };
}

/** Pages held by layers with a window; recorded only since the page was opened. */
function windowLine(window, i) {
  const heldPages = ({windows}) => (windows?.[window] ? windows[window].held + windows[window].shared : null);
  return [`held, window ${window}`, heldPages, `hue-${(i + 1) % 8}`, "dash"];
}

/** Pages of each tenant, stacked. memory: the answer of dashboard/memory.py; null: not loaded yet. */
function tenantAreas(memory) {
  return (memory?.tenants ?? []).map(({name, pages}, i) => ({
    x: pages.map((_, j) => ((memory.t - memory.from) * (j / (pages.length - 1) - 1))),
    y: pages,
    name: plain(name),
    mode: "none",
    stackgroup: "pages",
    fillcolor: colour(`hue-${i % 8}`),
    fillpattern: {shape: PATTERNS[i % PATTERNS.length], fillmode: "overlay", solidity: 0.2, fgcolor: colour("panel")},
    hovertemplate: "%{y}",
  }));
}

/** Signs beside colour. */
const PATTERNS = ["", "/", ".", "\\", "x", "-", "|", "+"];
const agoAxis = (memory) => ({range: [memory ? memory.from - memory.t : -600, 0], ticksuffix: " s", nticks: 6});

/** Prompt tokens by their depth in the prompt. */
function depthBars(memory) {
  const rows = memory?.depths ?? [];
  const x = rows.map((row, i) => depthInWords(row, rows[i + 1]));
  const kinds = [
    ["found in the cache", ({found}) => found, "good"],
    ["computed", ({tokens, found}) => tokens - found, "prefill"],
  ];
  const traces = kinds.map(([name, value, ink]) => ({type: "bar", name, x, y: rows.map(value), marker: {color: colour(ink)}}));
  return [traces, "prompt tokens", {barmode: "stack", xaxis: {type: "category", fixedrange: true}, legend: {orientation: "h", y: 1.15}}];
}

/** Counts by bucket; bounds are upper ends in seconds. */
function distribution(histograms, kinds) {
  const present = kinds.filter(([kind]) => histograms?.[kind]);
  const traces = present.map(([kind, name, ink]) => {
    const {bounds, counts} = histograms[kind];
    const x = bounds.map((bound) => `≤ ${short(bound)}`);
    x.push(`> ${short(bounds.at(-1))}`);
    return {type: "bar", name, x, y: counts, marker: {color: colour(ink)}};
  });
  const extra = {
    bargap: 0.1,
    xaxis: {type: "category", fixedrange: true, tickangle: -45, nticks: 12},
    margin: {l: 52, r: 10, t: 8, b: 50},
    legend: {orientation: "h", y: 1.15},
  };
  return [traces, "in the last minute", extra];
}

/** A bar for each finish reason, and for each reason for refusals. */
function endBars({finished, rejected}) {
  const bars = [];
  for (const [reason, name] of ENDS) {
    const good = SERVED.includes(reason);
    if (good || finished[reason]) {
      bars.push({name, count: finished[reason] ?? 0, ink: good ? "decode" : "waiting"});
    }
  }
  const refusals = Object.entries(rejected).filter(([, count]) => count);
  for (const [code, count] of refusals) {
    bars.push({name: `refused: ${plain(code)}`, count, ink: "bad"});
  }
  return {
    type: "bar",
    orientation: "h",
    x: bars.map((bar) => bar.count),
    y: bars.map((bar) => bar.name),
    text: bars.map((bar) => String(bar.count)),
    textposition: "auto",
    marker: {color: bars.map((bar) => colour(bar.ink))},
    hoverinfo: "none",
  };
}

function endLayout() {
  return {
    showlegend: false,
    margin: {l: 130, r: 16, t: 8, b: 30},
    xaxis: {
      gridcolor: colour("grid"),
      fixedrange: true,
      rangemode: "tozero",
      title: {text: "sequences since the start"},
    },
    yaxis: {autorange: "reversed", fixedrange: true},
  };
}

const short = (seconds) =>
  seconds < 1 ? `${+(seconds * 1000).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`;
/** Plotly interprets tags in texts, so remove them from the engine's texts. */
const plain = (text) => text.replace(/[<>&]/g, "·");

function layout(unit, extra, span) {
  const grid = {
    gridcolor: colour("grid"),
    zerolinecolor: colour("grid"),
    fixedrange: true,
    automargin: true,
  };
  const time = {range: [-span + 0.5, 0.5], ticksuffix: " s", nticks: 6};
  return {
    height: 230,
    margin: {l: 52, r: 10, t: 8, b: 30},
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: colour("faint"), size: 12, family: "system-ui, sans-serif"},
    hovermode: "x unified",
    hoverlabel: {bgcolor: colour("panel")},
    showlegend: true,
    legend: {orientation: "h", y: -0.16, yanchor: "top", traceorder: "normal"},
    ...extra,
    xaxis: {...grid, showgrid: false, ...(extra?.xaxis ?? time)},
    yaxis: {...grid, rangemode: "tozero", title: {text: unit, standoff: 6}, ...extra?.yaxis},
  };
}

/** Milliseconds of a mean over the bin's steps, as text. */
function meanMs(seconds, bin) {
  return bin.steps ? ((1000 * seconds) / bin.steps).toFixed(1) : "";
}

/** Columns of the table twin before those of the row kinds: [heading, text of a bin]. */
const COLUMNS = [
  ["Generated", (bin) => bin.rows.decode + bin.rows.accepted],
  ["Prompt", (bin) => bin.rows.prefill],
  ["Seats taken", (bin) => bin.busy],
  ["Waiting", (bin) => bin.waiting],
  ["Wait p95, s", (bin) => bin.wait?.p95.toFixed(3)],
  ["First token p95, s", (bin) => bin.ttft?.p95.toFixed(3)],
  ["Between tokens p95, s", (bin) => bin.itl?.p95.toFixed(4)],
  ["Steps", (bin) => bin.steps],
  ["Step, ms", (bin) => meanMs(bin.step_s, bin)],
  ["Longest, ms", (bin) => (1000 * bin.longest).toFixed(1)],
  ["Host gap, ms", (bin) => meanMs(bin.gap_s, bin)],
];

/** The charts' numbers as a table: the newest sixty seconds before t. */
export function chartTable(element, {history, t, rowKinds}) {
  const waste = rowKinds.filter((kind) => !kind.useful);
  const columns = [
    ...COLUMNS,
    ...waste.map((kind) => [capitalised(kind.label), (bin) => bin.rows[kind.name]]),
    ["Compiles", (bin) => bin.compiled],
  ];
  const rows = history.seconds(t, 60).reverse();
  const cells = rows.map(([ago, bin]) => {
    const values = bin ? columns.map(([, text]) => text(bin)) : [];
    return [`${-ago} s ago`, ...values];
  });
  table(element, ["Second", ...columns.map(([heading]) => heading)], cells);
}

const capitalised = (text) => text[0].toUpperCase() + text.slice(1);

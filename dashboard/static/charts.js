// Four Plotly charts of the last minute, redrawn once a second at most. Plotly is large, so it comes after the seats.

import {$, colour} from "./dom.js";
import {WINDOW} from "./history.js";

const LEDGER = [["prefill", "prompt", ""], ["decode", "generated", ""], ["padding", "padding", "/"],
                ["recomputed", "recomputed", "x"], ["past_end", "past the end", "."], ["cancelled", "cancelled", "\\"]];
const CONFIG = {displayModeBar: false, responsive: true};

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

export async function drawCharts(history, t, seats) {
  const Plotly = await plotly(), seconds = history.seconds(t), x = seconds.map(([ago]) => ago + 1);
  const series = (value) => seconds.map(([, bin]) => bin ? value(bin) : null);
  const draw = (id, traces, unit, extra) => Plotly.react($(id), traces, layout(unit, extra), CONFIG);
  draw("chart-rate", [line(x, series((bin) => bin.rows.decode), "generated", "decode"),
                      line(x, series((bin) => bin.rows.prefill), "prompt", "prefill", "dot")], "tok/s");
  draw("chart-queue", [line(x, series((bin) => bin.busy), "seats taken", "decode"),
                       line(x, series((bin) => bin.waiting), "waiting", "waiting", "dot"),
                       line(x, x.map(() => seats), "all seats", "faint", "dash")], "sequences");
  const ms = (value) => series((bin) => bin.steps ? 1000 * value(bin) : null);
  draw("chart-step", [line(x, ms((bin) => bin.step_s / bin.steps), "mean", "decode"),
                      line(x, ms((bin) => bin.worst), "longest", "waiting", "dot"),
                      line(x, ms((bin) => bin.gap_s / bin.steps), "gap", "prefill", "dash")], "ms");
  draw("chart-ledger", LEDGER.map(([kind, name, shape]) => ({
    type: "bar", x, y: series((bin) => bin.rows[kind]), name,
    marker: {color: colour(`row-${kind}`),
             pattern: {shape, fillmode: "overlay", solidity: 0.3, fgcolor: colour("panel")}},
  })), "rows/s", {barmode: "stack", bargap: 0.08});
}

function line(x, y, name, ink, dash = "solid") {
  return {x, y, name, mode: "lines", line: {color: colour(ink), width: 2, dash}};
}

function layout(unit, extra = {}) {
  const grid = {gridcolor: colour("grid"), zerolinecolor: colour("grid"), fixedrange: true};
  return {
    height: 230, margin: {l: 52, r: 10, t: 8, b: 30}, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: {color: colour("faint"), size: 12, family: "system-ui, sans-serif"}, hovermode: "x unified",
    hoverlabel: {bgcolor: colour("panel")}, showlegend: true,
    legend: {orientation: "h", y: -0.16, yanchor: "top", traceorder: "normal"},
    xaxis: {...grid, range: [-WINDOW + 0.5, 0.5], ticksuffix: " s", dtick: 15, showgrid: false, tick0: 0},
    yaxis: {...grid, rangemode: "tozero", title: {text: unit, standoff: 6}}, ...extra,
  };
}

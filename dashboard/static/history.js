// Ten minutes in bins of one second: filled from the server's own account at first, from the feed's totals afterwards.

import {sum} from "./dom.js";
import {KEPT_S} from "./rides.js";

/** What a bin adds up, besides rows by kind. */
const SUMS = ["steps", "step_s", "gap_s", "boarded", "preempted", "compiled"];
const LATENCIES = ["wait", "ttft", "itl"];

export class History {
  constructor(kinds) {
    this.kinds = kinds;
    this.bins = new Map();
    this.recent = [];  // totals of the last seconds, for the rates shown as figures
    this.since = -Infinity;  // totals are taken from here on
  }

  /** Add the server's bins of about one second up to time `base`, at which the feed's differences begin. */
  fill({bins, kept_from: keptFrom}, base) {
    this.since = Math.max(this.since, base);
    bins.t.forEach((t, i) => {
      if (t + bins.width <= keptFrom) return;
      const bin = this.bin(t + bins.width / 2);
      for (const kind of this.kinds) bin.rows[kind] += bins.rows[kind][i];
      for (const name of SUMS) bin[name] += bins[name]?.[i] ?? 0;
      bin.worst = Math.max(bin.worst, bins.worst_s[i] ?? 0);
      if (!bins.steps[i]) return;
      bin.waiting = Math.max(bin.waiting ?? 0, bins.waiting[i] ?? 0);
      bin.busy = Math.max(bin.busy ?? 0, bins.seats_busy[i] ?? 0);
      for (const name of LATENCIES) bin[name] = bins[`${name}_p95`]?.[i] ?? bin[name];
    });
  }

  /** Add what happened since the event before; busy: seats taken now. */
  add(frame, busy) {
    const last = this.recent.at(-1);
    if (last && last.t >= frame.t) return;
    this.recent.push({t: frame.t, s: frame.s});
    while (this.recent.length > 2 && this.recent[0].t < frame.t - 3) this.recent.shift();
    if (!last || frame.t <= this.since) return;
    const bin = this.bin(frame.t), before = last.s, now = frame.s;
    for (const kind of this.kinds) bin.rows[kind] += now.rows[kind] - before.rows[kind];
    bin.steps += sum(now.steps) - sum(before.steps);
    bin.step_s += now.step_s - before.step_s;
    bin.gap_s += now.gap_s - before.gap_s;
    bin.boarded += (now.boarded ?? 0) - (before.boarded ?? 0);
    bin.preempted += now.preemptions - before.preemptions;
    bin.compiled += now.compiles - before.compiles;
    bin.worst = Math.max(bin.worst, now.worst_s ?? 0);
    bin.waiting = Math.max(bin.waiting ?? 0, now.waiting);
    bin.busy = Math.max(bin.busy ?? 0, busy);
    for (const name of LATENCIES) bin[name] = now.latency?.[name]?.p95 ?? null;
  }

  bin(t) {
    const key = Math.floor(t);
    if (!this.bins.has(key)) {
      const zeros = (names) => Object.fromEntries(names.map((name) => [name, 0]));
      this.bins.set(key, {rows: zeros(this.kinds), ...zeros(SUMS), waiting: null, busy: null, worst: 0,
                          wait: null, ttft: null, itl: null});
      for (const old of this.bins.keys()) if (old < key - KEPT_S) this.bins.delete(old);
    }
    return this.bins.get(key);
  }

  /** The whole seconds of the `span` before t, oldest first: [seconds before t, bin or undefined]. */
  seconds(t, span) {
    const now = Math.floor(t), length = Math.max(10, Math.min(KEPT_S, Math.round(span)));
    return Array.from({length}, (_, i) => [i - length + 1, this.bins.get(now - length + i)]);
  }

  /** Rows a second of one kind over the last seconds (live), or in the three seconds before t; null if not known. */
  rate(kind, t = null) {
    if (t !== null) {
      const bins = [1, 2, 3].map((ago) => this.bins.get(Math.floor(t) - ago)).filter(Boolean);
      return bins.length ? bins.reduce((all, bin) => all + bin.rows[kind], 0) / bins.length : null;
    }
    const first = this.recent[0], last = this.recent.at(-1);
    if (!first || last.t - first.t < 0.1) return null;
    return (last.s.rows[kind] - first.s.rows[kind]) / (last.t - first.t);
  }
}

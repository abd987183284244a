// Ten minutes in bins of one second: filled from the server's own account at first, from the feed's totals afterwards.

import {sum} from "./dom.js";
import {KEPT_S} from "./stays.js";

/** What a bin adds up, besides rows by kind. */
const SUMS = ["steps", "step_s", "gap_s", "boarded", "preempted", "compiled", "refused", "cached_tokens"];
const LATENCIES = ["wait", "ttft", "itl"];
const POINTS = ["p50", "p95", "p99"];
/** Seconds that the rates shown as figures look back. */
const RATE_S = 3;

/** The device's share of its limit, from the feed's `device`; null: not known. */
export function limitOf(device) {
  const shares = [device?.bandwidth, device?.operations].filter(Number.isFinite);
  return shares.length ? Math.max(...shares) : null;
}

const zeros = (names) => Object.fromEntries(names.map((name) => [name, 0]));

export class History {
  constructor(kinds) {
    this.kinds = kinds;
    this.bins = new Map();
    this.recent = []; // {t, metrics} of the last RATE_S seconds
    this.since = -Infinity; // totals are taken from here on
  }

  /** Add the server's bins of about one second up to time `now`, at which the feed's differences begin. */
  fill({bins, kept_from: keptFrom}, now) {
    this.since = Math.max(this.since, now);
    bins.t.forEach((t, i) => {
      if (t + bins.width > keptFrom) {
        this.fillBin(this.bin(t + bins.width / 2), bins, i);
      }
    });
  }

  /** bins: columns; i: the place of one bin in them. */
  fillBin(bin, bins, i) {
    for (const kind of this.kinds) {
      bin.rows[kind] += bins.rows[kind][i];
    }
    for (const name of SUMS) {
      bin[name] += bins[name][i];
    }
    bin.longest = Math.max(bin.longest, bins.longest_step_s[i] ?? 0);
    if (!bins.steps[i]) {
      return;
    }
    bin.waiting = Math.max(bin.waiting ?? 0, bins.waiting[i] ?? 0);
    bin.busy = Math.max(bin.busy ?? 0, bins.seats_busy[i] ?? 0);
    bin.pages = bins.pages_used[i];
    if (bins.floor_s) {
      bin.limit = bins.floor_s[i] / (bins.step_s[i] - bins.gap_s[i]);
    }
    for (const name of LATENCIES) {
      const points = POINTS.map((point) => [point, bins[`${name}_${point}`][i]]);
      bin[name] = points[0][1] === null ? bin[name] : Object.fromEntries(points);
    }
  }

  /** Add what happened since the frame before; busy: seats taken now; windows: pages by state of each window. */
  add({t, metrics}, busy, windows = {}) {
    const last = this.recent.at(-1);
    if (last && last.t >= t) {
      return;
    }
    this.recent.push({t, metrics});
    while (this.recent.length > 2 && this.recent[0].t < t - RATE_S) {
      this.recent.shift();
    }
    if (!last || t <= this.since) {
      return;
    }
    const bin = this.bin(t);
    this.addTotals(bin, last.metrics, metrics);
    bin.longest = Math.max(bin.longest, metrics.longest_step_s ?? 0);
    bin.waiting = Math.max(bin.waiting ?? 0, metrics.waiting);
    bin.busy = Math.max(bin.busy ?? 0, busy);
    bin.pages = metrics.pages_used;
    bin.limit = limitOf(metrics.device);
    bin.device = metrics.device;
    bin.windows = windows;
    for (const name of LATENCIES) {
      bin[name] = metrics.latency[name] ?? null;
    }
  }

  addTotals(bin, before, now) {
    for (const kind of this.kinds) {
      bin.rows[kind] += now.rows[kind] - before.rows[kind];
    }
    bin.steps += sum(now.steps) - sum(before.steps);
    bin.step_s += now.step_s - before.step_s;
    bin.gap_s += now.gap_s - before.gap_s;
    bin.boarded += now.boarded - before.boarded;
    bin.preempted += now.preemptions - before.preemptions;
    bin.compiled += now.compiles - before.compiles;
    bin.refused += sum(now.rejected) - sum(before.rejected);
    bin.cached_tokens += now.cached_tokens - before.cached_tokens;
  }

  bin(t) {
    const key = Math.floor(t);
    if (!this.bins.has(key)) {
      this.bins.set(key, this.emptyBin());
      this.forget(key - KEPT_S);
    }
    return this.bins.get(key);
  }

  emptyBin() {
    return {
      rows: zeros(this.kinds),
      ...zeros(SUMS),
      longest: 0,
      // Null without steps, boarding sequences or tokens. limit: the device's share of its bandwidth or arithmetic,
      // whichever is higher; wait, ttft, itl: {p50, p95, p99}, seconds.
      waiting: null,
      busy: null,
      pages: null,
      limit: null,
      wait: null,
      ttft: null,
      itl: null,
    };
  }

  forget(before) {
    for (const key of this.bins.keys()) {
      if (key < before) {
        this.bins.delete(key);
      }
    }
  }

  /** Whether somebody waited in a second, and whether prompts were read meanwhile. A step counts in the second in which
   *  it is done: where none was, the next one tells what went on; of what is not known, neither. */
  waits(second) {
    const bin = this.bins.get(second);
    const told = bin?.steps ? bin : this.bins.get(second + 1);
    if (!bin?.waiting || !told?.steps) {
      return {waited: false, read: false};
    }
    return {waited: true, read: told.rows.prefill + told.rows.recomputed > 0};
  }

  /** The whole seconds of the `span` before t, oldest first: [seconds before t, bin or undefined]. */
  seconds(t, span) {
    const now = Math.floor(t);
    const length = Math.max(10, Math.min(KEPT_S, Math.round(span)));
    return Array.from({length}, (_, i) => [i - length + 1, this.bins.get(now - length + i)]);
  }

  /** A sum over the newest `span` seconds before t; value(bin). */
  total(value, t, span) {
    return this.seconds(t, span).reduce((all, [, bin]) => all + (bin ? value(bin) : 0), 0);
  }

  /** Rows a second of one kind over the last seconds (live), or in the three seconds before t; null if not known. */
  rate(kind, t = null) {
    if (t !== null) {
      return this.rateBefore(kind, Math.floor(t));
    }
    const first = this.recent[0];
    const last = this.recent.at(-1);
    if (!first || last.t - first.t < 0.1) {
      return null;
    }
    return (last.metrics.rows[kind] - first.metrics.rows[kind]) / (last.t - first.t);
  }

  rateBefore(kind, second) {
    const bins = [1, 2, 3].map((ago) => this.bins.get(second - ago)).filter(Boolean);
    if (!bins.length) {
      return null;
    }
    const rows = bins.reduce((all, bin) => all + bin.rows[kind], 0);
    return rows / bins.length;
  }
}

// Ten minutes in bins of one second: first from the server's history, then from the totals of the feed. Before them,
// hours in coarser bins, as the server stores them.

import {sum} from "./dom.js";
import {KEPT_S} from "./stays.js";

/** Fields that a bin sums up, besides rows by kind. */
const SUMS = ["steps", "step_s", "gap_s", "boarded", "preempted", "compiled", "refused", "cached_tokens"];
const LATENCIES = ["wait", "ttft", "itl"];
const POINTS = ["p50", "p95", "p99"];
/** Seconds over which the displayed rates are averaged. */
const RATE_S = 3;
/** Points of a curve over hours. */
const POINTS_OF_HOURS = 300;

/** The device's share of its limit, from the feed's `device`; null: not known. */
export function limitOf(device) {
  const shares = [device?.bandwidth, device?.operations].filter(Number.isFinite);
  return shares.length ? Math.max(...shares) : null;
}

/** Percentiles of a latency at index i of the columns; null: there are none. */
function pointsAt(bins, name, i) {
  const points = POINTS.map((point) => [point, bins[`${name}_${point}`][i]]);
  return points[0][1] === null ? null : Object.fromEntries(points);
}

/** The device's share of its limit at index i of the columns; null: not known. */
const limitAt = (bins, i) => (bins.floor_s?.[i] ? bins.floor_s[i] / (bins.step_s[i] - bins.gap_s[i]) : null);

const zeros = (names) => Object.fromEntries(names.map((name) => [name, 0]));

export class History {
  constructor(kinds) {
    this.kinds = kinds;
    this.bins = new Map();
    this.recent = []; // {t, metrics} of the last RATE_S seconds
    this.since = -Infinity; // time from which the feed's totals are counted
    this.filledFrom = Infinity; // time from which the server's bins are included
    this.hours = null; // {width, bins: Map(index -> bin)}: bins before the ten minutes
  }

  /** Store the server's bins of hours (route `history`). Each stored bin is a mean second of its time. */
  fillHours({bins}) {
    const {width, t} = bins;
    this.hours = {width, bins: new Map(t.map((start, i) => [Math.round(start / width), this.hoursBin(bins, i)]))};
  }

  hoursBin(bins, i) {
    const each = (column) => (column[i] ?? 0) / bins.seconds[i];
    const bin = this.emptyBin();
    for (const kind of this.kinds) {
      bin.rows[kind] = bins.rows[kind] ? each(bins.rows[kind]) : 0;
    }
    for (const name of SUMS) {
      bin[name] = each(bins[name]);
    }
    Object.assign(bin, {waiting: bins.waiting[i], busy: bins.seats_busy[i], pages: bins.pages_used[i]});
    bin.longest = bins.longest_step_s[i] ?? 0;
    bin.limit = limitAt(bins, i);
    for (const name of LATENCIES) {
      bin[name] = pointsAt(bins, name, i);
    }
    return bin;
  }

  /** The bin of a moment: of its second, or a mean second of its coarser bin. */
  at(t) {
    return this.bins.get(Math.floor(t)) ?? this.hours?.bins.get(Math.floor(t / this.hours.width));
  }

  /** Bins of the `reach` seconds before t, oldest first, undefined where nothing is recorded: each second of ten
   *  minutes, or POINTS_OF_HOURS samples of longer times. */
  series(t, reach) {
    if (reach <= KEPT_S) {
      return this.seconds(t, reach).map(([, bin]) => bin);
    }
    const each = reach / POINTS_OF_HOURS;
    return Array.from({length: POINTS_OF_HOURS}, (_, i) => this.at(t - reach + (i + 0.5) * each));
  }

  /** Add the server's bins of about one second up to time `now`, at which the feed's differences begin. A second call
   *  adds only bins before those of the first. */
  fill({bins, from, kept_from: keptFrom}, now) {
    this.since = Math.max(this.since, now);
    bins.t.forEach((t, i) => {
      const middle = t + bins.width / 2;
      if (t + bins.width > keptFrom && middle < this.filledFrom) {
        this.fillBin(this.bin(middle), bins, i);
      }
    });
    this.filledFrom = Math.min(this.filledFrom, from);
  }

  /** bins: columns; i: index of one bin in them. */
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
    bin.limit = limitAt(bins, i) ?? bin.limit;
    for (const name of LATENCIES) {
      bin[name] = pointsAt(bins, name, i) ?? bin[name];
    }
  }

  /** Add the changes since the frame before; busy: seats taken now; windows: pages by state of each window. */
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

  /** Whether requests waited in a second, and whether prompts were computed meanwhile. A step counts in the second in
   *  which it ends, so a second without one uses the next second's; without data both are false. */
  waits(second) {
    const bin = this.bins.get(second);
    const steps = bin?.steps ? bin : this.bins.get(second + 1);
    if (!bin?.waiting || !steps?.steps) {
      return {waited: false, read: false};
    }
    return {waited: true, read: steps.rows.prefill + steps.rows.recomputed > 0};
  }

  /** The whole seconds of the `span` before t, oldest first: [seconds before t, bin or undefined]. */
  seconds(t, span) {
    const now = Math.floor(t);
    const length = Math.max(10, Math.min(KEPT_S, Math.round(span)));
    return Array.from({length}, (_, i) => [i - length + 1, this.bins.get(now - length + i)]);
  }

  /** A sum over the newest `span` seconds before t; value(bin). */
  total(value, t, span) {
    if (!this.bins.has(Math.floor(t) - 1) && this.hours) {
      const bin = this.at(t);
      return bin ? span * value(bin) : 0;
    }
    return this.seconds(t, span).reduce((all, [, bin]) => all + (bin ? value(bin) : 0), 0);
  }

  /** Rows a second of one kind: over the last seconds (live), or over the three seconds before t; null if not known. */
  rate(kind, t = null) {
    if (t !== null) {
      return this.rateBefore(kind, Math.floor(t));
    }
    const first = this.recent[0];
    const last = this.recent.at(-1);
    if (!first || last.t - first.t < 0.1) {
      return first ? this.rateBefore(kind, Math.floor(last.t)) : null;
    }
    return (last.metrics.rows[kind] - first.metrics.rows[kind]) / (last.t - first.t);
  }

  rateBefore(kind, second) {
    const bins = [1, 2, 3].map((ago) => this.at(second - ago)).filter(Boolean);
    if (!bins.length) {
      return null;
    }
    const rows = bins.reduce((all, bin) => all + bin.rows[kind], 0);
    return rows / bins.length;
  }
}

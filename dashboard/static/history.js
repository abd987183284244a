// The last minute in bins of one second: filled from the step records at first, from key frames afterwards.

export const WINDOW = 60;

export class History {
  constructor(kinds) {
    this.kinds = kinds;
    this.bins = new Map();
    this.recent = [];  // key frames of the last seconds, for the rates shown as figures
  }

  /** Add the step records up to the key frame `base`, in which later differences begin. */
  fill(columns, base) {
    for (let i = 0; i < columns.step.length; i++) {
      if (columns.step[i] > base.step || columns.started[i] < base.t - WINDOW - 1) continue;
      const bin = this.bin(columns.started[i]), span = columns.device_s[i] + columns.gap_s[i];
      for (const kind of this.kinds) bin.rows[kind] += columns[kind][i];
      this.observe(bin, span, columns.gap_s[i], 1, span, columns.waiting[i], columns.seats_busy[i]);
    }
  }

  /** Add what happened since the frame before. */
  add(frame, busy) {
    const last = this.recent.at(-1);
    this.recent = [...this.recent.filter((old) => old.t > frame.t - 3), frame];
    if (!last || last.t >= frame.t) return;
    const bin = this.bin(frame.t), before = last.s, now = frame.s;
    for (const kind of this.kinds) bin.rows[kind] += now.rows[kind] - before.rows[kind];
    this.observe(bin, now.step_s - before.step_s, now.gap_s - before.gap_s, total(now.steps) - total(before.steps),
                 now.worst_s ?? 0, now.waiting, busy);
    for (const key of this.bins.keys()) if (key < Math.floor(frame.t) - WINDOW - 1) this.bins.delete(key);
  }

  observe(bin, step_s, gap_s, steps, worst, waiting, busy) {
    bin.step_s += step_s;
    bin.gap_s += gap_s;
    bin.steps += steps;
    bin.worst = Math.max(bin.worst, worst);
    bin.waiting = Math.max(bin.waiting ?? 0, waiting);
    bin.busy = Math.max(bin.busy ?? 0, busy);
  }

  bin(t) {
    const key = Math.floor(t);
    if (!this.bins.has(key)) {
      this.bins.set(key, {rows: Object.fromEntries(this.kinds.map((kind) => [kind, 0])), step_s: 0, gap_s: 0, steps: 0,
                          worst: 0, waiting: null, busy: null});
    }
    return this.bins.get(key);
  }

  /** Whole seconds before `t`, oldest first: [seconds ago, bin or undefined]. */
  seconds(t) {
    const now = Math.floor(t);
    return Array.from({length: WINDOW}, (_, i) => [i - WINDOW, this.bins.get(now - WINDOW + i)]);
  }

  /** Rows a second of one kind over the last seconds; null before there are two frames. */
  rate(kind) {
    const first = this.recent[0], last = this.recent.at(-1);
    if (!first || last.t - first.t < 0.1) return null;
    return (last.s.rows[kind] - first.s.rows[kind]) / (last.t - first.t);
  }
}

const total = (counts) => Object.values(counts).reduce((sum, value) => sum + value, 0);

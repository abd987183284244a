// The displayed moment: now, a past moment that stands still, or one that is replayed. The last ten minutes are
// recorded by the second; the hours before them in coarser bins.

import {KEPT_S} from "./stays.js";

const SHORTEST = 2;
const HOUR_S = 3600;
/** Spans that a reader may look back, in seconds, as far as the server's history goes. */
export const REACHES = [KEPT_S, HOUR_S, 6 * HOUR_S, 24 * HOUR_S, 168 * HOUR_S];

export class View {
  constructor(onChange) {
    this.mode = "live"; // live | paused | replay
    this.span = 60; // seconds that the timeline shows
    this.reach = KEPT_S; // seconds that the band shows and that the reader can scrub
    this.most = KEPT_S; // most seconds of `reach`
    this.speed = 1;
    this.now = 0; // the engine's clock at the newest frame
    this.at = 0; // the moment shown, unless live
    this.origin = 0; // the engine's clock plus this is the time since 1970, both in seconds
    this.onChange = onChange;
  }

  get t() {
    return this.mode === "live" ? this.now : this.at;
  }
  get ago() {
    return Math.max(0, this.now - this.t);
  }

  /** Whether the moment is before the time recorded by the second. */
  get isOld() {
    return this.ago > KEPT_S;
  }

  /** Look back this far, at most as far as there is a history. */
  lookBack(reach) {
    this.reach = Math.min(reach, this.most);
    this.go(this.t, this.mode);
  }

  /** Stop at time t, and look back as far as that needs. */
  seek(t) {
    const ago = this.now - t;
    this.lookBack(Math.max(this.reach, REACHES.find((reach) => reach >= ago) ?? this.most));
    this.scrub(t);
  }

  /** A moment as the time of day; fine: to a tenth of a second. */
  clock(t, fine) {
    const time = new Date(1000 * (t + this.origin) + 1); // so that 0.0999 s reads 0.1 s
    const tenth = Math.floor(time.getMilliseconds() / 100);
    const text = time.toLocaleTimeString("en-GB");
    return fine ? `${text}.${tenth}` : text;
  }

  /** A moment as a label of the timeline's axis: seconds ago while time moves on, else the time of day. */
  name(t, ago) {
    if (this.mode !== "live") {
      return this.clock(t, this.span < 20);
    }
    return ago ? `${+ago.toFixed(1)} s ago` : "now";
  }

  /** The engine's clock has moved on. A moment that is now out of reach cannot be shown any more. */
  tick(now) {
    this.now = now;
    this.at = Math.max(this.at, now - this.reach);
  }

  /** Continue a replay by `seconds` of real time; when it catches up it becomes live. */
  play(seconds) {
    if (this.mode !== "replay") {
      return;
    }
    this.at += seconds * this.speed;
    if (this.at >= this.now) {
      this.mode = "live";
    }
    this.onChange();
  }

  pause() {
    this.go(this.t, "paused");
  }
  resume() {
    this.go(this.now, "live");
  }
  replay(speed = this.speed) {
    this.speed = speed;
    this.go(this.mode === "live" ? this.now - Math.min(this.span, 30) : this.at, "replay");
  }
  toggle() {
    if (this.mode === "paused") {
      this.resume();
    } else {
      this.pause();
    }
  }

  /** Stop at time t. */
  scrub(t) {
    this.go(t, "paused");
  }
  pan(seconds) {
    this.scrub(this.t + seconds);
  }

  go(t, mode) {
    this.at = Math.max(this.now - this.reach, Math.min(this.now, t));
    this.mode = mode;
    this.onChange();
  }

  /** Show `factor` times as much time; the moment at `share` (0: left, 1: right end) stays in its place. */
  zoom(factor, share = 1) {
    const span = Math.max(SHORTEST, Math.min(KEPT_S, this.span * factor));
    const right = this.t + (span - this.span) * (1 - share);
    this.span = span;
    const live = this.mode === "live";
    if (live && share > 0.97) {
      this.onChange();
    } else if (right >= this.now) {
      this.go(right, "live");
    } else {
      this.go(right, live ? "paused" : this.mode);
    }
  }
}

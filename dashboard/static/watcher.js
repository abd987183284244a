// One engine being watched: the feed's events go into what is known of the engine, its rides and its history.

import {Engine} from "./engine.js";
import {ask, watch} from "./feed.js";
import {History} from "./history.js";
import {Recorder} from "./recorder.js";
import {KEPT_S, Rides} from "./rides.js";
import {momentOf} from "./seats.js";

/** Seconds that may pass until the server answers: it keeps no more than KEPT_S. */
const SLACK_S = 10;

export class Watcher {
  /** base: the path before the engine's own. on.greet(hello), on.change(), on.trouble(text). */
  constructor(base, on) {
    Object.assign(this, {base, on});
    this.heardAt = performance.now();
    this.trouble = "";
    this.stopping = new AbortController();
    this.reset();
    const trouble = (text) => { this.trouble = text; on.trouble(); };
    watch(base, {event: (name, data) => this.take(name, data), trouble}, this.stopping.signal);
  }

  stop() { this.stopping.abort(); }

  reset() {
    this.engine = new Engine();
    this.rides = this.rides ?? new Rides();
    this.rides.clear();
    this.history = this.recorder = null;
    this.past = 0;  // how often the account of the past was taken: another one may have changed it
    this.lifeKnown = null;
    this.early = null;  // life events that came while the account of the past was on its way
  }

  get silent() { return performance.now() - this.heardAt; }

  take(name, data) {
    this.heardAt = performance.now();
    this.trouble = name === "bye" ? data.reason : "";
    this[`on_${name}`]?.(data);
  }

  on_hello(news) {
    const {hello} = this.engine;
    if (hello && hello.run !== news.run) this.reset();  // another server: its times and steps start anew
    else if (hello) this.lifeKnown = null;
    this.engine.hello = news;
    this.on.greet(news);
  }

  on_key(news) {
    this.engine.key(news);
    if (!this.history) this.history = new History(Object.keys(news.s.rows));
    this.looked(news);
  }

  on_d(news) { if (this.engine.delta(news)) this.looked(news); }

  on_life({first, events}) {
    if (this.lifeKnown === null) return;  // the key frame that follows asks for the past
    const missed = first > this.lifeKnown;
    this.lifeKnown = first + events.length;
    if (this.early) this.early.push(...events);
    else if (missed) this.takePast();
    else for (const event of events) this.rides.live(event);
  }

  on_note(news) { this.engine.note(news); }

  looked(news) {
    const {engine} = this, moment = momentOf(engine);
    if (news.life !== undefined && news.life !== this.lifeKnown) {
      this.lifeKnown = news.life;
      this.takePast();
    }
    if (moment.count && this.recorder?.seats !== moment.count) {
      this.recorder = new Recorder(moment.count, engine.states);
    }
    this.recorder?.look(engine.frame.t, moment, engine.frame.s.waiting);
    this.history.add(engine.frame, engine.taken);
    const decode = engine.code("decode");
    if (engine.seats) this.rides.settle(engine.frame.t, (seat) => engine.seats.state[seat] === decode);
    this.on.change();
  }

  /** The ten minutes before now from the server's own account; live events go on from there. */
  async takePast() {
    if (this.early) return;
    this.early = [];
    const {history} = this, base = this.engine.frame.t, length = KEPT_S - SLACK_S;
    const account = await ask(`${this.base}timeline?from=${base - length}&to=${base}&bins=${length}`).catch(() => null);
    if (history !== this.history) return;
    const early = this.early;
    this.early = null;
    if (!account) this.rides.knownFrom = Math.min(this.rides.knownFrom, base);
    else this.rides.seed(account);
    if (account && this.past === 0) history.fill(account, base);
    this.past++;
    for (const event of early) this.rides.live(event);
    this.on.change();
  }
}

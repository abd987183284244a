// The views of the page, one of which is shown at a time. The part of the address after "#" names it, and may add what
// to show there: #overview, #overview/at=1764340000.5, #requests/ID, #requests/ID/1 (its second choice).

import {$, onKeys} from "./dom.js";

/** View names, in the order of the keys 1, 2, 3, ..., 9, 0. */
const NAMES = ["overview", "chat", "requests", "tenants", "work", "memory", "performance", "incidents", "lab", "settings"];

export class Views {
  /** on.shown(name): a view is on the screen. on.request(id, index) and on.moment(seconds since 1970): the address
   *  names one. names: of the views; the first is shown if the address names none. */
  constructor(on, names = NAMES) {
    Object.assign(this, {on, names, shown: names[0]});
    this.written = location.hash; // the address that this page last wrote or followed
    this.offered = new Set(names);
    addEventListener("hashchange", () => this.follow());
    $("sign-out").addEventListener("click", async () => {
      await fetch("sign-out", {method: "POST"}).catch(() => null);
      location.reload();
    });
    onKeys(Object.fromEntries(names.map((name, i) => [String((i + 1) % 10), () => this.go(name)])));
  }

  link(name) {
    return document.querySelector(`#views a[href="#${name}"]`);
  }

  /** Whether a view has content. */
  offer(name, offered) {
    this.link(name).hidden = !offered;
    offered ? this.offered.add(name) : this.offered.delete(name);
    if (!offered && this.shown === name) {
      this.show(this.names[0]);
    }
  }

  go(name) {
    if (this.offered.has(name)) {
      location.hash = name;
    }
  }

  /** Write the displayed content into the address, without a new entry in the browser's history. rest: after the name. */
  note(rest = "", name = this.shown) {
    const hash = rest ? `#${name}/${rest}` : `#${name}`;
    const isPlain = hash === `#${this.names[0]}` && !location.hash;
    const isAhead = location.hash !== this.written; // the reader has just changed it: `follow` runs soon
    if (location.hash !== hash && !isPlain && !isAhead) {
      history.replaceState(null, "", hash);
      this.written = location.hash;
    }
  }

  /** The parts of the address; the first is a view. */
  get named() {
    const [name, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
    return [this.offered.has(name) ? name : this.names[0], ...rest];
  }

  /** Show the content that the address names. */
  follow() {
    this.written = location.hash;
    const [name, ...rest] = this.named;
    this.show(name);
    if (name === "requests" && rest[0]) {
      this.on.request(rest[0], Number(rest[1] ?? 0));
    }
    const moment = /^at=(\d+(\.\d+)?)$/.exec(rest[0] ?? "");
    if (moment) {
      this.on.moment(Number(moment[1]));
    }
  }

  show(name) {
    this.shown = name;
    document.body.dataset.view = name;
    for (const one of this.names) {
      $(`view-${one}`).classList.toggle("shown", one === name);
      this.link(one).setAttribute("aria-current", one === name ? "page" : "false");
    }
    document.querySelector("main").scrollTop = 0;
    this.on.shown(name);
  }
}

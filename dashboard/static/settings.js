// Every setting of the engine with its value and its source.

import {$, count, say} from "./dom.js";
import {Listing, Polled} from "./listing.js";

const EVERY_MS = 10_000;
const DEFAULT = "default";

const inWords = (value) => (value === null ? "none" : typeof value === "string" ? value || '""' : JSON.stringify(value));

export class Settings {
  /** base(): the path before the engine's own. */
  constructor(base) {
    this.polled = new Polled(base, "settings", {note: $("setting-note"), show: () => this.show(), every: EVERY_MS});
    this.list = new Listing(
      $("setting-table"),
      [
        ["Setting", ({section, key}) => `${section}.${key}`],
        ["Value", ({value}) => inWords(value)],
        ["From", ({origin}) => origin],
      ],
      {key: ({section, key}) => `${section}.${key}`, none: "No setting is like that."},
    );
    for (const [id, event] of [["setting-search", "input"], ["setting-all", "change"]]) {
      $(id).addEventListener(event, () => this.show());
    }
  }

  /** Show another engine. */
  greet({role}) {
    this.isOffered = role !== "user";
    $("engine-settings").hidden = !this.isOffered;
  }

  frame(isShown) {
    if (this.isOffered) {
      this.polled.frame(isShown);
    }
  }

  show() {
    const all = Object.values(this.polled.answer?.settings ?? {});
    const word = $("setting-search").value.trim().toLowerCase();
    const shown = all.filter(
      ({section, key, origin}) =>
        `${section}.${key} ${origin}`.toLowerCase().includes(word) && (word || $("setting-all").checked || origin !== DEFAULT),
    );
    this.list.show(shown);
    say($("setting-sub"), `${count(shown.length)} of ${count(all.length)} settings are shown.`);
  }
}

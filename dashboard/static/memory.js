// The pages of every cache group now, and prefix cache hits by depth in the prompt; KV pages of tenants over time are
// drawn by charts.js.

import {$, count, percent, say, table} from "./dom.js";
import {Polled} from "./listing.js";

const EVERY_MS = 5000;

const group = (window) => (window === null ? "Layers that see all positions" : `Layers with a window of ${count(window)}`);

/** The range of depths of a row, given the next row. */
export const depthInWords = ({from}, next) => (next ? `${count(from)} to ${count(next.from)}` : `from ${count(from)}`);

export class Memory {
  /** base(): the path before the engine's own. */
  constructor(base) {
    this.polled = new Polled(base, "memory", {note: $("memory-note"), show: (answer) => this.show(answer), every: EVERY_MS});
  }

  /** The newest answer; null: none yet. */
  get answer() {
    return this.polled.answer;
  }

  /** pages: of the engine; states: their names. */
  frame(isShown, pages, states) {
    this.polled.frame(isShown);
    if (isShown && pages) {
      showGroups(pages, states);
    }
  }

  show({depths, tenants}) {
    table(
      $("depth-table"),
      ["Depth in tokens", "Prompts", "Prompt tokens", "Found in the cache", "Share"],
      depths.map((row, i) => [depthInWords(row, depths[i + 1]), count(row.prompts), count(row.tokens), count(row.found), percent(row.found, row.tokens)]),
    );
    table(
      $("tenant-page-table"),
      ["Tenant", "Pages now", "Most pages"],
      tenants.map(({name, pages}) => [name, count(pages.at(-1)), count(Math.max(...pages))]),
    );
    say($("depth-sub"), depths.length ? "How much of each part of a prompt was there already." : "No prompt was read in the last minutes.");
  }
}

function showGroups({counts, windows = {}}, states) {
  const groups = [[null, counts], ...Object.entries(windows).map(([window, own]) => [Number(window), own])];
  table(
    $("group-table"),
    ["Cache group", ...states, "In use"],
    groups.map(([window, own]) => {
      const all = states.reduce((sum, name) => sum + own[name], 0);
      return [group(window), ...states.map((name) => count(own[name])), percent(own.held + own.shared, all)];
    }),
  );
}

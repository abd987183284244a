// The bar that moves the whole page through the last ten minutes: pause, scrub, step, replay, back to now.

import {$, onKeys, say} from "./dom.js";
import {KEPT_S} from "./stays.js";
import {ago} from "./status.js";

const SPEEDS = [1, 4, 16];

/** step(by): show the snapshot before (-1) or after (1) the one on the screen. */
export function setUpBar(view, step) {
  const slider = $("scrub");
  slider.min = -KEPT_S;
  slider.addEventListener("input", () => view.scrub(view.now + Number(slider.value)));
  $("pause").addEventListener("click", () => view.toggle());
  $("live").addEventListener("click", () => view.resume());
  $("replay").addEventListener("click", () => replay(view));
  onKeys({
    " ": () => view.toggle(),
    l: () => view.resume(),
    r: () => replay(view),
    ",": () => step(-1),
    ".": () => step(1),
  });
}

/** Each press plays faster, then at the plain speed again. */
function replay(view) {
  const at = view.mode === "replay" ? SPEEDS.indexOf(view.speed) : -1;
  view.replay(SPEEDS[(at + 1) % SPEEDS.length]);
}

export function showBar(view) {
  const live = view.mode === "live";
  const slider = $("scrub");
  if (document.activeElement !== slider || live) {
    slider.value = -view.ago;
  }
  const text = live ? "now" : ago(view.ago);
  say($("moment"), live ? "live" : `${text}, ${view.clock(view.t, true)}`);
  slider.setAttribute("aria-valuetext", text);
  say($("pause"), live || view.mode === "replay" ? "Pause" : "Go on");
  say($("replay"), view.mode === "replay" ? `Replay ×${view.speed}` : "Replay");
  $("live").disabled = live;
}

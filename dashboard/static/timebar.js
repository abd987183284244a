// The bar that moves the whole page through the past: pause, scrub, step, replay, back to now; and the displayed span.

import {$, make, onKeys, say} from "./dom.js";
import {ago} from "./status.js";
import {KEPT_S} from "./stays.js";
import {REACHES} from "./view.js";

const SPEEDS = [1, 4, 16];

/** step(by): show the snapshot before (-1) or after (1) the one on the screen. */
export function setUpBar(view, step) {
  const slider = $("scrub");
  $("reach").addEventListener("change", ({target}) => view.lookBack(Number(target.value)));
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

const inWords = (reach) => (reach < 3600 ? `${reach / 60} min` : `${reach / 3600} h`);

/** Offer the spans covered by a server's history of this many hours. */
export function offerHours(view, hours) {
  view.most = Math.max(KEPT_S, 3600 * hours);
  const reaches = REACHES.filter((reach) => reach <= view.most);
  if (view.most > reaches.at(-1)) {
    reaches.push(view.most);
  }
  $("reach").replaceChildren(...reaches.map((reach) => make("option", {value: reach}, inWords(reach))));
  $("reach").hidden = reaches.length < 2;
  view.lookBack(view.reach);
}

/** Each press plays faster, and after the fastest at normal speed again. */
function replay(view) {
  const at = view.mode === "replay" ? SPEEDS.indexOf(view.speed) : -1;
  view.replay(SPEEDS[(at + 1) % SPEEDS.length]);
}

export function showBar(view) {
  const live = view.mode === "live";
  const slider = $("scrub");
  const {reach} = view;
  if (Number(slider.min) !== -reach) {
    slider.min = -reach;
    slider.step = reach > KEPT_S ? reach / 3600 : 0.1;
    slider.setAttribute("aria-label", `Moment shown, up to ${inWords(reach)} back`);
    $("reach").value = reach;
  }
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

// The switch between engines, where the page watches several.

import {make} from "./dom.js";
import {ask} from "./feed.js";

const EVERY_MS = 5000;

/** Watch the first engine and offer the others. start(base, standalone). */
export async function setUpEngines(select, start) {
  const alone = {standalone: false, engines: [{name: "", base: "", state: "unknown"}]};
  const {standalone, signed_in: signedIn, engines} = await ask("engines").catch(() => alone);
  document.getElementById("sign-out").hidden = !signedIn;
  const wanted = engines.find((one) => `#${one.base}` === location.hash) ?? engines[0];
  fill(select, engines, wanted.base);
  select.parentElement.hidden = engines.length < 2;
  select.addEventListener("change", () => {
    history.replaceState(null, "", `#${select.value}`);
    start(select.value, standalone);
  });
  start(wanted.base, standalone);
  if (engines.length > 1) {
    setInterval(() => refresh(select), EVERY_MS);
  }
}

async function refresh(select) {
  const listing = await ask("engines").catch(() => null);
  if (listing) {
    fill(select, listing.engines, select.value);
  }
}

function fill(select, engines, chosen) {
  const texts = engines.map((one) => `${one.name} at ${one.url ?? ""}: ${one.state}`);
  const key = JSON.stringify(texts);
  if (select.dataset.shows === key) {
    return;
  }
  select.dataset.shows = key;
  select.replaceChildren(...engines.map((one, i) => make("option", {value: one.base}, texts[i])));
  select.value = chosen;
}

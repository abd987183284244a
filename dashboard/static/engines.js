// Chooses the engine that the page shows, and links to the others.

import {make} from "./dom.js";
import {ask} from "./feed.js";

const EVERY_MS = 5000;

/** Watch this page's engine and offer the others. start(base, standalone). listed: the list, if already loaded. */
export async function setUpEngines(select, start, listed) {
  const alone = {standalone: false, engines: [{name: "", base: "", state: "unknown"}]};
  const listing = listed ?? (await ask("engines").catch(() => alone));
  const {standalone, signed_in: signedIn, engines, fleet} = listing;
  document.getElementById("sign-out").hidden = !signedIn;
  const here = fleet ? "" : engines[0].base;
  if (fleet) {
    showWayBack(document.getElementById("fleet"), fleet);
  }
  fill(select, engines, here);
  select.parentElement.hidden = engines.length < 2;
  select.addEventListener("change", () => location.assign(select.value));
  start(here, standalone);
  if (engines.length > 1) {
    setInterval(() => refresh(select, here), EVERY_MS);
  }
}

function showWayBack(link, fleet) {
  link.href = fleet;
  link.hidden = false;
}

async function refresh(select, here) {
  const listing = await ask("engines").catch(() => null);
  if (listing) {
    fill(select, listing.engines, here);
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

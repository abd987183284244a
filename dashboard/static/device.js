// The share of its device that the engine uses; unknown values are shown as unknown.

import {make, percent, say, shareInWords as share} from "./dom.js";

const UNITS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
];
let lines = null;

/** use: `DeviceUse` (engine/server/device_use.py), or empty. */
export function showDevice(element, use) {
  lines ??= ["Busy", "Memory bandwidth", "Arithmetic"].map((name) => makeLine(element, name));
  const values = [
    [share(use?.busy), use?.busy],
    [ofMost(use?.bandwidth, use?.bytes_s, use?.ceiling_bytes_s, "B/s"), use?.bandwidth],
    [ofMost(use?.operations, use?.operations_s, use?.ceiling_operations_s, "FLOP/s"), use?.operations],
  ];
  lines.forEach(({value, meter}, i) => {
    const [text, part] = values[i];
    say(value, text);
    meter.hidden = !Number.isFinite(part);
    meter.value = Number.isFinite(part) ? part : 0;
  });
}

function makeLine(element, name) {
  const value = make("span");
  const meter = make("meter", {value: 0, "aria-label": name});
  element.append(make("dt", {}, name), make("dd", {}, value, meter));
  return {value, meter};
}

function ofMost(part, amount, most, unit) {
  if (Number.isFinite(part)) {
    return `${percent(part, 1)} of ${inUnits(most, unit)}`;
  }
  const idle = most && !amount ? "no step of late" : null;
  const alone = amount ? `${inUnits(amount, unit)}, share unknown` : "unknown";
  return idle ?? `${alone}: the most was not measured here`;
}

function inUnits(value, unit) {
  const [scale, prefix] = UNITS.find(([least]) => value >= least) ?? [1, ""];
  return `${(value / scale).toPrecision(3)}\u00a0${prefix}${unit}`;
}

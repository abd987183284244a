"""How far off predictions are in speed, and which policy they say is faster, with the error of
saying so.

`policy_errors.json`, beside this file, is written by `jitney bench policies --errors FILE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from jitney.engine.common.requests import JsonObject

_FILE = Path(__file__).with_name("policy_errors.json")


def _speed_error(off: Mapping[str, float]) -> float | None:
    """How far a prediction is off in speed, out of its `accuracy.errors`; None if nothing is
    known of it.

    The greater of the errors of throughput and of the time between tokens: where an engine is not
    full, its throughput is that of the traffic, and predicting it says nothing.
    """
    known = [abs(off[name]) for name in ("output_tok_s", "itl_p50_s") if name in off]
    return max(known, default=None)


class ErrorsElsewhere(NamedTuple):
    """What is known of predictions like these from another machine."""

    #: Which machine, and when.
    where: str
    #: `_speed_error` of each policy.
    errors: Mapping[str, float]


class PolicyErrors(msgspec.Struct, frozen=True):
    """What one `jitney bench policies` found: how far off it is to learn step times from the run of
    one policy and predict another, on one machine; for whoever has run one policy only.
    """

    #: What ran it, in words.
    machine: str
    #: When, as YYYY-MM-DD.
    date: str
    #: {learned from: {predicted: the largest `_speed_error` of the cases}}.
    speed_errors: dict[str, dict[str, float]]

    @classmethod
    def of_report(cls, report: JsonObject) -> PolicyErrors:
        """Of what `jitney bench policies --json` writes."""
        found: dict[str, dict[str, float]] = {}
        for case in report["cases"].values():
            for source, predicted in case["cross_errors"].items():
                _keep_largest(found.setdefault(source, {}), predicted)
        return cls(report["engine"]["device"], report["date"], found)

    @classmethod
    @cache
    def shipped(cls) -> PolicyErrors:
        """Those that come with the package."""
        return msgspec.json.decode(_FILE.read_bytes(), type=cls)

    def learned_from(self, policy: str, machine: str = "") -> ErrorsElsewhere:
        """Those of predictions by the steps of a run under that policy. machine: the one that the
        predictions are of, in the same words; empty: not known.
        """
        where = f"{self.machine}, {self.date}"
        if machine and machine != self.machine:
            where = f"another machine, not on this one: {where}"
        return ErrorsElsewhere(where, self.speed_errors.get(policy, {}))


def _keep_largest(largest: dict[str, float], predicted: Mapping[str, Mapping[str, float]]) -> None:
    for policy, off in predicted.items():
        known = [largest.get(policy), _speed_error(off)]
        largest[policy] = _most(error for error in known if error is not None)


def _most(errors: Iterable[float]) -> float:
    return round(max(errors), 4)


def _verdict(
    output_tok_s: Mapping[str, float],
    off: Mapping[str, float | None],
    elsewhere: ErrorsElsewhere | None = None,
) -> str:
    """Who makes most tokens and how many times those of the slowest, with the error of saying so.

    output_tok_s: of each policy, predicted. off: `_speed_error` of each policy, as far as it was
    measured here; elsewhere: for those that were not.
    """
    if len(output_tok_s) < 2:
        return ""
    best, worst = (end(output_tok_s, key=output_tok_s.__getitem__) for end in (max, min))
    slowest, fastest = output_tok_s[worst], output_tok_s[best]
    if slowest <= 0:
        return f"By simulation {worst} makes no token here."
    if slowest == fastest:
        return "By simulation all make the same tokens a second."
    gain = f"{best} makes {fastest / slowest:.2f}x the tokens of {worst}"
    return f"By simulation {gain}{_certainty(best, worst, off, elsewhere)}"


def verdict_of(
    predicted: Mapping[str, JsonObject],
    off: Mapping[str, Mapping[str, float]],
    elsewhere: ErrorsElsewhere | None = None,
) -> str:
    """The verdict on policies by their predicted figures.

    off: `accuracy.errors` of those measured.
    """
    speeds = {name: figures["output_tok_s"] for name, figures in predicted.items()}
    here = {name: _speed_error(by_figure) for name, by_figure in off.items()}
    return _verdict(speeds, here, elsewhere)


def _certainty(
    best: str,
    worst: str,
    off: Mapping[str, float | None],
    elsewhere: ErrorsElsewhere | None,
) -> str:
    """How far off saying so may be, as the end of the sentence."""
    here = _known_of((best, worst), off)
    foreign: dict[str, float] = {}
    if elsewhere is not None:
        foreign = _known_of({best, worst} - here.keys(), elsewhere.errors)
    known = here | foreign
    if not known:
        return "; error unknown: neither was measured."
    spread = f"±{max(1, round(100 * sum(known.values())))} %"
    if len(known) == 1:
        (sure,) = known
        unsure = worst if sure == best else best
        return f", {spread} for {sure}, error unknown for {unsure}, which was not measured."
    if elsewhere is None or not foreign:
        return f", {spread}."
    whose = "" if len(foreign) == 2 else f"for {next(iter(foreign))} "
    return f", {spread} ({whose}measured on {elsewhere.where})."


def _known_of(names: Iterable[str], errors: Mapping[str, float | None]) -> dict[str, float]:
    found = {name: errors.get(name) for name in names}
    return {name: error for name, error in found.items() if error is not None}

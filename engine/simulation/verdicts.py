"""How far off predictions are in speed, and which policy they say is faster, with the error of
saying so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jitney.engine.types import JsonObject


def speed_error(off: Mapping[str, float]) -> float | None:
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
    #: `speed_error` of each policy.
    errors: Mapping[str, float]


def verdict(
    output_tok_s: Mapping[str, float],
    off: Mapping[str, float | None],
    elsewhere: ErrorsElsewhere | None = None,
) -> str:
    """Who makes most tokens and how many times those of the slowest, with the error of saying so.

    output_tok_s: of each policy, predicted. off: `speed_error` of each policy, as far as it was
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
    here = {name: speed_error(by_figure) for name, by_figure in off.items()}
    return verdict(speeds, here, elsewhere)


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

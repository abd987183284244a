"""The three ways to batch on the same requests: who wins, by how much, and whether the answers are
the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jitney.engine.bench.offline import OfflineRun, PolicyRuns
from jitney.engine.types import JsonDict, JsonObject

POLICIES = ("static", "dynamic", "continuous")
#: What others report for in-flight batching over each of these, as (least, most) times the
#: throughput; over dynamic batching at high concurrency.
PUBLISHED = {"static": (1.6, 3.4), "dynamic": (3.0, 5.0)}


class _Difference(NamedTuple):
    """A request that did not get the same tokens under two policies."""

    request: int
    #: The one compared with, and the other.
    policies: tuple[str, str]
    #: Output position at which they part.
    at: int


def differences(runs: PolicyRuns) -> list[_Difference]:
    """Requests that did not get the same tokens under every policy; the first policy is the one
    compared with.
    """
    (first, reference), *others = runs.items()
    differences = []
    for policy, run in others:
        for number, at in _partings(reference, run):
            differences.append(_Difference(number, (first, policy), at))
    return differences


def _partings(reference: OfflineRun, run: OfflineRun) -> Iterator[tuple[int, int]]:
    """(request, output position at which it parts) of those with other tokens in the two runs."""
    for number, (ours, theirs) in enumerate(zip(reference.tokens, run.tokens, strict=True)):
        if ours != theirs:
            yield number, _parting(ours, theirs)


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first position at which two different outputs differ, or at which the shorter one
    ends.
    """
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(theirs))


def ratios(figures: Mapping[str, JsonObject], best: str = "continuous") -> dict[str, JsonDict]:
    """What `best` gains over each other policy: times its throughput, and how many times shorter
    its waits are.
    """
    if best not in figures:
        return {}
    others = {name: theirs for name, theirs in figures.items() if name != best}
    return {name: _gains_over(name, figures[best], theirs) for name, theirs in others.items()}


def _gains_over(name: str, ours: JsonObject, theirs: JsonObject) -> JsonDict:
    gains = _gains(ours, theirs)
    return gains | {"published_output_tok_s": PUBLISHED.get(name)}


def _gains(ours: JsonObject, theirs: JsonObject) -> JsonDict:
    gains: JsonDict = {}
    for rate in ("output_tok_s", "req_s"):
        gains[rate] = _ratio(ours[rate], theirs[rate])
    for wait, quantile in itertools.product(("ttft_s", "e2e_s"), ("p50", "p99")):
        shorter = _percentile(ours, wait, quantile)
        longer = _percentile(theirs, wait, quantile)
        gains[f"{wait}_{quantile}"] = _ratio(longer, shorter)
    return gains


def _percentile(figures: JsonObject, name: str, quantile: str) -> float | None:
    """One percentile of a distribution among the figures; None if it is not known."""
    distribution = figures.get(name) or {}
    return distribution.get(quantile)


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or not below:
        return None
    return above / below

"""How far off it is to learn step times from the run of one policy and predict another, as `jitney
bench policies` measured it on one machine: for whoever has run one policy only.

`policy_errors.json`, beside this file, is written by `jitney bench policies --errors FILE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec

from jitney.engine.simulation.verdicts import ErrorsElsewhere, speed_error
from jitney.engine.types import JsonObject

_FILE = Path(__file__).with_name("policy_errors.json")


class PolicyErrors(msgspec.Struct, frozen=True):
    """What one `jitney bench policies` found."""

    #: What ran it, in words.
    machine: str
    #: When, as YYYY-MM-DD.
    date: str
    #: {learned from: {predicted: the largest `verdicts.speed_error` of the cases}}.
    speed_errors: dict[str, dict[str, float]]

    @classmethod
    def of_report(cls, report: JsonObject) -> PolicyErrors:
        """Of what `jitney bench policies --json` writes."""
        found: dict[str, dict[str, float]] = {}
        for case in report["cases"].values():
            for source, predicted in case["cross_errors"].items():
                _keep_largest(found.setdefault(source, {}), predicted)
        return cls(report["engine"]["device"], report["date"], found)

    def learned_from(self, policy: str) -> ErrorsElsewhere:
        """Those of predictions by the steps of a run under that policy."""
        where = f"{self.machine}, {self.date}"
        return ErrorsElsewhere(where, self.speed_errors.get(policy, {}))


def _keep_largest(largest: dict[str, float], predicted: Mapping[str, Mapping[str, float]]) -> None:
    for policy, off in predicted.items():
        known = [largest.get(policy), speed_error(off)]
        largest[policy] = _most(error for error in known if error is not None)


def _most(errors: Iterable[float]) -> float:
    return round(max(errors), 4)


@cache
def shipped() -> PolicyErrors:
    """Those that come with the package."""
    return msgspec.json.decode(_FILE.read_bytes(), type=PolicyErrors)

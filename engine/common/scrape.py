"""Reads metrics in Prometheus' text format, as one response of /metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

#: After the prefix: rest of the name, labels, value, optional timestamp.
_SERIES = r"(\w+)(\{.*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Scrape:
    """The series with a prefix, named without it. Invalid lines are skipped. prometheus_client's
    parser would reject the whole text, and takes four times as long.
    """

    def __init__(self, text: str, prefix: str = "jitney_"):
        self._samples: dict[str, list[_Sample]] = {}
        for name, labels, value in re.findall(f"^{prefix}{_SERIES}", text, re.MULTILINE):
            with suppress(ValueError):
                sample = _Sample(dict(_LABEL.findall(labels)), float(value))
                self._samples.setdefault(name, []).append(sample)

    def names(self) -> set[str]:
        """Names of all metrics, without the prefix."""
        return set(self._samples)

    def samples(self, name: str, **labels: str) -> Iterator[_Sample]:
        """The samples that have these labels, among others."""
        for sample in self._samples.get(name, ()):
            if labels.items() <= sample.labels.items():
                yield sample

    def value(self, name: str, **labels: str) -> float:
        """The sum of `samples`; NaN without any."""
        values = [sample.value for sample in self.samples(name, **labels)]
        return sum(values) if values else math.nan

"""Prometheus' text form, read: what an engine's /metrics said at one moment."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

#: After the prefix: the rest of a name, labels, a value, and perhaps a time.
_SERIES = r"(\w+)(\{.*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Scrape:
    """The series whose names begin with a prefix, called by the rest of their names.

    Lines that are no series are left out: prometheus_client's own parser refuses the whole text for
    one, and takes four times as long, while a fleet reads the metrics of every engine each second.
    """

    def __init__(self, text: str, prefix: str = "jitney_"):
        self._samples: dict[str, list[_Sample]] = {}
        for name, labels, value in re.findall(f"^{prefix}{_SERIES}", text, re.MULTILINE):
            with suppress(ValueError):
                sample = _Sample(dict(_LABEL.findall(labels)), float(value))
                self._samples.setdefault(name, []).append(sample)

    def names(self) -> set[str]:
        """Of all metrics, without the prefix."""
        return set(self._samples)

    def samples(self, name: str, **labels: str) -> Iterator[_Sample]:
        """Those with these labels, whatever else they have."""
        for sample in self._samples.get(name, ()):
            if labels.items() <= sample.labels.items():
                yield sample

    def value(self, name: str, **labels: str) -> float:
        """The sum of those samples; NaN if there is none."""
        values = [sample.value for sample in self.samples(name, **labels)]
        return sum(values) if values else math.nan

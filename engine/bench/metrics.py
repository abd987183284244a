"""What a Jitney server says of a run at /metrics: the ledger (`jitney_rows_total`) and the queue,
as differences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jitney.engine.bench.client import EndpointClient
from jitney.engine.records import ROW_KINDS
from jitney.engine.telemetry.cost import Bill

_SAMPLE = re.compile(r"^(jitney_\w+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|\+Inf)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

#: The metric that is 1 where padding is free.
_FREE = "jitney_padding_is_free"

type _SampleName = tuple[str, tuple[tuple[str, str], ...]]
#: (name, sorted labels) -> value.
type _Samples = dict[_SampleName, float]


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What a server's /metrics said at one time."""

    samples: _Samples

    @classmethod
    async def read(cls, client: EndpointClient) -> ServerMetrics | None:
        """Now; None if it has no such page, or publishes none of ours."""
        page = await client.read_page("/metrics")
        if page is None:
            return None
        metrics = cls.of(page.text)
        return None if metrics._rows("prefill") is None else metrics

    @classmethod
    def of(cls, text: str) -> ServerMetrics:
        """Our samples of a page in Prometheus' text format."""
        matches = filter(None, map(_SAMPLE.match, text.splitlines()))
        return cls(dict(_sample(*match.groups()) for match in matches))

    def bill_since(self, before: ServerMetrics, seconds: float) -> Bill:
        """Rows and device time by kind since another reading, `seconds` ago.

        The server tells the time of all steps together, so it is split over the rows of all steps
        alike, unlike a bill made from step records, or over all but padding where that is free;
        idle is the rest of `seconds`.
        """
        rows = {kind: self._rows_since(before, kind) for kind in ROW_KINDS}
        busy_s = self._step_seconds() - before._step_seconds()
        is_free = bool(self.samples.get((_FREE, ())))
        return Bill.of_totals(rows, busy_s, seconds, padding_is_free=is_free)

    def queue_mean_since(self, before: ServerMetrics) -> float | None:
        """Mean wait in the server's queue, seconds, of who boarded since another reading; None if
        nobody did.
        """
        count = self._growth("jitney_queue_seconds_count", before)
        if count <= 0:
            return None
        return self._growth("jitney_queue_seconds_sum", before) / count

    def _rows(self, kind: str) -> float | None:
        return self.samples.get(("jitney_rows_total", (("kind", kind),)))

    def _rows_since(self, before: ServerMetrics, kind: str) -> int:
        return round((self._rows(kind) or 0) - (before._rows(kind) or 0))

    def _step_seconds(self) -> float:
        named = self.samples.items()
        return sum(value for (name, _), value in named if name == "jitney_step_seconds_sum")

    def _growth(self, name: str, before: ServerMetrics) -> float:
        return self.samples.get((name, ()), 0.0) - before.samples.get((name, ()), 0.0)


def _sample(name: str, labels: str | None, value: str) -> tuple[_SampleName, float]:
    return (name, tuple(sorted(_LABEL.findall(labels or "")))), float(value)

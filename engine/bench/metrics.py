"""What a Jitney server says of a run at /metrics: the ledger (`jitney_rows_total`) and the queue,
as differences.
"""

from __future__ import annotations

import re

import httpx

from jitney.engine.bench.client import read_page
from jitney.engine.records import ROW_KINDS
from jitney.engine.telemetry.cost import Bill

_SAMPLE = re.compile(r"^(jitney_\w+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|\+Inf)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

#: (name, sorted labels) -> value.
_SampleName = tuple[str, tuple[tuple[str, str], ...]]
Samples = dict[_SampleName, float]


def _parse_metrics(text: str) -> Samples:
    """Our samples of a page in Prometheus' text format."""
    matches = filter(None, map(_SAMPLE.match, text.splitlines()))
    return dict(_sample(*match.groups()) for match in matches)


def _sample(name: str, labels: str | None, value: str) -> tuple[_SampleName, float]:
    return (name, tuple(sorted(_LABEL.findall(labels or "")))), float(value)


async def read_metrics(client: httpx.AsyncClient, base: str) -> Samples | None:
    """The server's samples; None if it has no such page, or publishes none of ours."""
    page = await read_page(client, f"{base}/metrics")
    if page is None:
        return None
    samples = _parse_metrics(page.text)
    return None if _rows(samples, "prefill") is None else samples


#: The metric that is 1 where padding is free.
_FREE = "jitney_padding_is_free"


def _rows(samples: Samples, kind: str) -> float | None:
    return samples.get(("jitney_rows_total", (("kind", kind),)))


def bill_between(before: Samples, after: Samples, seconds: float) -> Bill:
    """Rows and device time by kind between two readings, `seconds` apart; idle is the rest of
    `seconds`.
    """
    rows = {kind: _rows_between(before, after, kind) for kind in ROW_KINDS}
    busy_s = _step_seconds(after) - _step_seconds(before)
    is_free = bool(after.get((_FREE, ())))
    return Bill.of_totals(rows, busy_s, seconds, padding_is_free=is_free)


def _rows_between(before: Samples, after: Samples, kind: str) -> int:
    return round((_rows(after, kind) or 0) - (_rows(before, kind) or 0))


def _step_seconds(samples: Samples) -> float:
    return sum(value for (name, _), value in samples.items() if name == "jitney_step_seconds_sum")


def queue_mean(before: Samples, after: Samples) -> float | None:
    """Mean wait in the server's queue, seconds, of who boarded between two readings; None if nobody
    did.
    """
    count = _growth("jitney_queue_seconds_count", before, after)
    if count <= 0:
        return None
    return _growth("jitney_queue_seconds_sum", before, after) / count


def _growth(name: str, before: Samples, after: Samples) -> float:
    return after.get((name, ()), 0.0) - before.get((name, ()), 0.0)

"""What a Jitney server says of a run at /metrics: the ledger (`jitney_rows_total`) and the queue,
as differences.
"""

from __future__ import annotations

import re

import httpx

from jitney.engine.records import ROW_KINDS
from jitney.engine.telemetry.cost import IDLE, NANO, SPLIT_ORDER, Line

SAMPLE = re.compile(r"^(jitney_\w+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|\+Inf)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')

#: (name, sorted labels) -> value.
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse_metrics(text: str) -> Samples:
    """Our samples of a page in Prometheus' text format."""
    found: Samples = {}
    for line in text.splitlines():
        if match := SAMPLE.match(line):
            name, labels, value = match.groups()
            found[name, tuple(sorted(LABEL.findall(labels or "")))] = float(value)
    return found


async def read_metrics(client: httpx.AsyncClient, base: str) -> Samples | None:
    """The server's samples; None if it has no such page, or publishes none of ours."""
    try:
        response = await client.get(f"{base}/metrics")
    except httpx.HTTPError:
        return None
    samples = parse_metrics(response.text) if response.status_code == 200 else {}
    return samples if rows(samples, "prefill") is not None else None


def rows(samples: Samples, kind: str) -> float | None:
    return samples.get(("jitney_rows_total", (("kind", kind),)))


def bill_between(before: Samples, after: Samples, seconds: float) -> dict[str, Line]:
    """Rows and device time by kind between two readings, `seconds` apart.

    The server tells the time of all steps together, so it is split over the rows of all steps
    alike, unlike a bill made from step records; idle is the rest of `seconds`.
    """
    counts = {
        kind: round((rows(after, kind) or 0) - (rows(before, kind) or 0)) for kind in ROW_KINDS
    }
    busy = round((step_seconds(after) - step_seconds(before)) * NANO)
    total, edge, lines = max(1, sum(counts.values())), 0, {}
    passed = 0
    for kind in SPLIT_ORDER:
        passed += counts[kind]
        lines[kind] = Line(counts[kind], busy * passed // total - edge)
        edge = busy * passed // total
    return {kind: lines[kind] for kind in ROW_KINDS} | {
        IDLE: Line(0, max(0, round(seconds * NANO) - busy))
    }


def step_seconds(samples: Samples) -> float:
    """Device time of all steps since the server started."""
    return sum(value for (name, _), value in samples.items() if name == "jitney_step_seconds_sum")


def queue_mean(before: Samples, after: Samples) -> float | None:
    """Mean wait in the server's queue, seconds, of who boarded between two readings; None if nobody
    did.
    """
    count, total = (
        after.get((name, ()), 0.0) - before.get((name, ()), 0.0)
        for name in ("jitney_queue_seconds_count", "jitney_queue_seconds_sum")
    )
    return total / count if count > 0 else None

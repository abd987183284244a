"""The names of a server's metrics, and the names that a query uses."""

from __future__ import annotations

import re

from api_fakes import make_app

from jitney.engine.fleet.metrics import FleetMetrics

_TYPE = re.compile(r"^# TYPE (jitney_\w+) (\w+)$", re.MULTILINE)


def metric_names() -> set[str]:
    """The names of all series that `/metrics` of an engine or of a fleet declares."""
    text = make_app().state.service.metrics.render().decode()
    text += FleetMetrics(dict).render().decode()
    names: set[str] = set()
    for name, kind in _TYPE.findall(text):
        if kind == "histogram":
            names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(name)
    return names


def named_in(text: str) -> set[str]:
    """The names of our metrics in a query."""
    return set(re.findall(r"\bjitney_\w+", text))

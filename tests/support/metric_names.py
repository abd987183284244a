"""The names under which a server's metrics can be asked for."""

from __future__ import annotations

import re

from api_fakes import make_app

from jitney.engine.fleet.metrics import FleetMetrics

_TYPE = re.compile(r"^# TYPE (jitney_\w+) (\w+)$", re.MULTILINE)


def metric_names() -> set[str]:
    """Of every series that `/metrics` declares, of an engine or of a fleet."""
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
    """Metrics of ours that a query names."""
    return set(re.findall(r"\bjitney_\w+", text))

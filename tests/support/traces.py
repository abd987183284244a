"""Trace files in the format of other tools."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from jitney.engine.common.trace import Arrival, TraceLine


def write_trace(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write the arrivals, one JSON object a line."""
    lines = [TraceLine(**msgspec.structs.asdict(arrival)) for arrival in arrivals]
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))

"""What `jitney top` draws: seats, figures, the ledger and the newest notes, as one rich
renderable.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from jitney.dashboard.replica import Replica, SeatView
from jitney.engine.telemetry.row_kinds import ROW_KIND_TABLE

#: Seconds that rates look back.
WINDOW_S = 3.0
LEVELS = "▁▂▃▄▅▆▇█"
#: Glyph and style of a seat; a decoding one shows how far it has come instead.
SEATS = {"free": ("·", "bright_black"), "prefill": ("»", "bold yellow"), "held": ("×", "red")}
STATES = {"ready": "green", "loading": "yellow", "draining": "yellow", "dead": "bold red"}
BAR = 60
MAX_NOTES = 4


class Rates:
    """Differences of the totals over the last seconds."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, dict[str, Any]]] = deque()

    def add(self, replica: Replica) -> None:
        """A new frame; times that go back mean another server."""
        if self._kept and replica.t < self._kept[-1][0]:
            self._kept.clear()
        self._kept.append((replica.t, replica.metrics))
        while replica.t - self._kept[0][0] > WINDOW_S:
            self._kept.popleft()

    def rows(self) -> dict[str, int]:
        """Computed rows by kind within the window."""
        if not self._kept:
            return {}
        first, last = self._kept[0][1]["rows"], self._kept[-1][1]["rows"]
        return {kind: last[kind] - first[kind] for kind in last}

    def per_second(self, kind: str) -> float | None:
        """Rows of a kind a second; None before there are two frames."""
        span = self._kept[-1][0] - self._kept[0][0] if self._kept else 0.0
        return self.rows()[kind] / span if span > 0 else None

    def step_ms(self) -> float | None:
        """Mean time of a step, in milliseconds; None if there was none."""
        if not self._kept:
            return None
        first, last = self._kept[0][1], self._kept[-1][1]
        steps = sum(last["steps"].values()) - sum(first["steps"].values())
        return 1000 * (last["step_s"] - first["step_s"]) / steps if steps else None


class SeatGrid:
    """One character a seat, as many in a row as fit, in groups of eight."""

    def __init__(self, seats: list[SeatView]):
        self.seats = seats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        groups = max(1, (options.max_width - 6) // 9)
        for first in range(0, len(self.seats), groups * 8):
            line = Text(f"{first:>4}  ", "bright_black")
            for offset, seat in enumerate(self.seats[first : first + groups * 8]):
                if offset and offset % 8 == 0:
                    line.append(" ")
                line.append(*cell(seat))
            yield line


def cell(seat: SeatView) -> tuple[str, str]:
    """Glyph and style of a seat."""
    if seat.state != "decode":
        return SEATS.get(seat.state, ("?", ""))
    share = seat.n_output / seat.max_tokens if seat.max_tokens else 0.0
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))], "green"


def picture(replica: Replica, rates: Rates, url: str, trouble: str = "") -> Group:
    """All of it."""
    parts: list[Any] = [title(replica, url), Text(headline(replica), "bold")]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    if replica.seats is not None:
        parts += [
            figures(replica, rates),
            Text(),
            SeatGrid(replica.seats),
            legend(),
            Text(),
            ledger(rates.rows()),
        ]
    parts += [
        Text(f"{note['level']}: {note['message']}", "red" if note["level"] == "error" else "yellow")
        for note in replica.notes[-MAX_NOTES:]
    ]
    return Group(*parts)


def title(replica: Replica, url: str) -> Text:
    info, text = replica.info, Text("Jitney ", "bold")
    text.append(replica.state, STATES.get(replica.state, ""))
    text.append(
        f"  {info['model']} on {info['device']}, {info['policy']}, {info['kernels']} kernels"
        if info
        else ""
    )
    wrong = [proof["kernel"] for proof in info.get("proofs", ()) if not is_right(proof)]
    if wrong:
        text.append(f"  without {', '.join(wrong)}, wrong here", "bold red")
    return text.append(f"  {url}", "bright_black")


def is_right(proof: dict[str, Any]) -> bool:
    """Whether a kernel may serve; an error of None is one that is infinite."""
    return proof["error"] is not None and proof["error"] <= proof["limit"]


def headline(replica: Replica) -> str:
    """Is it full, and does anybody wait?"""
    if replica.seats is None:
        news = replica.progress
        return f"{news['stage']} {news['done']} of {news['total']}" if news else replica.state
    taken = sum(seat.state != "free" for seat in replica.seats)
    waiting = replica.metrics.get("waiting", 0)
    queue = f"{waiting} waiting" if waiting else "nobody waits"
    full = "Full: all" if taken == len(replica.seats) else f"{taken} of"
    return f"{full} {len(replica.seats)} seats taken, {queue}"


def figures(replica: Replica, rates: Rates) -> Columns:
    """The main numbers, as many in a row as fit."""
    counts, latency = replica.counts, replica.metrics.get("latency") or {}
    pages = sum(counts.values())
    used = counts.get("held", 0) + counts.get("shared", 0)
    told = {
        "output tok/s": number(rates.per_second("decode")),
        "prompt tok/s": number(rates.per_second("prefill")),
        "step ms": number(rates.step_ms(), 1),
        "pages used": f"{used / pages:.0%}" if pages else "–",
        "wait p95": duration(latency, "wait"),
        "first token p95": duration(latency, "ttft"),
        "between tokens p95": duration(latency, "itl"),
        "preempted": str(replica.metrics.get("preemptions", 0)),
    }
    tiles = [
        Text.assemble((name, "bright_black"), "\n", (value, "bold")) for name, value in told.items()
    ]
    return Columns(tiles, padding=(0, 3))


def legend() -> Text:
    text = Text("      ")
    for name, (glyph, style) in SEATS.items():
        text.append(glyph, style).append(f" {name}   ", "bright_black")
    return text.append(f"{LEVELS[0]}..{LEVELS[-1]}", "green").append(
        " decode, by share of its limit", "bright_black"
    )


def ledger(rows: dict[str, int]) -> Text:
    """Where the rows of the last seconds went: a bar, and the shares in words."""
    total = sum(rows.values())
    if not total:
        return Text("no rows computed in the last seconds", "bright_black")
    bar, words = Text(), Text("\n")
    for kind in ROW_KIND_TABLE.values():
        share = rows.get(kind.name, 0) / total
        bar.append("█" * round(share * BAR), kind.terminal)
        if rows.get(kind.name):
            words.append(f"{kind.label} {share:.0%}   ", kind.terminal)
    return bar.append(words)


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def duration(latency: dict[str, Any], name: str) -> str:
    """The 95th percentile as people read it."""
    told = latency.get(name)
    if not told:
        return "–"
    seconds = told["p95"]
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"

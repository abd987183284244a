"""`jitney top`: the page's twin in a terminal, over the same feed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from jitney.dashboard.replica import ReplicaView, SeatView
from jitney.dashboard.sse import Note, decode
from jitney.engine.common.messages import Progress
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.common.terminal import console
from jitney.engine.config import KEY_FLAG, Command, Flag, FlagGroup, short

if TYPE_CHECKING:
    from rich.live import Live

_DEFAULT_URL = "http://127.0.0.1:8000"
#: Seconds between two drawings.
_DRAW_S = 0.25
#: Seconds between two attempts to connect.
_RETRY_S = 2.0
#: Seconds that --once waits until rates are known.
_RATES_S = 1.2
#: Seconds that rates look back.
_WINDOW_S = 3.0
_LEVELS = "▁▂▃▄▅▆▇█"
#: Glyph and style of a seat; a decoding one shows how far it has come instead.
_SEATS = {"free": ("·", "bright_black"), "prefill": ("»", "bold yellow"), "held": ("×", "red")}
#: Style of the engine's state.
_STATES = {
    "ready": "green",
    "loading": "yellow",
    "restarting": "bold red",
    "draining": "yellow",
    "dead": "bold red",
}
_DIM = "bright_black"
#: What stands for a figure that is not known.
_UNKNOWN = "–"
#: Characters of the ledger's bar.
_BAR = 60
_MAX_NOTES = 4
_URL = Flag.of("url", "the engine", _DEFAULT_URL, nargs="?", metavar="URL")
_FLAGS = (_URL, Flag.switch("--once", "print one picture and leave"), KEY_FLAG)
_COMMAND = Command(
    "top",
    "Watch an engine's seats in the terminal, here or over ssh.",
    [FlagGroup(_FLAGS)],
    usage="jitney top [URL] [FLAG ...]",
)


def top_command(arguments: Sequence[str]) -> int:
    """Watch until interrupted; exit status 0. With --once: 0 after one picture."""
    args = _COMMAND.parse(arguments)
    show = _once if args.once else _watch
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(args.url, args.engine_key()))
    return 0


async def _once(url: str, key: str) -> None:
    """One picture, after a moment in which rates can be known. Raises Unreachable."""
    watched = _Watched(url, key)
    try:
        await _until_known(watched)
    finally:
        await watched.engine.close()
    console(highlight=False).print(watched.picture())


async def _until_known(watched: _Watched) -> None:
    """Take in frames until rates are known, or the feed ends."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            async for now in watched.frames():
                if watched.replica.t and limit.when() is None:
                    limit.reschedule(now + _RATES_S)


async def _watch(url: str, key: str) -> None:
    """Pictures for ever; an engine that goes away is waited for. Raises Unreachable if it was never
    there.
    """
    from rich.live import Live

    watched = _Watched(url, key)
    live = Live(auto_refresh=False, screen=sys.stdout.isatty(), console=console())
    try:
        while True:
            trouble = await _draw_feed(watched, live)
            live.update(watched.picture(trouble), refresh=True)
            await asyncio.sleep(_RETRY_S)
    finally:
        live.stop()
        await watched.engine.close()


async def _draw_feed(watched: _Watched, live: Live) -> str:
    """Until the feed ends; why it did. Raises Unreachable if it never began."""
    from jitney.dashboard.remote import Unreachable

    try:
        await _draw_frames(watched, live)
    except Unreachable as error:
        if watched.replica.hello is None:
            raise
        return str(error)
    return "the feed ended; connecting again"


async def _draw_frames(watched: _Watched, live: Live) -> None:
    drawn = 0.0
    async for now in watched.frames():
        live.start()
        if now - drawn >= _DRAW_S:
            drawn = now
            live.update(watched.picture(), refresh=True)


class _Watched:
    """An engine, and what its feed has said so far."""

    def __init__(self, url: str, key: str):
        from jitney.dashboard.remote import RemoteEngine

        self.engine = RemoteEngine(url, key)
        self.replica = ReplicaView()
        self.rates = _Rates()

    def picture(self, trouble: str = "") -> Group:
        return _picture(self.replica, self.rates, self.engine.url, trouble)

    async def frames(self) -> AsyncIterator[float]:
        """Keep `replica` and `rates` up to date; yields the time (loop seconds) of each frame."""
        async for event in self.engine.feed():
            if self._is_frame(event):
                self.rates.add(self.replica)
                yield asyncio.get_running_loop().time()

    def _is_frame(self, event: bytes) -> bool:
        """Take in an event; True for one that shows the engine as it is now."""
        name, data = decode(event)
        self.replica.apply(name, data)
        return name in ("key_frame", "delta")


class _Rates:
    """Differences of the totals over the last seconds."""

    def __init__(self) -> None:
        #: Time and totals of the frames within the window, the oldest first.
        self._frames: deque[tuple[float, JsonDict]] = deque()

    def add(self, replica: ReplicaView) -> None:
        """A new frame; times that go back mean another server."""
        frames = self._frames
        if frames and replica.t < frames[-1][0]:
            frames.clear()
        frames.append((replica.t, replica.metrics))
        while replica.t - frames[0][0] > _WINDOW_S:
            frames.popleft()

    def rows(self) -> dict[str, int]:
        """Computed rows by kind within the window."""
        if not self._frames:
            return {}
        first, last = self._ends()
        return {kind: count - first["rows"][kind] for kind, count in last["rows"].items()}

    def per_second(self, kind: str) -> float | None:
        """Rows of a kind a second; None before there are two frames."""
        if not self._frames:
            return None
        span = self._frames[-1][0] - self._frames[0][0]
        return self.rows()[kind] / span if span > 0 else None

    def step_ms(self) -> float | None:
        """Mean time of a step, in milliseconds; None if there was none."""
        if not self._frames:
            return None
        first, last = self._ends()
        steps = sum(last["steps"].values()) - sum(first["steps"].values())
        seconds = last["step_s"] - first["step_s"]
        return 1000 * seconds / steps if steps else None

    def _ends(self) -> tuple[JsonDict, JsonDict]:
        """The oldest and the newest totals."""
        return self._frames[0][1], self._frames[-1][1]


class _SeatGrid:
    """One character a seat, as many in a row as fit, in groups of eight."""

    def __init__(self, seats: list[SeatView]):
        self.seats = seats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        in_a_row = 8 * max(1, (options.max_width - 6) // 9)
        for first in range(0, len(self.seats), in_a_row):
            yield self._row(first, first + in_a_row)

    def _row(self, first: int, end: int) -> Text:
        row = Text(f"{first:>4}  ", _DIM)
        for offset, seat in enumerate(self.seats[first:end]):
            if offset and offset % 8 == 0:
                row.append(" ")
            row.append(*_seat_cell(seat))
        return row


def _seat_cell(seat: SeatView) -> tuple[str, str]:
    """Glyph and style of a seat."""
    if seat.state != "decode":
        return _SEATS.get(seat.state, ("?", ""))
    share = seat.n_output / seat.max_tokens if seat.max_tokens else 0.0
    level = min(len(_LEVELS) - 1, int(share * len(_LEVELS)))
    return _LEVELS[level], "green"


def _picture(replica: ReplicaView, rates: _Rates, url: str, trouble: str = "") -> Group:
    """All of it. trouble: why the picture may be old."""
    parts: list[RenderableType] = [_title(replica, url), Text(_headline(replica), "bold")]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    if replica.seats is not None:
        parts += _running(replica, rates, replica.seats)
    parts += map(_note, replica.notes[-_MAX_NOTES:])
    return Group(*parts)


def _running(replica: ReplicaView, rates: _Rates, seats: list[SeatView]) -> list[RenderableType]:
    """Lines for a running engine."""
    ledger = _ledger(rates.rows())
    return [_figures(replica, rates), Text(), _SeatGrid(seats), _legend(), Text(), ledger]


def _note(note: Note) -> Text:
    style = "red" if note["level"] == "error" else "yellow"
    return Text(f"{note['level']}: {note['message']}", style)


def _title(replica: ReplicaView, url: str) -> Text:
    text = Text("Jitney ", "bold")
    text.append(replica.state, _STATES.get(replica.state, ""))
    info = replica.info
    if info:
        text.append("  {model} on {device}, {policy}, {kernels} kernels".format_map(info))
        text.append(_configuration(info), _DIM)
    wrong = ", ".join(_wrong_kernels(info))
    if wrong:
        text.append(f"  without {wrong}, wrong here", "bold red")
    return text.append(f"  {url}", _DIM)


def _configuration(info: JsonDict) -> str:
    """The beginning of its digest; empty for an engine that tells none."""
    digest = short(info.get("config_digest", ""))
    return f", config {digest}" if digest else ""


def _wrong_kernels(info: JsonDict) -> list[str]:
    return [proof["kernel"] for proof in info.get("proofs", ()) if not _is_right(proof)]


def _is_right(proof: JsonDict) -> bool:
    """Whether a kernel may serve; an error of None is one that is infinite."""
    return proof["error"] is not None and proof["error"] <= proof["limit"]


def _headline(replica: ReplicaView) -> str:
    """Is it full, and does anybody wait?"""
    if replica.seats is None:
        return _loading(replica)
    seats, taken = len(replica.seats), sum(seat.state != "free" for seat in replica.seats)
    queue = _queue(replica.metrics.get("waiting", 0))
    if taken == seats:
        return f"Full: all {seats} seats taken, {queue}"
    return f"{taken} of {seats} seats taken, {queue}"


def _queue(waiting: int) -> str:
    return f"{waiting} waiting" if waiting else "nobody waits"


def _loading(replica: ReplicaView) -> str:
    progress = replica.progress
    if not progress:
        return replica.state
    stage, done, total = (progress[name] for name in ("stage", "done", "total"))
    return f"{stage} {Progress(stage, done, total).so_far}"


def _figures(replica: ReplicaView, rates: _Rates) -> Columns:
    figures = _rates(rates) | _latencies(replica)
    tiles = [Text.assemble((name, _DIM), "\n", (value, "bold")) for name, value in figures.items()]
    return Columns(tiles, padding=(0, 3))


def _rates(rates: _Rates) -> dict[str, str]:
    return {
        "output tok/s": _number(rates.per_second("decode")),
        "prompt tok/s": _number(rates.per_second("prefill")),
        "step ms": _number(rates.step_ms(), 1),
    }


def _latencies(replica: ReplicaView) -> dict[str, str]:
    latency = replica.metrics.get("latency") or {}
    return {
        "pages used": _pages_used(replica.counts),
        "wait p95": _p95(latency.get("wait")),
        "first token p95": _p95(latency.get("ttft")),
        "between tokens p95": _p95(latency.get("itl")),
        "preempted": str(replica.metrics.get("preemptions", 0)),
    }


def _pages_used(counts: dict[str, int]) -> str:
    pages = sum(counts.values())
    used = counts.get("held", 0) + counts.get("shared", 0)
    return f"{used / pages:.0%}" if pages else _UNKNOWN


def _legend() -> Text:
    text = Text("      ")
    for name, (glyph, style) in _SEATS.items():
        text.append(glyph, style).append(f" {name}   ", _DIM)
    text.append(f"{_LEVELS[0]}..{_LEVELS[-1]}", "green")
    return text.append(" decode, by share of its limit", _DIM)


def _ledger(rows: dict[str, int]) -> Text:
    """Where the rows of the last seconds went: a bar, and the shares in words."""
    total = sum(rows.values())
    if not total:
        return Text("no rows computed in the last seconds", _DIM)
    bar, words = Text(), Text("\n")
    for name, kind in ROW_KIND_TABLE.items():
        share = rows.get(name, 0) / total
        bar.append("█" * round(share * _BAR), kind.terminal)
        if share:
            words.append(f"{kind.label} {share:.0%}   ", kind.terminal)
    return bar.append(words)


def _number(value: float | None, digits: int = 0) -> str:
    return _UNKNOWN if value is None else f"{value:,.{digits}f}"


def _p95(summary: dict[str, float] | None) -> str:
    """The 95th percentile of times in seconds, as people read it."""
    if not summary:
        return _UNKNOWN
    seconds = summary["p95"]
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"

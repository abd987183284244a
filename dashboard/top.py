"""`jitney top`: the live view of an engine in a terminal, over the page's feed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from jitney.dashboard.replica import ReplicaView, SeatView
from jitney.dashboard.sse import Note, decode
from jitney.engine.common.engine_info import short_digest
from jitney.engine.common.messages import Progress
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.common.tasks import beside
from jitney.engine.common.terminal import console
from jitney.engine.config import KEY_FLAG, Command, Flag, FlagGroup

if TYPE_CHECKING:
    from jitney.dashboard.terminal_screen import Screen

_DEFAULT_URL = "http://127.0.0.1:8000"
#: Seconds between two drawings.
_DRAW_S = 0.25
#: Seconds between two attempts to connect.
_RETRY_S = 2.0
#: Seconds that --once waits until rates are known.
_RATES_S = 1.2
#: Seconds between two requests of a listing.
_ASK_S = 2.0
#: Seconds that rates look back, and that hits of the prefix cache and refusals are counted.
_WINDOW_S, _MINUTE_S = 3.0, 60.0
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
#: Placeholder of an unknown figure.
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
    """Show the engine until "q" is pressed; wait for an engine that is lost. Raises Unreachable if
    it never answered.
    """
    from jitney.dashboard.terminal_screen import Screen, reading_keys

    watched = _Watched(url, key)
    try:
        with Screen(console()) as screen:
            viewer = _Viewer(watched, screen)
            with reading_keys(viewer.press):
                await viewer.run()
    finally:
        await watched.engine.close()


class _Viewer:
    """The terminal views of an engine, and their keys."""

    def __init__(self, watched: _Watched, screen: Screen):
        self._watched = watched
        self._screen = screen
        self._view = _VIEWS["1"]
        #: The newest answer of the view, None before the first; why pictures may be old.
        self._listing: JsonDict | None = None
        self._trouble = ""
        self._switched = asyncio.Event()
        self._left = asyncio.Event()

    def press(self, keys: str) -> None:
        for key in keys.lower():
            if key == "q":
                self._left.set()
            elif key in _VIEWS:
                self._view, self._listing = _VIEWS[key], None
                self._switched.set()
                self._draw()

    async def run(self) -> None:
        """Run until "q" is pressed. Raises Unreachable if the engine never answered."""
        async with beside(self._follow(), self._ask(), self._left.wait()) as tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _follow(self) -> None:
        """Read the feed for ever. Raises Unreachable if the first connection fails."""
        from jitney.dashboard.remote import Unreachable

        while True:
            try:
                await self._draw_frames()
                self._trouble = "the feed ended; connecting again"
            except Unreachable as error:
                if self._watched.replica.hello is None:
                    raise
                self._trouble = str(error)
            self._draw()
            await asyncio.sleep(_RETRY_S)

    async def _draw_frames(self) -> None:
        drawn = 0.0
        async for now in self._watched.frames():
            if now - drawn >= _DRAW_S:
                drawn, self._trouble = now, ""
                self._draw()

    async def _ask(self) -> None:
        """Refresh the listing of the view regularly, for ever."""
        while True:
            view = self._view
            if view.path:
                listing = await self._watched.ask(view.path)
                if view is self._view:
                    self._listing = listing
                    self._draw()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_S):
                    await self._switched.wait()
            self._switched.clear()

    def _draw(self) -> None:
        if self._watched.replica.hello is None:
            return
        if self._view.path:
            picture = _listed(self._view, self._listing, self._trouble)
        else:
            picture = self._watched.picture(self._trouble)
        self._screen.show(picture, _help(self._view))


class _View(NamedTuple):
    """The view that a key shows."""

    name: str
    #: Question to the engine's page, and the field of its answer with the rows; empty: the
    #: overview, of the feed.
    path: str = ""
    field: str = ""
    #: Heading, and text of a row.
    columns: tuple[tuple[str, Callable[[JsonDict], str]], ...] = ()


def _cell(name: str) -> Callable[[JsonDict], str]:
    def text(row: JsonDict) -> str:
        value = row.get(name)
        return "" if value is None else str(value)

    return text


def _time(name: str) -> Callable[[JsonDict], str]:
    """Seconds of a field, as people read them."""
    return lambda row: _UNKNOWN if row.get(name) is None else _seconds(row[name])


def _seat(row: JsonDict) -> str:
    return "" if row["seat"] < 0 else str(row["seat"])


def _clock(row: JsonDict) -> str:
    return time.strftime("%d %b %H:%M:%S", time.localtime(row["t"]))


def _hit(row: JsonDict) -> str:
    concerned = [f"{n} {unit}" for unit, n in row["hit"].items()]
    if row["silence_s"] is not None:
        concerned.append(f"no tokens for {_seconds(row['silence_s'])}")
    return ", ".join(concerned)


#: By the keys that show them.
_VIEWS = {
    "1": _View("overview"),
    "2": _View(
        "requests",
        "requests?limit=100",
        "requests",
        (
            ("request", _cell("request")),
            ("state", _cell("state")),
            ("user", _cell("user")),
            ("seat", _seat),
            ("prompt", _cell("n_prompt")),
            ("output", lambda row: f"{row['n_output']} / {row['max_tokens']}"),
            ("waited", _time("queued_s")),
            ("first token", _time("ttft_s")),
            ("in all", _time("e2e_s")),
            ("end", lambda row: row["code"] or row["finish"]),
        ),
    ),
    "3": _View(
        "incidents",
        "incidents?limit=50",
        "incidents",
        (
            ("when", _clock),
            ("kind", _cell("code")),
            ("what", _cell("message")),
            ("concerned", _hit),
            ("what to change", _cell("advice")),
        ),
    ),
    "4": _View(
        "tenants",
        "tenants",
        "tenants",
        (
            ("tenant", _cell("name")),
            ("seats", _cell("seats")),
            ("waiting", _cell("waiting")),
            ("requests", _cell("requests")),
            ("refused", _cell("refused")),
            ("prompt tokens", _cell("prompt_tokens")),
            ("output tokens", _cell("output_tokens")),
            ("share of seats", lambda row: _percent(row.get("share"))),
            ("wait p95", lambda row: _p95(row.get("wait_s"))),
        ),
    ),
}


def _help(shown: _View) -> Text:
    """The keys, that of the view that is shown in bold."""
    text = Text(no_wrap=True)
    for key, view in _VIEWS.items():
        text.append(f" {key} {view.name} ", "reverse" if view is shown else _DIM)
    return text.append("  q quits", _DIM)


def _listed(view: _View, listing: JsonDict | None, trouble: str) -> Group:
    """Rows of a listing. trouble: why the picture may be old."""
    parts: list[RenderableType] = [Text(f"Jitney {view.name}", "bold")]
    trouble = trouble or (listing or {}).get("trouble", "")
    if trouble:
        parts.append(Text(trouble, "bold red"))
    rows = (listing or {}).get(view.field)
    if rows:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading, _ in view.columns:
            table.add_column(Text(heading, _DIM))
        for row in rows:
            table.add_row(*(Text(text(row)) for _, text in view.columns))
        parts.append(table)
    elif not trouble:
        parts.append(Text("asking the engine" if rows is None else "there are none", _DIM))
    return Group(*parts)


class _Watched:
    """An engine and its state by the feed."""

    def __init__(self, url: str, key: str):
        from jitney.dashboard.remote import RemoteEngine

        self.engine = RemoteEngine(url, key)
        self.replica = ReplicaView()
        self.rates = _Rates()
        self.minute = _Rates(_MINUTE_S)

    def picture(self, trouble: str = "") -> Group:
        return _picture(self.replica, self.rates, self.engine.url, trouble, self.minute)

    async def ask(self, path: str) -> JsonDict:
        """An answer of the page; `trouble` tells why there is none."""
        from jitney.dashboard.remote import Unreachable

        name, _, query = path.partition("?")
        try:
            async with self.engine.answer("GET", name, query=query) as answer:
                if answer.status_code != 200:
                    return {"trouble": f"{name}: the page answers {answer.status_code}"}
                return msgspec.json.decode(await answer.aread())
        except (Unreachable, msgspec.MsgspecError) as error:
            return {"trouble": str(error)}

    async def frames(self) -> AsyncIterator[float]:
        """Keep `replica` and `rates` up to date; yields the time (loop seconds) of each frame."""
        async for event in self.engine.feed():
            if self._is_frame(event):
                self.rates.add(self.replica)
                self.minute.add(self.replica)
                yield asyncio.get_running_loop().time()

    def _is_frame(self, event: bytes) -> bool:
        """Take in an event; True for one that shows the engine as it is now."""
        name, data = decode(event)
        self.replica.apply(name, data)
        return name in ("key_frame", "delta")


class _Rates:
    """Differences of the totals over the last seconds."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        #: Time and totals of the frames within the window, the oldest first.
        self._frames: deque[tuple[float, JsonDict]] = deque()

    def add(self, replica: ReplicaView) -> None:
        """Add a frame; a time before the last one means another server."""
        frames = self._frames
        if frames and replica.t < frames[-1][0]:
            frames.clear()
        frames.append((replica.t, replica.metrics))
        while replica.t - frames[0][0] > self._window_s:
            frames.popleft()

    def grown(self, total: Callable[[JsonDict], float]) -> float:
        """How much a total has grown within the window."""
        if not self._frames:
            return 0
        return total(self._frames[-1][1]) - total(self._frames[0][1])

    def rows(self) -> dict[str, int]:
        """Computed rows by kind within the window."""
        if not self._frames:
            return {}
        first, last = self._frames[0][1]["rows"], self._frames[-1][1]["rows"]
        return {kind: count - first[kind] for kind, count in last.items()}

    def refused(self) -> float:
        """Requests that were refused within the window."""
        return self.grown(lambda totals: sum(totals.get("rejected", {}).values()))

    def prefix_hits(self) -> float | None:
        """Share of the prompt tokens that were found in the prefix cache; None without any."""
        cached = self.grown(lambda totals: totals.get("cached_tokens", 0))
        read = self.grown(lambda totals: totals["rows"]["prefill"])
        return cached / (cached + read) if cached + read else None

    def per_second(self, kind: str) -> float | None:
        """Rows of a kind a second; None before there are two frames."""
        span = self._frames[-1][0] - self._frames[0][0] if self._frames else 0
        return self.rows()[kind] / span if span > 0 else None

    def step_ms(self) -> float | None:
        """Mean time of a step, in milliseconds; None if there was none."""
        steps = self.grown(lambda totals: sum(totals["steps"].values()))
        return 1000 * self.grown(lambda totals: totals["step_s"]) / steps if steps else None


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
    if seat.state != "decode":
        return _SEATS.get(seat.state, ("?", ""))
    share = seat.n_output / seat.max_tokens if seat.max_tokens else 0.0
    level = min(len(_LEVELS) - 1, int(share * len(_LEVELS)))
    return _LEVELS[level], "green"


def _picture(
    replica: ReplicaView, rates: _Rates, url: str, trouble: str = "", minute: _Rates | None = None
) -> Group:
    """All of it. trouble: why the picture may be old; minute: `rates` over a minute."""
    parts: list[RenderableType] = [_title(replica, url), Text(_headline(replica), "bold")]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    if replica.seats is not None:
        figures = _figures(replica, rates, minute or rates)
        ledger = _ledger(rates.rows())
        parts += [figures, Text(), _SeatGrid(replica.seats), _legend(), Text(), ledger]
    parts += map(_note, replica.notes[-_MAX_NOTES:])
    return Group(*parts)


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
    """The beginning of the configuration's digest; empty if the engine reports none."""
    digest = short_digest(info.get("config_digest", ""))
    return f", config {digest}" if digest else ""


def _wrong_kernels(info: JsonDict) -> list[str]:
    return [proof["kernel"] for proof in info.get("proofs", ()) if not _is_right(proof)]


def _is_right(proof: JsonDict) -> bool:
    """Whether a kernel may serve; an error of None is one that is infinite."""
    return proof["error"] is not None and proof["error"] <= proof["limit"]


def _headline(replica: ReplicaView) -> str:
    if replica.seats is None:
        return _loading(replica)
    seats, n_taken = len(replica.seats), sum(seat.state != "free" for seat in replica.seats)
    queue = _queue(replica.metrics.get("waiting", 0))
    if n_taken == seats:
        return f"Full: all {seats} seats taken, {queue}"
    return f"{n_taken} of {seats} seats taken, {queue}"


def _queue(waiting: int) -> str:
    return f"{waiting} waiting" if waiting else "none waiting"


def _loading(replica: ReplicaView) -> str:
    progress = replica.progress
    if not progress:
        return replica.state
    stage, done, total = (progress[name] for name in ("stage", "done", "total"))
    return f"{stage} {Progress(stage, done, total).so_far}"


def _figures(replica: ReplicaView, rates: _Rates, minute: _Rates) -> Columns:
    figures = _rates(rates) | _latencies(replica) | _shares(replica, minute)
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
    predicted = replica.metrics.get("predicted_wait_s", 0.0)
    return {
        "estimated wait": _seconds(predicted) if predicted else "none",
        "wait p95": _p95(latency.get("wait")),
        "first token p50 / p95 / p99": _points(latency.get("ttft")),
        "between tokens p50 / p95 / p99": _points(latency.get("itl")),
    }


def _shares(replica: ReplicaView, minute: _Rates) -> dict[str, str]:
    device = replica.metrics.get("device") or {}
    shares = [device[name] for name in ("bandwidth", "operations") if device.get(name) is not None]
    return {
        "pages used": _pages_used(replica.counts),
        "prefix hits": _percent(minute.prefix_hits()),
        "device of its limit": _percent(max(shares, default=None)),
        "refused in a minute": str(minute.refused()),
        "preempted": str(replica.metrics.get("preemptions", 0)),
    }


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


def _pages_used(counts: dict[str, int]) -> str:
    pages = sum(counts.values())
    used = counts.get("held", 0) + counts.get("shared", 0)
    return _percent(used / pages if pages else None)


def _legend() -> Text:
    text = Text("      ")
    for name, (glyph, style) in _SEATS.items():
        text.append(glyph, style).append(f" {name}   ", _DIM)
    text.append(f"{_LEVELS[0]}..{_LEVELS[-1]}", "green")
    return text.append(" decode, by share of its limit", _DIM)


def _ledger(rows: dict[str, int]) -> Text:
    """Shares of the kinds of rows in the last seconds: a bar, and in words."""
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
    return _seconds(summary["p95"]) if summary else _UNKNOWN


def _points(summary: dict[str, float] | None) -> str:
    if not summary:
        return _UNKNOWN
    return " / ".join(_seconds(summary[name]) for name in ("p50", "p95", "p99") if name in summary)


def _seconds(seconds: float) -> str:
    """Seconds as people read them."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"

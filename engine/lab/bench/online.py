"""A measurement over HTTP: find the model, learn how long texts are there, warm up, send, and read
the ledger.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.records import ROW_KINDS
from jitney.engine.common.trace import Arrival
from jitney.engine.core import Bill
from jitney.engine.lab.bench.load import LoadResult, Watch, run_load
from jitney.engine.lab.bench.text import arrival_prose, prose
from jitney.engine.server import Answer, EndpointClient, RemoteEndpoint

#: Words of the texts by which the endpoint's tokens are learnt: at first few, then as many as the
#: longest prompt has, but no more than this.
_FEW_WORDS, _MANY_WORDS = 16, 160
#: Requests open while the capacity of a server is measured that does not say how many it runs at
#: once.
_UNKNOWN_STREAMS = 64
_SAMPLE = re.compile(r"^(jitney_\w+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|\+Inf)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

#: The metric that is 1 where padding is free.
_FREE = "jitney_padding_is_free"

type _SampleName = tuple[str, tuple[tuple[str, str], ...]]
#: (name, sorted labels) -> value.
type _Samples = dict[_SampleName, float]


class _Ruler(NamedTuple):
    """How many tokens a text has on an endpoint."""

    #: Of the template around it.
    fixed: float
    #: Of one word of a made-up prompt.
    per_word: float

    @classmethod
    def of(cls, one: int, many: int, words: int) -> _Ruler:
        """From the tokens of one word, and of `words`."""
        per_word = (many - one) / (words - 1)
        return cls(one - per_word, per_word)

    def words(self, n_tokens: int) -> int:
        """Words of a text that comes nearest to n_tokens, at least one."""
        return max(1, round((n_tokens - self.fixed) / self.per_word))


class EngineAbout(NamedTuple):
    """What an endpoint says of itself at /version; a text is empty where it says nothing of that
    kind.
    """

    version: str = ""
    device: str = ""
    platform: str = ""
    kernels: str = ""
    dtype: str = ""

    @classmethod
    async def read(cls, client: EndpointClient) -> EngineAbout:
        """What the endpoint's /version says; nothing where there is no such page."""
        about = await _read_json(client, "/version")
        if not isinstance(about, dict):
            return cls()
        return cls(*[str(about.get(name) or "") for name in cls._fields])

    def __str__(self) -> str:
        if not self.version and not self.device:
            return "an engine that does not say what it is"
        if not self.device:
            return f"version {self.version}"
        about = "version {version}, {dtype}, {kernels} kernels on {device} ({platform})"
        return about.format_map(self._asdict())


#: An endpoint without such a page.
_UNKNOWN_ENGINE = EngineAbout()


@dataclass(slots=True)
class OnlineRun:
    """What was measured."""

    endpoint: RemoteEndpoint
    load: LoadResult
    #: The server's own ledger over the run; None where it publishes none.
    bill: Bill | None = None
    #: Mean wait in its queue, seconds; None likewise.
    queue_mean_s: float | None = None
    #: What the endpoint says of itself.
    about: EngineAbout = _UNKNOWN_ENGINE


@dataclass(frozen=True, slots=True)
class Sending:
    """How requests are sent."""

    #: Most that are open at a time, 0: any number.
    concurrency: int
    #: A request comes when another one ends.
    closed: bool
    #: Short requests sent before anything is timed.
    warmup: int
    watch: Watch


@dataclass(frozen=True, slots=True)
class OnlineBench:
    """Measures traffic at an endpoint. Both methods raise ConfigError or JitneyError if it does not
    answer at all.
    """

    endpoint: RemoteEndpoint

    async def measure(self, arrivals: Sequence[Arrival], sending: Sending) -> OnlineRun:
        """Send the arrivals to the endpoint."""
        async with EndpointClient(self.endpoint) as client:
            session = await _Session.open(client, arrivals)
            return await session.measure(arrivals, sending)

    async def capacity(self, arrivals: Sequence[Arrival], streams: int, sending: Sending) -> float:
        """Requests a second that the endpoint serves when there is always a next one.

        A closed loop on the first requests, so many open at a time (0: twice the seats that the
        server lists, 64 where it lists none), at most three times as many in all; only the time in
        which all of them were open counts. JitneyError if too few were served to tell.
        """
        async with EndpointClient(self.endpoint) as client:
            session = await _Session.open(client, arrivals)
            streams = streams or await _likely_streams(client)
            some = arrivals[: 3 * streams]
            streams = min(streams, max(1, len(some) // 2))
            run = await session.measure(some, replace(sending, concurrency=streams, closed=True))
        return _served_per_second(run.load, streams)


def _longest(arrivals: Sequence[Arrival]) -> int:
    """Tokens of the longest prompt."""
    return max(arrival.n_prompt for arrival in arrivals)


async def _read_json(client: EndpointClient, path: str) -> Any:
    """The page's content; None where there is no such page."""
    page = await client.read_page(path)
    with contextlib.suppress(ValueError):
        return None if page is None else page.json()


@dataclass(slots=True)
class _Session:
    """An endpoint that is known already."""

    #: With its model named.
    client: EndpointClient
    ruler: _Ruler

    @classmethod
    async def open(cls, client: EndpointClient, arrivals: Sequence[Arrival]) -> _Session:
        """Find the model, and learn how long texts as long as the arrivals' prompts are."""
        await client.find_model()
        return cls(client, await _measured_ruler(client, _longest(arrivals)))

    async def measure(self, arrivals: Sequence[Arrival], sending: Sending) -> OnlineRun:
        """As `OnlineBench.measure`.

        Texts are new in every run: an endpoint that remembers prompts would answer those of an
        earlier run too fast.
        """
        salt = secrets.randbits(32)
        texts = self._texts(arrivals, salt)
        await self._warm_up(arrivals[: sending.warmup], sending.concurrency, salt)
        before = await _ServerMetrics.read(self.client)
        load = await self._send(arrivals, texts, sending)
        about = await EngineAbout.read(self.client)
        run = OnlineRun(self.client.endpoint, load, about=about)
        if before is not None:
            await self._read_bill(run, before)
        return run

    async def _send(
        self, arrivals: Sequence[Arrival], texts: Sequence[str], sending: Sending
    ) -> LoadResult:
        def send(number: int) -> Awaitable[Answer]:
            arrival = arrivals[number]
            return self._ask(texts[number], arrival.n_output, arrival.tenant)

        n, closed, watch = sending.concurrency, sending.closed, sending.watch
        return await run_load(send, arrivals, concurrency=n, closed=closed, watch=watch)

    def _texts(self, arrivals: Sequence[Arrival], salt: int) -> list[str]:
        words, numbered = self.ruler.words, enumerate(arrivals)
        return [arrival_prose(arrival, words, number, salt) for number, arrival in numbered]

    async def _read_bill(self, run: OnlineRun, before: _ServerMetrics) -> None:
        after = await _ServerMetrics.read(self.client)
        if after is not None:
            run.bill = after.bill_since(before, run.load.seconds)
            run.queue_mean_s = after.queue_mean_since(before)

    async def _ask(self, text: str, max_tokens: int, user: str = "") -> Answer:
        return await self.client.ask(self.client.endpoint.body(text, max_tokens, user))

    async def _warm_up(self, arrivals: Sequence[Arrival], concurrency: int, salt: int) -> None:
        """Send requests with such prompts and short outputs, as a closed loop."""

        def send(number: int) -> Awaitable[Answer]:
            arrival = arrivals[number]
            text = prose(self.ruler.words(arrival.n_prompt), [salt, number, 1])
            return self._ask(text, min(16, arrival.n_output))

        if arrivals:
            at_once = [Arrival(0.0, 1, 1)] * len(arrivals)
            await run_load(send, at_once, concurrency=concurrency or len(arrivals), closed=True)


async def _measured_ruler(client: EndpointClient, longest: int) -> _Ruler:
    """From two texts, the longer one nearly of `longest` tokens."""
    one, few = await _lengths(client, 1, _FEW_WORDS)
    if few <= one:
        raise JitneyError(
            f"the endpoint counts {one} and {few} tokens for texts of 1 and {_FEW_WORDS} words"
        )
    ruler = _Ruler.of(one, few, _FEW_WORDS)
    words = min(_MANY_WORDS, ruler.words(longest))
    if words <= _FEW_WORDS:
        return ruler
    (many,) = await _lengths(client, words)
    return _Ruler.of(one, many, words)


async def _lengths(client: EndpointClient, *words: int) -> list[int]:
    """Tokens of texts of so many words."""
    texts = [prose(count, seed=count) for count in words]
    return await client.count_tokens(texts)


def _served_per_second(load: LoadResult, streams: int) -> float:
    """While so many requests were open."""
    ends = sorted(request.end for request in load.requests if request.served)
    full = len(ends) - streams
    if full < 1:
        served = f"{len(ends)} of {len(load.requests)} requests"
        raise JitneyError(f"the endpoint's capacity is unknown: it served {served}")
    return full / (ends[full - 1] - load.started)


async def _likely_streams(client: EndpointClient) -> int:
    """Twice as many requests as the server runs at once, by its list of seats at /slots."""
    seats = await _read_json(client, "/slots")
    if isinstance(seats, list) and seats:
        return 2 * len(seats)
    return _UNKNOWN_STREAMS


@dataclass(frozen=True, slots=True)
class _ServerMetrics:
    """What a server's /metrics said at one time: the ledger (`jitney_rows_total`) and the queue."""

    samples: _Samples

    @classmethod
    async def read(cls, client: EndpointClient) -> _ServerMetrics | None:
        """Now; None if it has no such page, or publishes none of ours."""
        page = await client.read_page("/metrics")
        if page is None:
            return None
        metrics = cls.of(page.text)
        return None if metrics._rows("prefill") is None else metrics

    @classmethod
    def of(cls, text: str) -> _ServerMetrics:
        """Our samples of a page in Prometheus' text format."""
        matches = filter(None, map(_SAMPLE.match, text.splitlines()))
        return cls(dict(_sample(*match.groups()) for match in matches))

    def bill_since(self, before: _ServerMetrics, seconds: float) -> Bill:
        """Rows and device time by kind since another reading, `seconds` ago.

        The server tells the time of all steps together, so it is split over the rows of all steps
        alike, unlike a bill made from step records, or over all but padding where that is free;
        idle is the rest of `seconds`.
        """
        rows = {kind: self._rows_since(before, kind) for kind in ROW_KINDS}
        busy_s = self._step_seconds() - before._step_seconds()
        is_free = bool(self.samples.get((_FREE, ())))
        return Bill.of_totals(rows, busy_s, seconds, padding_is_free=is_free)

    def queue_mean_since(self, before: _ServerMetrics) -> float | None:
        """Mean wait in the server's queue, seconds, of who boarded since another reading; None if
        nobody did.
        """
        count = self._growth("jitney_queue_seconds_count", before)
        if count <= 0:
            return None
        return self._growth("jitney_queue_seconds_sum", before) / count

    def _rows(self, kind: str) -> float | None:
        return self.samples.get(("jitney_rows_total", (("kind", kind),)))

    def _rows_since(self, before: _ServerMetrics, kind: str) -> int:
        return round((self._rows(kind) or 0) - (before._rows(kind) or 0))

    def _step_seconds(self) -> float:
        named = self.samples.items()
        return sum(value for (name, _), value in named if name == "jitney_step_seconds_sum")

    def _growth(self, name: str, before: _ServerMetrics) -> float:
        return self.samples.get((name, ()), 0.0) - before.samples.get((name, ()), 0.0)


def _sample(name: str, labels: str | None, value: str) -> tuple[_SampleName, float]:
    return (name, tuple(sorted(_LABEL.findall(labels or "")))), float(value)

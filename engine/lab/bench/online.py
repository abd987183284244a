"""Measures an endpoint over HTTP: finds the model, measures the token lengths of texts, warms up,
sends the traffic, and reads the ledger.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.records import ROW_KINDS
from jitney.engine.common.scrape import Scrape
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.bench.client import Answer, EndpointClient, RemoteEndpoint
from jitney.engine.lab.bench.cost import Bill
from jitney.engine.lab.bench.load import LoadResult, Watch, ignore_progress, run_load
from jitney.engine.lab.bench.load_clients import run_shared_load
from jitney.engine.lab.bench.text import arrival_prose, prose

#: Words of the two texts that measure the endpoint's tokens per word: few, and as many as the
#: longest prompt has, at most this number.
_FEW_WORDS, _MANY_WORDS = 16, 160
#: Open requests in the measurement of the capacity of a server that does not report its seats.
_UNKNOWN_STREAMS = 64


class _Ruler(NamedTuple):
    #: Tokens of the template around a prompt.
    fixed: float
    #: Tokens per word of a made-up prompt.
    per_word: float

    @classmethod
    def of(cls, one: int, many: int, words: int) -> _Ruler:
        """The ruler from the tokens of one word (`one`) and of `words` words (`many`)."""
        per_word = (many - one) / (words - 1)
        return cls(one - per_word, per_word)

    def words(self, n_tokens: int) -> int:
        """Number of words whose text is nearest to n_tokens, at least one."""
        return max(1, round((n_tokens - self.fixed) / self.per_word))


class EngineAbout(NamedTuple):
    """Contents of an endpoint's /version; a field is empty if unknown."""

    version: str = ""
    device: str = ""
    platform: str = ""
    kernels: str = ""
    dtype: str = ""

    @classmethod
    async def read(cls, client: EndpointClient) -> EngineAbout:
        """Read the endpoint's /version; all fields are empty if there is no such page."""
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
    """A measurement at an endpoint."""

    endpoint: RemoteEndpoint
    load: LoadResult
    #: The server's own ledger over the run; None if it publishes none.
    bill: Bill | None = None
    #: Mean wait in its queue, seconds; None if unknown.
    queue_mean_s: float | None = None
    #: Contents of the endpoint's /version.
    about: EngineAbout = _UNKNOWN_ENGINE


@dataclass(frozen=True, slots=True)
class OnlineBench:
    """Measures traffic at an endpoint.

    Its methods raise ConfigError or JitneyError if the endpoint does not answer at all. warmup:
    number of short requests before each measurement, which are not timed. clients: number of
    sending processes.
    """

    endpoint: RemoteEndpoint
    warmup: int = 0
    clients: int = 1

    async def measure(
        self,
        arrivals: Sequence[Arrival],
        *,
        concurrency: int = 0,
        closed: bool = False,
        watch: Watch = ignore_progress,
    ) -> OnlineRun:
        """Send the arrivals to the endpoint. concurrency, closed: see `run_load`.

        Texts are new in every run, since an endpoint with a prefix cache would answer those of an
        earlier run too fast.
        """
        async with EndpointClient(self.endpoint) as client:
            await client.find_model()
            ruler = await _measured_ruler(client, max(each.n_prompt for each in arrivals))
            salt = secrets.randbits(32)
            words = ruler.words
            texts = [arrival_prose(each, words, n, salt) for n, each in enumerate(arrivals)]

            await self._warm_up(client, ruler, arrivals[: self.warmup], concurrency, salt)
            before = await _ServerMetrics.read(client)
            if self.clients > 1:
                load = await run_shared_load(
                    client.endpoint,
                    arrivals,
                    texts,
                    self.clients,
                    concurrency=concurrency,
                    closed=closed,
                    watch=watch,
                )
            else:
                load = await run_load(
                    lambda number: client.send(arrivals[number], texts[number]),
                    arrivals,
                    concurrency=concurrency,
                    closed=closed,
                    watch=watch,
                )
            run = OnlineRun(client.endpoint, load, about=await EngineAbout.read(client))
            after = None if before is None else await _ServerMetrics.read(client)
            if before is not None and after is not None:
                run.bill = after.bill_since(before, load.seconds)
                run.queue_mean_s = after.queue_mean_since(before)
            return run

    @staticmethod
    async def _warm_up(
        client: EndpointClient,
        ruler: _Ruler,
        arrivals: Sequence[Arrival],
        concurrency: int,
        salt: int,
    ) -> None:

        def send(number: int) -> Awaitable[Answer]:
            arrival = arrivals[number]
            text = prose(ruler.words(arrival.n_prompt), [salt, number, 1])
            return client.ask(client.endpoint.body(text, min(16, arrival.n_output)))

        if arrivals:
            at_once = [Arrival(0.0, 1, 1)] * len(arrivals)
            await run_load(send, at_once, concurrency=concurrency or len(arrivals), closed=True)

    async def capacity(
        self, arrivals: Sequence[Arrival], streams: int, watch: Watch = ignore_progress
    ) -> float:
        """Requests a second that the endpoint serves with a queue that is never empty.

        Measured in a closed loop of the first requests with `streams` open (0: twice the seats that
        the server lists, 64 if it lists none), at most three times as many in total. Only the time
        with that many open requests counts. Raises JitneyError if too few were served.
        """
        if not streams:
            async with EndpointClient(self.endpoint) as client:
                streams = await _likely_streams(client)
        some = arrivals[: 3 * streams]
        streams = min(streams, max(1, len(some) // 2))
        run = await self.measure(some, concurrency=streams, closed=True, watch=watch)
        return _served_per_second(run.load, streams)


async def _read_json(client: EndpointClient, path: str) -> Any:
    """The page's JSON; None if there is no such page."""
    page = await client.read_page(path)
    with contextlib.suppress(ValueError):
        return None if page is None else page.json()


async def _measured_ruler(client: EndpointClient, longest: int) -> _Ruler:
    """Measure a ruler with two texts, the longer one of about `longest` tokens."""
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
    texts = [prose(count, seed=count) for count in words]
    return await client.count_tokens(texts)


def _served_per_second(load: LoadResult, streams: int) -> float:
    """Requests served per second while `streams` requests were open."""
    ends = sorted(request.end for request in load.requests if request.served)
    full = len(ends) - streams
    if full < 1:
        served = f"{len(ends)} of {len(load.requests)} requests"
        raise JitneyError(f"the endpoint's capacity is unknown: it served {served}")
    return full / (ends[full - 1] - load.started)


async def _likely_streams(client: EndpointClient) -> int:
    """Twice the server's seats, by its list at /slots."""
    seats = await _read_json(client, "/slots")
    if isinstance(seats, list) and seats:
        return 2 * len(seats)
    return _UNKNOWN_STREAMS


@dataclass(frozen=True, slots=True)
class _ServerMetrics:
    """A server's /metrics at one time: the ledger (`jitney_rows_total`) and the queue."""

    scrape: Scrape

    @classmethod
    async def read(cls, client: EndpointClient) -> _ServerMetrics | None:
        """Read the metrics; None if the server has no such page or no metrics of Jitney."""
        page = await client.read_page("/metrics")
        scrape = Scrape("" if page is None else page.text)
        return cls(scrape) if "rows_total" in scrape.names() else None

    def bill_since(self, before: _ServerMetrics, seconds: float) -> Bill:
        """Rows and device time by kind since an earlier reading, `seconds` ago.

        The server reports the time of all steps together. It is split evenly over the rows of all
        steps (without padding if that is free), unlike in a bill of step records. Idle is the rest
        of `seconds`.
        """
        rows = {kind: round(self._since(before, "rows_total", kind=kind)) for kind in ROW_KINDS}
        busy_s = self._since(before, "step_seconds_sum")
        is_free = self._value("padding_is_free") > 0
        return Bill.of_totals(rows, busy_s, seconds, padding_is_free=is_free)

    def queue_mean_since(self, before: _ServerMetrics) -> float | None:
        """Mean seconds in the queue of requests that boarded since `before`; None without any."""
        count = self._since(before, "queue_seconds_count")
        return self._since(before, "queue_seconds_sum") / count if count > 0 else None

    def _value(self, name: str, **labels: str) -> float:
        value = self.scrape.value(name, **labels)
        return 0.0 if math.isnan(value) else value

    def _since(self, before: _ServerMetrics, name: str, **labels: str) -> float:
        return self._value(name, **labels) - before._value(name, **labels)

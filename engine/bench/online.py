"""A measurement over HTTP: find the model, learn how long texts are there, warm up, send, and read
the ledger.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import httpx

from jitney.engine.bench.client import Target, ask, first_model, open_client, probe
from jitney.engine.bench.load import Load, Watch, run_load
from jitney.engine.bench.metrics import bill_between, queue_mean, read_metrics
from jitney.engine.bench.text import arrival_prose, prose
from jitney.engine.errors import JitneyError
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.cost import Line

#: Words of the texts by which the endpoint's tokens are learnt: at first few, then as many as the
#: longest prompt has, but no more than this.
FEW_WORDS, MANY_WORDS = 16, 160
#: Requests open while the capacity of a server is measured that does not say how many it runs at
#: once.
UNKNOWN_STREAMS = 64


class Ruler(NamedTuple):
    """How many tokens a text has on an endpoint: `fixed` (its template) and `per_word`."""

    fixed: float
    per_word: float

    @classmethod
    def of(cls, one: int, many: int, words: int) -> Ruler:
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

    def __str__(self) -> str:
        if not self.device:
            return (
                f"version {self.version}"
                if self.version
                else "an engine that does not say what it is"
            )
        return (
            f"version {self.version}, {self.dtype}, {self.kernels} "
            f"kernels on {self.device} ({self.platform})"
        )


#: An endpoint without such a page.
UNKNOWN_ENGINE = EngineAbout()


@dataclass(slots=True)
class Online:
    """What was measured. bill: the server's own ledger over the run; queue_mean_s: mean wait in its
    queue. Both are None where it publishes none. about: what the endpoint says of itself."""

    target: Target
    load: Load
    bill: dict[str, Line] | None = None
    queue_mean_s: float | None = None
    about: EngineAbout = UNKNOWN_ENGINE


async def measure(
    target: Target,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int,
    closed: bool,
    warmup: int,
    watch: Watch,
) -> Online:
    """Send the arrivals to the endpoint. Raises ConfigError or JitneyError if it does not answer at
    all.
    """
    async with open_client(target) as client:
        ready, ruler = await prepare(client, target, max(arrival.n_prompt for arrival in arrivals))
        return await measure_with(
            client,
            ready,
            ruler,
            arrivals,
            concurrency=concurrency,
            closed=closed,
            warmup=warmup,
            watch=watch,
        )


async def prepare(client: httpx.AsyncClient, target: Target, longest: int) -> tuple[Target, Ruler]:
    """The target with its model named, and the ruler for its texts of up to `longest` tokens."""
    ready = target if target.model else replace(target, model=await first_model(client, target))
    one, few = await probe(client, ready, [prose(words, seed=words) for words in (1, FEW_WORDS)])
    if few <= one:
        raise JitneyError(
            f"the endpoint counts {one} and {few} tokens for texts of 1 and {FEW_WORDS} words"
        )
    ruler = Ruler.of(one, few, FEW_WORDS)
    words = min(MANY_WORDS, ruler.words(longest))
    if words > FEW_WORDS:
        (many,) = await probe(client, ready, [prose(words, seed=words)])
        ruler = Ruler.of(one, many, words)
    return ready, ruler


async def read_about(client: httpx.AsyncClient, base: str) -> EngineAbout:
    """What the endpoint's /version says; nothing where there is no such page."""
    try:
        response = await client.get(f"{base}/version")
        said = response.json() if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        said = {}
    if not isinstance(said, dict):
        return EngineAbout()
    return EngineAbout(*(str(said.get(name) or "") for name in EngineAbout._fields))


async def read_seats(client: httpx.AsyncClient, base: str) -> int | None:
    """How many requests the server runs at once, by its list of seats at /slots; None if it has
    none.
    """
    try:
        response = await client.get(f"{base}/slots")
        listed = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return len(listed) if isinstance(listed, list) and listed else None


async def measure_with(
    client: httpx.AsyncClient,
    target: Target,
    ruler: Ruler,
    arrivals: Sequence[Arrival],
    *,
    concurrency: int,
    closed: bool,
    warmup: int,
    watch: Watch,
) -> Online:
    """As `measure`, on an endpoint that is known already.

    Texts are new in every run: an endpoint that remembers prompts would answer those of an earlier
    run too fast.
    """
    salt = secrets.randbits(32)
    texts = [
        arrival_prose(arrival, ruler.words, number, salt) for number, arrival in enumerate(arrivals)
    ]
    sizes = [ruler.words(arrival.n_prompt) for arrival in arrivals[:warmup]]
    extra = [prose(size, [salt, number, 1]) for number, size in enumerate(sizes)]
    if extra:
        await run_load(
            lambda n: ask(client, target, target.body(extra[n], min(16, arrivals[n].n_output))),
            [Arrival(0.0, 1, 1)] * len(extra),
            concurrency=concurrency or len(extra),
            closed=True,
        )
    before = await read_metrics(client, target.base)
    load = await run_load(
        lambda n: ask(
            client, target, target.body(texts[n], arrivals[n].n_output, arrivals[n].tenant)
        ),
        arrivals,
        concurrency=concurrency,
        closed=closed,
        watch=watch,
    )
    online = Online(target, load, about=await read_about(client, target.base))
    after = await read_metrics(client, target.base) if before is not None else None
    if before is not None and after is not None:
        online.bill = bill_between(before, after, load.seconds)
        online.queue_mean_s = queue_mean(before, after)
    return online


async def capacity_at(
    target: Target, arrivals: Sequence[Arrival], *, streams: int, warmup: int, watch: Watch
) -> float:
    """Requests a second that the endpoint serves when there is always a next one.

    A closed loop on the first requests, so many open at a time (0: twice the seats that the server
    lists, 64 where it lists none), at most three times as many in all; only the time in which all
    of them were open counts. JitneyError if too few were served to tell.
    """
    async with open_client(target) as client:
        longest = max(arrival.n_prompt for arrival in arrivals)
        ready, ruler = await prepare(client, target, longest)
        if not streams:
            seats = await read_seats(client, target.base)
            streams = 2 * seats if seats else UNKNOWN_STREAMS
        some = arrivals[: 3 * streams]
        streams = min(streams, max(1, len(some) // 2))
        online = await measure_with(
            client, ready, ruler, some, concurrency=streams, closed=True, warmup=warmup, watch=watch
        )
    ends = sorted(t.finished for t in online.load.times if t.served)
    full = len(ends) - streams
    if full < 1:
        raise JitneyError(
            f"the endpoint's capacity is unknown: it served {len(ends)} of {len(some)} requests"
        )
    return full / (ends[full - 1] - online.load.started)

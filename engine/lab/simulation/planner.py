"""Sizing a deployment before it is rented: what fits, how fast it is by batch size, what load to
give it, its cost.

A steady state is worked out by hand instead of simulated: with d sequences decoding, each step
carries d decode rows and, because every sequence that leaves is replaced, d * prompt / output
prompt rows on average; the roofline says how long such a step takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from jitney.engine.common.errors import ConfigError
from jitney.engine.core import Bucket, StepWork, powers_of_two
from jitney.engine.lab.simulation.roofline import Roofline

#: Seats beyond which nothing is looked at.
_MOST_SEATS = 1024
#: What a demand cannot be less than.
_LEAST = {"prompt": 1, "output": 1, "page_size": 1, "rate": 0, "token_budget": 2}


@dataclass(frozen=True, slots=True)
class Demand:
    """What is wanted."""

    #: Mean tokens of a request.
    prompt: int
    output: int
    #: Limits in seconds, None: none.
    itl_s: float | None = None
    ttft_s: float | None = None
    #: Requests/s to be served by all replicas together, 0: not asked.
    rate: float = 0.0
    #: Of one chip, None: not asked.
    price_per_hour: float | None = None
    #: Most rows of a step, and tokens of a KV page.
    token_budget: int = 2048
    page_size: int = 16

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}")
        for name in ("itl_s", "ttft_s", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be more than 0")

    @property
    def is_limited(self) -> bool:
        return self.itl_s is not None or self.ttft_s is not None

    @property
    def mean_context(self) -> float:
        """KV positions that a decoding sequence holds on average."""
        return self.prompt + self.output / 2

    @property
    def longest(self) -> int:
        """KV positions of a sequence at its end."""
        return self.prompt + self.output

    @property
    def prompt_rows(self) -> float:
        """Prompt rows that come with each decode row in a steady state."""
        return self.prompt / self.output


@dataclass(frozen=True, slots=True)
class _Memory:
    """What fits on the chips together."""

    #: Bytes of the weights, of the KV of one token, and of all KV there is room for.
    weight_bytes: float
    kv_bytes_per_token: float
    kv_room_bytes: float
    #: Of the pool, and the tokens that fit into them.
    pages: int
    positions: int
    #: Sequences of the mean context.
    seats_mean: int
    #: Sequences of the whole length, which can never be preempted.
    seats_full: int


@dataclass(frozen=True, slots=True)
class Operating:
    """The steady state with `seats` seats, all busy."""

    seats: int
    #: Sequences that decode in each step.
    decoding: float
    #: Seconds of a step; output tokens and requests a second.
    step_s: float
    output_tok_s: float
    req_s: float
    #: `Sizing.TTFT_QUANTILE` of it at `Sizing.UTILISATION`.
    ttft_s: float
    #: What a step waits for.
    bound: str
    #: Of a million output tokens; None without a price.
    cost_per_million: float | None

    @classmethod
    def of(cls, roofline: Roofline, demand: Demand, seats: int) -> Operating:
        """With all of so many seats busy; where prompts do not fit the token budget beside the
        decode rows, the rest of the seats are waiting for their prompts.
        """
        decoding = min(seats, demand.token_budget / (1 + demand.prompt_rows))
        bucket, work = _steady_step(demand, decoding)
        step = roofline.seconds(bucket, work)
        tokens = decoding / step
        return cls(
            seats=seats,
            decoding=decoding,
            step_s=step,
            output_tok_s=tokens,
            req_s=tokens / demand.output,
            ttft_s=_first_token(demand, seats, step),
            bound=_bound(roofline, bucket, work),
            cost_per_million=_cost_per_million(roofline, demand, tokens),
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer."""

    #: Share of the greatest throughput that a service is loaded with.
    UTILISATION: ClassVar = 0.8
    #: Quantile of the time to first token that its limit is about.
    TTFT_QUANTILE: ClassVar = 0.99

    memory: _Memory
    #: By seats, ascending.
    curve: tuple[Operating, ...]
    #: Where more seats begin to cost more latency than they bring throughput.
    knee: Operating
    #: Most seats that keep the limits, None if none do or there are none.
    within_slo: Operating | None
    #: `within_slo` if there are limits, else the knee.
    chosen: Operating | None
    #: Its load at `UTILISATION`.
    load_req_s: float | None = None
    #: At that load; None without a price.
    cost_per_million_loaded: float | None = None
    #: For the demanded rate, None if no rate was asked.
    replicas: int | None = None

    @classmethod
    def of(cls, roofline: Roofline, demand: Demand) -> Sizing:
        """Size one replica, and count replicas. Raises ConfigError when the model or a request
        does not fit.
        """
        roofline.check_split()
        _check_context(roofline, demand)
        memory = _fit(roofline, demand)
        sizes = powers_of_two(1, min(memory.seats_mean, _MOST_SEATS, demand.token_budget - 1))
        curve = tuple(Operating.of(roofline, demand, seats) for seats in sizes)
        chosen, within = _knee(curve), None
        if demand.is_limited:
            chosen = within = _last_within(curve, demand)
        sizing = cls(memory, curve, _knee(curve), within, chosen)
        return sizing if chosen is None else _loaded(sizing, chosen, demand.rate)


def _last_within(curve: Sequence[Operating], demand: Demand) -> Operating | None:
    """The point of most seats that keeps the limits."""
    kept = [point for point in curve if _keeps(point, demand)]
    return kept[-1] if kept else None


def _check_context(roofline: Roofline, demand: Demand) -> None:
    context = roofline.cost.config.context_length
    if demand.longest > context:
        raise ConfigError(
            f"prompt and output together are {demand.longest} tokens, more than the context of "
            f"{context}"
        )


def _loaded(sizing: Sizing, chosen: Operating, rate: float) -> Sizing:
    """With the load to give it, what a token costs then, and replicas for so many requests/s."""
    load = Sizing.UTILISATION * chosen.req_s
    full = chosen.cost_per_million
    cost = full / Sizing.UTILISATION if full else None
    replicas = math.ceil(rate / load) if rate else None
    return replace(sizing, load_req_s=load, cost_per_million_loaded=cost, replicas=replicas)


def _fit(roofline: Roofline, demand: Demand) -> _Memory:
    """Pages and seats beside the weights."""
    cost, page = roofline.cost, demand.page_size
    per_position = cost.kv_bytes / roofline.kv_split
    pages = int(roofline.kv_room / (per_position * page)) - 1  # one is trash
    seats_full = _seats_in(pages, demand.longest, page)
    if seats_full < 1:
        raise ConfigError(_no_room(roofline, demand))
    return _Memory(
        weight_bytes=cost.weight_bytes,
        kv_bytes_per_token=cost.kv_bytes,
        kv_room_bytes=roofline.kv_room * roofline.count,
        pages=pages,
        positions=pages * page,
        seats_mean=_seats_in(pages, demand.mean_context, page),
        seats_full=seats_full,
    )


def _seats_in(pages: int, length: float, page_size: int) -> int:
    """Sequences of that length that fit."""
    return max(0, int(pages / math.ceil(length / page_size)))


def _no_room(roofline: Roofline, demand: Demand) -> str:
    device, weights = roofline.device, roofline.cost.weight_bytes / 1e9
    chips = f"{roofline.count} x {device.name} ({device.memory / 1e9:g} GB each)"
    return (
        f"{weights:.1f} GB of weights leave no room for a sequence of {demand.longest} tokens on "
        f"{chips}: use more chips (--count), smaller --weights or --kv, or shorter requests"
    )


def _steady_step(demand: Demand, decoding: float) -> tuple[Bucket, StepWork]:
    """A step in which so many sequences decode."""
    prompt = decoding * demand.prompt_rows
    work = StepWork(
        decode=math.ceil(decoding),
        prompt=round(prompt),
        keys=round(decoding * demand.mean_context),
        longest=demand.longest,
        pairs=round(prompt * demand.prompt / 2),
    )
    return Bucket(math.ceil(decoding + prompt), max(1, work.decode)), work


def _cost_per_million(roofline: Roofline, demand: Demand, output_tok_s: float) -> float | None:
    if demand.price_per_hour is None:
        return None
    return demand.price_per_hour * roofline.count / 3600 / output_tok_s * 1e6


def _bound(roofline: Roofline, bucket: Bucket, work: StepWork) -> str:
    """What takes most of a step."""
    parts = {
        roofline.memory_seconds(bucket, work): "memory",
        roofline.compute_seconds(bucket, work): "compute",
        roofline.link_seconds(bucket.tokens): "links",
        roofline.assumed.overhead_s: "overhead",
    }
    return parts[max(parts)]


def _first_token(demand: Demand, seats: int, step: float) -> float:
    """The `TTFT_QUANTILE` of the time to first token at `UTILISATION`: wait for a seat (Erlang C),
    for the step under way, and the steps that the prompt takes."""
    steps = max(1, math.ceil(demand.prompt / max(1.0, demand.token_budget - seats)))
    service = (demand.output + steps) * step
    return (
        _seat_wait(seats, service, Sizing.UTILISATION, Sizing.TTFT_QUANTILE) + step + steps * step
    )


def _seat_wait(seats: int, service: float, load: float, quantile: float) -> float:
    """Quantile of the wait for one of `seats` in an M/M/c queue (Erlang, 1917) loaded to a share
    `load`, seconds.
    """
    offered, blocked = seats * load, 1.0
    for n in range(1, seats + 1):  # Erlang B, by its recurrence
        blocked = offered * blocked / (n + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return max(0.0, math.log(waits / (1 - quantile))) * service / (seats * (1 - load))


def _keeps(point: Operating, demand: Demand) -> bool:
    """True when the point is within the limits."""
    if demand.itl_s is not None and point.step_s > demand.itl_s:
        return False
    return demand.ttft_s is None or point.ttft_s <= demand.ttft_s


def _knee(curve: Sequence[Operating]) -> Operating:
    """The point farthest above the straight line between the ends of tokens/s over step time, both
    scaled to 0..1 (Kneedle: Satopaa and others, 2011); the last one if none is above it, as of a
    mixture of experts, of which few more rows read many more.
    """
    first, last = curve[0], curve[-1]
    if last.step_s <= first.step_s or last.output_tok_s <= first.output_tok_s:
        return max(curve, key=lambda point: point.output_tok_s)
    return max(curve, key=partial(_above_line, first, last))


def _above_line(first: Operating, last: Operating, point: Operating) -> tuple[float, float]:
    """How far above the line, and, where several are as far, which of them is the fastest."""
    above = _part("output_tok_s", first, last, point) - _part("step_s", first, last, point)
    return above, point.output_tok_s


def _part(name: str, *points: Operating) -> float:
    """How far the third point's figure is from the first one's to the second's, 0 .. 1."""
    begin, end, value = (getattr(point, name) for point in points)
    return (value - begin) / (end - begin)

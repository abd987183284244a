"""Sizes a deployment before it is rented: memory, speed by batch size, load and cost.

The steady state is computed, not simulated: with d decoding sequences, each step has d decode rows
and, since every sequence that ends is replaced, d * prompt / output prompt rows on average. The
roofline gives the time of such a step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.core import Bucket, PoolShares, StepWork, powers_of_two
from jitney.engine.lab.simulation.roofline import Roofline

#: Most seats that are considered.
_MOST_SEATS = 1024
#: Least value of each field of a load.
_LEAST = {
    "prompt": 1,
    "output": 1,
    "page_size": 1,
    "rate": 0,
    "token_budget": 2,
    "acceptance": 0,
    "drafts": 0,
}


@dataclass(frozen=True, slots=True)
class Load:
    """The load to size for, and its limits."""

    #: Mean tokens of a request.
    prompt: int
    output: int
    #: Limits of time between tokens and time to first token, seconds; None: no limit.
    itl_s: float | None = None
    ttft_s: float | None = None
    #: Requests/s of all replicas together; 0: unknown.
    rate: float = 0.0
    #: Price of one chip; None: unknown.
    price_per_hour: float | None = None
    #: Most rows of a step; tokens of a KV page.
    token_budget: int = 2048
    page_size: int = 16
    #: Probability that a draft is accepted after accepted ones; most drafts per sequence and step.
    acceptance: float = 0.0
    drafts: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}")
        if self.acceptance > 1:
            raise ConfigError(f"acceptance must be at most 1, not {self.acceptance:g}")
        for name in ("itl_s", "ttft_s", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be more than 0")

    @property
    def is_limited(self) -> bool:
        return self.itl_s is not None or self.ttft_s is not None

    @property
    def mean_context(self) -> float:
        """Mean KV positions of a decoding sequence."""
        return self.prompt + self.output / 2

    @property
    def longest(self) -> int:
        """KV positions of a sequence at its end."""
        return self.prompt + self.output

    @property
    def prompt_rows(self) -> float:
        """Prompt rows per decode row in the steady state."""
        return self.prompt / self.output

    @property
    def most_drafts(self) -> int:
        """Most drafts per sequence and step; 0 if drafts are never accepted."""
        return self.drafts if self.acceptance else 0

    def tokens_per_step(self, drafts: int) -> float:
        """Mean tokens of a decoding sequence in a step that verifies `drafts` of its drafts."""
        return sum([self.acceptance**number for number in range(drafts + 1)])


@dataclass(frozen=True, slots=True)
class _Memory:
    #: Bytes of the weights, of one token's KV, and available for all KV.
    weight_bytes: float
    kv_bytes_per_token: float
    kv_room_bytes: float
    #: Pages of the pool, and tokens that fit into them.
    pages: int
    positions: int
    #: Attention window -> pages of its cache group, for groups other than the first.
    window_pages: dict[int, int]
    #: Bytes of a sequence's recurrent state on one chip; checkpoints in addition to the seats'
    #: states.
    slot_bytes: float
    checkpoints: int
    #: Sequences of mean context that fit.
    seats_mean: int
    #: Sequences of full length that fit, and are never preempted.
    seats_full: int


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The steady state with all of `seats` seats busy."""

    seats: int
    #: Decoding sequences in each step.
    decoding: float
    #: Seconds of a step; output tokens and requests a second.
    step_s: float
    output_tok_s: float
    req_s: float
    #: `Sizing.TTFT_QUANTILE` of the time to first token at `Sizing.UTILISATION`, seconds.
    ttft_s: float
    #: The resource that limits a step.
    bound: str
    #: Cost of a million output tokens; None without a price.
    cost_per_million: float | None
    #: Drafts per sequence that a step verifies.
    drafts: int = 0

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens of a sequence."""
        return self.decoding / self.output_tok_s

    @classmethod
    def of(cls, roofline: Roofline, load: Load, seats: int) -> OperatingPoint:
        """The steady state with all `seats` busy, and the number of drafts with the most tokens. If
        prompts do not fit into the token budget with the decode rows, the other seats wait for
        their prompts.
        """
        counts = range(load.most_drafts + 1)
        points = [cls._with_drafts(roofline, load, seats, count) for count in counts]
        return max(points, key=_throughput)

    @classmethod
    def _with_drafts(
        cls, roofline: Roofline, load: Load, seats: int, drafts: int
    ) -> OperatingPoint:
        each = load.tokens_per_step(drafts)
        decoding = min(seats, load.token_budget / (1 + drafts + each * load.prompt_rows))
        bucket, work = _steady_step(load, decoding, drafts)
        step = roofline.seconds(bucket, work)
        rows = math.ceil(decoding)
        keys = round(decoding * load.mean_context)
        step += roofline.draft_seconds(StepWork(decode=rows, keys=keys), drafts)
        tokens = decoding * each / step
        return cls(
            seats=seats,
            decoding=decoding,
            step_s=step,
            output_tok_s=tokens,
            req_s=tokens / load.output,
            ttft_s=_first_token(load, seats, step, each),
            bound=_bound(roofline, bucket, work),
            cost_per_million=_cost_per_million(roofline, load, tokens),
            drafts=drafts,
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    """The sizing of a deployment."""

    #: Load of a service as a share of its greatest throughput.
    UTILISATION: ClassVar = 0.8
    #: Quantile of the time to first token to which its limit applies.
    TTFT_QUANTILE: ClassVar = 0.99

    memory: _Memory
    #: Steady states by seats, ascending.
    curve: tuple[OperatingPoint, ...]
    #: Point from which more seats add more latency than throughput.
    knee: OperatingPoint
    #: Point of the most seats within the limits; None without limits, or if no point keeps them.
    within_slo: OperatingPoint | None
    #: `within_slo` if there are limits, else the knee.
    chosen: OperatingPoint | None
    #: Requests a second of the chosen point at `UTILISATION`.
    load_req_s: float | None = None
    #: Cost of a million output tokens at that load; None without a price.
    cost_per_million_loaded: float | None = None
    #: Replicas for the load's rate; None without a rate.
    replicas: int | None = None

    @classmethod
    def of(cls, roofline: Roofline, load: Load) -> Sizing:
        """Size one replica, and count replicas. Raises ConfigError if it does not fit."""
        roofline.check_split()
        context = roofline.cost.config.context_length
        if load.longest > context:
            raise ConfigError(
                f"prompt and output together are {load.longest} tokens, more than the context of "
                f"{context}"
            )
        memory = _fit(roofline, load)
        sizes = powers_of_two(1, min(memory.seats_mean, _MOST_SEATS, load.token_budget - 1))
        curve = tuple(OperatingPoint.of(roofline, load, seats) for seats in sizes)
        at = knee([point.step_s for point in curve], [point.output_tok_s for point in curve])
        chosen = bend = max(curve, key=_throughput) if at is None else curve[at]
        within = None
        if load.is_limited:
            allowed = [point for point in curve if _keeps(point, load)]
            chosen = within = allowed[-1] if allowed else None
        sizing = cls(memory, curve, bend, within, chosen)
        if chosen is None:
            return sizing
        req_s = Sizing.UTILISATION * chosen.req_s
        full = chosen.cost_per_million
        return replace(
            sizing,
            load_req_s=req_s,
            cost_per_million_loaded=full / Sizing.UTILISATION if full else None,
            replicas=math.ceil(load.rate / req_s) if load.rate else None,
        )


def _fit(roofline: Roofline, load: Load) -> _Memory:
    cost, page, room = roofline.cost, load.page_size, roofline.kv_room

    def shares(seats: int) -> PoolShares:
        return PoolShares(
            windows=tuple(group.window for group in cost.config.cache_groups),
            page_bytes=roofline.page_bytes(page),
            page_size=page,
            seats=seats,
            token_budget=load.token_budget,
            context_length=load.longest,
            prefix_cache=cost.config.recurrent is not None,
            slot_bytes=roofline.slot_bytes,
            drafts=load.most_drafts,
        )

    def seats_of(length: float) -> int:
        """Most sequences of this length that fit."""
        each = math.ceil(length / page)
        most = max(0, int(room / min(roofline.page_bytes(page)))) // each
        return bisect_right(
            range(1, most + 1), 0, key=lambda n: n * each >= shares(n).fit(room).pages[0]
        )

    seats_mean, seats_full = seats_of(load.mean_context), seats_of(load.longest)
    (first, *others), checkpoints = shares(seats_mean).fit(room)
    pages = first - 1
    if seats_full < 1:
        raise ConfigError(_no_room(roofline, load))
    return _Memory(
        weight_bytes=cost.weight_bytes,
        kv_bytes_per_token=cost.kv_bytes,
        kv_room_bytes=roofline.kv_room * roofline.count,
        pages=pages,
        positions=pages * page,
        window_pages={
            group.window: own - 1
            for group, own in zip(cost.config.cache_groups[1:], others, strict=False)
        },
        slot_bytes=roofline.slot_bytes,
        checkpoints=checkpoints,
        seats_mean=seats_mean,
        seats_full=seats_full,
    )


def _no_room(roofline: Roofline, load: Load) -> str:
    device, weights = roofline.device, roofline.cost.weight_bytes / 1e9
    chips = f"{roofline.count} x {device.name} ({device.memory / 1e9:g} GB each)"
    return (
        f"{weights:.1f} GB of weights leave no room for a sequence of {load.longest} tokens on "
        f"{chips}: use more chips (--count), smaller --weights or --kv, or shorter requests"
    )


def _steady_step(load: Load, decoding: float, drafts: int) -> tuple[Bucket, StepWork]:
    """A step in which `decoding` sequences decode and verify `drafts` drafts each."""
    prompt = decoding * load.tokens_per_step(drafts) * load.prompt_rows
    rows = decoding * (1 + drafts)
    work = StepWork(
        decode=math.ceil(rows),
        prompt=round(prompt),
        keys=round(rows * load.mean_context),
        longest=load.longest,
        pairs=round(prompt * load.prompt / 2),
    )
    return Bucket(math.ceil(rows + prompt), max(1, work.decode)), work


def _cost_per_million(roofline: Roofline, load: Load, output_tok_s: float) -> float | None:
    if load.price_per_hour is None:
        return None
    return load.price_per_hour * roofline.count / 3600 / output_tok_s * 1e6


def _bound(roofline: Roofline, bucket: Bucket, work: StepWork) -> str:
    """The resource that takes most of a step's time."""
    parts = {
        roofline.memory_seconds(bucket, work): "memory",
        roofline.compute_seconds(bucket, work): "compute",
        roofline.link_seconds(bucket.tokens): "links",
        roofline.assumed.overhead_s: "overhead",
    }
    return parts[max(parts)]


def _first_token(load: Load, seats: int, step: float, each: float) -> float:
    """The `TTFT_QUANTILE` of the time to first token at `UTILISATION`: the wait for a seat (Erlang
    C) and for the running step, and the steps of the prompt. each: tokens per sequence and step.
    """
    steps = max(1, math.ceil(load.prompt / max(1.0, load.token_budget - seats)))
    service = (load.output / each + steps) * step
    return (
        _seat_wait(seats, service, Sizing.UTILISATION, Sizing.TTFT_QUANTILE) + step + steps * step
    )


def _seat_wait(seats: int, service: float, load: float, quantile: float) -> float:
    """Quantile of the wait in an M/M/c queue (Erlang, 1917) at utilisation `load`, seconds."""
    offered, blocked = seats * load, 1.0
    for n in range(1, seats + 1):  # Erlang B, by its recurrence
        blocked = offered * blocked / (n + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return max(0.0, math.log(waits / (1 - quantile))) * service / (seats * (1 - load))


def _keeps(point: OperatingPoint, load: Load) -> bool:
    if load.itl_s is not None and point.itl_s > load.itl_s:
        return False
    return load.ttft_s is None or point.ttft_s <= load.ttft_s


def _throughput(point: OperatingPoint) -> float:
    return point.output_tok_s


def knee(x: Sequence[float], y: Sequence[float], *, convex: bool = False) -> int | None:
    """Index of the knee of an ascending curve, None if it has none (a straight line, or fewer than
    three points).

    Kneedle without its smoothing (Satopää et al. 2011, "Finding a 'Kneedle' in a Haystack"): both
    axes are scaled to [0, 1], and the knee is the point farthest from the diagonal: above it for a
    curve that flattens (throughput over concurrency), below it for one that steepens (convex:
    latency over rate). A falling part counts as level, so that the knee is not at a dip.
    """
    if len(x) < 3:
        return None
    above = _unit(np.maximum.accumulate(np.asarray(y, np.float64)))
    above -= _unit(np.asarray(x, np.float64))
    if convex:
        above = -above
    best = int(np.argmax(above))
    return best if above[best] > 1e-9 else None


def _unit(values: np.ndarray) -> np.ndarray:
    """Values [n] f8 scaled to [0, 1]; all 0 if they are equal."""
    above = values - values.min()
    return above / (above.max() or 1.0)

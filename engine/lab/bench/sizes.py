"""Chooses threads, seats, token budget and buckets from step times on this machine.

A larger size is chosen as long as it raises the tokens a second, and its steps are short enough for
a client that reads along (docs/decisions/log.md, 94).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from jitney.engine.common.child_process import end_child, last_line, start_child
from jitney.engine.common.core_start import core_environ
from jitney.engine.common.errors import JitneyError
from jitney.engine.common.other_work import OtherWork
from jitney.engine.config import Config, settings
from jitney.engine.core import powers_of_two, processors_here
from jitney.engine.lab.tuned_sizes import SizeValue

#: A step beyond its time limit is only chosen if the smallest takes almost as long: the largest
#: ratio of both.
_ALMOST = 1.5
#: Least rows a second of a size up to the usual one, as a share of the best: if all sizes are about
#: as fast, small steps only make prompts wait.
_AS_GOOD = 0.9
#: Ratio up to which a step counts as hardly slower: then the smaller bucket is left out, and our
#: products are used.
_HARDLY = 1.03
#: Half the threads are enough if steps take at most this many times as long.
_AS_FAST = 1.05
#: Least seats, so that a few simultaneous requests share a step.
_LEAST_SEATS = 4
#: Rows of the smallest step with a prompt.
_LEAST_ROWS = 16
#: Most seats and most rows that are tried.
_MOST_SEATS, _MOST_ROWS = 128, 2048
#: Seconds for which the work of other programs is measured before steps are timed.
_LOOK_S = 0.5
#: Value of `product_rows` without limit.
_ANY_ROWS = 1 << 20
#: Timeout of a measuring process, seconds.
_LIMIT_S = 900.0


class _SizeRule(NamedTuple):
    #: The default size.
    usual: int
    #: Most seconds of a step of at most that size, and of a larger one.
    limit_s: float
    larger_limit_s: float
    #: Least ratio of the rows a second of a larger size to those of half the size.
    worth: float


class Timed(msgspec.Struct, frozen=True, array_like=True):
    """Time of a step of one size."""

    #: Rows, padding included.
    size: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.size / self.seconds


class SizeTimes(msgspec.Struct, frozen=True):
    """Times with one number of threads, both ascending."""

    threads: int
    #: Steps by decoding seats.
    decode: tuple[Timed, ...]
    #: Steps by rows of one prompt.
    prompts: tuple[Timed, ...]
    #: Whether our kernels could replace XLA's products of more rows than `product_rows`.
    rows_choose: bool = False
    #: Whether the kernels were never compared with the reference on a CPU of this kind.
    untried: bool = False


class TimedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step of one size, and how long timing it took."""

    #: Field of `SizeTimes`.
    kind: Literal["decode", "prompts"]
    step: Timed
    #: Seconds that timing it took.
    spent_s: float = 0.0


class TimingOrder(msgspec.Struct, frozen=True):
    """The order to a process that measures."""

    #: A `Config` as JSON.
    config: msgspec.Raw
    #: Steps that need not be timed again.
    known: tuple[TimedStep, ...]
    #: Share of the processors' time that other programs may use, 0 to 1.
    most_other_work: float


class TimingLine(msgspec.Struct, frozen=True):
    """A line of that process; the last one has `times`, or `other_work`."""

    step: TimedStep | None = None
    times: SizeTimes | None = None
    #: Share of the processors' time that other programs used, if it was too much.
    other_work: float = 0.0


class OtherPrograms(JitneyError):
    """Steps cannot be timed now, because other programs use too much of the processors."""

    def __init__(self, share: float):
        super().__init__(
            f"steps cannot be timed while other programs use {share:.0%} of the processors (at "
            f"most {OtherWork.most:.0%}): try again when it is quiet"
        )


class NoTimeLeft(JitneyError):
    """The time for timing steps is used up."""


def _ignore(what: object) -> None:
    pass


def _usual(name: str) -> int:
    return settings()[name].field.default


#: Rule for the decoding sequences of a step: each doubling delays every token of every stream.
_SEATS = _SizeRule(_usual("max_seats"), limit_s=0.2, larger_limit_s=0.2, worth=1.1)
#: Rule for the rows of a step with prompts, which other requests wait for. Steps beyond the usual
#: size only run if that many rows wait, so a small gain in rows a second is enough.
_ROWS = _SizeRule(_usual("token_budget"), limit_s=0.5, larger_limit_s=0.3, worth=1.03)

#: Times the steps of an engine with these settings.
_Time = Callable[[Config], Awaitable[SizeTimes]]
_Values = dict[str, SizeValue]


class _Measured(msgspec.Struct, frozen=True):
    #: Times with all threads, in the sizes that were tried last; then with fewer threads.
    times: tuple[SizeTimes, ...]
    #: Chosen settings by flat name, without those that equal the defaults.
    values: _Values


async def sizes_here(config: Config, time_steps: _Time | None = None) -> _Measured:
    """Measure and choose the sizes on this machine (`_measure_sizes`). time_steps: None:
    `time_apart`.
    """
    others = OtherWork(processors_here(config.engine.threads).chosen)
    await asyncio.sleep(_LOOK_S)
    share = others.share()
    if share > OtherWork.most:
        raise OtherPrograms(share)
    return await _measure_sizes(config, time_steps or time_apart)


async def _measure_sizes(config: Config, time_steps: _Time) -> _Measured:
    """Measure and choose sizes. config: with the fixed sizes. Raises JitneyError if steps cannot be
    timed, or other work disturbs them.

    The sizes grow as long as the largest is the best. Then the threads are halved as long as half
    of them are as fast. If the time runs out, the choice is made from the times so far.
    """
    seats, rows = config.engine.max_seats, config.engine.token_budget
    times = await time_steps(_of_sizes(config, seats, rows))
    products: _Values = {}
    with contextlib.suppress(NoTimeLeft):
        products, times = await _choose_products(config, times, time_steps)
        config = _with(config, **products)
        while (larger := _larger(times, seats, rows)) != (seats, rows):
            seats, rows = larger
            times = await time_steps(_of_sizes(config, seats, rows))
    seats = max(_best_seats(times), _LEAST_SEATS)
    rows = max(_best_rows(times), 2 * seats)
    values: _Values = {
        **products,
        "max_seats": seats,
        "token_budget": rows,
        "seat_buckets": _seat_buckets(times.decode, seats),
        "token_buckets": _worth_a_program(times.prompts, rows),
    }
    fewer = []
    if not config.engine.threads:
        fewer = await _try_fewer_threads(_with(config, **values), times, time_steps)
        values["threads"] = _fewest_as_fast(times, fewer, seats, rows)
    return _Measured((times, *fewer), _but_defaults(values))


async def _choose_products(
    config: Config, times: SizeTimes, time_steps: _Time
) -> tuple[_Values, SizeTimes]:
    """(settings of products with which steps are faster than in `times`, their times)."""
    engine = config.engine
    sizes = _of_sizes(config, engine.max_seats, engine.token_budget)
    if times.untried and engine.kernels == "auto":
        plain = await time_steps(_with(sizes, kernels="reference"))
        if _slower_with(times, plain):
            return {"kernels": "reference"}, plain
    if times.rows_choose and engine.product_rows == _usual("product_rows"):
        ours = await time_steps(_with(sizes, product_rows=_ANY_ROWS))
        rows = _rows_as_fast(ours, times, engine.product_rows)
        if rows == _ANY_ROWS:
            return {"product_rows": rows}, ours
        if rows > engine.product_rows:
            between = await time_steps(_with(sizes, product_rows=rows))
            return {"product_rows": rows}, between
    return {}, times


def _slower_with(kernels: SizeTimes, plain: SizeTimes) -> bool:
    """Whether the largest steps of both kinds take longer with kernels than with the reference."""
    decode = min(len(kernels.decode), len(plain.decode)) - 1
    prompts = min(len(kernels.prompts), len(plain.prompts)) - 1
    return (
        kernels.decode[decode].seconds > plain.decode[decode].seconds
        and kernels.prompts[prompts].seconds > plain.prompts[prompts].seconds
    )


def _rows_as_fast(ours: SizeTimes, xlas: SizeTimes, few: int) -> int:
    """The rows up to which steps are hardly slower with our products than with XLA's, which were
    used above `few` rows; _ANY_ROWS if this holds for all.
    """
    pairs = [
        *zip(ours.decode, xlas.decode, strict=False),
        *zip(ours.prompts, xlas.prompts, strict=False),
    ]
    tried = [(one, other) for one, other in pairs if one.size > few]
    slower = [one.size for one, other in tried if one.seconds > _HARDLY * other.seconds]
    if not slower:
        return _ANY_ROWS
    return max((one.size for one, _ in tried if one.size < min(slower)), default=few)


def _best_size(timed: Sequence[Timed], rule: _SizeRule) -> int:
    """The largest size that the rule allows."""
    best = timed[0]
    most = best.rate
    least_limit_s = _ALMOST * best.seconds
    for step in timed[1:]:
        if step.size <= rule.usual:
            limit_s, least_rate = rule.limit_s, _AS_GOOD * most
        else:
            doublings = math.log2(step.size / best.size)
            limit_s, least_rate = rule.larger_limit_s, rule.worth**doublings * best.rate
        if step.seconds <= max(limit_s, least_limit_s) and step.rate >= least_rate:
            best = step
        most = max(most, step.rate)
    return best.size


def _larger(times: SizeTimes, seats: int, rows: int) -> tuple[int, int]:
    """(seats, rows) to measure next: doubled if the largest is the best and fast."""
    more_seats = _best_seats(times) == seats < _MOST_SEATS and _quick(times.decode, _SEATS)
    more_rows = _best_rows(times) == rows < _MOST_ROWS and _quick(times.prompts, _ROWS)
    return seats * (1 + more_seats), rows * (1 + more_rows)


def _quick(timed: Sequence[Timed], rule: _SizeRule) -> bool:
    """Whether a step of twice the largest size may be within the time limit."""
    return timed[-1].seconds <= rule.larger_limit_s / 2


def _best_seats(times: SizeTimes) -> int:
    return _best_size(times.decode, _SEATS)


def _best_rows(times: SizeTimes) -> int:
    return _best_size(times.prompts, _ROWS)


def _worth_a_program(timed: Sequence[Timed], most: int) -> tuple[int, ...]:
    """The sizes up to `most` whose steps are faster than those of the next size, and `most`."""
    worthwhile = [
        step.size
        for step, following in pairwise(timed)
        if step.size < most and following.seconds >= _HARDLY * step.seconds
    ]
    return (*worthwhile, most)


def _seat_buckets(timed: Sequence[Timed], seats: int) -> tuple[int, ...]:
    """The seat buckets that are worth a program; () for the default ones if all timed sizes are."""
    chosen = _worth_a_program(timed, seats)
    usual = tuple(step.size for step in timed if step.size <= seats)
    return () if chosen == usual else chosen


async def _try_fewer_threads(
    config: Config, times: SizeTimes, time_steps: _Time
) -> list[SizeTimes]:
    """Times of the chosen sizes, with half the threads each time, until that is slower."""
    seats, rows = config.engine.max_seats, config.engine.token_budget
    config = _with(config, seat_buckets=(seats,), token_buckets=(rows,))
    timed_sizes: list[SizeTimes] = []
    threads = times.threads
    with contextlib.suppress(NoTimeLeft):
        while threads > 1:
            threads //= 2
            timed_sizes.append(await time_steps(_with(config, threads=threads)))
            if not _as_fast(timed_sizes[-1], times, seats, rows):
                break
    return timed_sizes


def _fewest_as_fast(times: SizeTimes, fewer: Sequence[SizeTimes], seats: int, rows: int) -> int:
    fast = [each.threads for each in fewer if _as_fast(each, times, seats, rows)]
    return min(fast, default=0)


def _as_fast(fewer: SizeTimes, all_of_them: SizeTimes, seats: int, rows: int) -> bool:
    pairs = (
        (_seconds_of(fewer.decode, seats), _seconds_of(all_of_them.decode, seats)),
        (_seconds_of(fewer.prompts, rows), _seconds_of(all_of_them.prompts, rows)),
    )
    return all(with_fewer <= _AS_FAST * with_all for with_fewer, with_all in pairs)


def _seconds_of(timed: Sequence[Timed], size: int) -> float:
    """Seconds of the smallest step with at least `size` rows, else of the largest step."""
    return next((step.seconds for step in timed if step.size >= size), timed[-1].seconds)


def _of_sizes(config: Config, seats: int, rows: int) -> Config:
    """The configuration to measure: with steps for prompts of all sizes, even of few rows for many
    seats; if `pages` is set, with at most as many seats as there are pages.
    """
    pages = config.engine.pages
    return _with(
        config,
        max_seats=min(seats, pages - 1) if pages else seats,
        token_budget=rows,
        token_buckets=powers_of_two(_LEAST_ROWS, rows),
    )


def _with(config: Config, **sizes: SizeValue) -> Config:
    engine = config.engine.model_copy(update=sizes)
    return config.model_copy(update={"engine": engine})


def _but_defaults(values: _Values) -> _Values:
    """The settings without those that equal the defaults."""
    described = settings()
    return {name: value for name, value in values.items() if value != described[name].field.default}


async def time_apart(
    config: Config,
    known: Sequence[TimedStep] = (),
    *,
    on_process: Callable[[asyncio.subprocess.Process], None] = _ignore,
    on_step: Callable[[TimedStep], None] = _ignore,
    limit_s: float | None = _LIMIT_S,
    most_other_work: float = OtherWork.most,
) -> SizeTimes:
    """Time the steps of an engine with these settings in a separate process.

    known: steps that are not timed again. on_process, on_step: called with the process, and with
    each timed step. limit_s: timeout of the process, None: no limit. most_other_work: see
    `TimingOrder`. Raises OtherPrograms if they made steps slower, and JitneyError with the last
    line of the process's output if it fails.
    """
    with tempfile.TemporaryFile() as errors:
        process = await start_child(
            "jitney.engine.lab.bench.sizes_worker",
            env=core_environ(config.engine.jax_environment),
            stderr=errors,
        )
        try:
            on_process(process)
            assert process.stdin is not None and process.stdout is not None  # start_child
            # The process gets no settings of the server, above all no keys.
            own = config.model_dump_json(exclude={"server"})
            order = TimingOrder(msgspec.Raw(own.encode()), tuple(known), most_other_work)
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            async with asyncio.timeout(limit_s):
                times = await _last_of(process.stdout, on_step)
        except TimeoutError:
            raise JitneyError(f"steps are not timed after {limit_s:.0f} s") from None
        finally:
            await end_child(process)
        if times is None:
            raise JitneyError(f"steps cannot be timed: {last_line(errors)}")
        return times


async def _last_of(
    lines: asyncio.StreamReader, on_step: Callable[[TimedStep], None]
) -> SizeTimes | None:
    """The times of a measuring process; None if it failed. Raises OtherPrograms."""
    async for line in lines:
        try:
            message = msgspec.json.decode(line, type=TimingLine)
        except msgspec.MsgspecError:
            return None  # half a line: it has died
        if message.step is not None:
            on_step(message.step)
        if message.other_work:
            raise OtherPrograms(message.other_work)
        if message.times is not None:
            return message.times
    return None

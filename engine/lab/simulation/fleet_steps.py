"""What a step of a replica costs and how many prompt rows it may have, looked up once for each
situation instead of in every step.
"""

from __future__ import annotations

import functools
from bisect import bisect_left

from jitney.engine.common.errors import ConfigError
from jitney.engine.core import (
    Bucket,
    Buckets,
    PrefillBudget,
    SchedulerLimits,
    StepTimeEstimate,
    StepWork,
)
from jitney.engine.lab.simulation.step_table import StepTimes

#: Positions of a prompt within which the rows of its next chunk are taken to be as many.
_START_STEP = 512
#: Answers that are remembered of each question.
_REMEMBERED = 1 << 16


class _KnownStepTimes(StepTimeEstimate):
    """Step times that need not be learnt: those of a table, with contexts of a usual length."""

    def __init__(self, buckets: Buckets, table: StepTimes, mean_context: float):
        super().__init__(buckets)
        self._mixed = {bucket: _of_prompts(table, bucket) for bucket in buckets.mixed}
        self._decode = {
            bucket: _of_decode(table, bucket, mean_context) for bucket in buckets.decode
        }
        self._per_pair = _per_pair(table, buckets.mixed[-1])

    @property
    def per_pair(self) -> float:
        return self._per_pair

    def mixed(self, bucket: Bucket, rows: int = 0) -> float:
        return self._with_rows(self._mixed[bucket], bucket, rows or bucket.tokens)

    @property
    def least(self) -> float:
        return next(iter(self._decode.values()))

    def decode(self, sequences: int) -> float:
        return next(
            seconds for bucket, seconds in self._decode.items() if sequences <= bucket.seats
        )

    def has_seen(self, bucket: Bucket) -> bool:
        return True


def _of_prompts(table: StepTimes, bucket: Bucket) -> float:
    """Seconds of a step full of prompt rows, without what they attend to."""
    return table.seconds(bucket, StepWork(prompt=bucket.tokens))


def _of_decode(table: StepTimes, bucket: Bucket, mean_context: float) -> float:
    keys = round(bucket.seats * mean_context)
    return table.seconds(
        bucket, StepWork(decode=bucket.seats, keys=keys, longest=round(mean_context))
    )


def _per_pair(table: StepTimes, bucket: Bucket) -> float:
    """Seconds that a query-key pair of a prompt adds to a step that is full of rows."""
    pairs = 1 << 24
    few, many = StepWork(prompt=bucket.tokens), StepWork(prompt=bucket.tokens, pairs=pairs)
    return (table.seconds(bucket, many) - table.seconds(bucket, few)) / pairs


class StepCosts:
    """Seconds and rows of the steps of one kind of replica; shared by all of that kind.

    mean_context: KV positions that a decoding sequence has on average; the share of prompt rows
    goes by it. ConfigError for settings that the rules here know nothing of.
    """

    def __init__(
        self, limits: SchedulerLimits, buckets: Buckets, table: StepTimes, mean_context: float
    ):
        _check_known(limits)
        self.table = table
        self.host = table.host
        self._buckets = buckets
        self._decode = buckets.decode
        self._decode_seats = [bucket.seats for bucket in buckets.decode]
        times = _KnownStepTimes(buckets, table, mean_context)
        self._budget = PrefillBudget(times, limits.prefill_share, 0.0)
        self.token_budget = buckets.token_budget
        #: As `Buckets.thrifty`.
        self.thrifty = functools.lru_cache(_REMEMBERED)(buckets.thrifty)
        self._most = functools.lru_cache(_REMEMBERED)(self._budget.most)
        self._brief = functools.cache(self._budget.brief)

    def prompt_rows(self, decoding: int, start: int, prompts: int, rest: int, whole: int) -> int:
        """As `PrefillBudget.most`; rest, whole: rows that the first prompt has left, and had."""
        short = self._budget.is_short(rest, whole)
        return self._most(decoding, start - start % _START_STEP, prompts, short=short)

    def brief_rows(self, decoding: int) -> int:
        """As `PrefillBudget.brief`."""
        return self._brief(decoding)

    def mixed_seconds(self, work: StepWork, sequences: int) -> float:
        """Of a step with prompt rows, of so many sequences."""
        bucket = self._buckets.choose(
            tokens=work.decode + work.prompt,
            sequences=sequences,
            decode_only=False,
            logit_rows=sequences,
        )
        return self.table.seconds(bucket, work)

    def decode_seconds(self, sequences: int, keys: int, longest: int) -> float:
        """Of a step without."""
        at = bisect_left(self._decode_seats, sequences)
        return self.table.seconds(self._decode[at], StepWork(sequences, 0, keys, longest))


def _check_known(limits: SchedulerLimits) -> None:
    if limits.policy != "continuous" or limits.order != "fcfs":
        raise ConfigError(
            "fleets are simulated with the policy continuous and the order fcfs, not "
            f"{limits.policy} and {limits.order}: give --policy continuous --order fcfs"
        )
    if limits.target_itl_ms:
        raise ConfigError("fleets are simulated without target_itl_ms")

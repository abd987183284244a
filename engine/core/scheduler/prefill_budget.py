"""The prefill budget: how many prompt rows a step may have beside decode rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jitney.engine.config import Share
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

#: The longest step with prompt rows, as a multiple of the time of a step with the same share whose
#: rows start at position 0.
_STRETCH = 1.15
#: With the least AUTO share, a step may take this many times as long as one without prompt rows, so
#: that the slowest of these steps stays within three times.
_MOST_SLOWER = 2.7
#: If the first prompt ends soon, AUTO gives at least this share, and a step may take this many
#: times as long as one without prompt rows: that is one slow step, where a long prompt makes many.
#: On a CPU that decodes 32 rows in 17 ms and computes 256 prompt rows in 84 ms, a lower factor
#: would halve those rows.
_SHORT_SHARE, _SHORT_SLOWER = 0.5, 6.0
#: The same factor for steps with background prompt rows.
_BACKGROUND_SLOWER = 2.0
#: If even the smallest mixed step is longer than the target, one in this many steps takes prompt
#: rows all the same.
_PATIENCE = 4
#: Share of full steps' rows per second that brief steps may lose.
_BRIEF_LOSS = 0.08
#: AUTO: the least share for prompts, and the number of different shares.
_LEAST_SHARE, _LEVELS = 0.25, 16

#: (decoding, share) -> (rows, bucket).
_Usual = dict[tuple[int, float], tuple[int, Bucket]]


@dataclass(eq=False)
class PrefillBudget:
    """The most prompt rows of a step. share: share of the token budget while sequences decode.
    target_itl_s: target for the time of a step, seconds; 0: none.

    With a limit a long prompt is computed in more, shorter steps, so decoding sequences slow down
    less. A row far into a long prompt takes longer, so a step has fewer of them: see _STRETCH.
    Share 1 means no limit.

    A step with many prompt rows makes every decoding sequence wait, a step with few makes every
    prompt wait. So the share AUTO is the number of waiting prompts divided by the number of
    decoding sequences, in _LEVELS steps, between _LEAST_SHARE and 1. One long prompt beside many
    decoding sequences gets _LEAST_SHARE, or less if steps would take more than _MOST_SLOWER times
    as long. A short prompt gets _SHORT_SHARE within _SHORT_SLOWER, so that its first token need not
    wait for a second step. If prompts are most of the work, they fill the seats until they get the
    whole budget, and weights are not read for a few rows at a time.
    """

    step_times: StepTimeEstimate
    share: Share
    target_itl_s: float
    #: Number of steps in a row that took no prompt rows because of target_itl_s.
    _denied: int = 0
    #: Cached results of `_rows_of_share` by (decoding, share).
    _usual_rows: _Usual = field(default_factory=_Usual)

    def share_beside(self, decoding: int, prompts: int) -> float:
        """The share of the token budget for `prompts` prompts beside `decoding` sequences."""
        if isinstance(self.share, str):
            level = _LEVELS * prompts // max(1, decoding)
            return max(_LEAST_SHARE, min(level, _LEVELS) / _LEVELS)
        return self.share

    def is_short(self, rest: int, whole: int) -> bool:
        """Whether a prompt counts as short for `most`, so that it can end in the next step. rest:
        rows left of the `whole` rows that it had when it boarded.

        Where padding is free, the end of a prompt that took several full steps is not short: other
        sequences have waited often enough. Elsewhere `Buckets.thrifty` splits such an end.
        """
        buckets = self.step_times.buckets
        if buckets.padding_is_free and whole > buckets.token_budget:
            return False
        return rest <= _SHORT_SHARE * buckets.token_budget

    def most(self, decoding: int, start: int = 0, prompts: int = 1, *, short: bool = False) -> int:
        """The most prompt rows of a step beside `decoding` sequences. Call it once per step, while
        prompts need rows.

        start: position of the first row, which determines the query-key pairs. prompts: number of
        prompts that need rows. short: whether the first of them is short, see `is_short`.
        """
        buckets = self.step_times.buckets
        if not decoding:
            return buckets.token_budget
        share, slower = self._share_and_limit(decoding, prompts, short)
        usual_rows = self._usual_rows.get((decoding, share))
        if usual_rows is None:
            usual_rows = self._rows_of_share(decoding, share)
            self._usual_rows[decoding, share] = usual_rows
        rows, bucket = usual_rows
        usual = self.step_times.mixed(bucket, decoding + rows)
        if usual is None:
            return min(rows, self._fewest(decoding)) if self.target_itl_s else rows
        limit = self._longest(usual, share)
        if slower < math.inf and self.step_times.has_seen(bucket):
            limit = min(limit, self._bearable(decoding, slower))
        if self._timely(bucket.tokens, decoding, start, limit - usual) >= rows:
            return rows  # nearly always: no need to look at other buckets
        return self._most_in_time(rows, decoding, start, limit)

    def brief(self, decoding: int, start: int = 0) -> int:
        """Prompt rows of the shortest step beside `decoding` sequences in which long prompts lose
        at most _BRIEF_LOSS of their speed, because a request that arrives waits for the step's end.
        Before any step was measured: all rows of the largest step. start: position of the first
        row.

        Each further step that a prompt is split into costs a step's fixed time once more. Far into
        a long prompt rows take longer, so a step with fewer of them loses as little.
        """
        times, buckets = self.step_times, self.step_times.buckets
        fullest, min_speed = buckets.mixed[-1], 1 - _BRIEF_LOSS
        most = fullest.tokens - decoding
        full = times.mixed(fullest)
        if full is None:
            return most
        attending = times.per_pair * (start + most / 2)
        full += most * attending
        if buckets.padding_is_free:
            fixed = (times.decode(decoding) if decoding else None) or times.least
            share = min(1.0, fixed / full) or 1.0
            return math.ceil(most * min_speed * share / (1 - min_speed * (1 - share)))
        for bucket in buckets.mixed_for(decoding + 1):
            rows, seconds = bucket.tokens - decoding, times.mixed(bucket)
            if seconds and rows * full >= min_speed * most * (seconds + rows * attending):
                return rows
        return most

    def _most_in_time(self, rows: int, decoding: int, start: int, limit: float) -> int:
        """The most prompt rows, up to `rows`, of a step of any bucket within `limit` seconds."""
        buckets = self.step_times.buckets
        beside = buckets.mixed_for(decoding + 1)
        timely = max(
            self._timely(size, decoding, start, limit - (self.step_times.mixed(other, size) or 0.0))
            for other, size in _sizes(beside, buckets.padding_is_free)
        )
        if timely < 1 and self.target_itl_s:
            self._denied = (self._denied + 1) % _PATIENCE
            return 0 if self._denied else min(rows, self._fewest(decoding))
        return min(rows, max(timely, beside[0].tokens // 8))

    def _fewest(self, decoding: int) -> int:
        """Prompt rows of the smallest mixed step beside `decoding` sequences."""
        return self.step_times.buckets.mixed_for(decoding + 1)[0].tokens - decoding

    def most_in_background(self, decoding: int, start: int = 0) -> int:
        """Prompt rows of a background step: those of the smallest bucket, or more if the step stays
        short, because a request that arrives waits for its end.
        """
        buckets = self.step_times.buckets.mixed_for(decoding + 1)
        fewest = self._fewest(decoding)
        alone = self.step_times.decode(decoding)
        if alone is None:
            return fewest
        limit = _BACKGROUND_SLOWER * alone
        timely = [
            self._timely(bucket.tokens, decoding, start, limit - usual)
            for bucket in buckets
            if (usual := self.step_times.mixed(bucket)) is not None
        ]
        return max([fewest, *timely])

    def _rows_of_share(self, decoding: int, share: float) -> tuple[int, Bucket]:
        """(prompt rows of the share, bucket of the step). If padding costs time and the next
        smaller bucket holds at least half of the rows, only enough rows to fill that bucket.
        """
        buckets = self.step_times.buckets
        beside = buckets.mixed_for(decoding + 1)
        rows = min(buckets.token_budget - decoding, max(1, int(share * buckets.token_budget)))
        lower = max(
            (bucket.tokens for bucket in beside if decoding < bucket.tokens <= decoding + rows),
            default=decoding,
        )
        if not buckets.padding_is_free and 2 * (lower - decoding) >= rows:
            rows = lower - decoding
        return rows, next(bucket for bucket in beside if decoding + rows <= bucket.tokens)

    def _longest(self, usual: float, share: float) -> float:
        """The longest time in seconds of a step with prompt rows. usual: time of a step with all
        rows of the share, at the start of a prompt.
        """
        target = self.target_itl_s or math.inf
        return min(target, _STRETCH * usual) if share < 1 else target

    def _share_and_limit(self, decoding: int, prompts: int, short: bool) -> tuple[float, float]:
        """(share, how many times as long as a step without prompt rows a step may take). The second
        is bounded where many decoding sequences wait for few prompts.
        """
        share = self.share_beside(decoding, prompts)
        if not isinstance(self.share, str):
            return share, math.inf
        if short and share < _SHORT_SHARE:
            return _SHORT_SHARE, _SHORT_SLOWER
        return share, _MOST_SLOWER if share == _LEAST_SHARE else math.inf

    def _bearable(self, decoding: int, slower: float) -> float:
        """The longest time in seconds of a step beside `decoding` sequences: `slower` times their
        own step time, but at least the time of the smallest mixed step.
        """
        alone = self.step_times.decode(decoding)
        if alone is None:
            return math.inf
        smallest = self.step_times.buckets.mixed_for(decoding + 1)[0]
        return max(slower * alone, _STRETCH * (self.step_times.mixed(smallest) or 0.0))

    def _timely(self, size: int, decoding: int, start: int, left: float) -> int:
        """The most prompt rows from `start` that fit a step of `size` rows and whose attention
        takes at most `left` seconds; 0 if left < 0.

        r rows have r * (start + r / 2) query-key pairs.
        """
        if left < 0:
            return 0
        slope = self.step_times.per_pair
        rows = math.sqrt(start * start + 2 * left / slope) - start if slope else math.inf
        return int(max(0.0, min(rows, size - decoding)))


def _sizes(buckets: Sequence[Bucket], padding_is_free: bool) -> Iterator[tuple[Bucket, int]]:
    """(bucket, rows) of the step sizes to consider: full buckets, and also some between them where
    padding is free.
    """
    for bucket in buckets:
        if padding_is_free:
            for eighths in (5, 6, 7):
                yield bucket, bucket.tokens * eighths // 8
        yield bucket, bucket.tokens

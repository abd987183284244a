"""Estimates of step times, measured while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from jitney.engine.core.scheduler.buckets import Bucket, Buckets

#: Number of newest steps kept per bucket. Their median stays right if fewer than half of them were
#: disturbed by other programs.
_KEPT = 15
#: The most observed steps that wait to be processed.
_MOST_UNTAKEN = 64
#: Weight of the old value in exponential means and sums, per new step.
_FADE = 0.95
#: The same weight for the sums that `stretch` uses: the last 100 steps or so count.
_FADE_SLOWLY = 0.99
#: Differences in query-key pairs below this are noise: short prompts tell nothing about long ones.
_FEW_PAIRS = 10_000.0
#: A decode step with background rows may take this many times as long as without them.
_BACKGROUND_STRETCH = 1.2
#: Where several sequences together fill a larger decode bucket, it must give this many times the
#: tokens per second.
_FILL = 1.2
#: A step that takes this many times as long as the quickest counts as far above it. On two cores 32
#: streams take about twice as long as one: scattered times must not decide.
_FAR = 1.5
#: Fewest measured steps of a bucket for `newest`, and for a median that one disturbed step does not
#: change.
_FEWEST_SEEN = 3
#: In the sums that `stretch` uses, a step counts as at most this many times as long as is typical:
#: a pause of seconds in which the machine did nothing, after hundreds of short steps, tells nothing
#: about the steps to come.
_LONGEST_STRETCH = 10.0
#: A step with less than this share of its bucket's rows is scaled as if it had this share, because
#: most of its time is the fixed part.
_LEAST_FULL = 0.5
#: The same share for a decode step, among its rows beyond those of the next smaller bucket.
_LEAST_FULL_DECODE = 0.125

#: A measured step: bucket, seconds, query-key pairs of its prompt rows, rows, seconds of the gap
#: before it.
type _Observed = tuple[Bucket, float, int, int, float]
#: (seconds, pairs) of the newest steps by bucket, each scaled to a full step.
type _Steps = defaultdict[Bucket, deque[tuple[float, float]]]


@dataclass(eq=False, slots=True)
class _Slope:
    """Seconds per query-key pair: a regression of step times on pairs, both taken as deviations
    from their exponential means per bucket.
    """

    #: Exponential means (seconds, pairs) of each bucket.
    _means: dict[Bucket, tuple[float, float]] = field(
        default_factory=dict[Bucket, tuple[float, float]]
    )
    #: Exponential sums of pairs * pairs and of pairs * seconds, both as deviations.
    _pairs_pairs: float = _FEW_PAIRS**2
    _pairs_seconds: float = 0.0

    def observe(self, bucket: Bucket, seconds: float, pairs: float) -> None:
        """Add a mixed step. Its time's deviation from the expected one is clipped to half of the
        mean.
        """
        usual, usual_pairs = self._means.get(bucket, (seconds, pairs))
        more = pairs - usual_pairs
        expected = more * self.value
        stray = expected + max(-usual / 2, min(usual / 2, seconds - usual - expected))
        self._pairs_pairs = _FADE * self._pairs_pairs + (1 - _FADE) * _FEW_PAIRS**2 + more * more
        self._pairs_seconds = _FADE * self._pairs_seconds + more * stray
        self._means[bucket] = usual + (1 - _FADE) * stray, usual_pairs + (1 - _FADE) * more

    @property
    def value(self) -> float:
        return max(0.0, self._pairs_seconds / self._pairs_pairs)


@dataclass(eq=False)
class StepTimeEstimate:
    """Step times in seconds, by bucket and by the query-key pairs of prompt rows.

    Observed steps are processed many at a time, when an estimate is requested: pure decoding
    requests none. Where padding is free, the time of a mixed step is scaled to a full bucket before
    it is stored: the time beyond that of a decode step grows with the rows.
    """

    buckets: Buckets
    #: Observed steps that are not processed yet.
    _untaken: list[_Observed] = field(default_factory=list[_Observed])
    #: Exponential sums of step times, with the gaps before them, and of the steps' typical times.
    _taken_s: float = 0.0
    _typical_s: float = 0.0
    #: Exponential mean of all step times, seconds; None before the first step.
    _step: float | None = None
    #: Newest measured steps, by bucket.
    _seen: _Steps = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_KEPT)))
    #: Cached results of `_typical` and `_base`.
    _typicals: dict[Bucket, float] = field(default_factory=dict[Bucket, float])
    _bases: dict[Bucket, float] = field(default_factory=dict[Bucket, float])
    #: Seconds per query-key pair of prompt rows.
    _slope: _Slope = field(default_factory=_Slope)
    #: Decode bucket -> the next smaller one; read once for each draft that is considered.
    _below: dict[Bucket, Bucket] = field(init=False)

    def __post_init__(self) -> None:
        decode = self.buckets.decode
        self._below = dict(zip(decode[1:], decode, strict=False))

    def observe(
        self, bucket: Bucket, seconds: float, pairs: int = 0, rows: int = 0, gap: float = 0.0
    ) -> None:
        """Record a step of this bucket that took `seconds` on the device. pairs: query-key pairs of
        its prompt rows. rows: rows that are not padding, 0: all. gap: seconds that the device had
        waited for the host before it.
        """
        self._untaken.append((bucket, seconds, pairs, rows or bucket.tokens, gap))
        if len(self._untaken) >= _MOST_UNTAKEN:
            self._take_in()

    def _take_in(self) -> None:
        """Process the steps observed since the last call, in order."""
        if not self._untaken:
            return
        for bucket, seconds, pairs, rows, gap in self._untaken:
            self._compare(bucket, seconds + gap, pairs, rows)
            self._step = (
                seconds if self._step is None else _FADE * self._step + (1 - _FADE) * seconds
            )
            whole, scale = seconds, 1 / self._fullness(bucket, rows)
            if scale > 1:
                least = min(seconds, self._least_of(bucket))
                whole = least + (seconds - least) * scale
            self._seen[bucket].append((whole, pairs * scale))
            self._typicals.pop(bucket, None)
            if not bucket.decode_only:
                self._slope.observe(bucket, whole, pairs * scale)
                self._bases.clear()
        self._untaken.clear()

    def _compare(self, bucket: Bucket, seconds: float, pairs: int, rows: int) -> None:
        """Add a step's time and its typical time to the sums that `stretch` uses."""
        if bucket not in self._seen:
            return
        full = self._typical(bucket) if bucket.decode_only else self._base(bucket)
        typical = self._with_rows(full, bucket, rows) + self._slope.value * pairs
        seconds = min(seconds, _LONGEST_STRETCH * typical)
        self._taken_s = _FADE_SLOWLY * self._taken_s + seconds
        self._typical_s = _FADE_SLOWLY * self._typical_s + typical

    @property
    def stretch(self) -> float:
        """Ratio of elapsed time to typical step times over a series of steps, at least 1. Medians
        ignore the few steps that other programs slow down, and the time that the device waits for
        the host.
        """
        self._take_in()
        return max(1.0, self._taken_s / self._typical_s) if self._typical_s else 1.0

    def _fullness(self, bucket: Bucket, rows: int) -> float:
        """The share of a full step's variable time that a step with `rows` rows takes."""
        if not self.buckets.padding_is_free:
            return 1.0
        if not bucket.decode_only:
            return min(1.0, max(_LEAST_FULL, rows / bucket.tokens))
        below = self._seen_below(bucket)
        if below is None:
            return 1.0
        return max(_LEAST_FULL_DECODE, (rows - below.seats) / (bucket.seats - below.seats))

    def _least_of(self, bucket: Bucket) -> float:
        """Fixed seconds of a step of this bucket: its time without the rows in `_fullness`."""
        below = self._seen_below(bucket) if bucket.decode_only else None
        return self.least if below is None else self._typical(below)

    def _seen_below(self, bucket: Bucket) -> Bucket | None:
        """The next smaller decode bucket, if a step of it was measured."""
        below = self._below.get(bucket)
        return below if below in self._seen else None

    @property
    def least(self) -> float:
        """Fixed seconds of any step: the typical time of the smallest measured decode bucket; 0
        before any.
        """
        for bucket in self.buckets.decode:
            if bucket in self._seen:
                return self._typical(bucket)
        return 0.0

    @property
    def step(self) -> float | None:
        """Exponential mean of all step times in seconds; None before the first step."""
        self._take_in()
        return self._step

    @property
    def per_pair(self) -> float:
        """Seconds that a prompt row takes for each position that it attends to."""
        self._take_in()
        return self._slope.value

    def mixed(self, bucket: Bucket, rows: int = 0) -> float | None:
        """Typical seconds of a mixed bucket with `rows` rows (0: full), without the time for
        query-key pairs; None before any mixed step.

        A bucket without measured steps gets a share of the next larger measured one's time, by its
        rows, and no less than the next smaller one's. That is too short, so that the bucket is
        tried and measured. Above all measured buckets the time grows in proportion to the rows.
        With few measured steps, which may all be disturbed, this is an upper bound.
        """
        self._take_in()
        full = self._base(bucket) if bucket in self._seen else None
        if full is None or not self._is_measured(bucket):
            least = self._of_neighbours(bucket)
            full = min(full or math.inf, least or math.inf)
        return None if full == math.inf else self._with_rows(full, bucket, rows or bucket.tokens)

    def _is_measured(self, bucket: Bucket) -> bool:
        """Whether at least _FEWEST_SEEN steps of this bucket were measured."""
        return bucket in self._seen and len(self._seen[bucket]) >= _FEWEST_SEEN

    def _of_neighbours(self, unknown: Bucket) -> float | None:
        """Estimated seconds of a full mixed step of this bucket, from the others; None before any
        step of those.
        """
        tokens = unknown.tokens
        others = [bucket for bucket in self.buckets.mixed if bucket != unknown]
        seen = [bucket for bucket in others if bucket in self._seen]
        if not seen:
            return None
        above = bisect_left(seen, tokens, key=lambda bucket: bucket.tokens)
        if above == len(seen):
            return self._base(seen[-1]) * tokens / seen[-1].tokens
        least = self._base(seen[above - 1]) if above else 0.0
        return max(least, self._base(seen[above]) * tokens / seen[above].tokens)

    def decode(self, rows: int) -> float | None:
        """Typical seconds of a step with `rows` decode rows and no others; None if its bucket was
        not measured. Where padding is free, the time is interpolated between two buckets.
        """
        bucket = self._decode_bucket(rows)
        self._take_in()
        if bucket not in self._seen:
            return None
        return self._with_rows(self._typical(bucket), bucket, rows)

    def far_above_quickest(self, sequences: int) -> bool:
        """Whether a step in which `sequences` sequences decode takes _FAR times as long as the
        quickest measured one. (The typical time of a single sequence is no good measure: its steps
        may be long ago and disturbed by other programs.)
        """
        seconds = self.decode(sequences) if sequences else None
        if seconds is None:
            return False
        seen = [time for bucket in self.buckets.decode for time, _ in self._seen.get(bucket, ())]
        return seconds >= _FAR * min(seen)

    def rows_beside(self, sequences: int) -> int:
        """Rows that can be added to a step in which `sequences` (at least 1) decode without slowing
        it down: its padding, and more where a larger bucket takes hardly longer.
        """
        own = self._decode_bucket(sequences)
        self._take_in()
        rows = own.seats
        if own in self._seen:
            limit = _BACKGROUND_STRETCH * self._typical(own)
            for bucket in self.buckets.decode:
                if bucket in self._seen and self._typical(bucket) <= limit:
                    rows = max(rows, bucket.seats)
        return rows - sequences

    def has_seen(self, bucket: Bucket) -> bool:
        """Whether a step of this bucket was measured."""
        self._take_in()
        return bucket in self._seen

    def mixed_at_least(self, bucket: Bucket, rows: int) -> float | None:
        """Like `mixed`, but no guess that may be too long: before several steps of at least as many
        rows were measured, the longest typical time of all buckets; None before any step.
        """
        self._take_in()
        measured = [seen for seen in self._seen if self._is_measured(seen)]
        if any([not seen.decode_only and seen.tokens >= bucket.tokens for seen in measured]):
            return self.mixed(bucket, rows)
        return max([self._typical(seen) for seen in measured], default=self._step)

    def needed_to_pay(self, sequences: int) -> int | None:
        """Number of sequences that must join `sequences` decoding ones to give more tokens per
        second; 1 if that is not known, None if the next bucket does not hold enough.

        One more sequence can lower the rate if it needs a larger bucket that is far from full.
        Several that join together must give _FILL times the rate, since some of them end soon.
        """
        now, then = (self._decode_bucket(count) for count in (sequences, sequences + 1))
        self._take_in()
        if now is then or now not in self._seen or then not in self._seen:
            return 1
        quick, slow = self._typical(now), self._typical(then)
        if (sequences + 1) * quick >= sequences * slow:
            return 1
        for count in range(sequences + 2, then.seats + 1):
            if count * quick >= _FILL * sequences * slow:
                return count - sequences
        return None

    def newest(self, bucket: Bucket, rows: int, pairs: int = 0) -> list[float]:
        """Seconds that the newest steps of a bucket would have taken with these rows and query-key
        pairs, ascending; empty with fewer than _FEWEST_SEEN steps.
        """
        self._take_in()
        if bucket not in self._seen or len(self._seen[bucket]) < _FEWEST_SEEN:
            return []
        slope = self._slope.value
        fixed = sorted([seconds - slope * before for seconds, before in self._seen[bucket]])
        return [self._with_rows(full, bucket, rows) + slope * pairs for full in fixed]

    def _with_rows(self, full: float, bucket: Bucket, rows: int) -> float:
        """Seconds of a step with `rows` rows, computed from the seconds of a full one."""
        fullness = self._fullness(bucket, rows)
        if fullness == 1:
            return full
        least = min(full, self._least_of(bucket))
        return least + (full - least) * fullness

    def _decode_bucket(self, sequences: int) -> Bucket:
        return next(bucket for bucket in self.buckets.decode if sequences <= bucket.seats)

    def _typical(self, bucket: Bucket) -> float:
        """Median seconds of a full step of a measured bucket."""
        typical = self._typicals.get(bucket)
        if typical is None:
            typical = median([seconds for seconds, _ in self._seen[bucket]])
            self._typicals[bucket] = typical
        return typical

    def _base(self, bucket: Bucket) -> float:
        """Median seconds of a full mixed step, without the time for query-key pairs."""
        base = self._bases.get(bucket)
        if base is None:
            slope = self._slope.value
            seen = self._seen[bucket]
            base = max(0.0, median([seconds - slope * pairs for seconds, pairs in seen]))
            self._bases[bucket] = base
        return base

    def fastest_prefill(self, rows: int) -> float:
        """A lower bound, in seconds, of the time for `rows` prompt rows by the measured steps; 0 if
        no similar step was measured.
        """
        budget = self.buckets.token_budget
        steps, rest = divmod(rows, budget)
        return steps * self._fastest(budget) + self._fastest(rest)

    def _fastest(self, rows: int) -> float:
        """The longest, over the buckets up to the smallest one that holds `rows`, of their shortest
        measured times; 0 for no rows.
        """
        self._take_in()
        longest = 0.0
        capacity = 0
        for bucket in self.buckets.mixed:
            if capacity >= rows:
                break
            capacity = bucket.tokens
            if bucket in self._seen:
                shortest = min(self._seen[bucket])[0]
                longest = max(longest, self._with_rows(shortest, bucket, rows))
        return longest

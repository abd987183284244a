"""How long steps take, learnt while serving."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from jitney.engine.core.scheduler.buckets import Bucket, Buckets

#: Newest steps kept per bucket. Their median bears half of them being disturbed by something else.
_KEPT = 15
#: Steps that may be waiting to be taken in.
_MOST_UNTAKEN = 64
#: What fading means and sums keep of themselves with each new step.
_FADE = 0.95
#: The same of the sums that tell how much longer than typical steps take: the last 100 or so.
_FADE_SLOWLY = 0.99
#: Query-key pairs that count as no difference: among prompts as short as that nothing is learnt
#: about long ones.
_FEW_PAIRS = 10_000.0
#: Steps in which streams decode beside background rows may take so many times as long as without.
_BACKGROUND_STRETCH = 1.2
#: Times the tokens a second that a larger decode bucket must give where several fill it together.
_FILL = 1.2
#: A step that takes so many times as long as the quickest is far above it. On two cores 32 streams
#: take about twice as long as one: times that scatter must not decide.
_FAR = 1.5
#: A bucket that was seen fewer times does not tell how soon a step of it may be done.
_FEWEST_SEEN = 3
#: A step with less than this share of its bucket's rows tells as much of them as one with so many:
#: what it took is mostly not theirs.
_LEAST_FULL = 0.5
#: The same of a decode step, by its rows beyond those of the next smaller bucket.
_LEAST_FULL_DECODE = 0.125

#: A step: its bucket, the seconds it took, the query-key pairs of its prompt rows, its rows, the
#: gap before it.
type _Observed = tuple[Bucket, float, int, int, float]
#: By bucket: seconds and pairs of the newest steps, as if each had been full.
type _Steps = defaultdict[Bucket, deque[tuple[float, float]]]


@dataclass(eq=False, slots=True)
class _Slope:
    """Seconds per query-key pair, from how step times and pairs of a bucket stray from their fading
    means together.
    """

    #: (seconds, pairs) of each bucket.
    _means: dict[Bucket, tuple[float, float]] = field(
        default_factory=dict[Bucket, tuple[float, float]]
    )
    #: Fading sums of pairs * pairs and of pairs * seconds, each less its mean.
    _pairs_pairs: float = _FEW_PAIRS**2
    _pairs_seconds: float = 0.0

    def observe(self, bucket: Bucket, seconds: float, pairs: float) -> None:
        """A mixed step; a time that strays from what was expected by more than half of the mean
        counts as that much.
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
    """Step times in seconds, by bucket and by what its prompt rows attend to.

    Steps are taken in when a figure is asked for, many at a time: streams alone ask for none. Where
    padding is free, what a step with prompts took is kept as what it would have taken with as many
    rows as its bucket has: all beyond a decode step grows with the rows.
    """

    buckets: Buckets
    #: Steps that were observed and not yet taken in.
    _untaken: list[_Observed] = field(default_factory=list[_Observed])
    #: Fading sums of what steps took, with the gaps before them, and of what is typical of them.
    _taken_s: float = 0.0
    _typical_s: float = 0.0
    #: Fading mean of all steps, seconds; None before the first.
    _step: float | None = None
    #: What was seen, by bucket.
    _seen: _Steps = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_KEPT)))
    #: What `_typical` and `_base` have said of what was seen so far.
    _typicals: dict[Bucket, float] = field(default_factory=dict[Bucket, float])
    _bases: dict[Bucket, float] = field(default_factory=dict[Bucket, float])
    #: Seconds that each pair of a prompt row and a key adds.
    _slope: _Slope = field(default_factory=_Slope)
    #: Decode bucket -> the next smaller one: asked for with each draft that is weighed.
    _below: dict[Bucket, Bucket] = field(init=False)

    def __post_init__(self) -> None:
        decode = self.buckets.decode
        self._below = dict(zip(decode[1:], decode, strict=False))

    def observe(
        self, bucket: Bucket, seconds: float, pairs: int = 0, rows: int = 0, gap: float = 0.0
    ) -> None:
        """A step of this bucket took so long on the device; pairs: query-key pairs of its prompt
        rows; rows: those that are not padding, 0: all; gap: seconds that the device had waited for
        the host before it.
        """
        self._untaken.append((bucket, seconds, pairs, rows or bucket.tokens, gap))
        if len(self._untaken) >= _MOST_UNTAKEN:
            self._take_in()

    def _take_in(self) -> None:
        """Learn from the steps observed since the last time, in their order."""
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
        """Add a step to what steps took and to what is typical of them."""
        if bucket not in self._seen:
            return
        full = self._typical(bucket) if bucket.decode_only else self._base(bucket)
        typical = self._with_rows(full, bucket, rows) + self._slope.value * pairs
        self._taken_s = _FADE_SLOWLY * self._taken_s + seconds
        self._typical_s = _FADE_SLOWLY * self._typical_s + typical

    @property
    def stretch(self) -> float:
        """How many times as long as their typical times steps take one after another, at least 1:
        medians leave out the few that something else on the machine makes long, and what the device
        waits for the host.
        """
        self._take_in()
        return max(1.0, self._taken_s / self._typical_s) if self._typical_s else 1.0

    def _fullness(self, bucket: Bucket, rows: int) -> float:
        """The share of a full step's rows by which one with so many is told from it."""
        if not self.buckets.padding_is_free:
            return 1.0
        if not bucket.decode_only:
            return min(1.0, max(_LEAST_FULL, rows / bucket.tokens))
        below = self._seen_below(bucket)
        if below is None:
            return 1.0
        return max(_LEAST_FULL_DECODE, (rows - below.seats) / (bucket.seats - below.seats))

    def _least_of(self, bucket: Bucket) -> float:
        """Seconds of a step of this bucket without the rows that `_fullness` counts."""
        below = self._seen_below(bucket) if bucket.decode_only else None
        return self.least if below is None else self._typical(below)

    def _seen_below(self, bucket: Bucket) -> Bucket | None:
        """The next smaller decode bucket, if it was seen."""
        below = self._below.get(bucket)
        return below if below in self._seen else None

    @property
    def least(self) -> float:
        """Seconds that a step takes however few its rows are, as far as it was seen: those of the
        smallest one that only decoded.
        """
        for bucket in self.buckets.decode:
            if bucket in self._seen:
                return self._typical(bucket)
        return 0.0

    @property
    def step(self) -> float | None:
        """Fading mean of the seconds of steps of all kinds; None before the first."""
        self._take_in()
        return self._step

    @property
    def per_pair(self) -> float:
        """Seconds that a prompt row takes for each position it attends to."""
        self._take_in()
        return self._slope.value

    def mixed(self, bucket: Bucket, rows: int = 0) -> float | None:
        """Typical time of a mixed bucket with so many rows, 0: all of them, without what its prompt
        rows attend to; None before any mixed step.

        A bucket that was not seen takes its share of the next larger one that was, by its rows, and
        no less than the next smaller one: too short, so that it is tried, until the first step of
        its own. Beyond all that were seen it takes as many times as long as it has rows.
        """
        self._take_in()
        full = self._base(bucket) if bucket in self._seen else self._of_neighbours(bucket.tokens)
        return None if full is None else self._with_rows(full, bucket, rows or bucket.tokens)

    def _of_neighbours(self, tokens: int) -> float | None:
        """Seconds of a full step of so many rows, whose bucket was not seen; None before any mixed
        step.
        """
        seen = [bucket for bucket in self.buckets.mixed if bucket in self._seen]
        if not seen:
            return None
        above = bisect_left(seen, tokens, key=lambda bucket: bucket.tokens)
        if above == len(seen):
            return self._base(seen[-1]) * tokens / seen[-1].tokens
        least = self._base(seen[above - 1]) if above else 0.0
        return max(least, self._base(seen[above]) * tokens / seen[above].tokens)

    def decode(self, rows: int) -> float | None:
        """Typical time of a step of so many decode rows and nothing else; None before any. Where
        padding is free it is on a line between the times of two sizes.
        """
        bucket = self._decode_bucket(rows)
        self._take_in()
        if bucket not in self._seen:
            return None
        return self._with_rows(self._typical(bucket), bucket, rows)

    def far_above_least(self, sequences: int) -> bool:
        """Whether a step in which so many sequences decode takes _FAR times as long as the quickest
        that was seen: the few steps of one stream may be long ago, and made long by something else.
        """
        seconds = self.decode(sequences) if sequences else None
        if seconds is None:
            return False
        seen = [time for bucket in self.buckets.decode for time, _ in self._seen.get(bucket, ())]
        return seconds >= _FAR * min(seen)

    def rows_beside(self, sequences: int) -> int:
        """Rows that may be added to a step in which so many sequences decode, at least one, without
        slowing it down: its padding, and more where a larger bucket takes hardly longer.
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

    def needed_to_pay(self, sequences: int) -> int | None:
        """How many more beside so many decoding sequences it takes to give more tokens a second; 1
        where it is not known, None if the next bucket does not hold as many.

        One more gives fewer where it takes a larger bucket that is far from full. Several that come
        together must bring _FILL times the tokens, since some of them soon leave a gap again.
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

    def soonest(self, bucket: Bucket, rows: int, pairs: int = 0) -> float | None:
        """The least seconds that the newest steps of a bucket would have taken with so many rows
        and query-key pairs of prompts; None where too few were seen to tell.
        """
        self._take_in()
        if bucket not in self._seen or len(self._seen[bucket]) < _FEWEST_SEEN:
            return None
        slope = self._slope.value
        least = min([seconds - slope * before for seconds, before in self._seen[bucket]])
        return self._with_rows(least, bucket, rows) + slope * pairs

    def _with_rows(self, full: float, bucket: Bucket, rows: int) -> float:
        """Seconds of a step with so many rows, from those of a full one."""
        fullness = self._fullness(bucket, rows)
        if fullness == 1:
            return full
        least = min(full, self._least_of(bucket))
        return least + (full - least) * fullness

    def _decode_bucket(self, sequences: int) -> Bucket:
        return next(bucket for bucket in self.buckets.decode if sequences <= bucket.seats)

    def _typical(self, bucket: Bucket) -> float:
        """Seconds of a step of a bucket that was seen."""
        typical = self._typicals.get(bucket)
        if typical is None:
            typical = median([seconds for seconds, _ in self._seen[bucket]])
            self._typicals[bucket] = typical
        return typical

    def _base(self, bucket: Bucket) -> float:
        """The same of a mixed bucket, without what its prompt rows attend to."""
        base = self._bases.get(bucket)
        if base is None:
            slope = self._slope.value
            seen = self._seen[bucket]
            base = max(0.0, median([seconds - slope * pairs for seconds, pairs in seen]))
            self._bases[bucket] = base
        return base

    def fastest_prefill(self, rows: int) -> float:
        """A time below which so many prompt rows have never been computed here; 0 if nothing like
        it was measured.
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
        held = 0
        for bucket in self.buckets.mixed:
            if held >= rows:
                break
            held = bucket.tokens
            if bucket in self._seen:
                shortest = min(self._seen[bucket])[0]
                longest = max(longest, self._with_rows(shortest, bucket, rows))
        return longest

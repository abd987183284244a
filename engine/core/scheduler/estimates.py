"""How long steps take, learnt while serving, and how many prompt rows a step may have for it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from jitney.engine.config import Share
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
#: A step with prompt rows may take so many times as long as one with all of their share at the
#: start of a prompt.
_STRETCH = 1.15
#: Share AUTO at its least: a step may take so many times as long as one without prompt rows, so
#: that the slowest of them stays within three times.
_MOST_SLOWER = 2.7
#: Where the first prompt ends soon, AUTO gives at least this share, and a step may take so many
#: times as long as one without prompt rows: one slow step, where a long prompt makes many. On a
#: CPU that decodes 32 rows in 17 ms and computes 256 of prompts in 84, less would be half of that.
_SHORT_SHARE, _SHORT_SLOWER = 0.5, 6.0
#: The same of steps with prompt rows that nobody waits for, and of steps in which streams decode
#: beside rows that nobody waits for.
_BACKGROUND_SLOWER, _BACKGROUND_STRETCH = 2.0, 1.2
#: Where even the smallest mixed step is longer than the target, one in so many steps takes prompt
#: rows all the same.
_PATIENCE = 4
#: Rows a second that brief steps may lose, of those of full ones.
_BRIEF_LOSS = 0.06
#: Share AUTO: the least that prompts get, and how many different shares there are.
_LEAST_SHARE, _LEVELS = 0.25, 16
#: Times the tokens a second that a larger decode bucket must give where several fill it together.
_FILL = 1.2
#: A bucket that was seen fewer times does not tell how soon a step of it may be done.
_FEWEST_SEEN = 3
#: A step with less than this share of its bucket's rows tells as much of them as one with so many:
#: what it took is mostly not theirs.
_LEAST_FULL = 0.5


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


def _no_steps() -> _Steps:
    return defaultdict(lambda: deque(maxlen=_KEPT))


@dataclass(eq=False)
class StepTimeEstimate:
    """Step times in seconds, by bucket and by what its prompt rows attend to.

    Steps are taken in when somebody asks, many at a time: running streams alone ask nothing. Where
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
    _seen: _Steps = field(default_factory=_no_steps)
    #: What `_typical` and `_base` have said of what was seen so far.
    _typicals: dict[Bucket, float] = field(default_factory=dict[Bucket, float])
    _bases: dict[Bucket, float] = field(default_factory=dict[Bucket, float])
    #: Seconds that each pair of a prompt row and a key adds.
    _slope: _Slope = field(default_factory=_Slope)

    def observe(
        self, bucket: Bucket, seconds: float, pairs: int = 0, rows: int = 0, gap: float = 0.0
    ) -> None:
        """A step of this bucket took so long on the device; pairs: query-key pairs of its prompt
        rows; rows: those that were somebody's, 0: all; gap: seconds that the device had waited for
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
                least = min(seconds, self.least)
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
        if bucket.decode_only:
            typical = self._typical(bucket)
        else:
            typical = self._with_rows(self._base(bucket), bucket, rows) + self._slope.value * pairs
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
        if bucket.decode_only or not self.buckets.padding_is_free:
            return 1.0
        return min(1.0, max(_LEAST_FULL, rows / bucket.tokens))

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

        A bucket that was not seen goes by the nearest one, in proportion to the rows: too long for
        a larger bucket, too short for a smaller one, until the first step of its own.
        """
        self._take_in()
        near = bucket if bucket in self._seen else self._nearest(bucket)
        if near is None:
            return None
        full = self._base(near) * bucket.tokens / near.tokens
        return self._with_rows(full, bucket, rows or bucket.tokens)

    def _nearest(self, bucket: Bucket) -> Bucket | None:
        """Of the mixed buckets that were seen the one that has the most similar number of rows."""
        seen = [other for other in self.buckets.mixed if other in self._seen]
        return min(seen, key=lambda other: abs(other.tokens - bucket.tokens), default=None)

    def decode(self, sequences: int) -> float | None:
        """Typical time of a step in which so many sequences decode and nothing else; None before
        any.
        """
        bucket = self._decode_bucket(sequences)
        self._take_in()
        return self._typical(bucket) if bucket in self._seen else None

    def far_above_least(self, sequences: int) -> bool:
        """Whether a step in which so many sequences decode takes twice as long as any step must."""
        seconds = self.decode(sequences) if sequences else None
        return seconds is not None and seconds >= 2 * self.least > 0

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

    def _shortest(self, bucket: Bucket, rows: int) -> float:
        """The least seconds of a bucket that was seen, with so many rows."""
        return self._with_rows(min(self._seen[bucket])[0], bucket, rows)

    def _with_rows(self, full: float, bucket: Bucket, rows: int) -> float:
        """Seconds of a step with so many rows, from those of a full one."""
        fullness = self._fullness(bucket, rows)
        if fullness == 1:
            return full
        least = min(full, self.least)
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
                longest = max(longest, self._shortest(bucket, rows))
        return longest


#: (decoding, share) -> (rows, bucket).
_Wanted = dict[tuple[int, float], tuple[int, Bucket]]


@dataclass(eq=False)
class PrefillBudget:
    """The most prompt rows of a step. share: of the token budget, while others decode;
    target_itl_s: 0 for none.

    A long prompt then passes in more, shorter steps, and the streams that run beside it notice less
    of it. A row far into a long prompt takes longer, so there are fewer of them in a step: see
    STRETCH. Share 1 is no limit.

    Share AUTO goes by who waits for whom: a step with many prompt rows makes every stream wait, one
    with few makes every prompt wait. It is the prompts that want rows over the streams that run, in
    LEVELS steps, between _LEAST_SHARE and 1. One long prompt beside many streams gets _LEAST_SHARE,
    or as much less as makes their steps no more than _MOST_SLOWER times as long; a short one gets
    SHORT_SHARE within _SHORT_SLOWER, so that its first token need not wait for a second step;
    where prompts are most of the work, they pile up in the seats until they get the whole budget,
    and no weights are read for a few rows at a time.
    """

    step_times: StepTimeEstimate
    share: Share
    target_itl_s: float
    #: Steps in a row that took no prompt row for the sake of target_itl_s.
    _denied: int = 0
    #: By (decoding, share).
    _wanted: _Wanted = field(default_factory=_Wanted)

    def share_beside(self, decoding: int, prompts: int) -> float:
        """Of the token budget for prompts, of which so many want rows, beside so many decoding
        sequences.
        """
        if isinstance(self.share, str):
            return _auto_share(decoding, prompts)
        return self.share

    def is_short(self, rest: int, whole: int) -> bool:
        """Whether a prompt may end in the next step by what `most` allows short ones: rest, the
        rows it has left, of `whole` rows that it had when it boarded.

        Where padding is free, the end of a prompt that took several full steps is not short: who
        rides beside it has waited often enough. Elsewhere `Buckets.thrifty` cuts such an end.
        """
        buckets = self.step_times.buckets
        if buckets.padding_is_free and whole > buckets.token_budget:
            return False
        return rest <= _SHORT_SHARE * buckets.token_budget

    def most(self, decoding: int, start: int = 0, prompts: int = 1, *, short: bool = False) -> int:
        """Prompt rows for a step of so many decoding sequences; to be asked once per step, while
        prompts want rows.

        start: position of the first row, which tells what they attend to. prompts: how many prompts
        want rows now. short: the first of them is, see `is_short`.
        """
        buckets = self.step_times.buckets
        if not decoding:
            return buckets.token_budget
        share, slower = self._share_and_limit(decoding, prompts, short)
        wanted = self._wanted.get((decoding, share))
        if wanted is None:
            wanted = self._wanted[decoding, share] = self._most_wanted(decoding, share)
        rows, bucket = wanted
        usual = self.step_times.mixed(bucket, decoding + rows)
        if usual is None:
            return min(rows, self._fewest(decoding)) if self.target_itl_s else rows
        limit = self._longest(usual, share)
        if slower < math.inf and self.step_times.has_seen(bucket):
            limit = min(limit, self._bearable(decoding, slower))
        if self._timely(bucket.tokens, decoding, start, limit - usual) >= rows:
            return rows  # as nearly always: no need to ask about other steps
        return self._most_in_time(rows, decoding, start, limit)

    def brief(self, decoding: int) -> int:
        """Prompt rows of the shortest step beside so many decoding sequences in which long prompts
        lose no more than _BRIEF_LOSS of their speed: whoever comes meanwhile waits for its end. All
        that a step can have, before any was measured.

        What a step takes whatever its prompt rows is lost once more with each step that a prompt is
        cut into. A bucket that was not seen looks as fast as the nearest one, so it is tried.
        """
        times, buckets = self.step_times, self.step_times.buckets
        fullest, kept = buckets.mixed[-1], 1 - _BRIEF_LOSS
        most = fullest.tokens - decoding
        full = times.mixed(fullest)
        if full is None:
            return most
        if buckets.padding_is_free:
            fixed = (times.decode(decoding) if decoding else None) or times.least
            share = min(1.0, fixed / full) or 1.0
            return math.ceil(most * kept * share / (1 - kept * (1 - share)))
        for bucket in buckets.mixed_for(decoding + 1):
            rows, seconds = bucket.tokens - decoding, times.mixed(bucket)
            if seconds and rows * full >= kept * most * seconds:
                return rows
        return most

    def _most_in_time(self, rows: int, decoding: int, start: int, limit: float) -> int:
        """At most so many prompt rows, of a step of any bucket that takes `limit` seconds."""
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
        """Prompt rows of the smallest step beside so many decoding sequences."""
        return self.step_times.buckets.mixed_for(decoding + 1)[0].tokens - decoding

    def most_in_background(self, decoding: int, start: int = 0) -> int:
        """Prompt rows for a step that nobody waits for yet: whoever comes meanwhile waits for its
        end. Those of the smallest bucket, or more where the step stays short all the same.
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

    def _most_wanted(self, decoding: int, share: float) -> tuple[int, Bucket]:
        """The share of prompt rows, and the bucket of the step; or, unless padding is free, as many
        rows as fill the next smaller bucket if that is at least half as many: no padding then."""
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
        """Seconds that a step with prompt rows may take. usual: of one with all that may be, at the
        start of a prompt.
        """
        target = self.target_itl_s or math.inf
        return min(target, _STRETCH * usual) if share < 1 else target

    def _share_and_limit(self, decoding: int, prompts: int, short: bool) -> tuple[float, float]:
        """The share, and how many times as long as one without prompt rows a step may take: that is
        bounded where many streams wait for few prompts.
        """
        share = self.share_beside(decoding, prompts)
        if not isinstance(self.share, str):
            return share, math.inf
        if short and share < _SHORT_SHARE:
            return _SHORT_SHARE, _SHORT_SLOWER
        return share, _MOST_SLOWER if share == _LEAST_SHARE else math.inf

    def _bearable(self, decoding: int, slower: float) -> float:
        """Seconds that a step may take beside so many streams, `slower` times as long as their own:
        never fewer than the smallest step with prompt rows takes.
        """
        alone = self.step_times.decode(decoding)
        if alone is None:
            return math.inf
        smallest = self.step_times.buckets.mixed_for(decoding + 1)[0]
        return max(slower * alone, _STRETCH * (self.step_times.mixed(smallest) or 0.0))

    def _timely(self, size: int, decoding: int, start: int, left: float) -> int:
        """The most prompt rows from `start` that fit a step of so many rows and can attend in the
        `left` seconds; 0 if left < 0.

        r rows attend to r * (start + r / 2) positions.
        """
        if left < 0:
            return 0
        slope = self.step_times.per_pair
        rows = math.sqrt(start * start + 2 * left / slope) - start if slope else math.inf
        return int(max(0.0, min(rows, size - decoding)))


def _sizes(buckets: Sequence[Bucket], padding_is_free: bool) -> Iterator[tuple[Bucket, int]]:
    """(bucket, rows) of steps that are worth thinking of: full ones, and where padding is free some
    between.
    """
    for bucket in buckets:
        if padding_is_free:
            for eighths in (5, 6, 7):
                yield bucket, bucket.tokens * eighths // 8
        yield bucket, bucket.tokens


def _auto_share(decoding: int, prompts: int) -> float:
    level = _LEVELS * prompts // max(1, decoding)
    return max(_LEAST_SHARE, min(level, _LEVELS) / _LEVELS)

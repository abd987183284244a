"""How long an answer will be, learnt from the answers before it: no model, a few numbers per class of requests.

Method: life tables (Kaplan and Meier, Nonparametric Estimation from Incomplete Observations, 1958). Lengths are cut
into buckets; of each class of requests it is counted how many answers came into a bucket, and how many ended in it by
themselves. An answer that was cut off (max_tokens, an abort), or that still runs, counts in the buckets it has passed
and in no other: that it went on says something, where it would have ended is not known. So short answers, which end
first, do not make all answers look short.

A request belongs to four classes, from coarse to fine: everybody; its shape (prompt length and max_tokens, in powers of
two); its tenant; its tenant and shape. A finer class is believed as far as it has seen answers: it starts from the next
coarser one's share that ends in a bucket, as if it had seen WEIGHT answers come into that bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

#: What is expected before anything was seen, in tokens: whatever was generated, on average so many more will come.
#: `expect` guesses; an outlook, on which pages are promised, is careful.
FIRST_GUESS, CAREFUL_GUESS = 256, 1024
#: How many answers a coarser class weighs in a finer one, in each bucket.
WEIGHT = 4.0
#: When so many answers of a class have ended, its counts are halved: about the last 128 to 256 count.
HALVE_AT = 256
#: Classes that are remembered; the one that was not seen for longest is forgotten first.
MOST_CLASSES = 1024
#: Buckets of lengths: one for each length up to 7, then four to each power of two, up to 2**20 tokens and more.
BUCKETS = 80

#: A class of requests; () is everybody.
type ClassKey = tuple[str | int, ...]


def bucket_of(tokens: int) -> int:
    """The bucket that a length falls in."""
    if tokens < 8:
        return max(0, tokens)
    octave = tokens.bit_length() - 3
    return min(BUCKETS - 1, 4 * octave + (tokens >> octave))


def edge_of(bucket: int) -> int:
    """The shortest length in a bucket."""
    if bucket < 8:
        return bucket
    octave = (bucket - 4) >> 2
    return (4 + (bucket & 3)) << octave


#: The shortest length of each bucket, and the end of the last one: f8 [BUCKETS + 1].
EDGES = np.array([edge_of(bucket) for bucket in range(BUCKETS + 1)], np.float64)


def steady_hazard(tokens: int) -> np.ndarray:
    """The share that ends in each bucket if on average so many tokens are always still to come, f8 [BUCKETS]."""
    return -np.expm1(-np.diff(EDGES) / tokens)


FIRST_HAZARD, CAREFUL_HAZARD = steady_hazard(FIRST_GUESS), steady_hazard(CAREFUL_GUESS)


class Kind(NamedTuple):
    """The classes of a request, from coarse to fine."""

    everybody: ClassKey
    shape: ClassKey
    tenant: ClassKey
    own: ClassKey


def kind_of(tenant: str, n_prompt: int, max_tokens: int | None) -> Kind:
    """The classes of a request. tenant: whom it is charged to. max_tokens: as the client gave it, None for no limit."""
    shape = (n_prompt.bit_length(), 0 if max_tokens is None else max_tokens.bit_length())
    return Kind((), shape, (tenant,), (tenant, *shape))


class LifeTable:
    """Of one class: answers that came into each bucket, and that ended in it by themselves, both f8 [BUCKETS]."""

    __slots__ = ("came", "ended", "n_ended")

    def __init__(self) -> None:
        self.came = np.zeros(BUCKETS)
        self.ended = np.zeros(BUCKETS)
        self.n_ended = 0.0

    def end(self, bucket: int) -> None:
        """An answer ended by itself in this bucket."""
        self.came[bucket] += 1.0
        self.ended[bucket] += 1.0
        self.n_ended += 1.0
        if self.n_ended >= HALVE_AT:
            self.came /= 2
            self.ended /= 2
            self.n_ended /= 2

    def hazard(self, coarser: np.ndarray) -> np.ndarray:
        """The share of those who come into a bucket that ends there, f8 [BUCKETS]. coarser: of the coarser class."""
        return (self.ended + WEIGHT * coarser) / (self.came + WEIGHT)


class Outlook:
    """How long the answers of a class get. alive: the share that reaches each edge, f8 [BUCKETS + 1]; mean: tokens."""

    __slots__ = ("alive", "mean")

    def __init__(self, hazard: np.ndarray):
        self.alive = np.concatenate(([1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0))))
        per_bucket = (self.alive[1:] + self.alive[:-1]) / 2 * np.diff(EDGES)
        self.mean = float(per_bucket.sum())

    def reaches(self, tokens: np.ndarray) -> np.ndarray:
        """The share of answers that get at least so long, of the shape of `tokens`."""
        return np.interp(tokens, EDGES, self.alive)


class OutputLengths:
    """Life tables of the classes seen lately. All is O(1) per request; `passed` costs one look where nothing is new."""

    def __init__(self) -> None:
        self._tables: OrderedDict[ClassKey, LifeTable] = OrderedDict()
        self._outlooks: dict[Kind, Outlook] = {}  # with CAREFUL_GUESS
        self._means: dict[Kind, float] = {}  # with FIRST_GUESS

    def __len__(self) -> int:
        """Classes that are remembered."""
        return len(self._tables)

    def passed(self, kind: Kind, before: int, n_output: int) -> int:
        """A running answer has so many tokens: count it in the buckets that it has left behind since the last time.

        before: what the last call returned for it, 0 at first. Returns the bucket it is in.
        """
        bucket = bucket_of(n_output)
        if bucket > before:
            for key in kind:
                self._table(key).came[before:bucket] += 1.0
        return bucket

    def observe(self, kind: Kind, before: int, n_output: int, *, by_itself: bool) -> None:
        """An answer of so many tokens is over. by_itself: not cut off. before: see `passed`."""
        bucket = self.passed(kind, before, n_output)
        if by_itself:
            for key in kind:
                self._table(key).end(bucket)
        self._outlooks.clear()
        self._means.clear()

    def outlook(self, kind: Kind) -> Outlook:
        """What is known about answers of these classes; the same object until another answer is over."""
        found = self._outlooks.get(kind)
        if found is None:
            if len(self._outlooks) >= MOST_CLASSES:
                self._outlooks.clear()
            found = self._outlooks[kind] = Outlook(self._hazard(kind, CAREFUL_HAZARD))
        return found

    def expect(self, kind: Kind, most: int) -> int:
        """Output tokens to expect, at least 1 and at most `most`."""
        mean = self._means.get(kind)
        if mean is None:
            if len(self._means) >= MOST_CLASSES:
                self._means.clear()
            mean = self._means[kind] = Outlook(self._hazard(kind, FIRST_HAZARD)).mean
        return max(1, min(most, round(mean)))

    def _hazard(self, kind: Kind, hazard: np.ndarray) -> np.ndarray:
        """The share of those who come into a bucket that ends there, f8 [BUCKETS]. hazard: before anything was seen."""
        for key in kind:
            table = self._tables.get(key)
            if table is not None:
                hazard = table.hazard(hazard)
        return hazard

    def _table(self, key: ClassKey) -> LifeTable:
        """The table of a class, now the one seen last."""
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MOST_CLASSES:
                self._tables.popitem(last=False)
            table = self._tables[key] = LifeTable()
        self._tables.move_to_end(key)
        return table

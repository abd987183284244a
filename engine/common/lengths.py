"""Estimates of answer lengths, learnt from the answers so far.

The same share of a class's answers is assumed to end with each token. That share is the number of
answers that ended by themselves divided by the tokens of all answers, including those that still
run or were cut off (the estimate of an exponential distribution from censored data). So short
answers, which end first, do not make all answers look short.

A request belongs to four classes, from coarse to fine. The mean of a finer class starts from that
of the next coarser one, which counts as much as a few answers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

#: Mean tokens assumed before the first answer: by `expect`, and by `careful`, which guesses high.
FIRST_GUESS, CAREFUL_GUESS = 256, 1024
#: Number of answers that the coarser class counts as in a finer one.
_WEIGHT = 4.0
#: Number of ended answers at which a class's counts are halved: the last 128 to 256 count.
_HALVE_AT = 256
#: The most classes stored; the least recently seen one is dropped first.
_MOST_CLASSES = 1024
#: New tokens after which a running answer is counted again.
_COUNT_EVERY = 32

#: A class of requests; () is all requests.
type _ClassKey = tuple[str | int, ...]


class RequestClasses(NamedTuple):
    """The classes of a request, from coarse to fine."""

    all_requests: _ClassKey
    #: Requests of similar prompt length and max_tokens.
    shape: _ClassKey
    tenant: _ClassKey
    tenant_shape: _ClassKey

    @classmethod
    def of(cls, tenant: str, n_prompt: int, max_tokens: int | None) -> RequestClasses:
        """The classes of a request. tenant: the account that is charged for it. max_tokens: as the
        client gave it, None for no limit.
        """
        shape = (n_prompt.bit_length(), (max_tokens or 0).bit_length())
        return cls((), shape, (tenant,), (tenant, *shape))


@dataclass(eq=False, slots=True)
class _Counts:
    """Counts of one class: answers that ended by themselves, and tokens of all answers."""

    ended: float = 0.0
    tokens: float = 0.0

    def mean(self, coarser: float) -> float:
        """Mean tokens of an answer. coarser: the mean of the coarser class."""
        return (self.tokens + _WEIGHT * coarser) / (self.ended + _WEIGHT)


@dataclass(eq=False)
class LengthEstimate:
    """Mean answer lengths by class. All methods take O(1)."""

    #: The class seen last is at the end.
    _classes: OrderedDict[_ClassKey, _Counts] = field(
        default_factory=OrderedDict[_ClassKey, _Counts]
    )

    def __len__(self) -> int:
        """Number of stored classes."""
        return len(self._classes)

    def progress(self, kind: RequestClasses, counted: int, n_output: int) -> int:
        """Count the tokens of a running answer. counted: what the last call returned for it, 0 at
        first. Returns the tokens that are counted now.
        """
        if n_output - counted < _COUNT_EVERY:
            return counted
        self._add(kind, n_output - counted, ended=0)
        return n_output

    def observe(
        self, kind: RequestClasses, counted: int, n_output: int, *, by_itself: bool
    ) -> None:
        """Count an ended answer of `n_output` tokens. by_itself: it was not cut off. counted: see
        `progress`.
        """
        self._add(kind, n_output - counted, ended=int(by_itself))

    def _add(self, kind: RequestClasses, tokens: int, *, ended: int) -> None:
        for key in kind:
            counts = self._classes.get(key)
            if counts is None:
                if len(self._classes) >= _MOST_CLASSES:
                    self._classes.popitem(last=False)
                counts = self._classes[key] = _Counts()
            self._classes.move_to_end(key)
            counts.tokens += tokens
            counts.ended += ended
            if counts.ended >= _HALVE_AT:
                counts.tokens /= 2
                counts.ended /= 2

    def expect(self, kind: RequestClasses, most: int) -> int:
        """Tokens to expect of an answer, at least 1 and at most `most`."""
        return max(1, min(most, round(self.mean(kind))))

    def mean(self, kind: RequestClasses, guess: float = FIRST_GUESS) -> float:
        """Mean tokens of an answer. guess: the mean before any answer was seen."""
        for key in kind:
            counts = self._classes.get(key)
            if counts is not None:
                guess = counts.mean(guess)
        return max(1.0, guess)

    def careful(self, kind: RequestClasses) -> float:
        """The mean with a larger first guess, for page demand: pages must not run out."""
        return self.mean(kind, CAREFUL_GUESS)

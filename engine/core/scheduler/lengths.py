"""How long answers get, learnt from the answers so far.

Of the answers of a class, the same share is taken to end with each token. That share is the number
of answers that ended by themselves divided by the tokens of all answers, those that still run or
were cut off included (the estimate of an exponential distribution from censored data): short
answers, which end first, do not make all of them look short.

A request belongs to four classes, from coarse to fine. A finer class starts from the mean of the
next coarser one, which weighs as much as a few answers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

#: Mean tokens before any answer was seen: `expect` guesses, `careful` rather guesses too many.
FIRST_GUESS, CAREFUL_GUESS = 256, 1024
#: Answers that the coarser class weighs in a finer one.
_WEIGHT = 4.0
#: Ended answers of a class after which its counts are halved: the last 128 to 256 count.
_HALVE_AT = 256
#: Classes that are kept; the one that was not seen for longest is dropped first.
_MOST_CLASSES = 1024
#: Tokens after which a running answer is counted again.
_COUNT_EVERY = 32

#: A class of requests; () is all requests.
type _ClassKey = tuple[str | int, ...]


class RequestClasses(NamedTuple):
    """The classes of a request, from coarse to fine."""

    all_requests: _ClassKey
    #: Requests of like prompt length and max_tokens.
    shape: _ClassKey
    tenant: _ClassKey
    tenant_shape: _ClassKey

    @classmethod
    def of(cls, tenant: str, n_prompt: int, max_tokens: int | None) -> RequestClasses:
        """tenant: the account that the request is charged to. max_tokens: as the client gave it,
        None for no limit.
        """
        shape = (n_prompt.bit_length(), (max_tokens or 0).bit_length())
        return cls((), shape, (tenant,), (tenant, *shape))


@dataclass(eq=False, slots=True)
class _Counts:
    """The answers of one class: how many ended by themselves, and tokens of all of them."""

    ended: float = 0.0
    tokens: float = 0.0

    def mean(self, coarser: float) -> float:
        """Tokens of an answer. coarser: the same of the coarser class."""
        return (self.tokens + _WEIGHT * coarser) / (self.ended + _WEIGHT)


@dataclass(eq=False)
class LengthEstimate:
    """Mean lengths by class. All methods take O(1)."""

    #: The class seen last is at the end.
    _classes: OrderedDict[_ClassKey, _Counts] = field(
        default_factory=OrderedDict[_ClassKey, _Counts]
    )

    def __len__(self) -> int:
        """Classes that are kept."""
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
        """An answer of `n_output` tokens is over. by_itself: it was not cut off. counted: see
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
        """Mean tokens of an answer. guess: of answers of which none was seen."""
        for key in kind:
            counts = self._classes.get(key)
            if counts is not None:
                guess = counts.mean(guess)
        return max(1.0, guess)

    def careful(self, kind: RequestClasses) -> float:
        """As `mean`, with a larger guess, for pages that must not run out."""
        return self.mean(kind, CAREFUL_GUESS)

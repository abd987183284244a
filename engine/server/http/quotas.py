"""Limits of one client: `Quotas` of its API key's work, `Shares` of scarce things. Work is not
counted in requests but in sequences, which are charged for their expected output on arrival.
Retry times of refused requests are spread: one after the other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from jitney.engine.common.errors import RequestError
from jitney.engine.common.lengths import LengthEstimate, RequestClasses
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.http.errors import HttpError

_MINUTE_S = 60.0
#: Initial estimate of the seconds between ends of a key's sequences; the longest Retry-After;
#: the weight of the newest interval in the mean.
_FIRST_RETRY_S, _LONGEST_RETRY_S, _FADE = 1.0, 3600.0, 0.9


@dataclass(slots=True)
class RetryTimes:
    """Spreads the retry times of refused requests: one after the other, not all the same."""

    #: Clock seconds; times before this have been assigned to refused requests.
    until: float = 0.0

    def next(self, now: float, first_in: float, each: float) -> float:
        """The retry time in seconds. first_in: the earliest; each: seconds reserved for this
        request.
        """
        at = max(self.until, now + first_in)
        if at - now < _LONGEST_RETRY_S:
            self.until = at + each
        return min(at - now, _LONGEST_RETRY_S)


@dataclass(slots=True)
class _Usage:
    """The use of one key."""

    #: Tokens left, negative after answers longer than expected; as of `at` (clock seconds).
    tokens: float
    at: float
    #: Retry times of requests refused for their sequences, and for their tokens.
    for_sequences: RetryTimes
    for_tokens: RetryTimes
    #: Sequences under way.
    open: int = 0
    #: Mean seconds between two ends of sequences at the limit; time of the last end.
    ends_every: float = _FIRST_RETRY_S
    full_since: float | None = None


class _KeyUse(NamedTuple):
    """The use of a key, as metrics and pages show it."""

    #: Sequences under way.
    open: int
    #: Tokens left to spend; None: not limited.
    tokens_left: float | None


@dataclass(slots=True)
class Spending:
    """The tokens of one request. reserved: output tokens that were charged and have not come."""

    #: None: tokens are not limited.
    usage: _Usage | None
    reserved: float

    def spend(self, tokens: int) -> None:
        """Count output tokens; unexpected ones are a debt that makes the next request wait."""
        if self.usage is None:
            return
        expected = min(self.reserved, tokens)
        self.reserved -= expected
        self.usage.tokens -= tokens - expected

    def give_back(self, tokens: float) -> None:
        """Give back prompt tokens charged in excess; negative: too few were charged."""
        if self.usage is not None:
            self.usage.tokens += tokens


@dataclass(slots=True)
class Shares:
    """Limits how many things (such as uploads) one client (`client_of`) may have under way."""

    #: Limit of one client.
    most: int
    #: Plural name of the things, for the message; and the error's code.
    things: str
    code: str
    _n_open: Counter[str] = field(default_factory=Counter[str], init=False)

    @contextmanager
    def one_of(self, client: str) -> Iterator[None]:
        """Context of one thing. Raises HttpError 429 if the client is at its limit."""
        if self._n_open[client] >= self.most:
            raise HttpError(
                429,
                f"one client may have {self.most} {self.things} at a time",
                code=self.code,
                headers={"retry-after": "1"},
                close=True,
            )
        self._n_open[client] += 1
        try:
            yield
        finally:
            self._n_open[client] -= 1
            if not self._n_open[client]:
                del self._n_open[client]


@dataclass(slots=True, eq=False)
class Quotas:
    """Open sequences and tokens per minute of each key; 0 for no limit. Tokens are a bucket of a
    minute's worth. A request enters if its prompt and expected output are covered (or the bucket is
    full); what did not come is given back at its end.
    """

    max_concurrent: int
    tokens_per_minute: int
    clock: Callable[[], float] = time.monotonic
    #: By key.
    _usage: dict[str, _Usage] = field(default_factory=dict[str, "_Usage"], init=False)
    #: Estimates of output lengths.
    _lengths: LengthEstimate = field(default_factory=LengthEstimate, init=False)

    def limit(self, max_concurrent: int, tokens_per_minute: int) -> None:
        """Change the limits. Tokens already spent still count; open sequences go on."""
        for key in self._usage:
            self._of(key).tokens += tokens_per_minute - self.tokens_per_minute
        self.max_concurrent, self.tokens_per_minute = max_concurrent, tokens_per_minute

    def use(self, key: str) -> _KeyUse:
        """The use of a key now."""
        usage = self._of(key) if key in self._usage else None
        left = self.tokens_per_minute if usage is None else usage.tokens
        return _KeyUse(usage.open if usage else 0, left if self.tokens_per_minute else None)

    @contextmanager
    def open(self, key: str, sequences: int = 1) -> Iterator[None]:
        """Count sequences of a key as open. Raises RequestError rate_limit if they are too many."""
        usage = self._of(key)
        if self.max_concurrent and usage.open + sequences > self.max_concurrent:
            retry = self._free_in(usage, sequences)
            raise RequestError(
                f"at most {self.max_concurrent} sequences of one client may be open at a time, and "
                f"{usage.open} are; retry in {retry:.1f} s",
                code="rate_limit",
                retry_after=retry,
            )
        self._count(usage, sequences)
        try:
            yield
        finally:
            self._count(usage, -sequences)

    @contextmanager
    def open_rest(self, key: str, sequences: int) -> Iterator[None]:
        """Count a request's sequences beside the open one. Raises RequestError if never allowed."""
        if self.max_concurrent and sequences > self.max_concurrent:
            raise RequestError(
                f"prompts times n (or best_of) is {sequences}, and one client may have at most "
                f"{self.max_concurrent} sequences open",
                param="n",
            )
        if sequences == 1:
            yield
            return
        with self.open(key, sequences - 1):
            yield

    @contextmanager
    def spending(self, key: str, requests: Sequence[EngineRequest]) -> Iterator[Spending]:
        """Charge prompts and expected answers. Raises RequestError rate_limit, with the wait."""
        if not self.tokens_per_minute:
            yield Spending(None, 0.0)
            return
        kinds = [_kind(key, request) for request in requests]
        reserved = sum(map(self._expected, kinds, requests))
        prompts = sum(len(request.prompt) for request in requests)
        with self.charging(key, prompts, reserved) as spending:
            yield spending

    @contextmanager
    def charging(self, key: str, n_prompt: int, reserved: float) -> Iterator[Spending]:
        """Charge so many prompt tokens and expected output tokens, as `spending` does."""
        cost = n_prompt + reserved
        usage = self._of(key)
        self._check_tokens(usage, cost)
        usage.tokens -= cost
        spending = Spending(usage, reserved)
        try:
            yield spending
        finally:
            self._of(key).tokens += spending.reserved

    def observe(self, request: EngineRequest, key: str, n_output: int, *, by_itself: bool) -> None:
        """Record a sequence's length at its end. by_itself: the model ended it."""
        if self.tokens_per_minute:
            self._lengths.observe(_kind(key, request), 0, n_output, by_itself=by_itself)

    def expect(self, key: str, n_prompt: int, max_tokens: int | None, most: int) -> int:
        """Expected output tokens of one sequence, at most `most`. max_tokens: as the client set
        it.
        """
        return self._lengths.expect(RequestClasses.of(key, n_prompt, max_tokens), most)

    def seen(self, key: str, n_prompt: int, max_tokens: int | None, n_output: int) -> None:
        """Record the length of a sequence that ended."""
        self._lengths.observe(
            RequestClasses.of(key, n_prompt, max_tokens), 0, n_output, by_itself=True
        )

    def _expected(self, kind: RequestClasses, request: EngineRequest) -> int:
        """Output tokens of all its sequences."""
        sampling = request.sampling
        most = sampling.max_tokens or 1
        return sampling.n * self._lengths.expect(kind, most)

    def _check_tokens(self, usage: _Usage, cost: float) -> None:
        missing = min(cost, self.tokens_per_minute) - usage.tokens
        if missing <= 0:
            return
        second = _MINUTE_S / self.tokens_per_minute
        retry = usage.for_tokens.next(self.clock(), missing * second, cost * second)
        raise RequestError(
            f"one client may use {self.tokens_per_minute} tokens a minute, and this request is "
            f"expected to use {cost:.0f}; retry in {retry:.1f} s",
            code="rate_limit",
            retry_after=retry,
        )

    def _count(self, usage: _Usage, sequences: int) -> None:
        """Change the number of open sequences."""
        now = self.clock()
        if sequences < 0 and usage.full_since is not None:
            each = (now - usage.full_since) / -sequences
            usage.ends_every = _FADE * usage.ends_every + (1 - _FADE) * each
        usage.open += sequences
        usage.full_since = now if usage.open >= self.max_concurrent else None

    def _free_in(self, usage: _Usage, sequences: int) -> float:
        """Expected seconds until `sequences` may be opened, after those refused before them."""
        missing = usage.open + sequences - self.max_concurrent
        each = usage.ends_every
        return usage.for_sequences.next(self.clock(), missing * each, sequences * each)

    def _of(self, key: str) -> _Usage:
        """The key's usage as of now. Usages are never dropped: configured keys bound their
        number.
        """
        now, full = self.clock(), float(self.tokens_per_minute)
        usage = self._usage.get(key)
        if usage is None:
            usage = self._usage[key] = _Usage(full, now, RetryTimes(), RetryTimes())
        usage.tokens = min(full, usage.tokens + (now - usage.at) * full / _MINUTE_S)
        usage.at = now
        return usage


def _kind(key: str, request: EngineRequest) -> RequestClasses:
    return RequestClasses.of(key, len(request.prompt), request.sampling.max_tokens)

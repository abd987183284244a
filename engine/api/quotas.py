"""What one API key may have at a time and in a minute, so that no client can take the whole
server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jitney.engine.errors import RequestError

_MINUTE_S = 60.0
#: Seconds to advise to who has too many requests open: nobody knows when one of them will end.
_RETRY_S = 1.0


@dataclass(slots=True)
class _Usage:
    """What one key uses."""

    #: Requests under way.
    open: int
    #: Left to spend, below 0 after long answers; as of `at` (clock seconds).
    tokens: float
    at: float


class Quotas:
    """Open requests and tokens per minute of each key; 0 for no limit. clock: seconds.

    Tokens are a bucket: it holds a minute's worth and fills at that rate. A request enters if its
    prompt is covered (a prompt larger than the bucket: if the bucket is full); its output is
    charged as it comes, so a long answer is not cut off, and the debt keeps the next request
    waiting.
    """

    def __init__(
        self,
        max_concurrent: int,
        tokens_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_concurrent = max_concurrent
        self.tokens_per_minute = tokens_per_minute
        self.clock = clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def open(self, key: str) -> Iterator[None]:
        """One request of this key is under way. Raises RequestError rate_limit if it is one too
        many.
        """
        usage = self._of(key)
        if self.max_concurrent and usage.open >= self.max_concurrent:
            raise RequestError(
                f"at most {self.max_concurrent} requests of one client may be open at a time",
                code="rate_limit",
                retry_after=_RETRY_S,
            )
        usage.open += 1
        try:
            yield
        finally:
            usage.open -= 1

    def enter(self, key: str, prompt_tokens: int) -> None:
        """Spend a prompt. Raises RequestError rate_limit with the seconds after which there is
        enough for it.
        """
        if not self.tokens_per_minute:
            return
        usage = self._of(key)
        missing = min(prompt_tokens, self.tokens_per_minute) - usage.tokens
        if missing > 0:
            wait = missing * _MINUTE_S / self.tokens_per_minute
            raise RequestError(
                f"one client may use {self.tokens_per_minute} tokens a minute; "
                f"retry in {wait:.1f} s",
                code="rate_limit",
                retry_after=wait,
            )
        usage.tokens -= prompt_tokens

    def spend(self, key: str, tokens: int) -> None:
        """So many output tokens came."""
        if self.tokens_per_minute:
            self._of(key).tokens -= tokens

    def _of(self, key: str) -> _Usage:
        """The key's usage as of now; keys are as many as were handed out, so none is forgotten."""
        now, full = self.clock(), float(self.tokens_per_minute)
        usage = self._usage.get(key)
        if usage is None:
            usage = self._usage[key] = _Usage(0, full, now)
        usage.tokens = min(full, usage.tokens + (now - usage.at) * full / _MINUTE_S)
        usage.at = now
        return usage

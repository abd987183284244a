"""Requests that a new core gets one after the other, because one of them may be what ends cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jitney.engine.server.process.stream import Stream

#: A request that was in so many cores when they crashed is suspected.
_SUSPICIOUS = 2
#: Tokens after which one that is suspected has passed.
_ENOUGH_TOKENS = 4


class Suspicion:
    """Keeps count of the crashes that each request was in, and tells which one it was.

    A core that was killed from outside says nothing about its requests; one that crashed, said that
    it could not go on, or hung may have done so over one of them.
    """

    def __init__(self) -> None:
        #: Who is in the core as the only one that is suspected.
        self.on_trial: Stream | None = None
        # Those who wait for their trial.
        self._waiting: deque[Stream] = deque()
        # Tokens that `on_trial` had when its trial began.
        self._tokens = 0

    def core_crashed(self, streams: list[Stream]) -> Stream | None:
        """A core has crashed; streams: the open requests. Returns the one that did it, if that is
        known now.

        All that the core had count, seated or not: who boarded in the core's last step has not been
        heard of.
        """
        if self.on_trial in streams:
            for stream in streams:
                stream.crashes = 0
            return self.on_trial
        for stream in streams:
            stream.crashes += stream not in self._waiting
        return None

    def core_ready(self, streams: Iterable[Stream]) -> list[Stream]:
        """Those of the open requests that a new core gets at once."""
        at_once: list[Stream] = []
        self._waiting.clear()
        for stream in streams:
            if stream.crashes >= _SUSPICIOUS:
                self._waiting.append(stream)
            else:
                at_once.append(stream)
        return at_once + self._next()

    def waits(self, stream: Stream) -> bool:
        """Whether the core has not got a request yet."""
        return stream in self._waiting

    def progressed(self, stream: Stream) -> list[Stream]:
        """Something came of the request on trial, or nobody wants it any more. Returns those that
        the core gets now.
        """
        if _tokens_of(stream) - self._tokens < _ENOUGH_TOKENS and not stream.closed:
            return []
        stream.crashes = 0
        return self._next()

    def _next(self) -> list[Stream]:
        """Begin the next trial, if anybody still waits for one."""
        self.on_trial = None
        while self._waiting and self.on_trial is None:
            stream = self._waiting.popleft()
            if not stream.closed:
                self.on_trial, self._tokens = stream, _tokens_of(stream)
        return [] if self.on_trial is None else [self.on_trial]


def _tokens_of(stream: Stream) -> int:
    return sum(len(tokens) for tokens in stream.tokens)

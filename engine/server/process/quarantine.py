"""Requests that made the engine fail, which are not given to it again for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import EngineRequest

#: Seconds that a request is refused, and how many are remembered.
_SECONDS, _MOST = 60.0, 256


class Quarantine:
    """Knows requests by a digest of prompt and parameters; who sends them makes no difference."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # When each digest may come again, in that order.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: EngineRequest) -> None:
        """Refuse its like for a while."""
        digest = _digest(request)
        self._until.pop(digest, None)
        self._until[digest] = self._clock() + _SECONDS
        if len(self._until) > _MOST:
            self._until.popitem(last=False)

    def check(self, request: EngineRequest) -> None:
        """Raise RequestError request_quarantined if its like is refused now."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            return
        until = self._until.get(_digest(request))
        if until is not None:
            raise RequestError(
                "the engine failed over this request a moment ago, and it is not tried again for "
                f"another {until - now:.0f} s",
                code="request_quarantined",
            )


def _digest(request: EngineRequest) -> bytes:
    """Of what decides the computation; a seed that nobody asked for would make each one another."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    return blake2b(msgspec.msgpack.encode((request.prompt, sampling)), digest_size=16).digest()

"""What an answer shows of itself while it passes: when its first token came, how many came, and
whether it went well. Nothing is read twice or kept.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from jitney.engine.fleet.comparison import RequestOutcome
from jitney.engine.fleet.forwarding import ProxiedAnswer, is_own_limit

_FULL, _SERVER_ERROR, _CLIENT_ERROR = 429, 500, 400


def is_failure(status: int) -> bool:
    """True for answers that are the engine's fault, lack of room included."""
    return status == _FULL or status >= _SERVER_ERROR


#: A piece of text that is not empty, in an event of any of the API's forms.
_PIECE = re.compile(
    rb'"(?:content|text|delta|thinking|reasoning_content|reasoning|arguments|partial_json)"'
    rb': ?"(?!")'
)
#: The tokens of a usage, and the bytes in which they stand after its name.
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)": ?(\d{1,9})')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)": ?(\d{1,9})')
_USAGE, _USAGE_BYTES = re.compile(rb'"usage"'), 512
#: How the API ends a stream that went wrong.
_ERRORS = (b'data: {"error"', b"event: error\n", b"event: response.failed\n")


@dataclass(slots=True)
class UsageWatch:
    """Tokens of an answer that passes, by its last usage."""

    #: None: no usage says.
    prompt: int | None = None
    output: int | None = None
    #: Pieces of text that came.
    pieces: int = 0
    #: End of the bytes so far: a usage may be cut in two.
    _tail: bytes = b""

    @property
    def tokens(self) -> int:
        """Of the output; without a usage, the pieces that came."""
        return self.pieces if self.output is None else self.output

    def see(self, part: bytes) -> int:
        """More of the answer. Returns the pieces of text in it."""
        pieces = len(_PIECE.findall(part))
        self.pieces += pieces
        seen = self._tail + part
        for usage in _USAGE.finditer(seen):
            at = usage.start()
            output = _OUTPUT.search(seen, at, at + _USAGE_BYTES)
            prompt = _PROMPT.search(seen, at, at + _USAGE_BYTES)
            self.output = int(output[1]) if output else self.output
            self.prompt = int(prompt[1]) if prompt else self.prompt
        self._tail = seen[-_USAGE_BYTES:]
        return pieces


@dataclass(slots=True)
class AnswerWatch:
    """One answer on its way to the client. Seconds of `clock`."""

    clock: Callable[[], float]
    begun: float = field(init=False)
    #: Of the answer; 0: there was none.
    _status: int = 0
    _is_stream: bool = False
    _first: float | None = None
    _usage: UsageWatch = field(default_factory=UsageWatch)
    #: It says itself that it failed.
    _broken: bool = False
    #: All of it came.
    _whole: bool = False

    def __post_init__(self) -> None:
        self.begun = self.clock()

    async def of(self, answer: ProxiedAnswer) -> ProxiedAnswer:
        """The same answer, watched."""
        if answer.status == _FULL:
            return await self._refusal(answer)
        self._status = answer.status
        kind = dict(answer.headers).get(b"content-type", b"")
        self._is_stream = kind.startswith(b"text/event-stream")
        return ProxiedAnswer(answer.status, answer.headers, self._watched(answer.body))

    async def _refusal(self, answer: ProxiedAnswer) -> ProxiedAnswer:
        """A client that asks for more than its due says nothing of the engine."""
        body = b"".join([part async for part in answer.body])
        self._status = _CLIENT_ERROR if is_own_limit(body) else _FULL
        return ProxiedAnswer(answer.status, answer.headers, _parts(body))

    @property
    def failed(self) -> bool:
        """As far as is known now."""
        return is_failure(self._status)

    def refused(self, status: int) -> None:
        """There is no answer but an error of this status."""
        self._status = status

    async def _watched(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in body:
            self._see(part)
            yield part
        self._whole = True

    def _see(self, part: bytes) -> None:
        pieces = self._usage.see(part)
        if not self._is_stream:
            return
        if pieces and self._first is None:
            self._first = self.clock()
        self._broken = self._broken or any(error in part for error in _ERRORS)

    @property
    def _tokens(self) -> int:
        """Of a plain answer by its usage alone: its text is one piece."""
        return self._usage.tokens if self._is_stream else self._usage.output or 0

    def outcome(self, cost: float) -> RequestOutcome | None:
        """How it went; None: it says nothing of the engine, since the client left, or sent what
        cannot be answered.
        """
        if is_failure(self._status):
            return RequestOutcome(ok=False)
        if self._status >= _CLIENT_ERROR or not (self._whole or self._broken):
            return None
        if self._broken:
            return RequestOutcome(ok=False)
        first = None if self._first is None else self._first - self.begun
        return RequestOutcome(True, self._tokens, self.clock() - self.begun, first, cost)


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    yield body


@dataclass(slots=True)
class CostMeter:
    """Splits what an arm's engines cost among the requests that are open there, evenly at each
    moment. Time without any is nobody's.
    """

    #: Requests that are open.
    open: int = 0
    #: What one request would have cost that was always there.
    _each: float = 0.0
    _at: float = 0.0

    def begin(self, now: float, per_second: float) -> float:
        """A request comes; the value goes to `end`. per_second: what all engines cost."""
        self._advance(now, per_second)
        self.open += 1
        return self._each

    def end(self, now: float, per_second: float, begun: float) -> float:
        """A request goes; what it cost."""
        self._advance(now, per_second)
        self.open -= 1
        return self._each - begun

    def _advance(self, now: float, per_second: float) -> None:
        if self.open:
            self._each += (now - self._at) * per_second / self.open
        self._at = now

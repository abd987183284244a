"""An open request in the API process: its listener, and the state that another core needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.process.client import OutputListener


@dataclass(eq=False)
class Stream:
    """An open request; it ends after each of its sequences had its terminal output."""

    #: With a seed, so that another core would draw the same tokens.
    request: EngineRequest
    listener: OutputListener
    #: Sequences without a terminal output.
    open: set[int] = field(init=False)
    #: Output tokens of each sequence so far.
    tokens: list[list[int]] = field(init=False)
    #: No more outputs will come, or the listener is gone; written by the client.
    closed: bool = False
    #: Ends requested from the core: sequence number -> reason.
    requested_ends: dict[int, FinishReason] = field(default_factory=dict)
    #: Cores that crashed while they had it; see `faults.CrashBlame`.
    crashes: int = 0
    #: Timer that ends the request if the core has not done so at its deadline.
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        numbers = range(self.request.sampling.n)
        self.open = set(numbers)
        self.tokens = [[] for _ in numbers]

    @property
    def id(self) -> str:
        return self.request.id

    def put(self, output: SequenceOutput) -> None:
        """Deliver an output; outputs after a sequence's end are dropped."""
        if output.index in self.open:
            self.tokens[output.index] += output.tokens
            if output.finish is not None:
                self.open.discard(output.index)
            self.listener(output)

    def ask_end(self, index: int | None, reason: FinishReason) -> None:
        """Note that the core was asked to end a sequence (None: all of them)."""
        for number in self.open if index is None else self.open & {index}:
            self.requested_ends.setdefault(number, reason)

    def asked_ends(self) -> list[SequenceOutput]:
        """Terminal outputs of the requested ends that the core has not sent."""
        return [
            self._end(index, self.requested_ends[index])
            for index in sorted(self.open & set(self.requested_ends))
        ]

    def ends(self, reason: FinishReason, error: ErrorInfo) -> list[SequenceOutput]:
        """Terminal outputs for every sequence that is still open."""
        return [self._end(index, reason, error) for index in sorted(self.open)]

    def _end(
        self, index: int, reason: FinishReason, error: ErrorInfo | None = None
    ) -> SequenceOutput:
        return SequenceOutput(request_id=self.id, index=index, finish=reason, error=error)

    def resumed(self) -> EngineRequest:
        """The request for another core, with what its open sequences have so far."""
        outputs = [
            tokens if index in self.open else None for index, tokens in enumerate(self.tokens)
        ]
        return msgspec.structs.replace(self.request, resumed=outputs)

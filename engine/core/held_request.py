"""A request that has not reached the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from jitney.engine.common.outputs import FinishReason
from jitney.engine.common.requests import EngineRequest


@dataclass(slots=True)
class HeldRequest:
    """A request that waits for its adapter or its grammar."""

    request: EngineRequest
    #: Its sequences that were ended meanwhile -> reason.
    ended: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])

    @property
    def is_over(self) -> bool:
        return len(self.ended) >= self.request.sampling.n

"""The scheduler's limits, from the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import REQUEST_MOST
from jitney.engine.config import AUTO, EngineSection, Share


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the scheduler. The defaults describe the plainest engine, without optional limits.

    context_length: the most tokens of one sequence, prompt included. policy, order: names in
    `engine.core.scheduler.policies`. batch_size: sequences of a batch, for policies that batch; 0:
    the number of seats. max_wait_ms: for the policy dynamic. static_timeout_ms: for the policy
    static; 0: none. prefill_share: share of the token budget for prompt rows while sequences
    decode, or AUTO. target_itl_ms, max_predicted_wait_s: 0: none. background_seats: seats for
    background requests while live requests arrive; 0: a quarter of all. max_logprobs: alternatives
    computed for each token. embedding_pooling: how prompts' vectors are made ("off" or a
    `Pooling`). adapters: numbers of the adapters that requests may use. max_drafts: the most drafts
    that a sequence checks in a step; 0: no drafts. late_drafts: the host learns drafts only when
    the step that checks them is launched, not with the step before. encoder: each prompt is
    computed in one step, and keeps no pages.
    """

    max_seats: int
    context_length: int
    max_waiting_requests: int = 256
    max_waiting_tokens: int = 262144
    policy: str = "continuous"
    batch_size: int = 0
    max_wait_ms: float = 200.0
    order: str = "fcfs"
    prefill_share: Share = 1.0
    target_itl_ms: float = 0.0
    max_predicted_wait_s: float = 0.0
    static_timeout_ms: float = 0.0
    background_seats: int = 0
    max_logprobs: int = REQUEST_MOST.logprobs
    embedding_pooling: str = "off"
    adapters: frozenset[int] = frozenset()
    max_drafts: int = 0
    late_drafts: bool = False
    encoder: bool = False

    @classmethod
    def of(
        cls,
        settings: EngineSection,
        *,
        context_length: int,
        adapters: frozenset[int] = frozenset(),
        embedding_pooling: str = "off",
        max_drafts: int = 0,
        late_drafts: bool = False,
        encoder: bool = False,
    ) -> SchedulerLimits:
        """The limits that the configuration and the model set."""
        values = {name: getattr(settings, name) for name in _SETTINGS}
        return cls(
            context_length=context_length,
            adapters=adapters,
            embedding_pooling=embedding_pooling,
            max_drafts=max_drafts,
            late_drafts=late_drafts,
            encoder=encoder,
            **values,
        )

    @property
    def batch(self) -> int:
        """Number of sequences of a batch, for policies that batch."""
        return self.batch_size or self.max_seats

    @property
    def max_wait_s(self) -> float:
        """The longest wait of the oldest request in seconds, for the policy dynamic."""
        return self.max_wait_ms / 1000

    @property
    def static_timeout_s(self) -> float:
        """Seconds without an arrival after which a smaller batch boards, for the policy static;
        inf: never.
        """
        return self.static_timeout_ms / 1000 if self.static_timeout_ms else math.inf

    def __post_init__(self) -> None:
        for name in ("max_seats", "max_waiting_requests", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.context_length < 2:
            raise ConfigError("context_length must be at least 2: one prompt token and one more")
        if not 0 <= self.background_seats <= self.max_seats:
            raise ConfigError(
                f"background_seats must be 1 to max_seats ({self.max_seats}), or 0 for a quarter"
            )
        if not 0 <= self.batch_size <= self.max_seats:
            raise ConfigError(
                f"batch_size must be 1 to max_seats ({self.max_seats}), or 0 for all seats"
            )
        if self.prefill_share != AUTO and not 0 < self.prefill_share <= 1:
            raise ConfigError(f"prefill_share must be more than 0 and at most 1, or {AUTO}")
        for name in ("max_wait_ms", "static_timeout_ms", "target_itl_ms", "max_predicted_wait_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0")


#: Names of the fields that the configuration sets under the same names.
_SETTINGS = {field.name for field in fields(SchedulerLimits)} - {
    "context_length",
    "adapters",
    "embedding_pooling",
    "max_drafts",
    "late_drafts",
    "encoder",
}

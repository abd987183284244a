"""What is checked, and made, before a request may wait: a request that can never run is refused
here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b

from jitney.engine.config.schema import AUTO, EngineSection, Share
from jitney.engine.errors import ConfigError
from jitney.engine.scheduler.estimates import OutputLengths, kind_of
from jitney.engine.scheduler.kv_pages import PagePool, root_key
from jitney.engine.scheduler.policies import Batches
from jitney.engine.scheduler.sequence import Sequence
from jitney.engine.types import EngineRequest, RequestLimits

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler is held to; the defaults are the plainest engine, without any of the
    optional limits.

    context_length: tokens of one sequence, prompt included. policy, order: names in
    `engine.scheduler.policies`. batch_size (0: as many as there are seats): of the policies that
    batch; max_wait_ms: of dynamic; static_timeout_ms: of static, 0 for none. prefill_share: of the
    token budget, for prompt rows while others decode, or AUTO. target_itl_ms, max_predicted_wait_s:
    0 for none.
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

    @classmethod
    def of(cls, settings: EngineSection, *, context_length: int) -> SchedulerLimits:
        """The limits that the configuration sets; it names them alike."""
        names = [field.name for field in fields(cls) if field.name != "context_length"]
        return cls(
            context_length=context_length, **{name: getattr(settings, name) for name in names}
        )

    @property
    def batch(self) -> int:
        """Sequences of a batch, of the policies that batch."""
        return self.batch_size or self.max_seats

    @property
    def batches(self) -> Batches:
        """The batches of the policies that batch."""
        timeout_s = self.static_timeout_ms / 1000 if self.static_timeout_ms else math.inf
        return Batches(self.batch, self.max_wait_ms / 1000, timeout_s)

    def __post_init__(self) -> None:
        for name in ("max_seats", "max_waiting_requests", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.context_length < 2:
            raise ConfigError("context_length must be at least 2: one prompt token and one more")
        if not 0 <= self.batch_size <= self.max_seats:
            raise ConfigError(
                f"batch_size must be 1 to max_seats ({self.max_seats}), or 0 for all seats"
            )
        if self.prefill_share != AUTO and not 0 < self.prefill_share <= 1:
            raise ConfigError(f"prefill_share must be more than 0 and at most 1, or {AUTO}")
        for name in ("max_wait_ms", "static_timeout_ms", "target_itl_ms", "max_predicted_wait_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0")


class Admission:
    """Turns requests into sequences. vocab_size: ids at or above it are refused. eos_ids end a
    sequence.

    class_of: from a request and its expected output tokens to its class in the queue
    (`engine.scheduler.policies.Order.key`).
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        eos_ids: Iterable[int],
        vocab_size: int,
        class_of: Callable[[EngineRequest, int], float],
        lengths: OutputLengths,
    ):
        self.pool = pool
        self.request_limits = RequestLimits(
            vocab_size, limits.context_length, pool.capacity * pool.page_size
        )
        self.class_of, self.lengths = class_of, lengths
        self.eos_ids = frozenset(eos_ids)

    def sequences(self, request: EngineRequest, number: int) -> list[Sequence]:
        """The n sequences of a request, or RequestError; nothing is registered yet. number: in
        order of arrival.
        """
        sampling = request.sampling
        max_tokens = self.request_limits.check(request)
        kind = kind_of(request.account, len(request.prompt), sampling.max_tokens)
        expected = self.lengths.expect(kind, max_tokens)
        group = self.class_of(request, expected)
        # Sets that several sequences may have are one object, which stays in the host's caches.
        stop_ids = NOTHING if sampling.ignore_eos else self.eos_ids
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        root = root_key(request.tenant, request.cache_salt, "" if self.pool.retain else request.id)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return [
            Sequence(
                request,
                index,
                sibling_seed(seed, index),
                list(request.prompt),
                max_tokens,
                rank=(group, number, index),
                expected=expected,
                plain=sampling.plain,
                stop_ids=stop_ids,
                shares=self.pool.retain or sampling.n > 1,
                root=root,
            )
            for index in range(sampling.n)
        ]


def sibling_seed(seed: int, index: int) -> int:
    """int64 seed of the index-th sequence of a request; the first keeps the request's own.

    Hashed, so that the second sequence of seed 1 is not the first of seed 2.
    """
    if index == 0:
        return seed
    words = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little", signed=True)

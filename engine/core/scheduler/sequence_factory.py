"""The sequence factory checks requests and makes their sequences. It refuses requests that can
never run.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from jitney.engine.common.lengths import LengthEstimate
from jitney.engine.common.requests import EngineRequest, RequestLimits, SamplingParams
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.sequence import OwnPages, Sequence


@dataclass(eq=False)
class SequenceFactory:
    """Makes the sequences of requests."""

    pool: PagePool
    request_limits: RequestLimits
    #: Tokens that end a sequence.
    eos_ids: frozenset[int]
    #: Computes the class of a request in the queue from it and its expected output tokens
    #: (`engine.core.scheduler.policies._ORDERS`).
    order_key: Callable[[EngineRequest, int], float]
    lengths: LengthEstimate

    def check(self, request: EngineRequest) -> int:
        """The most tokens the request may generate. Raises RequestError if it can never run."""
        if request.pooling is None:
            self.request_limits.check_writes()
        return self.request_limits.check(request)

    def sequences_of(self, request: EngineRequest, number: int) -> list[Sequence]:
        """All sequences of a request, the leader first, without those that ended in an earlier
        core. See `leader`.
        """
        leader = self.leader(request, number)
        sequences = [leader, *self._siblings(leader)]
        if request.resumed is None:
            return sequences
        return _continued(sequences, request.resumed)

    def leader(self, request: EngineRequest, number: int) -> Sequence:
        """Make the first sequence of a request; raises RequestError if the request can never run.
        Nothing is registered yet. number: of the request, in order of arrival.
        """
        max_tokens = self.check(request)
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(63)
        seq = self._sequence(request, 0, number, seed, max_tokens)
        seq.expected = self.lengths.expect(seq.kind, max_tokens)
        seq.rank = self.order_key(request, seq.expected), number, 0
        return seq

    def _siblings(self, leader: Sequence) -> list[Sequence]:
        """The other sequences of the leader's request."""
        group, number, _ = leader.rank
        siblings: list[Sequence] = []
        for index in range(1, leader.request.sampling.n):
            seed = _sibling_seed(leader.seed, index)
            seq = self._sequence(leader.request, index, number, seed, leader.max_tokens)
            seq.expected = leader.expected
            seq.rank = group, number, index
            siblings.append(seq)
        return siblings

    def _sequence(
        self, request: EngineRequest, index: int, number: int, seed: int, max_tokens: int
    ) -> Sequence:
        sampling = request.sampling
        own_pages = None
        if not self.pool.share_outputs:
            own_pages = OwnPages.of(len(request.prompt), number, index)
        return Sequence(
            request,
            index=index,
            seed=seed,
            tokens=list(request.prompt),
            max_tokens=max_tokens,
            greedy_only=sampling.greedy_only,
            stop_ids=self._stop_ids(sampling),
            shares=self.pool.shares and (self.pool.retain or sampling.n > 1),
            retains=self.pool.retain,
            own_pages=own_pages,
        )

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset[int]() if sampling.ignore_eos else self.eos_ids
        if sampling.stop_token_ids:
            return stop_ids.union(sampling.stop_token_ids)
        return stop_ids


def _continued(sequences: list[Sequence], outputs: list[list[int] | None]) -> list[Sequence]:
    """The sequences that had not ended in an earlier core, with their output tokens so far.

    Sequences without output come first: the first one computes the prompt for the others, and its
    log-probabilities, which sequences with output have sent already.
    """
    fresh: list[Sequence] = []
    begun: list[Sequence] = []
    for seq, tokens in zip(sequences, outputs, strict=True):
        if tokens:
            seq.tokens += tokens
            seq.computed_high = seq.n_prompt + len(tokens) - 1
            seq.first_token_at = seq.request.arrival
            seq.scored = seq.n_prompt - 1
            begun.append(seq)
        elif tokens is not None:
            fresh.append(seq)
    return fresh + begun


def _sibling_seed(seed: int, index: int) -> int:
    """int64 seed of the index-th sequence of a request; the first keeps the request's own.

    The seed is hashed, so that the second sequence of seed 1 is not the first of seed 2.
    """
    if index == 0:
        return seed
    words = struct.pack("<qq", seed, index)
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little", signed=True)

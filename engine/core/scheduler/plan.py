"""What the scheduler decides for one step: counts and references, no device, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from jitney.engine.common.outputs import TokenLogprobs
from jitney.engine.core.scheduler.buckets import Bucket

if TYPE_CHECKING:
    from jitney.engine.core.scheduler.sequence import Sequence


class StepWork(NamedTuple):
    """The rows of one step and what they attend to."""

    #: Decode rows, one for each sequence that decodes.
    decode: int = 0
    #: Prompt rows.
    prompt: int = 0
    #: KV positions that the decode rows attend to, summed.
    keys: int = 0
    #: The most that one of them attends to: rows attended in groups take as long as the longest.
    longest: int = 0
    #: Query-key pairs of the prompt rows.
    pairs: int = 0

    @classmethod
    def of(cls, chunks: list[Chunk]) -> StepWork:
        """The work of some chunks, for plans made by hand; the scheduler counts while it plans."""
        ends = [chunk.end for chunk in chunks if chunk.decode]
        prompts = [chunk for chunk in chunks if not chunk.decode]
        return cls(
            decode=len(ends),
            prompt=sum(chunk.count for chunk in prompts),
            keys=sum(ends),
            longest=max(ends, default=0),
            pairs=sum(chunk.pairs for chunk in prompts),
        )


class Chunk(msgspec.Struct, gc=False):
    """Rows [start, start + count) of one sequence in one step.

    A struct, whose constructor is C: one is made for each row that decodes, and with a dataclass a
    plan for 64 seats took 33 microseconds instead of 19 (AMD EPYC, Zen 5).
    """

    seq: Sequence
    #: Position of the first row.
    start: int
    #: 1 for a decode row, whose token may still be on the device (start >= len(seq.tokens)).
    count: int
    #: It is a row of a sequence that generates, not of a prompt.
    decode: bool
    #: The last row's logits choose the next token.
    sample: bool
    #: Rows that bring prompt log-probabilities: those of the positions score_start ..
    #: score_start + scored - 1, each scored against the prompt token after it.
    scored: int = 0
    #: First rows that had been computed before a preemption.
    recomputed: int = 0
    #: See `scored`.
    score_start: int = 0
    #: Its token does not count; see `Scheduler.sit_out`.
    sits_out: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def logit_rows(self) -> int:
        return int(self.sample)

    @property
    def pools(self) -> bool:
        """Its rows are part of the vector of its prompt."""
        pooling = self.seq.request.pooling
        return pooling == "mean" or (pooling is not None and self.end >= self.seq.n_prompt)

    @property
    def pairs(self) -> int:
        """Query-key pairs of its rows: each attends to all positions up to its own."""
        return self.count * (self.start + self.end + 1) // 2


class MaskedRow(NamedTuple):
    """A logit row of a sequence that is held to a grammar."""

    #: Among the plan's logit rows.
    row: int
    chunk: Chunk
    #: Noted at the plan: by the time its token is chosen the sequence may have left it.
    seat: int


def mask_words(vocab: int) -> int:
    """int32 words of the mask of such a row: a bit for each token."""
    return -(-vocab // 32)


class Occupancy(NamedTuple):
    """How full the engine is while a step runs."""

    #: Seats with a sequence in them; not those that a batch only keeps.
    seats_busy: int = 0
    #: Pages that sequences hold.
    pages_used: int = 0
    #: Pages that only serve the prefix cache.
    pages_cached: int = 0
    #: Sequences that want a seat.
    waiting: int = 0
    #: Prompt tokens of the requests none of whose sequences has boarded yet.
    waiting_tokens: int = 0


_NOBODY = Occupancy()


# `list[Chunk]()` takes ten times as long as a function that returns `[]`, and every step makes six.


def _no_chunks() -> list[Chunk]:
    return []


def _no_rows() -> list[MaskedRow]:
    return []


def _no_sequences() -> list[Sequence]:
    return []


def _no_passed() -> set[Sequence]:
    return set()


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    #: Prompt rows that it can still take.
    tokens_left: int
    #: Logit rows that it can still take.
    rows_left: int
    #: Rows taken so far, of both kinds, and those of them that decode.
    rows: int = 0
    n_decode: int = 0
    #: Padding rows that a batch wants.
    reserved: int = 0
    #: See `StepWork`; counted while each chunk is at hand.
    keys: int = 0
    longest: int = 0
    pairs: int = 0
    #: See `Plan`.
    greedy_only: bool = True
    #: Somebody in it is held to a grammar.
    masked: bool = False
    #: Prompts whose rows go before those of longer ones that came first.
    passed: set[Sequence] = field(default_factory=_no_passed)
    #: This and the lists: see `Plan`.
    cached_tokens: int = 0
    chunks: list[Chunk] = field(default_factory=_no_chunks)
    boarded: list[Sequence] = field(default_factory=_no_sequences)
    fed: list[Sequence] = field(default_factory=_no_sequences)
    dropped: list[Sequence] = field(default_factory=_no_sequences)
    preempted: list[Sequence] = field(default_factory=_no_sequences)

    @property
    def prompt_chunks(self) -> list[Chunk]:
        return self.chunks[self.n_decode :]

    @property
    def masked_rows(self) -> list[MaskedRow]:
        """The logit rows of those who are held to a grammar."""
        rows: list[MaskedRow] = []
        if not self.masked:
            return rows
        sampled = [chunk for chunk in self.chunks if chunk.sample]
        for row, chunk in enumerate(sampled):
            if chunk.seq.matcher is not None:
                rows.append(MaskedRow(row, chunk, chunk.seq.seat))
        return rows

    @property
    def work(self) -> StepWork:
        return StepWork(
            decode=self.n_decode,
            prompt=self.rows - self.n_decode,
            keys=self.keys,
            longest=self.longest,
            pairs=self.pairs,
        )


@dataclass(slots=True)
class Plan:
    """One step. The pages of a seated sequence change in no other way than it says here."""

    #: Rising from 1.
    number: int
    #: Decode rows first, then prompt chunks.
    chunks: list[Chunk]
    #: The padded sizes of its program.
    bucket: Bucket
    #: All its tokens are a bare argmax, so the executable without a sampler serves.
    greedy_only: bool
    #: What its time depends on, beside the bucket.
    work: StepWork
    #: Sequences that took their seat.
    boarded: list[Sequence] = field(default_factory=_no_sequences)
    #: Decoding sequences that got one more page.
    fed: list[Sequence] = field(default_factory=_no_sequences)
    #: Sequences that gave back pages behind the model's window.
    dropped: list[Sequence] = field(default_factory=_no_sequences)
    #: Sequences that lost their seat.
    preempted: list[Sequence] = field(default_factory=_no_sequences)
    #: Prompt tokens of the boarded whose KV was found in pages.
    cached_tokens: int = 0
    #: Nobody waits for any of its rows.
    background: bool = False
    #: Padding rows that a batch wants: prompts up to the longest, steps up to the batch's size.
    reserved: int = 0
    #: Who sat where when it was planned.
    occupancy: Occupancy = _NOBODY
    #: Logit rows whose tokens are chosen behind the step, under masks.
    masked: list[MaskedRow] = field(default_factory=_no_rows)

    # What became of its rows; `Results.commit` counts.
    prefill: int = 0
    decode: int = 0
    recomputed: int = 0
    #: Rows of sequences that had ended by themselves before.
    past_end: int = 0
    #: Rows of sequences that were ended from outside.
    cancelled: int = 0
    #: Sequences that ended since the commit before.
    finished: int = 0

    @property
    def rows(self) -> int:
        """Rows that carry a token; the bucket's other rows are padding."""
        return self.work.decode + self.work.prompt

    @property
    def n_decode(self) -> int:
        return self.work.decode

    @property
    def prompt_chunks(self) -> list[Chunk]:
        return self.chunks[self.work.decode :]

    @property
    def logit_rows(self) -> int:
        """Rows of the result: one of each decode row, then those of the prompt chunks."""
        return self.n_decode + sum(chunk.logit_rows for chunk in self.prompt_chunks)

    @property
    def pools(self) -> bool:
        """Some of its rows are part of the vectors of prompts."""
        return any([chunk.pools for chunk in self.prompt_chunks])

    @property
    def scored_rows(self) -> int:
        """Rows that bring prompt log-probabilities."""
        return sum(chunk.scored for chunk in self.prompt_chunks)


@dataclass(slots=True)
class StepResult:
    """What a step brought, in plan order."""

    #: The sampled ids, one for each logit row; -1 where the logits were not finite.
    tokens: list[int]
    #: Likewise; None if nobody asked.
    logprobs: list[TokenLogprobs] | None = None
    #: One for each scored row.
    prompt_logprobs: list[TokenLogprobs] | None = None
    #: Of each chunk, whether any of its rows was not finite, with logits or without. None: none
    #: was, or it is a step without prompt rows, of which the tokens tell.
    broken: list[bool] | None = None
    #: Of each chunk, float32 [E]: the sum of its rows' hidden states, or one row's; by classify the
    #: logits of its text. None where the plan did not ask.
    pooled: np.ndarray | None = None

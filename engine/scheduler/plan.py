"""What the scheduler decides for one step: counts and references, no device, no arrays.

What is made anew in each step is a msgspec Struct here and elsewhere: its constructor is C, where a
dataclass runs a Python function that the host's caches have forgotten since the last step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from jitney.engine.scheduler.buckets import Bucket
from jitney.engine.types import TokenLogprobs

if TYPE_CHECKING:
    from jitney.engine.scheduler.sequence import Sequence


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """The rows of one step. decode, prompt: rows of each kind, padding excluded.

    keys: KV positions that the decode rows attend to, summed. longest: most that one of them
    attends to, because rows that are attended in groups take as long as the longest. pairs:
    query-key pairs of the prompt rows.
    """

    decode: int = 0
    prompt: int = 0
    keys: int = 0
    longest: int = 0
    pairs: int = 0


def work_of(chunks: list[Chunk]) -> StepWork:
    """The work of some chunks, for plans made by hand; the scheduler counts while it plans."""
    ends = [chunk.end for chunk in chunks if chunk.decode]
    prompts = [chunk for chunk in chunks if not chunk.decode]
    return StepWork(
        len(ends),
        sum(chunk.count for chunk in prompts),
        sum(ends),
        max(ends, default=0),
        sum(chunk.count * (chunk.start + chunk.end + 1) // 2 for chunk in prompts),
    )


class Chunk(msgspec.Struct, gc=False):
    """Rows [start, start + count) of one sequence in one step.

    A decode chunk has count 1; its token may still be on the device (position start >=
    len(seq.tokens)). sample: the last row's logits choose the next token. scored: its rows that
    bring prompt log-probabilities, namely those of the positions score_start .. score_start +
    scored - 1, each scored against the following prompt token. recomputed: its first rows that had
    been computed before a preemption.
    """

    seq: Sequence
    start: int
    count: int
    decode: bool
    sample: bool
    scored: int = 0
    recomputed: int = 0
    score_start: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def logit_rows(self) -> int:
        return int(self.sample)


class Occupancy(msgspec.Struct, frozen=True, gc=False):
    """How full the engine is while a step runs.

    seats_busy have a sequence in them: those that a batch only holds are not among them. pages_used
    are held by sequences; pages_cached only serve the prefix cache. waiting: sequences that want a
    seat; waiting_tokens: prompt tokens of the requests none of whose sequences has boarded yet.
    """

    seats_busy: int
    pages_used: int
    pages_cached: int
    waiting: int
    waiting_tokens: int


EMPTY = Occupancy(0, 0, 0, 0, 0)


class Draft(msgspec.Struct):
    """A plan in the making. rows: taken so far; tokens_left, rows_left: prompt and logit rows it
    can still take.

    keys, longest, pairs: see `engine.scheduler.plan.StepWork`; counted here, where each chunk is at
    hand anyway.
    """

    tokens_left: int
    rows_left: int
    rows: int = 0
    chunks: list[Chunk] = []
    n_decode: int = 0
    plain: bool = True
    boarded: list[Sequence] = []
    fed: list[Sequence] = []
    dropped: list[Sequence] = []
    preempted: list[Sequence] = []
    cached_tokens: int = 0
    reserved: int = 0
    keys: int = 0
    longest: int = 0
    pairs: int = 0


class Plan(msgspec.Struct):
    """One step. chunks: decode rows first, then prefill chunks. boarded: sequences that took their
    seat in this plan. fed: decoding sequences that got another page for it. dropped: sequences that
    gave back pages behind the model's window. The pages of a seated sequence change in no other
    way.

    reserved: padding rows that a batch wants beside its rows: its prompts are padded to the
    longest, its steps to its size. preempted: sequences that lost their seat to it. plain: every
    row belongs to a sequence whose tokens are a bare argmax, so the all-greedy executable serves.
    cached_tokens: prompt tokens of the boarded whose KV was found in pages. `commit` fills in what
    became of the rows (prefill .. cancelled, in rows) and `finished`, the sequences that ended
    since the commit before.
    """

    number: int
    chunks: list[Chunk]
    bucket: Bucket
    plain: bool
    work: StepWork
    boarded: list[Sequence] = []
    fed: list[Sequence] = []
    dropped: list[Sequence] = []
    preempted: list[Sequence] = []
    cached_tokens: int = 0
    reserved: int = 0
    occupancy: Occupancy = EMPTY
    prefill: int = 0
    decode: int = 0
    recomputed: int = 0
    past_end: int = 0
    cancelled: int = 0
    finished: int = 0

    @property
    def rows(self) -> int:
        """Rows that carry a token; the bucket's other rows are padding."""
        return self.work.decode + self.work.prompt

    @property
    def n_decode(self) -> int:
        return self.work.decode

    @property
    def logit_rows(self) -> int:
        """Rows of the result: one of each decode row, then those of the prompt chunks."""
        n_decode = self.work.decode
        return n_decode + sum([chunk.logit_rows for chunk in self.chunks[n_decode:]])

    @property
    def scored_rows(self) -> int:
        """Rows that bring prompt log-probabilities."""
        return sum([chunk.scored for chunk in self.chunks[self.work.decode :]])


class StepResult(msgspec.Struct):
    """What a step brought, in plan order.

    tokens: the sampled ids, one per logit row; -1 for a row whose logits were not finite. logprobs:
    likewise, None if nobody asked. prompt_logprobs: one entry per scored row. broken: per chunk,
    whether any of its rows was not finite, with logits or without; None: no row was (of steps
    without prompt rows, the tokens tell).
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    broken: list[bool] | None = None

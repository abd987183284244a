"""The plan of one step: counts and references, no device, no arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from jitney.engine.common.outputs import TokenLogprobs
from jitney.engine.core.scheduler.buckets import Bucket

if TYPE_CHECKING:
    from jitney.engine.core.scheduler.sequence import Sequence


#: Rows that a prompt row counts for whose log-probabilities are asked for, while others decode: the
#: output head and the best of all tokens take as long as the layers of a small model (1.7 to 2.2
#: times a row's time with 49,152 tokens), and more with more tokens.
_SCORED_ROW = 3

#: In the place of a sampled token: the row read a draft that the row before did not sample.
REJECTED = -2


class StepWork(NamedTuple):
    """The rows of one step and what they attend to."""

    #: Decode rows: one for each sequence that decodes, and one for each draft.
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
    #: Which draft its row reads, from 1 (`engine.core.scheduler.speculation`); 0: none. The row's
    #: position may be later than it says, by the drafts that the step before accepts.
    draft: int = 0
    #: Its rows are output that had decode rows before, e.g. before a preemption: attention computes
    #: each as a decode row, to the same bits.
    again: bool = False

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
    #: Sequences that wait for a seat.
    waiting: int = 0
    #: Prompt tokens of the requests none of whose sequences has boarded yet.
    waiting_tokens: int = 0


_EMPTY = Occupancy()


# `list` and `set` stand alone below: `list[Chunk]()` takes several times as long.


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
    #: Padding rows that a batch needs.
    reserved: int = 0
    #: See `StepWork`; counted while each chunk is at hand.
    keys: int = 0
    longest: int = 0
    pairs: int = 0
    #: See `Plan`.
    greedy_only: bool = True
    #: One of its sequences is held to a grammar.
    masked: bool = False
    #: Prompts whose rows go before those of longer ones that came first.
    passed: set[Sequence] = field(default_factory=set["Sequence"])
    #: This and the lists: see `Plan`.
    cached_tokens: int = 0
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    boarded: list[Sequence] = field(default_factory=list["Sequence"])
    fed: list[Sequence] = field(default_factory=list["Sequence"])
    dropped: list[Sequence] = field(default_factory=list["Sequence"])
    preempted: list[Sequence] = field(default_factory=list["Sequence"])

    @property
    def prompt_chunks(self) -> list[Chunk]:
        return self.chunks[self.n_decode :]

    def add_decode_rows(self, sequences: list[Sequence]) -> None:
        """One row for each of these, which come first in a step, long contexts first: kernels that
        work in groups of rows then give short contexts to short ones' groups.
        """
        chunks = self.chunks
        keys, greedy_only = 0, True
        for seq in sequences:
            start = seq.scheduled
            recomputed = 1 if start < seq.computed_high else 0
            row = Chunk(seq, start, 1, decode=True, sample=True, recomputed=recomputed)
            chunks.append(row)
            seq.scheduled = start + 1
            seq.in_flight += 1
            keys += start + 1
            if not seq.greedy_only:
                greedy_only = False
                self.masked |= seq.matcher is not None
        self.greedy_only = greedy_only
        self.keys = keys
        self.longest = sequences[0].scheduled
        self.rows = self.n_decode = len(sequences)
        self.tokens_left -= len(sequences)
        self.rows_left -= len(sequences)

    def add_drafts(self, widths: dict[Sequence, int]) -> None:
        """Behind the rows of these sequences, so many rows that read drafts."""
        chunks: list[Chunk] = []
        for row in self.chunks:
            chunks.append(row)
            seq = row.seq
            width = widths.get(seq, 0)
            for number in range(1, width + 1):
                start = row.start + number
                recomputed = 1 if start < seq.computed_high else 0
                chunks.append(
                    Chunk(
                        seq,
                        start,
                        1,
                        decode=True,
                        sample=True,
                        recomputed=recomputed,
                        draft=number,
                    )
                )
                self.keys += start + 1
                self.longest = max(self.longest, start + 1)
            seq.drafting += width
        drafts = len(chunks) - len(self.chunks)
        self.chunks = chunks
        self.n_decode += drafts
        self.rows += drafts
        self.tokens_left -= drafts
        self.rows_left -= drafts

    def add_chunk(self, seq: Sequence, most: int) -> bool:
        """At most `most` of the next known tokens, as the step can take them; the last one's logits
        are sampled. -> whether all are scheduled now.
        """
        start, known = seq.scheduled, len(seq.tokens)
        count = min(known - start, most, self.tokens_left)
        if count <= 0:
            return False
        own = seq.own_pages
        again = own is not None and start >= own.start
        if own is not None and not again:
            count = min(count, own.start - start)
        cost = _SCORED_ROW if seq.must_score and self.n_decode else 1
        if cost > 1:
            unscored = max(0, seq.scored - start)
            count = min(count, unscored + max(1, (self.tokens_left - unscored) // cost))
        end = start + count
        # Positions before seq.scored have been scored: before a preemption, or for a prompt with
        # the same first pages.
        scored = max(0, min(end, seq.n_prompt - 1) - seq.scored) if seq.must_score else 0
        is_last = end == known
        chunk = Chunk(
            seq,
            start,
            count,
            decode=False,
            sample=is_last and seq.request.pooling is None,
            scored=scored,
            recomputed=max(0, min(end, seq.computed_high) - start),
            score_start=seq.scored,
            again=again,
        )
        self.chunks.insert(self.n_decode if again else len(self.chunks), chunk)
        self.rows += count
        self.pairs += chunk.pairs
        self.tokens_left = max(0, self.tokens_left - count - scored * (cost - 1))
        self.rows_left -= chunk.logit_rows
        self.greedy_only = self.greedy_only and seq.greedy_only
        self.masked |= seq.matcher is not None
        seq.scored += scored
        seq.scheduled = end
        if is_last:  # a pooled vector is in flight like a token
            seq.in_flight += 1
        return is_last

    def plan(self, number: int, bucket: Bucket, occupancy: Occupancy, *, background: bool) -> Plan:
        """The finished plan. background: no client waits for any of its rows."""
        work = StepWork(
            decode=self.n_decode,
            prompt=self.rows - self.n_decode,
            keys=self.keys,
            longest=self.longest,
            pairs=self.pairs,
        )
        return Plan(
            number=number,
            chunks=self.chunks,
            bucket=bucket,
            greedy_only=self.greedy_only,
            work=work,
            boarded=self.boarded,
            fed=self.fed,
            dropped=[seq for seq in self.dropped if seq.seated],
            preempted=self.preempted,
            cached_tokens=self.cached_tokens,
            background=background,
            reserved=self.reserved,
            occupancy=occupancy,
            masked=self._masked_rows() if self.masked else [],
        )

    def _masked_rows(self) -> list[MaskedRow]:
        """The logit rows of sequences that are held to a grammar."""
        sampled = [chunk for chunk in self.chunks if chunk.sample]
        return [
            MaskedRow(row, chunk, chunk.seq.seat)
            for row, chunk in enumerate(sampled)
            if chunk.seq.matcher is not None
        ]


@dataclass(slots=True)
class Plan:
    """One step. The pages of a seated sequence change in no other way than it says here."""

    #: Rising from 1.
    number: int
    #: Decode rows first, then prompt chunks, of which those of output computed again come first.
    chunks: list[Chunk]
    #: The padded sizes of its program.
    bucket: Bucket
    #: All its tokens are a bare argmax, so the executable without a sampler serves.
    greedy_only: bool
    #: What its time depends on, beside the bucket.
    work: StepWork
    #: Sequences that took their seat.
    boarded: list[Sequence] = field(default_factory=list["Sequence"])
    #: Decoding sequences that got one more page.
    fed: list[Sequence] = field(default_factory=list["Sequence"])
    #: Sequences that gave back pages behind the model's window.
    dropped: list[Sequence] = field(default_factory=list["Sequence"])
    #: Sequences that lost their seat.
    preempted: list[Sequence] = field(default_factory=list["Sequence"])
    #: Prompt tokens of the boarded whose KV was found in pages.
    cached_tokens: int = 0
    #: No client waits for any of its rows.
    background: bool = False
    #: Padding rows that a batch needs: prompts up to the longest, steps up to the batch's size.
    reserved: int = 0
    #: How full the engine was when it was planned.
    occupancy: Occupancy = _EMPTY
    #: Logit rows whose tokens are chosen behind the step, under masks.
    masked: list[MaskedRow] = field(default_factory=list[MaskedRow])

    # What became of its rows; `Results.commit` counts.
    prefill: int = 0
    decode: int = 0
    recomputed: int = 0
    #: Rows of sequences that had ended by themselves before.
    past_end: int = 0
    #: Rows of sequences that were ended from outside.
    cancelled: int = 0
    #: Rows that read right drafts, and wrong ones.
    accepted: int = 0
    rejected: int = 0
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
    """Results of a step, in plan order."""

    #: The sampled ids, one for each logit row; -1 where the logits were not finite, or REJECTED.
    tokens: list[int]
    #: Likewise; None if no sequence asked.
    logprobs: list[TokenLogprobs] | None = None
    #: One for each scored row.
    prompt_logprobs: list[TokenLogprobs] | None = None
    #: Of each chunk, whether any of its rows was not finite, with logits or without. None: none
    #: was, or it is a step without prompt rows, of which the tokens tell.
    broken: list[bool] | None = None
    #: Of each chunk, float32 [E]: the sum of its rows' hidden states, or one row's; by classify the
    #: logits of its text. None where the plan did not ask.
    pooled: np.ndarray | None = None
    #: Of each logit row, whether its token's successor was drafted right; None without speculation.
    guessed: list[bool] | None = None
    #: By logit row, of those whose tokens were chosen under masks: the drafts of what follows.
    drafts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    @classmethod
    def drawn(cls, plan: Plan, is_right: Callable[[], bool]) -> StepResult:
        """The result of a step without a device: each token is 0. is_right: draws whether the draft
        of a token's successor is right.
        """
        tokens, guessed = list[int](), list[bool]()
        right = False
        for chunk in plan.chunks:
            if chunk.sample:
                counts = not chunk.draft or right
                right = counts and is_right()
                tokens.append(0 if counts else REJECTED)
                guessed.append(right)
        return cls(tokens, guessed=guessed)

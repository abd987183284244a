"""The plan of one step, its draft and its result: counts and references, without device arrays."""

from __future__ import annotations

# pyright: reportUnknownVariableType=false
# Factories are `list` and `set`: calling `list[Chunk]` takes several times as long, in each step.
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from jitney.engine.common.outputs import TokenLogprobs
from jitney.engine.core.scheduler.buckets import Bucket

if TYPE_CHECKING:
    from jitney.engine.core.scheduler.sequence import Sequence


#: Cost, in rows, of a prompt row that also needs log-probabilities, while others decode: the output
#: head and the top tokens take as long as the layers of a small model (1.7 to 2.2 times a row's
#: time with a vocabulary of 49,152 tokens), and longer with a larger vocabulary.
_SCORED_ROW = 3

#: Value instead of a sampled token: the row read a draft that the row before it did not sample.
REJECTED = -2


class StepWork(NamedTuple):
    """The rows of one step and what they attend to."""

    #: Number of decode rows: one for each decoding sequence, and one for each draft.
    decode: int = 0
    #: Number of prompt rows.
    prompt: int = 0
    #: KV positions that the decode rows attend to, summed over the rows.
    keys: int = 0
    #: KV positions of the decode row that attends to most: a group of rows takes as long as its
    #: longest row.
    longest: int = 0
    #: Query-key pairs of the prompt rows.
    pairs: int = 0

    @classmethod
    def of(cls, chunks: list[Chunk]) -> StepWork:
        """Count the work of chunks, for plans made by hand; the scheduler counts as it plans."""
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

    The class is a msgspec struct, because its constructor is C code and every decode row makes one:
    with a dataclass a plan for 64 seats took 33 microseconds instead of 19 (AMD EPYC, Zen 5).
    """

    seq: Sequence
    #: Position of the first row.
    start: int
    #: Number of rows; 1 for a decode row, whose token may still be on the device (then
    #: start >= len(seq.tokens)).
    count: int
    #: Whether this is a decode row of a generating sequence, not a part of a prompt.
    decode: bool
    #: Whether the next token is sampled from the last row's logits.
    sample: bool
    #: Number of rows that return prompt log-probabilities: those of the positions score_start ..
    #: score_start + scored - 1, each scored against the prompt token after it.
    scored: int = 0
    #: Number of leading rows that had been computed before a preemption.
    recomputed: int = 0
    #: First position of the rows counted by `scored`.
    score_start: int = 0
    #: Whether its token is discarded; see `Scheduler.sit_out`.
    sits_out: bool = False
    #: Number of the draft that the row reads, from 1 (`engine.core.scheduler.speculation`); 0: no
    #: draft. The real position may be after `start` by the drafts that the step before accepts.
    draft: int = 0
    #: Whether its rows recompute output that had decode rows before, e.g. before a preemption:
    #: attention computes each as a decode row, to the same bits.
    again: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def logit_rows(self) -> int:
        return int(self.sample)

    @property
    def pools(self) -> bool:
        """Whether its rows are part of its prompt's pooled vector."""
        pooling = self.seq.request.pooling
        return pooling == "mean" or (pooling is not None and self.end >= self.seq.n_prompt)

    @property
    def pairs(self) -> int:
        """Query-key pairs of its rows: each attends to all positions up to its own."""
        return self.count * (self.start + self.end + 1) // 2


class MaskedRow(NamedTuple):
    """A logit row of a sequence that a grammar constrains."""

    #: Index among the plan's logit rows.
    row: int
    chunk: Chunk
    #: Seat at planning time; the sequence may have left it when its token is chosen.
    seat: int


def mask_words(vocab: int) -> int:
    """Number of int32 words in the mask of a logit row, which has one bit for each token."""
    return -(-vocab // 32)


class Occupancy(NamedTuple):
    """Counts of busy seats, used pages and waiting work while a step runs."""

    #: Number of seats with a sequence in them, without empty seats that a batch keeps.
    seats_busy: int = 0
    #: Number of pages that sequences hold.
    pages_used: int = 0
    #: Number of pages that only serve the prefix cache.
    pages_cached: int = 0
    #: Number of sequences that wait for a seat.
    waiting: int = 0
    #: Prompt tokens of the requests of which no sequence has boarded yet.
    waiting_tokens: int = 0


_EMPTY = Occupancy()


@dataclass(slots=True)
class Draft:
    """A plan while it is being made."""

    #: Number of prompt rows that still fit.
    tokens_left: int
    #: Number of logit rows that still fit.
    rows_left: int
    #: Number of rows so far, and how many of them are decode rows.
    rows: int = 0
    n_decode: int = 0
    #: Padding rows that a batch needs.
    reserved: int = 0
    #: See `StepWork`; counted as chunks are added.
    keys: int = 0
    longest: int = 0
    pairs: int = 0
    #: See `Plan`.
    greedy_only: bool = True
    #: Whether a grammar constrains one of its sequences.
    masked: bool = False
    #: Short prompts whose rows go before those of longer prompts that arrived first.
    passed: set[Sequence] = field(default_factory=set)
    #: See `Plan` for this field and the lists below.
    cached_tokens: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    boarded: list[Sequence] = field(default_factory=list)
    fed: list[Sequence] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def prompt_chunks(self) -> list[Chunk]:
        return self.chunks[self.n_decode :]

    def add_decode_rows(self, sequences: list[Sequence]) -> None:
        """Add one decode row for each sequence, as the first rows of the step. The sequences are in
        descending order of context length: kernels that work on groups of rows then group short
        contexts together.
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
        """Insert draft rows after their sequences' decode rows. widths: draft rows by sequence."""
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
        """Add a chunk with at most `most` of the sequence's next known tokens, if they fit. The
        logits of the last known token are sampled. -> whether all known tokens are scheduled now.
        """
        start, n_known = seq.scheduled, len(seq.tokens)
        count = min(n_known - start, most, self.tokens_left)
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
        # Positions before seq.scored are scored already: before a preemption, or by another prompt
        # with the same first pages.
        scored = max(0, min(end, seq.n_prompt - 1) - seq.scored) if seq.must_score else 0
        is_last = end == n_known
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
        if is_last:  # a pooled vector counts as in flight, like a token
            seq.in_flight += 1
        return is_last

    def plan(self, number: int, bucket: Bucket, occupancy: Occupancy, *, background: bool) -> Plan:
        """Build the finished plan. background: all its rows belong to background requests."""
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
        """The logit rows of sequences that a grammar constrains."""
        sampled = [chunk for chunk in self.chunks if chunk.sample]
        return [
            MaskedRow(row, chunk, chunk.seq.seat)
            for row, chunk in enumerate(sampled)
            if chunk.seq.matcher is not None
        ]


@dataclass(slots=True)
class Plan:
    """One step. It lists every change to the pages of seated sequences."""

    #: Number of the step, from 1.
    number: int
    #: Decode rows first, then prompt chunks; among these, recomputed output comes first.
    chunks: list[Chunk]
    #: The padded sizes of its program.
    bucket: Bucket
    #: Whether all its tokens are a plain argmax, so that the executable without a sampler is used.
    greedy_only: bool
    #: The work that, beside the bucket, determines the step's time.
    work: StepWork
    #: Sequences that took their seat.
    boarded: list[Sequence] = field(default_factory=list)
    #: Decoding sequences that got one more page.
    fed: list[Sequence] = field(default_factory=list)
    #: Sequences that gave back pages behind the model's window.
    dropped: list[Sequence] = field(default_factory=list)
    #: Sequences that lost their seat.
    preempted: list[Sequence] = field(default_factory=list)
    #: Prompt tokens of the `boarded` sequences whose KV was found in pages.
    cached_tokens: int = 0
    #: Whether all its rows belong to background requests.
    background: bool = False
    #: Padding rows of a static batch: prompts up to the longest, steps up to the batch's size.
    reserved: int = 0
    #: Seats, pages and waiting work at planning time.
    occupancy: Occupancy = _EMPTY
    #: Logit rows whose tokens are chosen after the step, under grammar masks.
    masked: list[MaskedRow] = field(default_factory=list)

    # Counts of rows by their outcome; `Results.commit` writes them.
    prefill: int = 0
    decode: int = 0
    recomputed: int = 0
    #: Rows of sequences that had already ended by themselves.
    past_end: int = 0
    #: Rows of sequences that were ended from outside.
    cancelled: int = 0
    #: Rows whose draft was accepted, and rejected.
    accepted: int = 0
    rejected: int = 0
    #: Number of sequences that ended since the last commit.
    finished: int = 0

    @property
    def rows(self) -> int:
        """Number of rows that carry a token; the bucket's other rows are padding."""
        return self.work.decode + self.work.prompt

    @property
    def n_decode(self) -> int:
        return self.work.decode

    @property
    def prompt_chunks(self) -> list[Chunk]:
        return self.chunks[self.work.decode :]

    @property
    def logit_rows(self) -> int:
        """Number of logit rows: one for each decode row, then those of the prompt chunks."""
        return self.n_decode + sum(chunk.logit_rows for chunk in self.prompt_chunks)

    @property
    def pools(self) -> bool:
        """Whether some of its rows are part of a prompt's pooled vector."""
        return any([chunk.pools for chunk in self.prompt_chunks])

    @property
    def scored_rows(self) -> int:
        """Number of rows that return prompt log-probabilities."""
        return sum(chunk.scored for chunk in self.prompt_chunks)


@dataclass(slots=True)
class StepResult:
    """Results of a step, in plan order."""

    #: One token id for each logit row; -1 where the logits were not finite, or REJECTED.
    tokens: list[int]
    #: Log-probabilities of each logit row; None if no sequence requested them.
    logprobs: list[TokenLogprobs] | None = None
    #: Log-probabilities of each scored prompt row.
    prompt_logprobs: list[TokenLogprobs] | None = None
    #: For each chunk, whether a value in any of its rows was not finite. None: all were finite, or
    #: the step has no prompt rows, and `tokens` shows it.
    broken: list[bool] | None = None
    #: float32 [chunks, E]: the sum of each chunk's hidden states, or one row's hidden state; with
    #: the pooling "classify" the logits of its text. None if the plan pools nothing.
    pooled: np.ndarray | None = None
    #: For each logit row, whether the token after it was drafted right; None without speculation.
    guessed: list[bool] | None = None
    #: Drafts of the next tokens by logit row, for rows whose tokens were chosen under masks.
    drafts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    @classmethod
    def drawn(cls, plan: Plan, is_right: Callable[[], bool]) -> StepResult:
        """A simulated result, without a device: each token is 0. is_right: returns at random
        whether the draft of the next token is right.
        """
        tokens, guessed = list[int](), list[bool]()
        right = False
        for chunk in plan.chunks:
            if chunk.sample:
                is_sampled = not chunk.draft or right
                right = is_sampled and is_right()
                tokens.append(0 if is_sampled else REJECTED)
                guessed.append(right)
        return cls(tokens, guessed=guessed)

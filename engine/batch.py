"""From a plan to the one packed int32 array that a step uploads, and back to named arrays inside jit.

Axes: T token rows and S sequences (also logit rows) of the bucket, P pages per sequence, M seats of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jitney.engine.buckets import Bucket
from jitney.engine.plan import Plan
from jitney.engine.sequence import Sequence

#: Per logit row, float32: temperature, top_p, min_p, repetition, presence and frequency penalty.
FLOATS = 6
#: Per logit row, int32: top_k, seed (low, high word), token to score (-1: sample one), position, LOOKS bits.
INTS = 6
#: Bits of the last int: which optional parts of the sampler this row needs.
PENALISED, BIASED, SCORED = 1, 2, 4


class StepInputs(NamedTuple):
    """One step's upload, int32 unless said otherwise. `sampler` parts are None in the all-greedy executable."""

    tokens: Any  # [T] token ids; -1: read last_token of token_seats on the device
    token_seats: Any  # [T] seat each row belongs to
    positions: Any  # [T]
    write_rows: Any  # [T] flat KV row; N * page = drop
    kv_lens: Any  # [S]
    cu_q: Any  # [S + 1]
    counts: Any  # [3] sequences that decode, sequences, token rows
    page_table: Any  # [S, P]
    logit_rows: Any  # [S] which token row each logit row reads
    seats: Any  # [S] seat whose last_token a logit row sets; M = none
    floats: Any = None  # [S, FLOATS] float32 bits
    ints: Any = None  # [S, INTS]


@dataclass(frozen=True)
class Layout:
    """Where each field of StepInputs lies in the packed array of one executable."""

    bucket: Bucket
    pages: int
    plain: bool

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Field name -> shape, in packing order."""
        rows, seqs = self.bucket.tokens, self.bucket.seats
        shapes = {"tokens": (rows,), "token_seats": (rows,), "positions": (rows,), "write_rows": (rows,),
                  "kv_lens": (seqs,), "cu_q": (seqs + 1,), "counts": (3,), "page_table": (seqs, self.pages),
                  "logit_rows": (seqs,), "seats": (seqs,)}
        return shapes if self.plain else shapes | {"floats": (seqs, FLOATS), "ints": (seqs, INTS)}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Field name -> its half-open range in the packed array."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()]).tolist()
        return {name: slice(start, end) for name, start, end in zip(self.shapes, [0, *ends[:-1]], ends, strict=True)}

    @property
    def size(self) -> int:
        """int32 words of the packed array."""
        return list(self.slices.values())[-1].stop

    def split(self, packed: Any) -> StepInputs:
        """Views of the packed array, numpy or traced."""
        return StepInputs(**{name: packed[at].reshape(self.shapes[name]) for name, at in self.slices.items()})


class BatchBuilder:
    """Packs plans; keeps each seat's page table and sampling row between steps, so that a step copies, not rebuilds."""

    def __init__(self, *, seats: int, pages_per_seat: int, page_size: int, pool_rows: int):
        self.seats, self.pages, self.page_size, self.pool_rows = seats, pages_per_seat, page_size, pool_rows
        self.tables = np.zeros((seats, pages_per_seat), np.int32)
        self.known = [0] * seats  # pages of each seat already in `tables`
        self.floats = np.zeros((seats, FLOATS), np.float32)
        self.ints = np.zeros((seats, INTS), np.int32)
        self.layouts: dict[tuple[Bucket, bool], Layout] = {}

    def layout(self, bucket: Bucket, plain: bool) -> Layout:
        """The layout of one executable."""
        key = bucket, plain
        if key not in self.layouts:
            self.layouts[key] = Layout(bucket, self.pages, plain)
        return self.layouts[key]

    def build(self, plan: Plan, plain: bool) -> np.ndarray:
        """Plan -> packed int32 array, fresh each step: the device may still read the last one.

        plain: for the executable without a sampler, which takes no sampling parameters.
        """
        layout = self.layout(plan.bucket, plain)
        packed = np.zeros(layout.size, np.int32)
        out = layout.split(packed)
        for seq in plan.boarded:
            self.board(seq)
        self.fill_rows(plan, out)
        self.fill_logits(plan, out)
        return packed

    def board(self, seq: Sequence) -> None:
        """A sequence took a seat: forget the last owner's pages, note its sampling parameters."""
        self.known[seq.seat] = 0
        params = seq.request.sampling
        self.floats[seq.seat] = (0.0 if params.greedy else params.temperature, params.top_p, params.min_p,
                                 params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        looks = PENALISED * params.penalised | BIASED * params.biased | SCORED * params.scored
        seed = seq.seed & 0xFFFFFFFFFFFFFFFF
        low, high = seed & 0xFFFFFFFF, seed >> 32
        words = np.array([low, high], np.uint32).view(np.int32)
        self.ints[seq.seat] = (max(params.top_k, 0), words[0], words[1], -1, 0, looks)

    def fill_rows(self, plan: Plan, out: StepInputs) -> None:
        """Tokens, positions, page tables and KV rows of every chunk."""
        chunks, tables, known = plan.chunks, self.tables, self.known
        tokens: list[int] = []
        seats, starts, counts = [], [], []
        for chunk in chunks:
            seq = chunk.seq
            seat, start, count, have = seq.seat, chunk.start, chunk.count, known[seq.seat]
            pages = seq.pages
            if have < len(pages):
                tables[seat, have : len(pages)] = pages[have:]
                known[seat] = len(pages)
            seats.append(seat)
            starts.append(start)
            counts.append(count)
            if count == 1:
                tokens.append(seq.tokens[start] if start < len(seq.tokens) else -1)
            else:
                tokens.extend(seq.tokens[start : start + count])
        n_seqs, n_rows = len(chunks), len(tokens)
        at_seat, length = np.array(seats, np.int32), np.array(counts, np.int32)
        start_of = np.array(starts, np.int32)
        out.cu_q[1 : n_seqs + 1] = np.cumsum(length)
        out.cu_q[n_seqs + 1 :] = n_rows
        out.kv_lens[:n_seqs] = start_of + length
        out.counts[:] = plan.n_decode, n_seqs, n_rows
        out.page_table[:n_seqs] = tables[at_seat]
        row_seat = np.repeat(at_seat, length)
        position = np.arange(n_rows, dtype=np.int32) + np.repeat(start_of - out.cu_q[:n_seqs], length)
        out.tokens[:n_rows] = tokens
        out.token_seats[:n_rows] = row_seat
        out.positions[:n_rows] = position
        out.write_rows[:n_rows] = tables[row_seat, position // self.page_size] * self.page_size + (
            position % self.page_size)
        out.write_rows[n_rows:] = self.pool_rows

    def fill_logits(self, plan: Plan, out: StepInputs) -> None:
        """Which rows need logits, in plan order (scored rows of a chunk first), and how to sample them."""
        rows, seats, owners, scored, positions = [], [], [], [], []
        row = 0
        for chunk in plan.chunks:
            seat = chunk.seq.seat
            for i in range(chunk.scored):
                rows.append(row + i)
                seats.append(self.seats)
                owners.append(seat)
                scored.append(chunk.seq.tokens[chunk.start + i + 1])
                positions.append(chunk.start + i)
            row += chunk.count
            if chunk.sample:
                rows.append(row - 1)
                seats.append(seat)
                owners.append(seat)
                scored.append(-1)
                positions.append(chunk.end - 1)
        n = len(rows)
        out.logit_rows[:n] = rows
        out.seats[:n] = seats
        out.seats[n:] = self.seats
        if out.floats is not None:
            out.floats[:n] = self.floats[owners].view(np.int32)
            out.ints[:n] = self.ints[owners]
            out.ints[:n, 3] = scored
            out.ints[:n, 4] = positions

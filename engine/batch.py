"""From a plan to the one packed int32 array that a step uploads, and back to named arrays inside jit.

Axes: T token rows and S sequences (also logit rows) of the bucket, P pages per sequence, M seats of the engine.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
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
    logit_rows: Any  # [S] which token row each logit row reads
    seats: Any  # [S] seat whose last_token a logit row sets; M = none
    page_table: Any  # [S, P]
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
        """Field name -> shape, in packing order: what each step writes anew, then what may stay from step to step."""
        rows, seqs = self.bucket.tokens, self.bucket.seats
        shapes = {"tokens": (rows,), "token_seats": (rows,), "positions": (rows,), "write_rows": (rows,),
                  "kv_lens": (seqs,), "cu_q": (seqs + 1,), "counts": (3,), "logit_rows": (seqs,), "seats": (seqs,)}
        if not self.plain:
            shapes |= {"floats": (seqs, FLOATS), "ints": (seqs, INTS)}
        return shapes | {"page_table": (seqs, self.pages)}

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


class Upload:
    """A packed array of one executable, and what the rows of its page table are copies of.

    fresh: all fields but the page table, flat. table: the page table, flat. stamps: of each of its rows, the stamp
    of the seat's table that it holds; 0: zeros. used: rows that may hold a table.
    """

    def __init__(self, layout: Layout):
        self.packed = np.zeros(layout.size, np.int32)
        words = memoryview(self.packed)
        table = layout.slices["page_table"]
        self.fresh, self.table = words[: table.start], words[table]
        self.stamps, self.used = [0] * layout.bucket.seats, 0


class BatchBuilder:
    """Packs plans. Each seat's page table and sampling row stay between steps, and so do the packed arrays with the
    tables in them: what a step costs does not grow with the longest context that there may be.

    Each executable has two arrays in turn, because the device may still read the one of the step before, and of no
    other: a step is packed after the tokens of the last but one were read. What is written anew is gathered in lists
    and converted once: beside a device that is the same CPU, the host's caches are cold, and each numpy call costs
    several times what it costs in a loop of its own.
    """

    def __init__(self, *, seats: int, pages_per_seat: int, page_size: int, pool_rows: int):
        self.seats, self.pages, self.page_size, self.pool_rows = seats, pages_per_seat, page_size, pool_rows
        self.tables = memoryview(np.zeros(seats * pages_per_seat, np.int32))  # each seat's page table
        self.no_pages = array("i", [0] * pages_per_seat)
        self.known = [0] * seats  # pages of each seat already in `tables`
        self.stamps = [0] * seats  # changes whenever the seat's table does
        self.changes = 0
        self.floats = [[0] * FLOATS] * seats  # each seat's sampling parameters, as the bits of float32
        self.ints = [(0, 0, 0, 0)] * seats  # top_k, seed (low, high word), LOOKS bits
        self.layouts: dict[tuple[Bucket, bool], Layout] = {}
        self.uploads: dict[tuple[Bucket, bool], list[Upload]] = {}

    def layout(self, bucket: Bucket, plain: bool) -> Layout:
        """The layout of one executable."""
        key = bucket, plain
        if key not in self.layouts:
            self.layouts[key] = Layout(bucket, self.pages, plain)
        return self.layouts[key]

    def build(self, plan: Plan, plain: bool) -> np.ndarray:
        """Plan -> packed int32 array, which stays as it is until the next but one of its executable is built.

        plain: for the executable without a sampler, which takes no sampling parameters.
        """
        upload = self.next_upload(plan.bucket, plain)
        for seq in plan.boarded:
            self.board(seq)
        self.fill(plan, upload, None if plain else self.sampling_of(plan))
        return upload.packed

    def next_upload(self, bucket: Bucket, plain: bool) -> Upload:
        """The one of an executable's two arrays that was used before the other."""
        key = bucket, plain
        both = self.uploads.get(key)
        if both is None:
            layout = self.layout(bucket, plain)
            both = self.uploads[key] = [Upload(layout), Upload(layout)]
        both.reverse()
        return both[0]

    def board(self, seq: Sequence) -> None:
        """A sequence took a seat: forget the last owner's pages, note its sampling parameters."""
        self.known[seq.seat] = 0
        params = seq.request.sampling
        floats = struct.pack(f"{FLOATS}f", 0.0 if params.greedy else params.temperature, params.top_p, params.min_p,
                             params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.floats[seq.seat] = list(struct.unpack(f"{FLOATS}i", floats))
        looks = PENALISED * params.penalised | BIASED * params.biased | SCORED * params.scored
        low, high = struct.unpack("<2i", struct.pack("<Q", seq.seed & 0xFFFFFFFFFFFFFFFF))
        self.ints[seq.seat] = max(params.top_k, 0), low, high, looks

    def fill(self, plan: Plan, upload: Upload, sampling: tuple[list[int], list[int]] | None) -> None:
        """Tokens, positions, page tables, KV rows and logit rows of every chunk, and how to sample, padded."""
        n_decode, page, known, stamps, held = plan.n_decode, self.page_size, self.known, self.stamps, upload.stamps
        tokens = [-1] * n_decode  # what a decoding row's seat sampled last, the host need not know it yet
        token_seats: list[int] = []
        positions: list[int] = []
        writes: list[int] = []
        prompt_lens: list[int] = []
        ends = list(range(n_decode + 1))
        width, table, tables = self.pages, upload.table, self.tables
        for row, chunk in enumerate(plan.chunks):
            seq, start = chunk.seq, chunk.start
            seat, pages = seq.seat, seq.pages
            if len(pages) != known[seat]:
                self.note_pages(seq)
            if held[row] != stamps[seat]:
                held[row] = stamps[seat]
                table[row * width : row * width + width] = tables[seat * width : seat * width + width]
            if row < n_decode:
                token_seats.append(seat)
                positions.append(start)
                writes.append(pages[start // page] * page + start % page)
            else:
                end = start + chunk.count
                tokens += seq.tokens[start:end]
                token_seats += [seat] * chunk.count
                positions += range(start, end)
                for at in range(start - start % page, end, page):
                    low, high, first = max(at, start), min(at + page, end), pages[at // page] * page - at
                    writes += range(first + low, first + high)
                prompt_lens.append(end)
                ends.append(len(tokens))
        logit_rows, seats = self.prompt_logits(plan, ends)
        n_rows, n_seqs = len(tokens), len(plan.chunks)
        for row in range(n_seqs, upload.used):
            table[row * width : row * width + width] = self.no_pages
            held[row] = 0
        upload.used = n_seqs
        padding, absent = plan.bucket.tokens - n_rows, plan.bucket.seats - n_seqs
        no_logits = plan.bucket.seats - n_decode - len(seats)
        zeros = [0] * max(padding, absent, no_logits)
        words = array("i", chain(
            tokens, zeros[:padding], token_seats, zeros[:padding], positions, zeros[:padding],
            writes, [self.pool_rows] * padding,
            [start + 1 for start in positions[:n_decode]], prompt_lens, zeros[:absent], ends, [n_rows] * absent,
            (n_decode, n_seqs, n_rows), range(n_decode), logit_rows, zeros[:no_logits],
            token_seats[:n_decode], seats, [self.seats] * no_logits))
        if sampling is not None:
            floats, ints = sampling
            words.extend(chain(floats, [0] * (FLOATS * no_logits), ints, [0] * (INTS * no_logits)))
        upload.fresh[:] = words

    def prompt_logits(self, plan: Plan, ends: list[int]) -> tuple[list[int], list[int]]:
        """(token row, seat whose token it sets) of the prompt chunks' logit rows; ends: cu_q. Scored rows set none."""
        rows: list[int] = []
        seats: list[int] = []
        for end, chunk in zip(ends[plan.n_decode + 1 :], plan.chunks[plan.n_decode :], strict=True):
            first = end - chunk.count
            rows += range(first, first + chunk.scored)
            seats += [self.seats] * chunk.scored
            if chunk.sample:
                rows.append(end - 1)
                seats.append(chunk.seq.seat)
        return rows, seats

    def note_pages(self, seq: Sequence) -> None:
        """Write a sequence's new pages into its seat's table."""
        seat, have, pages = seq.seat, self.known[seq.seat], len(seq.pages)
        first = seat * self.pages
        self.tables[first + have : first + pages] = array("i", seq.pages[have:])
        self.known[seat] = pages
        self.changes += 1
        self.stamps[seat] = self.changes

    def sampling_of(self, plan: Plan) -> tuple[list[int], list[int]]:
        """The rows of `floats` and `ints` of each logit row, in plan order (scored rows of a chunk first)."""
        floats: list[int] = []
        ints: list[int] = []
        for chunk in plan.chunks:
            seat, start = chunk.seq.seat, chunk.start
            top_k, low, high, looks = self.ints[seat]
            for position in range(start, start + chunk.scored):
                floats += self.floats[seat]
                ints += (top_k, low, high, chunk.seq.tokens[position + 1], position, looks)
            if chunk.sample:
                floats += self.floats[seat]
                ints += (top_k, low, high, -1, chunk.end - 1, looks)
        return floats, ints

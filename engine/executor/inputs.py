"""From a plan to the one packed int32 array that a step uploads, and back to named arrays inside
jit.

Axes: T token rows and S sequences (also logit rows) of the bucket, P pages per sequence, M seats of
the engine.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jitney.engine.scheduler.buckets import Bucket
from jitney.engine.scheduler.plan import Chunk, Plan
from jitney.engine.scheduler.sequence import Sequence

#: Per logit row, float32: temperature, top_p, min_p, repetition, presence and frequency penalty.
FLOATS = 6
#: Per logit row, int32: top_k, seed (low, high word), LOOKS bits.
INTS = 4
#: Both as a seat keeps them.
FLOATS_STRUCT, INTS_STRUCT = struct.Struct(f"<{FLOATS}f"), struct.Struct("<iQi")
#: Bits of the last int: which optional parts of the sampler this row needs.
PENALISED, BIASED, SCORED = 1, 2, 4


class StepInputs(NamedTuple):
    """One step's upload, int32 unless said otherwise.

    floats and ints are None in a step without the sampler, the score fields also in one without
    prompt rows.
    """

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
    score_count: Any = None  # [1] rows that bring prompt log-probabilities
    score_rows: Any = None  # [T] which token rows those are; only the first score_count count
    score_tokens: Any = None  # [T] the token that each of them is scored against


@dataclass(frozen=True)
class Layout:
    """Where each field of StepInputs lies in the packed array of one executable."""

    bucket: Bucket
    pages: int
    plain: bool

    @property
    def scores(self) -> bool:
        """True where prompt rows can bring log-probabilities."""
        return not self.plain and not self.bucket.decode_only

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Field name -> shape, in packing order: what each step writes anew, then what may stay
        from step to step.
        """
        rows, seqs = self.bucket.tokens, self.bucket.seats
        shapes = {
            "tokens": (rows,),
            "token_seats": (rows,),
            "positions": (rows,),
            "write_rows": (rows,),
            "kv_lens": (seqs,),
            "cu_q": (seqs + 1,),
            "counts": (3,),
            "logit_rows": (seqs,),
            "seats": (seqs,),
        }
        if not self.plain:
            shapes |= {"floats": (seqs, FLOATS), "ints": (seqs, INTS)}
        if self.scores:
            shapes |= {"score_count": (1,), "score_rows": (rows,), "score_tokens": (rows,)}
        return shapes | {"page_table": (seqs, self.pages)}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Field name -> its half-open range in the packed array."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()]).tolist()
        return {
            name: slice(start, end)
            for name, start, end in zip(self.shapes, [0, *ends[:-1]], ends, strict=True)
        }

    @cached_property
    def fresh(self) -> struct.Struct:
        """Packs the fields before the sampling parameters and the page table, which are copied from
        the seats'.
        """
        return struct.Struct(f"{self.slices['page_table' if self.plain else 'floats'].start}i")

    @property
    def size(self) -> int:
        """int32 words of the packed array."""
        return list(self.slices.values())[-1].stop

    def split(self, packed: Any) -> StepInputs:
        """Views of the packed array, numpy or traced."""
        return StepInputs(
            **{name: packed[at].reshape(self.shapes[name]) for name, at in self.slices.items()}
        )


class Rows(msgspec.Struct):
    """Rows of a step while they are gathered, padding excluded; see StepInputs.

    tokens: -1 for decode rows: the host need not know yet what their seats sampled last. ends:
    cu_q. prompt_lens: kv_lens of the prompts. logit_rows, seats: of the prompts' logit rows.
    score_rows, score_tokens: of all scored rows.
    """

    tokens: list[int]
    token_seats: list[int]
    positions: list[int]
    write_rows: list[int]
    prompt_lens: list[int]
    ends: list[int]
    logit_rows: list[int]
    seats: list[int]
    score_rows: list[int]
    score_tokens: list[int]


class Upload:
    """A packed array of one executable, and what the rows of its page table are copies of.

    words: all of it. floats, ints: their bytes. table: the page table, flat. stamps: of each of its
    rows, the stamp of the seat's table that it holds; None: zeros. used: rows that may hold a
    table.
    """

    def __init__(self, layout: Layout):
        self.packed = np.zeros(layout.size, np.int32)
        self.words, self.pack_into = memoryview(self.packed), layout.fresh.pack_into
        self.table = self.words[layout.slices["page_table"]]
        if not layout.plain:
            self.floats, self.ints = (
                self.words[layout.slices[name]].cast("B") for name in ("floats", "ints")
            )
        if layout.scores:
            self.inputs = layout.split(self.packed)
        self.stamps: list[object] = [None] * layout.bucket.seats
        self.used = 0


class BatchBuilder:
    """Packs plans. Each seat's page table and sampling row stay between steps, and so do the packed
    arrays with the tables in them: what a step costs does not grow with the longest context that
    there may be.

    Each executable has two arrays in turn, because the device may still read the one of the step
    before, and of no other: a step is packed after the tokens of the last but one were read. What
    is written anew is gathered in lists and converted once: beside a device that is the same CPU,
    the host's caches are cold, and each numpy call costs several times what it costs in a loop of
    its own. For the same reason a row's page comes from the seat's table, an array, and not from
    the sequence's list of numbers that lie anywhere.
    """

    def __init__(self, *, seats: int, pages_per_seat: int, page_size: int, pool_rows: int):
        self.seats, self.pages, self.page_size, self.pool_rows = (
            seats,
            pages_per_seat,
            page_size,
            pool_rows,
        )
        self.no_pages = array("i", [0]) * pages_per_seat
        self.tables = self.no_pages * seats  # each seat's page table
        self.known = [0] * seats  # pages of each seat in `tables`
        self.stamps = [
            object() for _ in range(seats)
        ]  # another one whenever the seat's table changes
        self.floats, self.ints = [b""] * seats, [b""] * seats  # each seat's sampling parameters
        self.layouts: dict[tuple[Bucket, bool], Layout] = {}
        self.uploads: dict[tuple[Bucket, bool], list[Upload]] = {}

    def layout(self, bucket: Bucket, plain: bool) -> Layout:
        """The layout of one executable."""
        key = bucket, plain
        if key not in self.layouts:
            self.layouts[key] = Layout(bucket, self.pages, plain)
        return self.layouts[key]

    def build(self, plan: Plan, plain: bool) -> np.ndarray:
        """Plan -> packed int32 array, which stays as it is until the next but one of its executable
        is built.

        plain: for the executable without a sampler, which takes no sampling parameters.
        """
        upload = self.next_upload(plan.bucket, plain)
        for seq in plan.boarded:
            self.board(seq)
        for seq in plan.fed:
            self.feed(seq)
        for seq in plan.dropped:
            self.drop(seq)
        self.fill(plan, upload, plain)
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
        """A sequence took a seat: note its pages instead of the last owner's, and its sampling
        parameters.
        """
        first = seq.seat * self.pages
        self.tables[first : first + len(seq.pages)] = array("i", seq.pages)
        self.known[seq.seat] = len(seq.pages)
        self.stamps[seq.seat] = object()
        params = seq.request.sampling
        self.floats[seq.seat] = FLOATS_STRUCT.pack(
            0.0 if params.greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        looks = (
            PENALISED * params.penalised
            | BIASED * params.biased
            | SCORED * (params.logprobs is not None)
        )
        self.ints[seq.seat] = INTS_STRUCT.pack(
            max(params.top_k, 0), seq.seed & 0xFFFFFFFFFFFFFFFF, looks
        )

    def feed(self, seq: Sequence) -> None:
        """A seated sequence got one more page."""
        seat = seq.seat
        self.tables[seat * self.pages + self.known[seat]] = seq.pages[-1]
        self.known[seat] += 1
        self.stamps[seat] = object()

    def drop(self, seq: Sequence) -> None:
        """A seated sequence gave back its first pages: no kernel is to read what others write
        there.
        """
        first = seq.seat * self.pages
        self.tables[first : first + seq.dropped] = self.no_pages[: seq.dropped]
        self.stamps[seq.seat] = object()

    def fill(self, plan: Plan, upload: Upload, plain: bool) -> None:
        """Tokens, positions, page tables, KV rows and logit rows of every chunk, and how to sample,
        padded.
        """
        n_decode, page, width, tables = plan.n_decode, self.page_size, self.pages, self.tables
        rows = Rows([-1] * n_decode, [], [], [], [], list(range(n_decode + 1)), [], [], [], [])
        token_seats, positions, write_rows = rows.token_seats, rows.positions, rows.write_rows
        stamps, held = self.stamps, upload.stamps
        for number, chunk in enumerate(plan.chunks):
            seat, start = chunk.seq.seat, chunk.start
            if held[number] is not stamps[seat]:
                self.copy_table(upload, number, seat)
            if number < n_decode:
                token_seats.append(seat)
                positions.append(start)
                write_rows.append(tables[seat * width + start // page] * page + start % page)
            else:
                self.add_prompt(rows, chunk)
        n_rows, n_seqs = len(rows.tokens), len(plan.chunks)
        for number in range(n_seqs, upload.used):
            upload.table[number * width : (number + 1) * width] = self.no_pages
            held[number] = None
        upload.used = n_seqs
        padding, absent = plan.bucket.tokens - n_rows, plan.bucket.seats - n_seqs
        no_logits = plan.bucket.seats - n_decode - len(rows.seats)
        words = [
            *rows.tokens,
            *[0] * padding,
            *token_seats,
            *[0] * padding,
            *positions,
            *[0] * padding,
            *write_rows,
            *[self.pool_rows] * padding,
            *[start + 1 for start in positions[:n_decode]],
            *rows.prompt_lens,
            *[0] * absent,
            *rows.ends,
            *[n_rows] * absent,
            n_decode,
            n_seqs,
            n_rows,
            *range(n_decode),
            *rows.logit_rows,
            *[0] * no_logits,
            *token_seats[:n_decode],
            *rows.seats,
            *[self.seats] * no_logits,
        ]
        upload.pack_into(upload.words, 0, *words)
        if plain:
            return
        if not plan.bucket.decode_only:
            self.fill_scores(rows, upload)
        owners = token_seats[:n_decode] + rows.seats
        upload.floats[:] = b"".join([self.floats[seat] for seat in owners]) + bytes(
            4 * FLOATS * no_logits
        )
        upload.ints[:] = b"".join([self.ints[seat] for seat in owners]) + bytes(
            4 * INTS * no_logits
        )

    def add_prompt(self, rows: Rows, chunk: Chunk) -> None:
        """The rows of a prompt chunk."""
        seq, start, end, page = chunk.seq, chunk.start, chunk.end, self.page_size
        first = len(rows.tokens)
        rows.tokens += seq.tokens[start:end]
        rows.token_seats += [seq.seat] * chunk.count
        rows.positions += range(start, end)
        for at in range(start - start % page, end, page):
            low, high, in_pool = (
                max(at, start),
                min(at + page, end),
                seq.pages[at // page] * page - at,
            )
            rows.write_rows += range(in_pool + low, in_pool + high)
        rows.prompt_lens.append(end)
        rows.ends.append(first + chunk.count)
        if chunk.scored:
            row, target = first + chunk.score_start - start, chunk.score_start + 1
            rows.score_rows += range(row, row + chunk.scored)
            rows.score_tokens += seq.tokens[target : target + chunk.scored]
        if chunk.sample:
            rows.logit_rows.append(first + chunk.count - 1)
            rows.seats.append(seq.seat)

    @staticmethod
    def fill_scores(rows: Rows, upload: Upload) -> None:
        """Which rows bring prompt log-probabilities; numbers behind them are of former steps and
        mean nothing.
        """
        count = len(rows.score_rows)
        upload.inputs.score_count[0] = count
        if count:
            upload.inputs.score_rows[:count] = rows.score_rows
            upload.inputs.score_tokens[:count] = rows.score_tokens

    def copy_table(self, upload: Upload, number: int, seat: int) -> None:
        """Copy a seat's pages into a row of the upload; numbers behind them, of former owners,
        belong to no key.
        """
        to, of, pages = number * self.pages, seat * self.pages, self.known[seat]
        upload.table[to : to + pages] = self.tables[of : of + pages]
        upload.stamps[number] = self.stamps[seat]

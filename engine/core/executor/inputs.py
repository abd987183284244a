"""Packs a plan into the int32 array that a step uploads, and splits it into named arrays in jit.

`_FIELDS` declares the fields of an upload and `SAMPLING` its sampling parameters; packing, slicing
and the sampler read both by name.

Axes: T token rows and S sequences (also logit rows) of the bucket, P pages per sequence, W words of
a seat's sampling parameters, M seats, A seats with adapters (M or 0), G cache groups beside the
first with page tables of their own, R sequences with a recurrent state (S or 0), C states stored
within a sequence's rows, D sequences with a state for each draft (S or 0).
"""

from __future__ import annotations

import struct
from array import array
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jitney.engine.common.requests import SamplingParams, Uploaded
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import Chunk, MaskedRow, Plan, mask_words
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.state_slots import MOST_SAVES

#: Optional parts of the sampler, as bits of the parameter `parts`.
PENALISED, BIASED, SCORED = 1, 2, 4


class _SeatField(NamedTuple):
    """One sampling parameter of a seat."""

    #: Field of `SamplingParams`, or a name of the upload's own.
    name: str
    dtype: Literal["float32", "int32"]
    #: Computes its value for a request.
    value: Callable[[SamplingParams], float]


class _SamplingUpload:
    """Sampling inputs of each seat: the uploaded parameters of `params`, the `parts` of the
    sampler that it needs, and the sequence's seed.
    """

    def __init__(self, params: type[SamplingParams]):
        self.fields = [*_uploaded(params), _SeatField("parts", "int32", _parts)]
        formats = {"float32": "f", "int32": "i"}
        numbers = "".join([formats[field.dtype] for field in self.fields])
        self._struct = struct.Struct(f"<{numbers}q")
        self.words = self._struct.size // 4
        #: Packed parameters of a row that takes the likeliest token.
        self.bare_argmax = self.pack(params(temperature=0.0), 0)

    def pack(self, params: SamplingParams, seed: int) -> bytes:
        """Pack a seat's parameters; seed: int64."""
        return self._struct.pack(*[field.value(params) for field in self.fields], seed)

    def columns(self, words: Any) -> dict[str, Any]:
        """Split words int32 [S, W], numpy or traced, into one array [S] for each parameter. The
        seed is int32 [S, 2], low word first.
        """
        columns = {
            field.name: words[:, number].view(np.dtype(field.dtype))
            for number, field in enumerate(self.fields)
        }
        return columns | {"seed": words[:, len(self.fields) :]}


def _uploaded(params: type[SamplingParams]) -> list[_SeatField]:
    fields = []
    for name, items in params.declared().items():
        for item in items:
            if isinstance(item, Uploaded):
                fields.append(_SeatField(name, item.dtype, item.value or attrgetter(name)))
    return fields


def _parts(params: SamplingParams) -> int:
    scored = params.logprobs is not None
    return PENALISED * params.penalised | BIASED * params.biased | SCORED * scored


SAMPLING = _SamplingUpload(SamplingParams)
#: Number of words in a row of `MaskedRows.heads` before its sampling parameters.
_HEAD = 4


class MaskedRows(NamedTuple):
    """Rows of a step whose tokens are chosen after it, under masks: int32 arrays of R rows."""

    #: [R, 4 + W]: the row's position, its seat (M: none), the number of the draft that it reads (0:
    #: none), that draft's token, then its sampling parameters.
    heads: np.ndarray
    #: [R, ceil(V / 32)]: one bit for each allowed token, low bits first.
    masks: np.ndarray

    @classmethod
    def empty(cls, rows: int, vocab: int, seats: int) -> MaskedRows:
        """Rows without a seat: all tokens are allowed, and their choice is not read."""
        heads = np.empty((rows, MaskedHeads.words()), np.int32)
        heads[:, :_HEAD] = 0, seats, 0, 0
        heads[:, _HEAD:] = np.frombuffer(SAMPLING.bare_argmax, np.int32)
        return cls(heads, np.full((rows, mask_words(vocab)), -1, np.int32))


class MaskedHeads(NamedTuple):
    """`MaskedRows.heads` by column, numpy or traced."""

    positions: Any  #: int32 [R]
    seats: Any  #: int32 [R]
    numbers: Any  #: int32 [R]: see `DraftRows`
    drafts: Any  #: int32 [R]
    sampling: Any  #: int32 [R, W]: see `_SamplingUpload.columns`

    @classmethod
    def of(cls, heads: Any) -> MaskedHeads:
        return cls(heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3], heads[:, _HEAD:])

    @property
    def params(self) -> dict[str, Any]:
        """See `_SamplingUpload.columns`."""
        return SAMPLING.columns(self.sampling)

    @staticmethod
    def words() -> int:
        """Number of int32 words in a row of `MaskedRows.heads`."""
        return _HEAD + SAMPLING.words


class _Field(NamedTuple):
    """One field of a step's upload, int32."""

    name: str
    shape: tuple[str, ...]  #: names of its axes in UploadLayout
    #: rows: made anew for each step. pages: copied from the seats' page tables. sampling: sampling
    #: parameters, copied from the seats. scores: for rows that return prompt log-probabilities.
    part: Literal["rows", "pages", "sampling", "scores"]
    #: Value of the elements after the step's own values.
    padding: Callable[[BatchBuilder], int] = lambda builder: 0


#: All fields of a step's upload. An executable takes the fields of its parts (`UploadLayout`).
_FIELDS = (
    # Token ids; -1: the last token of the row's seat, on the device; -1 - n: its n-th draft.
    _Field("tokens", ("T",), "rows"),
    # The seat of each row.
    _Field("token_seats", ("T",), "rows"),
    _Field("positions", ("T",), "rows"),
    # Index of the KV row in the flat pool; indices after its end are not written.
    _Field("write_rows", ("T",), "rows", padding=attrgetter("pool_rows")),
    _Field("kv_lens", ("S",), "rows"),
    _Field("cu_q", ("S + 1",), "rows"),
    # Numbers of decoding sequences, sequences, token rows, sequences whose output is recomputed.
    _Field("counts", ("4",), "rows"),
    # The token row that each logit row reads.
    _Field("logit_rows", ("S",), "rows"),
    # The seat whose last token a logit row sets; M: none; M + 1 + seat for a row whose token is
    # chosen after the step.
    _Field("seats", ("S",), "rows", padding=attrgetter("seats")),
    # Each seat's adapter number, from 1; 0: none. Empty if the engine has no adapters.
    _Field("seat_adapters", ("A",), "rows"),
    # See `jitney.kernels.delta_net.StateSlots`; empty if no layer is recurrent.
    _Field("state_reads", ("R",), "rows"),
    _Field("state_cuts", ("R", "C"), "rows"),
    _Field("state_writes", ("R", "C + 1"), "rows"),
    _Field("state_ends", ("D + 1",), "rows"),
    _Field("state_drafts", ("D",), "rows"),
    # `write_rows` of the other cache groups; the builder pads them.
    _Field("window_rows", ("G", "T"), "rows"),
    _Field("page_table", ("S", "P"), "pages"),
    _Field("window_tables", ("G", "S", "P"), "pages"),
    # See _SamplingUpload.
    _Field("sampling", ("S", "W"), "sampling"),
    # Number of rows that return prompt log-probabilities.
    _Field("score_count", ("1",), "scores"),
    # Indices of these token rows, and the tokens that they are scored against; values after the
    # first score_count are left over from earlier steps.
    _Field("score_rows", ("T",), "scores"),
    _Field("score_tokens", ("T",), "scores"),
)
#: Parts in the order of packing: first those of all executables, then those of executables with a
#: sampler.
_PARTS = ("rows", "pages", "sampling", "scores")
#: One step's upload as named arrays; None for fields that its executable does not take.
_StepInputs = namedtuple(  # pyright: ignore[reportUntypedNamedTuple]
    "StepInputs", [field.name for field in _FIELDS], defaults=[None] * len(_FIELDS)
)


def _most_saves(bucket: Bucket, drafts: int) -> int:
    """The most recurrent states that a step stores within a sequence's rows: at page ends of a
    prompt, or after drafts.
    """
    return max(drafts, 0 if bucket.decode_only else MOST_SAVES)


class UploadLayout:
    """The positions of the fields in the packed array of one executable. The upload of the
    executable without a sampler (greedy_only) is a prefix of the other's.

    pages: P. adapted: seats whose adapters are uploaded; 0: the engine has no adapters. groups: G.
    recurrent: sequences have a recurrent state. drafts: the most drafts of a sequence in a step.
    """

    def __init__(
        self,
        bucket: Bucket,
        pages: int,
        greedy_only: bool,
        adapted: int = 0,
        groups: int = 0,
        *,
        recurrent: bool = False,
        drafts: int = 0,
    ):
        saves = _most_saves(bucket, drafts)
        drafting = bucket.seats if recurrent and drafts else 0
        self.bucket = bucket
        self.greedy_only = greedy_only
        self.sampling = SAMPLING
        self._axes = {
            "1": 1,
            "4": 4,
            "T": bucket.tokens,
            "S": bucket.seats,
            "S + 1": bucket.seats + 1,
            "P": pages,
            "W": self.sampling.words,
            "A": adapted,
            "G": groups,
            "R": bucket.seats if recurrent else 0,
            "C": saves,
            "C + 1": saves + 1,
            "D": drafting,
            "D + 1": drafting + 1 if drafting else 0,
        }

    @property
    def scores(self) -> bool:
        """Whether prompt rows can return log-probabilities."""
        return not self.greedy_only and not self.bucket.decode_only

    @property
    def _parts(self) -> list[str]:
        """The parts of an upload that this executable takes, in order of packing."""
        has_part = {"sampling": not self.greedy_only, "scores": self.scores}
        return [part for part in _PARTS if has_part.get(part, True)]

    @cached_property
    def fields(self) -> list[_Field]:
        """The fields that this executable takes, in order of packing."""
        return [field for part in self._parts for field in _FIELDS if field.part == part]

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Field name -> shape, in order of packing."""
        return {field.name: [self._axes[axis] for axis in field.shape] for field in self.fields}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Field name -> its range in the packed array."""
        slices = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + int(np.prod(shape))
            slices[name] = slice(start, end)
            start = end
        return slices

    def length(self, name: str) -> int:
        """Number of words of a field."""
        return self.slices[name].stop - self.slices[name].start

    @property
    def size(self) -> int:
        """Number of int32 words of the packed array."""
        return list(self.slices.values())[-1].stop

    def split(self, packed: Any) -> Any:
        """Split the packed array, numpy or traced, into views as `_StepInputs`."""
        slices = self.slices.items()
        return _StepInputs(**{name: packed[at].reshape(self.shapes[name]) for name, at in slices})


class _StepRows(msgspec.Struct):
    """The fields that each step writes anew, without padding. owners: the seat of each sequence."""

    owners: list[int] = []
    tokens: list[int] = []
    token_seats: list[int] = []
    positions: list[int] = []
    write_rows: list[int] = []
    window_rows: list[int] = []
    kv_lens: list[int] = []
    cu_q: list[int] = []
    counts: list[int] = []
    logit_rows: list[int] = []
    seats: list[int] = []
    seat_adapters: list[int] = []
    state_reads: list[int] = []
    state_cuts: list[int] = []
    state_writes: list[int] = []
    state_ends: list[int] = []
    state_drafts: list[int] = []
    score_rows: list[int] = []
    score_tokens: list[int] = []


class _SeatTables:
    """The page tables of all seats in one cache group."""

    def __init__(self, seats: int, width: int, pool_rows: int):
        """width: pages of a table. pool_rows: KV rows of the group's pool."""
        self.width = width
        self.pool_rows = pool_rows
        self._no_pages = array("i", [0]) * width
        #: The tables of all seats, one after the other.
        self.flat = self._no_pages * seats
        #: Number of pages in each table.
        self._counts = [0] * seats
        #: One object per seat, replaced whenever the seat's table changes.
        self._stamps = [object() for _ in range(seats)]

    def board(self, seat: int, pages: list[int]) -> None:
        """Set the pages of a seat's new sequence."""
        first = seat * self.width
        self.flat[first : first + len(pages)] = array("i", pages)
        self._counts[seat] = len(pages)
        self._stamps[seat] = object()

    def add(self, seat: int, page: int) -> None:
        """Append a page to a seat's table."""
        count = self._counts[seat]
        self.flat[seat * self.width + count] = page
        self._counts[seat] = count + 1
        self._stamps[seat] = object()

    def feed(self, seat: int, pages: list[int]) -> None:
        """Append those of a sequence's pages that its table does not have yet."""
        count = self._counts[seat]
        if len(pages) > count:
            first = seat * self.width
            self.flat[first + count : first + len(pages)] = array("i", pages[count:])
            self._counts[seat] = len(pages)
            self._stamps[seat] = object()

    def drop(self, seat: int, count: int) -> None:
        """Clear the first pages, which were given back: no kernel may read them again."""
        first = seat * self.width
        self.flat[first : first + count] = self._no_pages[:count]
        self._stamps[seat] = object()

    def copy(self, owners: list[int], upload: _UploadTable) -> None:
        """Update an upload's page table from the tables of the seats `owners`."""
        stamps, copied, width = self._stamps, upload.stamps, self.width
        for number, seat in enumerate(owners):
            if copied[number] is not stamps[seat]:
                self._copy_table(upload, number, seat)
        for number in range(len(owners), upload.used):
            upload.words[number * width : (number + 1) * width] = self._no_pages
            copied[number] = None
        upload.used = len(owners)

    def _copy_table(self, upload: _UploadTable, number: int, seat: int) -> None:
        """Copy a seat's pages into a row of the upload; later entries are not used by any key."""
        target = number * self.width
        source = seat * self.width
        pages = self._counts[seat]
        upload.words[target : target + pages] = self.flat[source : source + pages]
        upload.stamps[number] = self._stamps[seat]


@dataclass(slots=True)
class _UploadTable:
    """The page table of one cache group in a packed array."""

    #: The table's words, flat.
    words: memoryview
    #: For each row, the stamp of the seat's table that it holds; None: zeros.
    stamps: list[object]
    #: Number of rows that may hold a table.
    used: int = 0


class _Upload:
    """A packed array of one executable, with the state of its page tables."""

    def __init__(self, layout: UploadLayout, builder: BatchBuilder):
        self.packed = np.zeros(layout.size, np.int32)
        self.inputs = layout.split(self.packed)
        self._words = memoryview(self.packed)
        #: (name, length, padding) of each field that every step writes anew.
        self._fresh: list[tuple[str, int, int]] = []
        length = 0
        for field in layout.fields:
            if field.part == "rows":
                own = layout.length(field.name)
                if own:
                    self._fresh.append((field.name, own, field.padding(builder)))
                length += own
        self._pack_into = struct.Struct(f"{length}i").pack_into
        table = layout.slices["page_table"]
        size = table.stop - table.start
        #: The tables of all cache groups, one after the other.
        self.tables = [
            _UploadTable(
                self._words[table.start + number * size : table.start + (number + 1) * size],
                [None] * layout.bucket.seats,
            )
            for number in range(len(builder.groups))
        ]
        if not layout.greedy_only:
            self._sampling = self._words[layout.slices["sampling"]].cast("B")

    def pack(self, rows: _StepRows) -> None:
        """Write the fields that every step writes anew."""
        words = []
        end = 0
        for name, length, padding in self._fresh:
            words += getattr(rows, name)
            end += length
            words += [padding] * (end - len(words))
        self._pack_into(self._words, 0, *words)

    def pack_sampling(self, seats: list[bytes]) -> None:
        packed = b"".join(seats)
        self._sampling[: len(packed)] = packed
        self._sampling[len(packed) :] = bytes(len(self._sampling) - len(packed))

    def pack_scores(self, rows: _StepRows) -> None:
        count = len(rows.score_rows)
        self.inputs.score_count[0] = count
        if count:
            self.inputs.score_rows[:count] = rows.score_rows
            self.inputs.score_tokens[:count] = rows.score_tokens


class BatchBuilder:
    """Packs plans into uploads. Page tables and sampling parameters stay between steps, so a step's
    cost does not grow with the context.

    Each executable has two arrays that alternate, since the device may still read the last one. New
    values are gathered in lists and converted once, and pages are copied from the seats' tables: if
    the device is the same CPU, caches are cold, and each numpy call costs several times as much.
    """

    def __init__(
        self,
        *,
        seats: int,
        pages_per_seat: int,
        page_size: int,
        pool_rows: int,
        has_adapters: bool = False,
        window_rows: Iterable[int] = (),
        recurrent: bool = False,
        drafts: int = 0,
        draft_slots: int = 0,
    ):
        """window_rows: KV rows of the other cache groups' pools, as pool_rows. recurrent: sequences
        have a recurrent state (`Sequence.state`). drafts: the most drafts of a sequence in a step.
        draft_slots: the first slot for states after drafts; each seat has `drafts` such slots.
        """
        self.seats = seats
        self.recurrent = recurrent
        self._drafts = drafts
        self._draft_slots = draft_slots
        self.pages = pages_per_seat
        self.page_size = page_size
        self.pool_rows = pool_rows
        #: The tables of all cache groups; below they are split into the first and the others.
        self.groups = [
            _SeatTables(seats, pages_per_seat, rows) for rows in (pool_rows, *window_rows)
        ]
        self._first, *self._windows = self.groups
        #: Each seat's sampling parameters, and those that the step's program gets.
        self._own_sampling = [b""] * seats
        self._sampling = [b""] * seats
        #: Each seat's adapter number; empty if the engine has no adapters.
        self._adapters = [0] * (seats if has_adapters else 0)
        self._layouts: dict[tuple[Bucket, bool], UploadLayout] = {}
        self._uploads: dict[tuple[Bucket, str], list[_Upload]] = {}

    def layout(self, bucket: Bucket, greedy_only: bool) -> UploadLayout:
        key = bucket, greedy_only
        if key not in self._layouts:
            adapted, groups = len(self._adapters), len(self._windows)
            self._layouts[key] = UploadLayout(
                bucket,
                self.pages,
                greedy_only,
                adapted,
                groups,
                recurrent=self.recurrent,
                drafts=self._drafts,
            )
        return self._layouts[key]

    def empty(self, bucket: Bucket, greedy_only: bool) -> np.ndarray:
        """The upload of an empty step."""
        upload = _Upload(self.layout(bucket, greedy_only), self)
        rows = _StepRows()
        for tables in self._windows:
            rows.window_rows += [tables.pool_rows] * bucket.tokens
        upload.pack(rows)
        return upload.packed

    def build(self, plan: Plan, greedy_only: bool) -> np.ndarray:
        """Pack a plan into an int32 array, which is valid until the next but one upload of the same
        executable is built.

        greedy_only: for the executable without a sampler.
        """
        for seq in plan.boarded:
            self._board(seq)
        for seq in plan.fed:
            self._feed(seq)
        for seq in plan.dropped:
            self._drop(seq)
        upload = self._next_upload(plan.bucket, "greedy" if greedy_only else "full")
        rows = self._gather(plan.chunks, plan.n_decode, plan.bucket)
        for number, tables in enumerate(self._windows):
            self._add_window_rows(rows, plan, number, tables)
        if self.recurrent:
            self._add_slots(rows, plan)
        sampling = [self._sampling[seat] for seat in rows.seats]
        for masked in plan.masked:
            rows.seats[masked.row] += self.seats + 1
        upload.pack(rows)
        if not greedy_only:
            upload.pack_sampling(sampling)
            if not plan.bucket.decode_only:
                upload.pack_scores(rows)
        self._first.copy(rows.owners, upload.tables[0])
        for tables, table in zip(self._windows, upload.tables[1:], strict=True):
            tables.copy(rows.owners, table)
        return upload.packed

    def build_decode_rows(self, rows: list[Chunk], bucket: Bucket) -> np.ndarray:
        """Pack some decode rows of the plan that was built last, without a sampler, for a model
        whose layers all use the pages of the first cache group.
        """
        upload = self._next_upload(bucket, "drafts")
        gathered = self._gather(rows, len(rows), bucket)
        upload.pack(gathered)
        self._first.copy(gathered.owners, upload.tables[0])
        return upload.packed

    def put_masked(
        self, upload: MaskedRows, place: int, masked: MaskedRow, mask: np.ndarray
    ) -> None:
        """Write a row and its mask, int32 [ceil(V / 32)], to the index `place` of an upload."""
        head, seq, draft = upload.heads[place], masked.chunk.seq, masked.chunk.draft
        token = seq.drafts[draft - 1] if draft else 0
        # The position is known by now: that of the newest token, or of a draft after it.
        head[:_HEAD] = len(seq.tokens) - 1 + draft, masked.seat, draft, token
        head[_HEAD:] = np.frombuffer(self._own_sampling[masked.seat], np.int32)
        upload.masks[place] = mask

    def _next_upload(self, bucket: Bucket, kind: Literal["greedy", "full", "drafts"]) -> _Upload:
        """Return the less recently used of an executable's two arrays."""
        key = bucket, kind
        both = self._uploads.get(key)
        if both is None:
            layout = self.layout(bucket, kind != "full")
            both = self._uploads[key] = [_Upload(layout, self), _Upload(layout, self)]
        both.reverse()
        return both[0]

    def _board(self, seq: Sequence) -> None:
        """Store the pages and sampling parameters of a sequence that took a seat."""
        self._first.board(seq.seat, seq.pages)
        for tables, held in zip(self._windows, seq.windows, strict=True):
            tables.board(seq.seat, held.pages)
        own = SAMPLING.pack(seq.request.sampling, seq.seed)
        self._own_sampling[seq.seat] = own
        self._sampling[seq.seat] = own if seq.matcher is None else SAMPLING.bare_argmax
        if self._adapters:
            self._adapters[seq.seat] = seq.request.adapter

    def _feed(self, seq: Sequence) -> None:
        """Add the new page of a seated sequence to its tables."""
        self._first.add(seq.seat, seq.pages[-1])
        for number, tables in enumerate(self._windows):
            tables.feed(seq.seat, seq.windows[number].pages)

    def _drop(self, seq: Sequence) -> None:
        """Clear the first pages that a seated sequence gave back."""
        if seq.dropped:
            self._first.drop(seq.seat, seq.dropped)
        for tables, held in zip(self._windows, seq.windows, strict=True):
            tables.drop(seq.seat, held.dropped)

    def _gather(self, chunks: list[Chunk], n_decode: int, bucket: Bucket) -> _StepRows:
        """Gather tokens, positions, KV rows and logit rows of all chunks. The first n_decode chunks
        are decode rows, whose tokens may not be known yet.
        """
        rows = self._decode_rows(chunks[:n_decode])
        for chunk in chunks[n_decode:]:
            self._add_prompt(rows, chunk)
        n_seqs, n_rows = len(rows.owners), len(rows.tokens)
        rows.cu_q += [n_rows] * (bucket.seats - n_seqs)
        again = sum(chunk.again for chunk in chunks[n_decode:])
        rows.counts = [n_decode, n_seqs, n_rows, again]
        rows.seat_adapters = self._adapters
        return rows

    def _decode_rows(self, chunks: list[Chunk]) -> _StepRows:
        page, width, tables = self.page_size, self.pages, self._first.flat
        rows = _StepRows(tokens=[-1] * len(chunks))
        token_seats, positions, write_rows = rows.token_seats, rows.positions, rows.write_rows
        for number, chunk in enumerate(chunks):
            seat, start = chunk.seq.seat, chunk.start
            if chunk.draft:
                rows.tokens[number] = -1 - chunk.draft
            elif start < len(chunk.seq.tokens):  # after sit_out the device may have another token
                rows.tokens[number] = chunk.seq.tokens[start]
            token_seats.append(seat)
            positions.append(start)
            write_rows.append(tables[seat * width + start // page] * page + start % page)
        rows.kv_lens = [start + 1 for start in positions]
        rows.cu_q = list(range(len(chunks) + 1))
        rows.logit_rows = rows.cu_q[:-1]
        rows.seats = token_seats[:]
        rows.owners = token_seats[:]
        return rows

    def _add_prompt(self, rows: _StepRows, chunk: Chunk) -> None:
        """Add the rows of a prompt chunk."""
        seq = chunk.seq
        first = len(rows.tokens)
        rows.tokens += seq.tokens[chunk.start : chunk.end]
        rows.owners.append(seq.seat)
        rows.token_seats += [seq.seat] * chunk.count
        rows.positions += range(chunk.start, chunk.end)
        self._add_write_rows(rows.write_rows, chunk)
        rows.kv_lens.append(chunk.end)
        rows.cu_q.append(first + chunk.count)
        if chunk.scored:
            _add_scored(rows, chunk, first)
        if chunk.sample:
            rows.logit_rows.append(first + chunk.count - 1)
            rows.seats.append(seq.seat)

    def _add_write_rows(self, write_rows: list[int], chunk: Chunk) -> None:
        """Add the KV rows to which a prompt chunk's rows are written, page by page."""
        if not chunk.seq.pages:
            return  # an encoder's rows are not written
        self._add_rows_of_pages(write_rows, chunk, chunk.seq.pages)

    def _add_rows_of_pages(self, write_rows: list[int], chunk: Chunk, pages: list[int]) -> None:
        page, start, end = self.page_size, chunk.start, chunk.end
        for begin in range(start - start % page, end, page):
            offset = pages[begin // page] * page - begin
            low = max(begin, start)
            high = min(begin + page, end)
            write_rows += range(offset + low, offset + high)

    def _add_window_rows(
        self, rows: _StepRows, plan: Plan, number: int, tables: _SeatTables
    ) -> None:
        """Add the padded `window_rows` of one cache group, and store the new pages of chunks."""
        page, width, flat = self.page_size, self.pages, tables.flat
        own = [
            flat[chunk.seq.seat * width + chunk.start // page] * page + chunk.start % page
            for chunk in plan.chunks[: plan.n_decode]
        ]
        for chunk in plan.prompt_chunks:
            pages = chunk.seq.windows[number].pages
            tables.feed(chunk.seq.seat, pages)
            self._add_rows_of_pages(own, chunk, pages)
        rows.window_rows += own
        rows.window_rows += [tables.pool_rows] * (plan.bucket.tokens - len(own))

    def _add_slots(self, rows: _StepRows, plan: Plan) -> None:
        """Add the slots in which each sequence's state is read and written. The device's arrays
        have no slot 0, which belongs to no sequence. Drafts count as further rows of a sequence.
        """
        room = _most_saves(plan.bucket, self._drafts)
        drafts: list[int] = []
        owners: list[Chunk] = []
        for chunk in plan.chunks:
            if chunk.draft:
                drafts[-1] += 1
            else:
                owners.append(chunk)
                drafts.append(0)
        for chunk, count in zip(owners, drafts, strict=True):
            self._add_slots_of(rows, chunk, count, room)
        if self._drafts:
            counts = [chunk.count + more for chunk, more in zip(owners, drafts, strict=True)]
            rows.state_ends = [0, *accumulate(counts)]
            missing = plan.bucket.seats - len(owners)
            rows.state_ends += [rows.state_ends[-1]] * missing

    def _add_slots_of(self, rows: _StepRows, chunk: Chunk, drafts: int, room: int) -> None:
        """Add the slots of one sequence. drafts: number of draft rows after the chunk. room: the
        most states stored within its rows.
        """
        held, page = chunk.seq.state, self.page_size
        assert held is not None
        saves = held.saves if chunk.count > 1 else []
        cuts = [end * page - chunk.start for end, _ in saves]
        slots = [slot - 1 for _, slot in saves] + [held.writes - 1]
        if self._drafts:
            first = self._draft_slots + chunk.seq.seat * self._drafts
            cuts += range(1, drafts + 1)
            slots += range(first, first + drafts)
            rows.state_drafts.append(first)
        none = [0] * (room - len(cuts))
        rows.state_reads.append(held.reads - 1)
        rows.state_cuts += none + cuts
        rows.state_writes += none + slots


def _add_scored(rows: _StepRows, chunk: Chunk, first: int) -> None:
    """Add the rows of a prompt chunk that return log-probabilities. first: index of the chunk's
    first row.
    """
    row = first + chunk.score_start - chunk.start
    target = chunk.score_start + 1
    rows.score_rows += range(row, row + chunk.scored)
    rows.score_tokens += chunk.seq.tokens[target : target + chunk.scored]

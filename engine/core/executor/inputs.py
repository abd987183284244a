"""From a plan to the packed int32 array that a step uploads, and back to named arrays in jit.

`_FIELDS` declares an upload and `SAMPLING` its sampling parameters; packing, slicing and the
sampler read both by name.

Axes: T token rows and S sequences (also logit rows) of the bucket, P pages per sequence, W words of
a seat's sampling parameters, M seats, A seats with adapters (M or 0), G cache groups with page
tables of their own, beside the first, R sequences with a recurrent state (S or 0), C states within
a sequence's rows that are kept, D sequences with a state whose drafts leave theirs (S or 0).
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
    """One number of a seat that the sampler reads."""

    #: Of `SamplingParams`, or one of the seat's own.
    name: str
    dtype: Literal["float32", "int32"]
    #: What it is for a request.
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
        #: Of a row that asks for nothing but the likeliest token.
        self.bare_argmax = self.pack(params(temperature=0.0), 0)

    def pack(self, params: SamplingParams, seed: int) -> bytes:
        """A seat's parameters; seed: int64."""
        return self._struct.pack(*[field.value(params) for field in self.fields], seed)

    def columns(self, words: Any) -> dict[str, Any]:
        """int32 [S, W], numpy or traced -> an array [S] each; the seed's is int32 [S, 2], low word
        first.
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
#: Words of a row of `MaskedRows.heads` before its sampling parameters.
_HEAD = 4


class MaskedRows(NamedTuple):
    """Rows of a step whose tokens are chosen behind it, under masks: int32 arrays of R rows."""

    #: [R, 4 + W]: the row's position, its seat (M: none), which draft it reads (0: none) and that
    #: token, then its sampling parameters.
    heads: np.ndarray
    #: [R, ceil(V / 32)]: one bit for each token that it may choose, low bits first.
    masks: np.ndarray

    @classmethod
    def empty(cls, rows: int, vocab: int, seats: int) -> MaskedRows:
        """Rows of no seat: they choose from all tokens, and the choice is not read."""
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
        """int32 words of a row of `MaskedRows.heads`."""
        return _HEAD + SAMPLING.words


class _Field(NamedTuple):
    """One field of a step's upload, int32."""

    name: str
    shape: tuple[str, ...]  #: its axes, by their names in UploadLayout
    #: rows: gathered anew for each step. pages: copied from the seats' page tables. sampling: the
    #: sampler's, copied from the seats. scores: of rows that bring prompt log-probabilities.
    part: Literal["rows", "pages", "sampling", "scores"]
    #: What stands behind the step's own values.
    padding: Callable[[BatchBuilder], int] = lambda builder: 0


#: All fields of a step's upload. An executable takes those whose part it has (`UploadLayout`).
_FIELDS = (
    # Token ids; -1: the last token of token_seats on the device; -1 - n: its n-th draft.
    _Field("tokens", ("T",), "rows"),
    # The seat that each row belongs to.
    _Field("token_seats", ("T",), "rows"),
    _Field("positions", ("T",), "rows"),
    # Flat KV rows; behind the pool: not written.
    _Field("write_rows", ("T",), "rows", padding=attrgetter("pool_rows")),
    _Field("kv_lens", ("S",), "rows"),
    _Field("cu_q", ("S + 1",), "rows"),
    # Sequences that decode, sequences, token rows, sequences whose output is computed again.
    _Field("counts", ("4",), "rows"),
    # The token row that each logit row reads.
    _Field("logit_rows", ("S",), "rows"),
    # The seat whose last token a logit row sets; M: none; above M: M + 1 more than the seat of a
    # row whose token is chosen behind the step.
    _Field("seats", ("S",), "rows", padding=attrgetter("seats")),
    # Each seat's adapter, from 1; 0: none. Nothing where the engine has no adapters.
    _Field("seat_adapters", ("A",), "rows"),
    # See `jitney.kernels.delta_net.StateSlots`; nothing where no layer is recurrent.
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
    # How many rows bring prompt log-probabilities.
    _Field("score_count", ("1",), "scores"),
    # Which token rows those are, and the tokens that they are scored against; what stands behind
    # the first score_count is of former steps.
    _Field("score_rows", ("T",), "scores"),
    _Field("score_tokens", ("T",), "scores"),
)
#: Parts in the order of packing: what every executable takes, then what only those with a sampler
#: do.
_PARTS = ("rows", "pages", "sampling", "scores")
#: One step's upload as named arrays; None for what its executable does not take.
_StepInputs = namedtuple(  # pyright: ignore[reportUntypedNamedTuple]
    "StepInputs", [field.name for field in _FIELDS], defaults=[None] * len(_FIELDS)
)


def _most_saves(bucket: Bucket, drafts: int) -> int:
    """States within a sequence's rows that a step keeps at most: behind pages of a prompt, or
    behind drafts.
    """
    return max(drafts, 0 if bucket.decode_only else MOST_SAVES)


class UploadLayout:
    """Where each field lies in the packed array of one executable. The upload of the executable
    without a sampler (greedy_only) is a prefix of the other's.

    pages: P. adapted: seats whose adapters are uploaded; 0: the engine has no adapters. groups: G.
    recurrent: sequences have a state beside their pages. drafts: of a sequence in a step at most.
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
        """True where prompt rows can bring log-probabilities."""
        return not self.greedy_only and not self.bucket.decode_only

    @property
    def _parts(self) -> list[str]:
        """The parts of an upload that this executable takes, in order of packing."""
        wanted = {"sampling": not self.greedy_only, "scores": self.scores}
        return [part for part in _PARTS if wanted.get(part, True)]

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
        """Field name -> its half-open range in the packed array."""
        slices = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + int(np.prod(shape))
            slices[name] = slice(start, end)
            start = end
        return slices

    def length(self, name: str) -> int:
        """Words of a field."""
        return self.slices[name].stop - self.slices[name].start

    @property
    def size(self) -> int:
        """int32 words of the packed array."""
        return list(self.slices.values())[-1].stop

    def split(self, packed: Any) -> Any:
        """`_StepInputs` of views of the packed array, numpy or traced."""
        slices = self.slices.items()
        return _StepInputs(**{name: packed[at].reshape(self.shapes[name]) for name, at in slices})


class _StepRows(msgspec.Struct):
    """The fields that a step writes anew, without padding; `owners`: each sequence's seat."""

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
        """width: pages of a table. pool_rows: of the group's pool."""
        self.width = width
        self.pool_rows = pool_rows
        self._no_pages = array("i", [0]) * width
        #: One behind the other.
        self.flat = self._no_pages * seats
        #: Pages of each.
        self._counts = [0] * seats
        #: Another object whenever the seat's table changes.
        self._stamps = [object() for _ in range(seats)]

    def board(self, seat: int, pages: list[int]) -> None:
        """A seat's sequence has these pages."""
        first = seat * self.width
        self.flat[first : first + len(pages)] = array("i", pages)
        self._counts[seat] = len(pages)
        self._stamps[seat] = object()

    def add(self, seat: int, page: int) -> None:
        """A seat's sequence got one more page."""
        count = self._counts[seat]
        self.flat[seat * self.width + count] = page
        self._counts[seat] = count + 1
        self._stamps[seat] = object()

    def feed(self, seat: int, pages: list[int]) -> None:
        """Note the last of a sequence's pages that were not noted yet."""
        count = self._counts[seat]
        if len(pages) > count:
            first = seat * self.width
            self.flat[first + count : first + len(pages)] = array("i", pages[count:])
            self._counts[seat] = len(pages)
            self._stamps[seat] = object()

    def drop(self, seat: int, count: int) -> None:
        """The first pages of a sequence were given back: no kernel may read them again."""
        first = seat * self.width
        self.flat[first : first + count] = self._no_pages[:count]
        self._stamps[seat] = object()

    def copy(self, owners: list[int], upload: _UploadTable) -> None:
        """Bring an upload's page table up to date with the tables of its rows' seats."""
        stamps, copied, width = self._stamps, upload.stamps, self.width
        for number, seat in enumerate(owners):
            if copied[number] is not stamps[seat]:
                self._copy_table(upload, number, seat)
        for number in range(len(owners), upload.used):
            upload.words[number * width : (number + 1) * width] = self._no_pages
            copied[number] = None
        upload.used = len(owners)

    def _copy_table(self, upload: _UploadTable, number: int, seat: int) -> None:
        """Copy a seat's pages into a row of the upload; numbers behind them belong to no key."""
        target = number * self.width
        source = seat * self.width
        pages = self._counts[seat]
        upload.words[target : target + pages] = self.flat[source : source + pages]
        upload.stamps[number] = self._stamps[seat]


@dataclass(slots=True)
class _UploadTable:
    """The page table of one cache group in a packed array."""

    #: Flat.
    words: memoryview
    #: Of each row, the stamp of the seat's table that it holds; None: zeros.
    stamps: list[object]
    #: Rows that may hold a table.
    used: int = 0


class _Upload:
    """A packed array of one executable, and what the rows of its page tables are copies of."""

    def __init__(self, layout: UploadLayout, builder: BatchBuilder):
        self.packed = np.zeros(layout.size, np.int32)
        self.inputs = layout.split(self.packed)
        self._words = memoryview(self.packed)
        #: (name, length, padding) of each field that is written anew.
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
        #: Of each cache group; the tables lie one behind the other.
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
        """Write what is new in a step."""
        words = []
        end = 0
        for name, length, padding in self._fresh:
            words += getattr(rows, name)
            end += length
            words += [padding] * (end - len(words))
        self._pack_into(self._words, 0, *words)

    def pack_sampling(self, seats: list[bytes]) -> None:
        known = b"".join(seats)
        self._sampling[: len(known)] = known
        self._sampling[len(known) :] = bytes(len(self._sampling) - len(known))

    def pack_scores(self, rows: _StepRows) -> None:
        count = len(rows.score_rows)
        self.inputs.score_count[0] = count
        if count:
            self.inputs.score_rows[:count] = rows.score_rows
            self.inputs.score_tokens[:count] = rows.score_tokens


class BatchBuilder:
    """Packs plans; page tables and sampling parameters stay, so a step's cost does not grow with
    the context.

    Each executable has two arrays in turn, since the device may still read the last one. New values
    are gathered in lists and converted once, and pages come from the seat's table, an array: beside
    a device that is the same CPU caches are cold, and each numpy call costs several times as much.
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
        """window_rows: as pool_rows, of the pools of the other cache groups. recurrent: sequences
        have a state beside their pages (`Sequence.state`). drafts: of a sequence in a step at most;
        draft_slots: the first of the slots that keep the states behind them, so many for each seat.
        """
        self.seats = seats
        self.recurrent = recurrent
        self._drafts = drafts
        self._draft_slots = draft_slots
        self.pages = pages_per_seat
        self.page_size = page_size
        self.pool_rows = pool_rows
        #: The tables of each cache group, and those of all but the first.
        self.groups = [
            _SeatTables(seats, pages_per_seat, rows) for rows in (pool_rows, *window_rows)
        ]
        self._first, *self._windows = self.groups
        #: Each seat's sampling parameters, and what the steps' programs get of them.
        self._own_sampling = [b""] * seats
        self._sampling = [b""] * seats
        #: Each seat's adapter; empty where there are none.
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
        """The upload of a step without a row."""
        upload = _Upload(self.layout(bucket, greedy_only), self)
        rows = _StepRows()
        for tables in self._windows:
            rows.window_rows += [tables.pool_rows] * bucket.tokens
        upload.pack(rows)
        return upload.packed

    def build(self, plan: Plan, greedy_only: bool) -> np.ndarray:
        """Plan -> packed int32 array, valid until the executable's next but one is built.

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
        """As `build`, without a sampler, of some decode rows of the plan that was built last, for
        a model whose layers all have the pages of the first cache group.
        """
        upload = self._next_upload(bucket, "drafts")
        gathered = self._gather(rows, len(rows), bucket)
        upload.pack(gathered)
        self._first.copy(gathered.owners, upload.tables[0])
        return upload.packed

    def put_masked(
        self, upload: MaskedRows, place: int, masked: MaskedRow, mask: np.ndarray
    ) -> None:
        """Put a row and its mask, int32 [ceil(V / 32)], in a place of an upload."""
        head, seq, draft = upload.heads[place], masked.chunk.seq, masked.chunk.draft
        token = seq.drafts[draft - 1] if draft else 0
        # Its position is known by now: that of the newest token, or of a draft behind it.
        head[:_HEAD] = len(seq.tokens) - 1 + draft, masked.seat, draft, token
        head[_HEAD:] = np.frombuffer(self._own_sampling[masked.seat], np.int32)
        upload.masks[place] = mask

    def _next_upload(self, bucket: Bucket, kind: Literal["greedy", "full", "drafts"]) -> _Upload:
        """The one of an executable's two arrays that was used before the other."""
        key = bucket, kind
        both = self._uploads.get(key)
        if both is None:
            layout = self.layout(bucket, kind != "full")
            both = self._uploads[key] = [_Upload(layout, self), _Upload(layout, self)]
        both.reverse()
        return both[0]

    def _board(self, seq: Sequence) -> None:
        """Note the pages and sampling parameters of a sequence that took a seat."""
        self._first.board(seq.seat, seq.pages)
        for tables, held in zip(self._windows, seq.windows, strict=True):
            tables.board(seq.seat, held.pages)
        own = SAMPLING.pack(seq.request.sampling, seq.seed)
        self._own_sampling[seq.seat] = own
        self._sampling[seq.seat] = own if seq.matcher is None else SAMPLING.bare_argmax
        if self._adapters:
            self._adapters[seq.seat] = seq.request.adapter

    def _feed(self, seq: Sequence) -> None:
        """A seated sequence got one more page."""
        self._first.add(seq.seat, seq.pages[-1])
        for number, tables in enumerate(self._windows):
            tables.feed(seq.seat, seq.windows[number].pages)

    def _drop(self, seq: Sequence) -> None:
        """Note that a seated sequence gave back its first pages."""
        if seq.dropped:
            self._first.drop(seq.seat, seq.dropped)
        for tables, held in zip(self._windows, seq.windows, strict=True):
            tables.drop(seq.seat, held.dropped)

    def _gather(self, chunks: list[Chunk], n_decode: int, bucket: Bucket) -> _StepRows:
        """Tokens, positions, KV rows and logit rows of every chunk, the first n_decode of which
        decode; sampled tokens may be unknown yet.
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
            elif start < len(chunk.seq.tokens):  # the device may have chosen another, see sit_out
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
        """The rows of a prompt chunk."""
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
        """Where in the pool a prompt chunk's rows are written, page by page."""
        if not chunk.seq.pages:
            return  # an encoder's rows are not written, as those that pad a step
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
        """`_StepRows.window_rows` of one cache group, padded, and the pages that chunks got."""
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
        """Where the state of each sequence is read and written; the arrays lack the pool's slot 0,
        which belongs to no sequence. A sequence's drafts are further rows of it.
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
        """The slots of one sequence; drafts: rows behind the chunk. room: states that are kept
        within its rows at most.
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
    """Rows of a prompt chunk that bring log-probabilities; first: its first row."""
    row = first + chunk.score_start - chunk.start
    target = chunk.score_start + 1
    rows.score_rows += range(row, row + chunk.scored)
    rows.score_tokens += chunk.seq.tokens[target : target + chunk.scored]

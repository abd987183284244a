"""Drafts by a head of the model (`jitney.engine.core.models.prediction`), in programs that run
between steps.

The head uses the target's page tables, with the same number of pages in its own pool: row j reads
hidden state j and token j + 1, and is stored at position j. It reads a step's rows when the next
step is launched, since only then all tokens after them are chosen; so each sequence has one draft.
If the next step checks drafts, the head continues from its own hidden states, to one draft more
than is checked, from which the scheduler learns whether more would be right.

The last row of a page reads the first token of the next page. After a prefix that was found in
pages, the real token may differ from the one that was read: drafts there are a little worse.

Axes: M seats, T token rows and S sequences of the bucket, K drafts, E embed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jitney.engine.core.executor.draft_model import (
    DraftModel,
    DraftPrograms,
    DraftUpload,
    own_inputs,
)
from jitney.engine.core.executor.inputs import BatchBuilder, UploadLayout
from jitney.engine.core.executor.program import DeviceState, Program, StateSizes, meta_of
from jitney.engine.core.executor.seat_tokens import DraftedTokens
from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.prediction import PredictionHead
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import Chunk, Plan

#: Value instead of the token after a sequence's rows: only the device has it.
_CHOSEN = -1


class HeadModel(DraftModel):
    """A prediction head with its weights, and the target's kernels."""

    @property
    def reads_normed(self) -> bool:
        return isinstance(self.model, PredictionHead) and self.model.reads_normed

    def programs(self, sizes: StateSizes, target: Program, leaves: list[Array]) -> DraftPrograms:
        return _HeadPrograms(self, sizes, target, leaves)


@dataclass
class _Step:
    """A launched step that the head has not read yet."""

    bucket: Bucket
    packed: np.ndarray  #: its upload, without the parts that only some executables have
    before: DraftedTokens  #: seat tokens before the step, which its rows read
    behind: np.ndarray  #: see `DraftUpload`
    for_head: Array | None = None  #: see `StepOutput.for_head`


class _HeadPrograms(DraftPrograms):
    """Programs of a prediction head. target, target_leaves: the model that the head belongs to."""

    def __init__(
        self, head: HeadModel, sizes: StateSizes, target: Program, target_leaves: list[Array]
    ):
        super().__init__(head, sizes, target.mesh)
        self._target, self._target_leaves = target, target_leaves
        drafting = sizes.drafting
        assert drafting is not None  # always so in an engine that speculates
        #: The most drafts after the first.
        self._more = drafting.count - 1
        config, dtype = head.model.config, head.model.dtype
        states = self._program.whole((sizes.seats, config.hidden_size), dtype)
        #: Size of the part of a target's row that the head reads.
        self._read_size = config.hidden_size if config.eagle3 is None else config.eagle3.read_size
        self.row_bytes = self._read_size * dtype.itemsize
        #: Its pool, then the hidden states [M, E] from which each seat's first draft was made.
        self.pools = [*self.pools, states]
        self._pool_rows = sizes.n_pages * sizes.page_size
        self._copy = jax.jit(partial(jax.tree.map, jnp.copy))
        #: The last step, and `DraftUpload.behind` of the next step.
        self._unread: _Step | None = None
        self._behind: np.ndarray | None = None

    def drafting(self, buckets: Buckets) -> list[Bucket]:
        return super().drafting(buckets) if self._more else []

    def _lower_read(self, bucket: Bucket, state: DeviceState) -> jax.stages.Lowered:
        whole = self._program.whole
        states = whole((bucket.tokens, self._read_size), state.draft_kv[-1].dtype)
        behind = whole((bucket.seats,), jnp.int32)
        more = self._target_leaves, state.seat_tokens, states, behind
        return self._lower(partial(_read, self._target), bucket, state, *more)

    def _lower_draft(self, bucket: Bucket, state: DeviceState) -> jax.stages.Lowered:
        whole = self._program.whole
        more = self._target_leaves, whole((bucket.seats,), jnp.int32), whole((), jnp.int32)
        step = partial(_draft, self._target, self._pool_rows)
        return self._lower(step, bucket, state, *more)

    def pack(self, plan: Plan, buckets: Buckets, builder: BatchBuilder) -> DraftUpload:
        """See `DraftPrograms.pack`; every plan has an upload."""
        behind = np.full(plan.bucket.seats, _CHOSEN, np.int32)
        tokens = [_token_behind(chunk) for chunk in plan.prompt_chunks]
        behind[plan.n_decode : len(plan.chunks)] = tokens
        upload = super().pack(plan, buckets, builder) if self._more else None
        if upload is None:
            return DraftUpload(plan.bucket, behind[:0], 0, behind=behind)
        widths: list[int] = []
        for chunk in plan.chunks[: plan.n_decode]:
            if chunk.draft == 1:
                widths.append(0)
            if chunk.draft:
                widths[-1] += 1
        padded = np.zeros(upload.bucket.seats, np.int32)
        padded[: len(widths)] = widths
        return upload._replace(widths=padded, behind=behind)

    def draft(self, upload: DraftUpload, state: DeviceState) -> None:
        self._read_last(state)
        if upload.behind.size:
            self._behind = upload.behind
        count = min(upload.count, self._more)
        if count:
            state.draft_kv, state.seat_tokens = self._drafts[upload.bucket](
                self.leaves,
                state.draft_kv,
                state.seat_tokens,
                upload.packed,
                self._target_leaves,
                upload.widths,
                np.int32(count),
            )

    def read(self, bucket: Bucket, packed: Any, state: DeviceState) -> None:
        """Store the next step; its rows are read when the step after it is launched."""
        self._read_last(state)
        behind, self._behind = self._behind, None
        if behind is None:
            behind = np.full(bucket.seats, _CHOSEN, np.int32)
        # Copied, because the upload is overwritten while a device may still read this.
        own = packed[: self._layouts[bucket].size].copy()
        self._unread = _Step(bucket, own, self._copy(state.seat_tokens), behind)

    def take(self, for_head: Array | None) -> None:
        assert self._unread is not None  # `read` comes before the step
        self._unread.for_head = for_head

    def forget(self) -> None:
        self._unread = self._behind = None

    def _read_last(self, state: DeviceState) -> None:
        """Read the rows of the last step; replaces the donated state."""
        step, self._unread = self._unread, None
        if step is None:
            return
        state.draft_kv, state.seat_tokens = self._reads[step.bucket](
            self.leaves,
            state.draft_kv,
            state.seat_tokens,
            step.packed,
            self._target_leaves,
            step.before,
            step.for_head,
            step.behind,
        )


def _token_behind(chunk: Chunk) -> int:
    """See `DraftUpload.behind`. After a prompt without sampling, any token will do."""
    if chunk.sample:
        return _CHOSEN
    tokens = chunk.seq.tokens
    return tokens[chunk.end] if chunk.end < len(tokens) else 0


def _models(
    target: Program, head: Program, target_leaves: list[Array], leaves: list[Array]
) -> tuple[Llama, PredictionHead]:
    model, own = target.model(target_leaves), head.model(leaves)
    assert isinstance(model, Llama) and isinstance(own, PredictionHead)
    return model, own


def _read(
    target: Program,
    head: Program,
    layout: UploadLayout,
    leaves: list[Array],
    kept: list[Array],
    seat_tokens: DraftedTokens,
    packed: Array,
    target_leaves: list[Array],
    before: DraftedTokens,
    for_head: Array,
    behind: Array,
) -> tuple[list[Array], DraftedTokens]:
    """Read the rows of a step, whose sampled tokens are in seat_tokens, and write one draft for
    each sequence that sampled. before, behind: see `_Step`.
    """
    model, own = _models(target, head, target_leaves, leaves)
    upload = layout.split(packed)
    inputs = own_inputs(before.fill(upload)[0])
    rows = jnp.maximum(inputs.cu_q[1:] - 1, 0)
    seats = inputs.token_seats[rows]
    # Number of the draft that each sequence's last row read. A draft row is a sequence here.
    numbers = jnp.maximum(-1 - upload.tokens[rows], 0)
    newest = numbers == seat_tokens.accepted[seats]
    followed = jnp.roll(inputs.tokens, -1)
    token = jnp.where(newest, seat_tokens.last[seats], followed[rows])
    is_there = inputs.cu_q[1:] > inputs.cu_q[:-1]
    places = jnp.where(is_there, rows, len(followed))
    following = followed.at[places].set(jnp.where(behind >= 0, behind, token), mode="drop")
    embedded = own.embedded_for(jnp.maximum(following, 0), model)
    states = own.joined(for_head, head.kernels)
    *pools, carried = kept
    read, pools = own.predict(embedded, states, pools, meta_of(inputs, 1), head.kernels)
    states, likeliest = _drafted(model, own, head, read[rows])
    owners = jnp.where(is_there & newest & (behind < 0), seats, len(seat_tokens.last))
    drafts = jnp.full((len(rows), seat_tokens.drafts.shape[1]), -1, jnp.int32)
    drafts = drafts.at[:, 0].set(likeliest)
    carried = carried.at[owners].set(states, mode="drop")
    return [*pools, carried], seat_tokens.with_drafts(owners, drafts)


def _drafted(
    model: Llama, own: PredictionHead, head: Program, hidden: Hidden
) -> tuple[Array, Array]:
    """Draft from R rows of the head. -> (states from which it continues [R, E], the likeliest token
    after each row int32 [R]).
    """
    states, logits = own.drafted(hidden, model, head.kernels)
    return states, own.token_ids(head.vocabulary.greedy(logits))


def _draft(
    target: Program,
    pool_rows: int,
    head: Program,
    layout: UploadLayout,
    leaves: list[Array],
    kept: list[Array],
    seat_tokens: DraftedTokens,
    packed: Array,
    target_leaves: list[Array],
    widths: Array,
    count: Array,
) -> tuple[list[Array], DraftedTokens]:
    """Write `count` (int32 []) more drafts for each sequence of the next step. widths: see
    `DraftUpload`; beyond its width a sequence's rows are not stored, and its surplus drafts are not
    used. pool_rows: KV rows of the head's pool.
    """
    model, own = _models(target, head, target_leaves, leaves)
    first = own_inputs(seat_tokens.fill(layout.split(packed))[0])
    there = first.kv_lens > 0
    longest = first.page_table.shape[1] * seat_tokens.page_size
    *pools, carried = kept

    def write(number: Array, carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        pools, states, drafts = carry
        inputs = first._replace(
            positions=first.positions + number,
            kv_lens=jnp.where(there, jnp.minimum(first.kv_lens + number, longest), 0),
        )
        inputs = seat_tokens.write_anew(inputs, there & (number > 0))
        kept_rows = jnp.where(number <= widths, inputs.write_rows, pool_rows)
        meta = meta_of(inputs._replace(write_rows=kept_rows), 1)
        embedded = own.embedded_for(jnp.maximum(drafts[:, number], 0), model)
        read, pools = own.predict(embedded, states, pools, meta, head.kernels)
        states, likeliest = _drafted(model, own, head, read[first.logit_rows])
        return pools, states, drafts.at[:, number + 1].set(likeliest)

    states = carried.at[first.seats].get(mode="clip")
    drafts = seat_tokens.drafts.at[first.seats].get(mode="clip")
    pools, _, drafts = jax.lax.fori_loop(0, count, write, (pools, states, drafts))
    return [*pools, carried], seat_tokens.with_drafts(first.seats, drafts)

"""Drafts by a second, small model of the same vocabulary (speculative decoding, Leviathan et al.
2023), in programs that run before a step.

The draft model has the target's page tables and as many pages, in pools of its own. It reads every
row that the target computes, so its pages of a prefix are there wherever the target's are. Before a
step that checks drafts it writes as many, one after the other, each the likeliest token.

Axes: M seats, T token rows and S sequences of the bucket, K drafts, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jitney.engine.core.executor.inputs import BatchBuilder, UploadLayout
from jitney.engine.core.executor.program import DeviceState, Program, StateSizes
from jitney.engine.core.executor.seat_tokens import DraftedTokens
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.sharding import WHOLE
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import Plan
from jitney.kernels.interface import Kernels

#: No numbers.
_NOTHING = np.zeros(0, np.int32)


class DraftModel(NamedTuple):
    """A draft model with its weights, on a mesh in shares, and its kernels."""

    model: Model
    kernels: Kernels

    def sizes(self, target: StateSizes) -> StateSizes:
        """The sizes of its pools, given the target's: all its layers share the pages of the first
        cache group.
        """
        return replace(target, kv_dtype=self.model.dtype, window_pages=(), checkpoints=0)

    def page_bytes(self, target: StateSizes) -> int:
        """Bytes of a page in all its layers, on one device."""
        return sum(self.sizes(target).page_bytes(self.model.config, self.kernels))

    @property
    def reads_normed(self) -> bool:
        """It reads the target's hidden states behind the final norm, not only its tokens."""
        return False

    def programs(self, sizes: StateSizes, target: Program, leaves: list[Array]) -> DraftPrograms:
        """The programs that run it; sizes, target, leaves: the target's."""
        return DraftPrograms(self, sizes, target.mesh)


class DraftUpload(NamedTuple):
    """The rows that drafts follow, packed as a decode step of their own."""

    bucket: Bucket
    packed: np.ndarray
    count: int  #: the most drafts of a sequence
    #: Of a prediction head alone: int32 [S], drafts of each row's sequence; and of the step's
    #: bucket int32 [S], the token behind each of its sequences' rows, -1 where the device has it.
    widths: np.ndarray = _NOTHING
    behind: np.ndarray = _NOTHING


class DraftPrograms:
    """The compiled programs of a draft model, and its weights. mesh: the target's."""

    #: Bytes that the target's steps leave for it of each row.
    row_bytes = 0

    def __init__(self, draft: DraftModel, target: StateSizes, mesh: Mesh | None):
        graph, weights = nnx.split(draft.model)
        #: Its weights.
        self.leaves, treedef = jax.tree.flatten(weights)
        self._program = Program(graph, treedef, draft.kernels, mesh)
        #: The shapes of its pools, for `DeviceState.draft_kv`.
        self.pools = draft.sizes(target).shapes(draft.model.config, draft.kernels, mesh).kv
        #: By bucket of the target's steps, what reads their rows; and by decode bucket what drafts.
        self._reads: dict[Bucket, jax.stages.Compiled] = {}
        self._drafts: dict[Bucket, jax.stages.Compiled] = {}
        self._layouts: dict[Bucket, UploadLayout] = {}
        self._copied = jax.jit(jnp.copy)

    def compile(
        self,
        pool: Executor,
        buckets: Buckets,
        layout_of: Callable[[Bucket, bool], UploadLayout],
        state: DeviceState,
        report: Callable[[int, str], None],
    ) -> None:
        """Compile all programs. layout_of: of the target's steps. state: its shapes. report: called
        with the number of programs done and the last one's name.
        """
        self._layouts = {bucket: layout_of(bucket, True) for bucket in buckets.all()}
        kinds = [("read", self._reads, bucket) for bucket in buckets.all()]
        kinds += [("draft", self._drafts, bucket) for bucket in self.drafting(buckets)]
        futures: list[Future[jax.stages.Compiled]] = []
        for kind, _, bucket in kinds:
            lower = self._lower_read if kind == "read" else self._lower_draft
            futures.append(pool.submit(self._program.compile, lower(bucket, state)))
        for number, (kind, compiled, bucket) in enumerate(kinds):
            compiled[bucket] = futures[number].result()
            report(number + 1, f"{bucket} {kind}")

    def count(self, buckets: Buckets) -> int:
        """How many programs steps of these buckets need."""
        return len(buckets.all()) + len(self.drafting(buckets))

    def drafting(self, buckets: Buckets) -> list[Bucket]:
        """Those that drafts are written in: a row for each sequence, of as many as there are
        seats.
        """
        return [bucket for bucket in buckets.decode if bucket.seats <= buckets.seats]

    def _lower_read(self, bucket: Bucket, state: DeviceState) -> jax.stages.Lowered:
        return self._lower(_read, bucket, state)

    def _lower_draft(self, bucket: Bucket, state: DeviceState) -> jax.stages.Lowered:
        return self._lower(_draft, bucket, state, self._program.whole((), jnp.int32))

    def _lower(
        self, function: Callable[..., Any], bucket: Bucket, state: DeviceState, *more: Any
    ) -> jax.stages.Lowered:
        program, layout = self._program, self._layouts[bucket]
        upload = program.whole((layout.size,), jnp.int32)
        args = self.leaves, state.draft_kv, state.seat_tokens, upload, *more
        step = partial(function, program, layout)
        if program.split:
            kept = jax.tree.map(lambda x: x.sharding.spec, state.draft_kv)
            step = program.on_every_device(step, args, (kept, WHOLE))
        return jax.jit(step, donate_argnums=(1, 2)).lower(*args)

    @property
    def programs(self) -> Iterator[tuple[str, jax.stages.Compiled]]:
        """Each program with its name."""
        for bucket, program in self._reads.items():
            yield f"{bucket} read", program
        for bucket, program in self._drafts.items():
            yield f"{bucket} draft", program

    def pack(self, plan: Plan, buckets: Buckets, builder: BatchBuilder) -> DraftUpload | None:
        """The rows of a plan that drafts follow; None: no sequence checks any. Called behind
        `BatchBuilder.build` of the same plan.
        """
        decoding = plan.chunks[: plan.n_decode]
        count = max((row.draft for row in decoding), default=0)
        if not count:
            return None
        rows = [row for row, behind in pairwise(decoding) if behind.draft == 1]
        bucket = buckets.choose(
            tokens=len(rows), sequences=len(rows), decode_only=True, logit_rows=len(rows)
        )
        return DraftUpload(bucket, builder.build_decode_rows(rows, bucket), count)

    def draft(self, upload: DraftUpload, state: DeviceState) -> None:
        """Write drafts for the next step; replaces the donated state."""
        state.draft_kv, state.seat_tokens = self._drafts[upload.bucket](
            self.leaves,
            state.draft_kv,
            state.seat_tokens,
            upload.packed,
            np.int32(upload.count),
        )

    def drafted(self, state: DeviceState) -> Array:
        """The drafts of all seats, int32 [M, K]: a copy, since the next step replaces them."""
        tokens = state.seat_tokens
        assert isinstance(tokens, DraftedTokens)  # of an engine that speculates
        return self._copied(tokens.drafts)

    def read(self, bucket: Bucket, packed: Any, state: DeviceState) -> None:
        """Read the rows of the next step, and note what the model expects behind each; replaces
        the donated state. packed: the step's upload.
        """
        state.draft_kv, state.seat_tokens = self._reads[bucket](
            self.leaves,
            state.draft_kv,
            state.seat_tokens,
            packed[: self._layouts[bucket].size],
        )

    def warm_up(self, buckets: Buckets, builder: BatchBuilder, state: DeviceState) -> None:
        """Run every program that drafts, without a row."""
        for bucket in self.drafting(buckets):
            widths = np.zeros(bucket.seats, np.int32)
            self.draft(DraftUpload(bucket, builder.empty(bucket, True), 1, widths), state)
        self.drafted(state)

    def take(self, for_head: Array | None) -> None:
        """Take what the step that was read last left, see `StepOutput.for_head`."""

    def forget(self) -> None:
        """The device's state is made anew."""


def own_inputs(inputs: Any) -> Any:
    """A step's upload without what only the target has: adapters, recurrent state, pages of other
    cache groups.
    """
    names = (
        "seat_adapters",
        "state_reads",
        "state_cuts",
        "state_writes",
        "window_rows",
        "window_tables",
    )
    return inputs._replace(**{name: getattr(inputs, name)[:0] for name in names})


def _read(
    program: Program,
    layout: UploadLayout,
    leaves: list[Array],
    kv: list[Array],
    seat_tokens: DraftedTokens,
    packed: Array,
) -> tuple[list[Array], DraftedTokens]:
    """See `DraftPrograms.read`."""
    inputs, drafts = seat_tokens.fill(layout.split(packed))
    assert drafts is not None  # of an engine that speculates
    logits_of, _, kv = program.forward(leaves, kv, own_inputs(inputs))
    expected = program.vocabulary.greedy(logits_of(inputs.logit_rows))
    return kv, seat_tokens.expect(inputs.seats, drafts, expected)


def _draft(
    program: Program,
    layout: UploadLayout,
    leaves: list[Array],
    kv: list[Array],
    seat_tokens: DraftedTokens,
    packed: Array,
    count: Array,
) -> tuple[list[Array], DraftedTokens]:
    """See `DraftPrograms.draft`; count: int32 []. A sequence that checks fewer drafts than others,
    or has no page for them, writes into the trash page, and its other drafts mean nothing.
    """
    filled, _ = seat_tokens.fill(layout.split(packed))
    first = own_inputs(filled)
    rows = first.kv_lens > 0
    longest = first.page_table.shape[1] * seat_tokens.page_size

    def write(number: Array, carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        pools, tokens, drafts = carry
        inputs = first._replace(
            tokens=jnp.maximum(tokens, 0),
            positions=first.positions + number,
            kv_lens=jnp.where(rows, jnp.minimum(first.kv_lens + number, longest), 0),
        )
        inputs = seat_tokens.write_anew(inputs, rows & (number > 0))
        logits_of, _, pools = program.forward(leaves, pools, inputs)
        likeliest = program.vocabulary.greedy(logits_of(inputs.logit_rows))
        return pools, likeliest, drafts.at[:, number].set(likeliest)

    nothing = jnp.full((layout.bucket.seats, seat_tokens.drafts.shape[1]), -1, jnp.int32)
    kv, _, drafts = jax.lax.fori_loop(0, count, write, (kv, first.tokens, nothing))
    return kv, seat_tokens.with_drafts(first.seats, drafts)

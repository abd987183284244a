"""Drafts by a second, small model of the same vocabulary (speculative decoding, Leviathan et al.
2023), in programs that run before a step.

The draft model uses the target's page tables, with the same number of pages in its own pools. It
reads every row that the target computes, so it has the pages of every prefix that the target has.
Before a step that checks drafts it writes them one after the other, each the likeliest token.

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

#: An empty array.
_NOTHING = np.zeros(0, np.int32)


class DraftModel(NamedTuple):
    """A draft model with its weights (on a mesh, split into shares) and its kernels."""

    model: Model
    kernels: Kernels

    def sizes(self, target: StateSizes) -> StateSizes:
        """The sizes of its pools from the target's. All its layers share the page tables of the
        target's first cache group.
        """
        return replace(target, kv_dtype=self.model.dtype, window_pages=(), checkpoints=0)

    def page_bytes(self, target: StateSizes) -> int:
        """Bytes of a page in all its layers on one device."""
        return sum(self.sizes(target).page_bytes(self.model.config, self.kernels))

    @property
    def reads_normed(self) -> bool:
        """Whether it reads the target's hidden states after the final norm, not only tokens."""
        return False

    def programs(self, sizes: StateSizes, target: Program, leaves: list[Array]) -> DraftPrograms:
        """The programs that run it. sizes, target, leaves: those of the target model."""
        return DraftPrograms(self, sizes, target.mesh)


class DraftUpload(NamedTuple):
    """The rows after which drafts are made, packed as a decode step of their own."""

    bucket: Bucket
    packed: np.ndarray
    count: int  #: the most drafts of a sequence
    #: Only for a prediction head: int32 [S], number of drafts of each row's sequence; and int32 [S]
    #: of the step's bucket, the token after each sequence's rows, -1 if only the device has it.
    widths: np.ndarray = _NOTHING
    behind: np.ndarray = _NOTHING


class DraftPrograms:
    """The compiled programs of a draft model, and its weights. mesh: the target's."""

    #: Bytes per row that the target's steps return for it.
    row_bytes = 0

    def __init__(self, draft: DraftModel, target: StateSizes, mesh: Mesh | None):
        graph, weights = nnx.split(draft.model)
        #: Its weights.
        self.leaves, treedef = jax.tree.flatten(weights)
        self._program = Program(graph, treedef, draft.kernels, mesh)
        #: The shapes of its pools, for `DeviceState.draft_kv`.
        self.pools = draft.sizes(target).shapes(draft.model.config, draft.kernels, mesh).kv
        #: Programs that read a step's rows, by the step's bucket; and that draft, by decode bucket.
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
        """Compile all programs. layout_of: layouts of the target's steps. state: shapes of the
        state. report: called with the number of programs done and the last one's name.
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
        """Number of programs for steps of these buckets."""
        return len(buckets.all()) + len(self.drafting(buckets))

    def drafting(self, buckets: Buckets) -> list[Bucket]:
        """The buckets of the drafting programs: one row for each sequence, up to all seats."""
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
            cache_specs = jax.tree.map(lambda x: x.sharding.spec, state.draft_kv)
            step = program.on_every_device(step, args, (cache_specs, WHOLE))
        return jax.jit(step, donate_argnums=(1, 2)).lower(*args)

    @property
    def programs(self) -> Iterator[tuple[str, jax.stages.Compiled]]:
        """Each program with its name."""
        for bucket, program in self._reads.items():
            yield f"{bucket} read", program
        for bucket, program in self._drafts.items():
            yield f"{bucket} draft", program

    def pack(self, plan: Plan, buckets: Buckets, builder: BatchBuilder) -> DraftUpload | None:
        """Pack the rows of a plan after which drafts are made; None if no sequence checks drafts.
        Call it after `BatchBuilder.build` of the same plan.
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
        assert isinstance(tokens, DraftedTokens)  # always so in an engine that speculates
        return self._copied(tokens.drafts)

    def read(self, bucket: Bucket, packed: Any, state: DeviceState) -> None:
        """Read the rows of the next step, and store the token that the model expects after each;
        replaces the donated state. packed: the step's upload.
        """
        state.draft_kv, state.seat_tokens = self._reads[bucket](
            self.leaves,
            state.draft_kv,
            state.seat_tokens,
            packed[: self._layouts[bucket].size],
        )

    def warm_up(self, buckets: Buckets, builder: BatchBuilder, state: DeviceState) -> None:
        """Run every drafting program on an empty batch."""
        for bucket in self.drafting(buckets):
            widths = np.zeros(bucket.seats, np.int32)
            self.draft(DraftUpload(bucket, builder.empty(bucket, True), 1, widths), state)
        self.drafted(state)

    def take(self, for_head: Array | None) -> None:
        """Store `StepOutput.for_head` of the step that was read last."""

    def forget(self) -> None:
        """Drop data of launched steps, because the device state is allocated anew."""


def own_inputs(inputs: Any) -> Any:
    """A step's upload without the fields that only the target uses: adapters, recurrent state,
    pages of other cache groups.
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
    assert drafts is not None  # always so in an engine that speculates
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
    """See `DraftPrograms.draft`. count: int32 []. A sequence that checks fewer drafts than others,
    or that has no page for them, writes to the trash page; its surplus drafts are not used.
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

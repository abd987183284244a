"""The step as a pure function, and how it is lowered: for arrays, or from shapes alone, for one
device or several.

embed -> layers (write KV page, attend) -> rows that need logits -> sample -> last_token of each
seat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.executor.inputs import BatchBuilder, UploadLayout
from jitney.engine.executor.sampling import (
    SamplingRows,
    SeatState,
    empty_state,
    greedy,
    sample,
    score_prompt,
    score_rows_at_once,
)
from jitney.engine.models.llama import Llama
from jitney.engine.models.sharding import POOL, WHOLE, first_best, gather, widen
from jitney.engine.scheduler.buckets import Bucket
from jitney.kernels.interface import AttentionMeta, Kernels

#: Page table rows are padded to a multiple of this, so that kernels that read chunks of pages never
#: run off them.
PAGE_CHUNK = 16
#: Platform -> what XLA is told when it compiles a step. Once arguments fill 80 % of a GPU's memory,
#: as a pool is meant to, XLA would compute products twice, the output head among them, to save
#: temporaries: a decode step of 32 rows of an 8B model would touch 1.13 times the bytes that it
#: must, not 1.07.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_disable_hlo_passes": "rematerialization"}
}

#: From numbers of token rows, int32 [R], to their logits, float32 [R, V].
type LogitsOf = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass
class DeviceState:
    """Everything a step replaces: KV pools, one a layer; last_token int32 [M]; per-seat
    sampling.
    """

    kv: list[Any]
    last_token: Any
    seats: SeatState


@dataclass(frozen=True)
class StateSizes:
    """What the arrays of `DeviceState` are sized by. seats: of the engine, M."""

    seats: int
    n_pages: int
    page_size: int
    context_length: int
    kv_dtype: Any

    def builder(self) -> BatchBuilder:
        """Packs the uploads of an engine of this size."""
        pages = -(-self.context_length // self.page_size)
        return BatchBuilder(
            seats=self.seats,
            pages_per_seat=-(-pages // PAGE_CHUNK) * PAGE_CHUNK,
            page_size=self.page_size,
            pool_rows=self.n_pages * self.page_size,
        )

    def pool(self, config: ModelConfig, kernels: Kernels) -> tuple[int, ...]:
        """Shape of one layer's pool on one device; config: of one device (`ModelConfig.local`)."""
        if kernels.pool_shape is None:
            return self.n_pages, self.page_size, 2 * config.n_kv_heads, config.head_dim
        return kernels.pool_shape(
            self.n_pages, self.page_size, config.n_kv_heads, config.head_dim, self.kv_dtype
        )

    def pool_bytes(self, config: ModelConfig, kernels: Kernels) -> int:
        """Of all layers, on one device."""
        return (
            config.n_layers
            * math.prod(self.pool(config, kernels))
            * jnp.dtype(self.kv_dtype).itemsize
        )

    def shapes(self, config: ModelConfig, kernels: Kernels, mesh: Mesh | None) -> DeviceState:
        """The state as shapes, placed on the mesh; config: of one device."""
        pages, page, rows, width = self.pool(config, kernels)
        pool = (pages, page, rows * config.shards, width)
        small = jax.eval_shape(partial(empty_state, self.seats, config.vocab_size))
        return DeviceState(
            kv=[shape_on(mesh, pool, self.kv_dtype, POOL)] * config.n_layers,
            last_token=shape_on(mesh, (self.seats,), jnp.int32, WHOLE),
            seats=jax.tree.map(lambda x: shape_on(mesh, x.shape, x.dtype, WHOLE), small),
        )


def shape_on(
    mesh: Mesh | None, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec
) -> jax.ShapeDtypeStruct:
    """A shape on the mesh, or on the default device."""
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=None if mesh is None else NamedSharding(mesh, spec)
    )


def allocate(shapes: DeviceState, config: ModelConfig) -> DeviceState:
    """The state of seats nobody sits in, each array where its shape says."""
    seats = empty_state(shapes.last_token.shape[0], config.vocab_size)
    return DeviceState(
        kv=[jnp.zeros(pool.shape, pool.dtype, device=pool.sharding) for pool in shapes.kv],
        last_token=jnp.zeros(shapes.last_token.shape, jnp.int32, device=shapes.last_token.sharding),
        seats=SeatState(
            *(
                column if shape.sharding is None else jax.device_put(column, shape.sharding)
                for column, shape in zip(seats, shapes.seats, strict=True)
            )
        ),
    )


class StepOutput(NamedTuple):
    """What a step brings to the host, beside the state that it replaces."""

    sampled: Any  # int32 [S] of an all-greedy step, else `Sampled`
    # bool [S]: sequences with a row that is not finite; None without prompt rows: tokens tell
    broken: Any = None
    scores: Any = None  # `Scores` of the scored prompt rows; None where there can be none


def broken_sequences(hidden: jax.Array, cu_q: jax.Array) -> jax.Array:
    """Sequences any of whose rows is not finite: hidden [T, E], cu_q int32 [S + 1] -> bool [S]."""
    bad = ~jnp.all(jnp.isfinite(hidden), axis=-1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(bad.astype(jnp.int32))])
    return before[cu_q[1:]] > before[cu_q[:-1]]


def meta_of(inputs: Any) -> AttentionMeta:
    """The attention's part of a step's upload."""
    return AttentionMeta(
        kv_lens=inputs.kv_lens,
        cu_q=inputs.cu_q,
        page_table=inputs.page_table,
        write_rows=inputs.write_rows,
        positions=inputs.positions,
        counts=inputs.counts,
    )


@dataclass
class Program:
    """The step as a pure function of flat weights, for any bucket; these fields are its only
    constants.

    mesh: the devices it runs on, None for the default one. On more than one, `graph` is that of the
    model that each of them runs, and the functions here run on each with its share of `leaves` and
    `kv`.
    """

    graph: Any
    treedef: Any
    kernels: Kernels
    mesh: Mesh | None = None

    @property
    def split(self) -> bool:
        """True when the step runs on several devices."""
        return self.mesh is not None and self.mesh.size > 1

    def forward(
        self, leaves: list[jax.Array], kv: list[jax.Array], last_token: jax.Array, inputs: Any
    ) -> tuple[LogitsOf, jax.Array, list[jax.Array]]:
        """-> (from row numbers int32 [R] to their logits, float32 [R, V], this device's columns of
        them if split; hidden [T, E]; kv)."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
        known = inputs.tokens >= 0
        tokens = jnp.where(known, inputs.tokens, jnp.maximum(last_token[inputs.token_seats], 0))
        hidden, kv = model(tokens, kv, meta_of(inputs), self.kernels)

        def logits_of(rows: jax.Array) -> jax.Array:
            return model.logits(hidden[rows], self.kernels)

        return logits_of, hidden, kv

    def plain(self, layout: UploadLayout, leaves, kv, last_token, packed):
        """The all-greedy step: no sampler in it."""
        inputs = layout.split(packed)
        logits_of, hidden, kv = self.forward(leaves, kv, last_token, inputs)
        logits = logits_of(inputs.logit_rows)
        tokens = greedy(logits)
        if self.split:
            tokens = first_best(jnp.max(logits, axis=-1), tokens, logits.shape[-1])
        broken = None if layout.bucket.decode_only else broken_sequences(hidden, inputs.cu_q)
        return kv, last_token.at[inputs.seats].set(tokens, mode="drop"), StepOutput(tokens, broken)

    def full(self, layout: UploadLayout, leaves, kv, last_token, seats: SeatState, packed):
        """The step with every sampling option; split, every device samples from all logits, and
        alike.
        """
        inputs = layout.split(packed)
        logits_of, hidden, kv = self.forward(leaves, kv, last_token, inputs)

        def whole_logits_of(rows: jax.Array) -> jax.Array:
            return gather(logits_of(rows)) if self.split else logits_of(rows)

        rows = SamplingRows(
            params=layout.sampling.columns(inputs.sampling),
            position=inputs.positions[inputs.logit_rows],
            seats=inputs.seats,
        )
        logits = whole_logits_of(inputs.logit_rows)
        sampled, seats = sample(logits, rows, seats, self.kernels.threshold)
        last_token = last_token.at[inputs.seats].set(sampled.tokens, mode="drop")
        if not layout.scores:
            return kv, last_token, seats, StepOutput(sampled)
        block = score_rows_at_once(layout.bucket.tokens, logits.shape[-1])
        scores = score_prompt(
            whole_logits_of, inputs.score_rows, inputs.score_tokens, inputs.score_count[0], block
        )
        return (
            kv,
            last_token,
            seats,
            StepOutput(sampled, broken_sequences(hidden, inputs.cu_q), scores),
        )

    def lower(
        self, layout: UploadLayout, leaves: list[Any], state: DeviceState
    ) -> jax.stages.Lowered:
        """The step of one executable, for weights and state as arrays or shapes; all of the state
        is donated, so addresses stay the same from step to step."""
        packed = shape_on(self.mesh, (layout.size,), jnp.int32, WHOLE)
        if layout.plain:
            step, args = partial(self.plain, layout), (leaves, state.kv, state.last_token, packed)
            results: tuple[PartitionSpec, ...] = (POOL, WHOLE, WHOLE)
        else:
            step, args = (
                partial(self.full, layout),
                (leaves, state.kv, state.last_token, state.seats, packed),
            )
            results = (POOL, WHOLE, WHOLE, WHOLE)
        if self.split:
            # Unchecked: kernels are opaque to the analysis that would prove the results alike on
            # all devices.
            step = jax.shard_map(
                step,
                mesh=self.mesh,
                in_specs=jax.tree.map(lambda x: x.sharding.spec, args),
                out_specs=results,
                check_vma=False,
            )
        return jax.jit(step, donate_argnums=tuple(range(1, len(args) - 1))).lower(*args)


def compile_step(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a lowered step as the engine runs it on the default platform."""
    return lowered.compile(compiler_options=COMPILER_OPTIONS.get(jax.default_backend()))


def lower_step(
    model: Llama,
    bucket: Bucket,
    plain: bool,
    kernels: Kernels,
    sizes: StateSizes,
    mesh: Mesh | None = None,
) -> jax.stages.Lowered:
    """The step of one bucket from shapes alone, for devices that need not be there.

    model: `abstract_model` of the configuration that one device runs (`config.local(n)` for a mesh
    of n). plain: the all-greedy step. mesh: of `sharding.make_mesh`, one device or more; None: the
    default device.
    """
    graph, state = nnx.split(model)
    if mesh is not None:
        state = nnx.from_flat_state(
            [
                (path, leaf.replace(widen(path, leaf, mesh)))
                for path, leaf in nnx.to_flat_state(state)
            ]
        )
    leaves, treedef = jax.tree.flatten(state)
    program = Program(graph, treedef, kernels, mesh)
    return program.lower(
        sizes.builder().layout(bucket, plain), leaves, sizes.shapes(model.config, kernels, mesh)
    )

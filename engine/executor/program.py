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
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jitney.engine.checkpoints.files import Shape
from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.executor.inputs import (
    BatchBuilder,
    MaskedHeads,
    UploadLayout,
    masked_head_words,
)
from jitney.engine.executor.sampling import (
    SamplingRows,
    SeatState,
    empty_state,
    greedy,
    sample,
    score_prompt,
    score_rows_at_once,
    unpack_masks,
)
from jitney.engine.models.sharding import POOL, WHOLE, first_best, gather
from jitney.engine.scheduler.plan import mask_words
from jitney.engine.types import MAX_LOGPROBS
from jitney.kernels.interface import AttentionMeta, Kernels

#: Page table rows are padded to a multiple of this, so that kernels that read chunks of pages never
#: run off them.
_PAGE_CHUNK = 16
#: Platform -> what XLA is told when it compiles a step. Once arguments fill 80 % of a GPU's memory,
#: as a pool is meant to, XLA would compute products twice, the output head among them, to save
#: temporaries: a decode step of 32 rows of an 8B model would touch 1.13 times the bytes that it
#: must, not 1.07.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_disable_hlo_passes": "rematerialization"}
}
#: What may be in a CUDA graph: all that is by default, and the all-reduces between devices, two a
#: layer, at each of which the step would else end one graph and begin another.
_GRAPH_COMMANDS = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES"
)

#: From numbers of token rows, int32 [R], to their logits, float32 [R, V].
type _LogitsOf = Callable[[Array], Array]


@jax.tree_util.register_dataclass
@dataclass
class DeviceState:
    """Everything a step replaces: arrays, or their shapes."""

    kv: list[Any]  #: pools, one a layer
    last_token: Any  #: int32 [M]
    seats: SeatState


@dataclass(frozen=True)
class StateSizes:
    """What the arrays of `DeviceState` are sized by."""

    seats: int
    n_pages: int  #: of the pool, the trash page included
    page_size: int  #: positions
    context_length: int  #: tokens a sequence may have
    kv_dtype: Any
    logprobs: int = MAX_LOGPROBS  #: alternatives that are computed for each token

    @property
    def pages_per_seat(self) -> int:
        """Pages of a sequence of the whole context."""
        return -(-self.context_length // self.page_size)

    def builder(self) -> BatchBuilder:
        """Packs the uploads of an engine of this size."""
        return BatchBuilder(
            seats=self.seats,
            pages_per_seat=-(-self.pages_per_seat // _PAGE_CHUNK) * _PAGE_CHUNK,
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
        layer = math.prod(self.pool(config, kernels)) * jnp.dtype(self.kv_dtype).itemsize
        return config.n_layers * layer

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
    mesh: Mesh | None, shape: Shape, dtype: Any, spec: PartitionSpec
) -> jax.ShapeDtypeStruct:
    """A shape on the mesh, or on the default device."""
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def allocate(shapes: DeviceState, config: ModelConfig) -> DeviceState:
    """The state of seats nobody sits in, each array where its shape says."""

    def zeros(shape: Any) -> Array:
        return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)

    def place(column: Array, shape: Any) -> Array:
        if shape.sharding is None:
            return column
        values = np.asarray(column)
        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda at: values[at])

    seats = empty_state(shapes.last_token.shape[0], config.vocab_size)
    return DeviceState(
        kv=jax.tree.map(zeros, shapes.kv),
        last_token=zeros(shapes.last_token),
        seats=jax.tree.map(place, seats, shapes.seats),
    )


class StepOutput(NamedTuple):
    """What a step brings to the host, beside the state that it replaces."""

    #: int32 [S] of an all-greedy step, else `Sampled`.
    sampled: Any
    #: bool [S]: sequences with a row that is not finite; None without prompt rows: tokens tell.
    broken: Any = None
    #: `Scores` of the scored prompt rows; None where there can be none.
    scores: Any = None


def _broken_sequences(hidden: Array, cu_q: Array) -> Array:
    """Sequences any of whose rows is not finite: hidden [T, E], cu_q int32 [S + 1] -> bool [S]."""
    bad = ~jnp.all(jnp.isfinite(hidden), axis=-1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(bad.astype(jnp.int32))])
    return before[cu_q[1:]] > before[cu_q[:-1]]


def _meta_of(inputs: Any) -> AttentionMeta:
    """The upload's metadata as arrays of their own, which nothing in them would change: none is
    negative.

    As slices of the upload, whose place moves from step to step, a GPU's graph would have each
    kernel that takes one recorded anew in every step.
    """
    return AttentionMeta(
        kv_lens=jnp.maximum(inputs.kv_lens, 0),
        cu_q=jnp.maximum(inputs.cu_q, 0),
        page_table=jnp.maximum(inputs.page_table, 0),
        write_rows=jnp.maximum(inputs.write_rows, 0),
        positions=jnp.maximum(inputs.positions, 0),
        counts=jnp.maximum(inputs.counts, 0),
    )


def _sampling_rows(layout: UploadLayout, inputs: Any) -> SamplingRows:
    return SamplingRows(
        params=layout.sampling.columns(inputs.sampling),
        position=inputs.positions[inputs.logit_rows],
        seats=inputs.seats,
    )


@dataclass
class Program:
    """The step as a pure function of flat weights, for any bucket; these fields are its only
    constants.

    On several devices, the functions here run on each with its share of `leaves` and `kv`.
    """

    graph: Any  #: of the model, as `nnx.split` makes it; on several devices, of each one's share
    treedef: Any  #: of its weights
    kernels: Kernels
    mesh: Mesh | None = None  #: the devices it runs on; None: the default one
    logprobs: int = MAX_LOGPROBS  #: alternatives that are computed for each token

    @property
    def split(self) -> bool:
        """True when the step runs on several devices."""
        return self.mesh is not None and self.mesh.size > 1

    def forward(
        self, leaves: list[Array], kv: list[Array], last_token: Array, inputs: Any
    ) -> tuple[_LogitsOf, Array, list[Array]]:
        """-> (from row numbers int32 [R] to their logits, float32 [R, V], this device's columns of
        them if split; hidden [T, E]; kv)."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
        sampled_last = jnp.maximum(last_token[inputs.token_seats], 0)
        tokens = jnp.where(inputs.tokens >= 0, inputs.tokens, sampled_last)
        hidden, kv = model(tokens, kv, _meta_of(inputs), self.kernels)

        def logits_of(rows: Array) -> Array:
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
        last_token = last_token.at[inputs.seats].set(tokens, mode="drop")
        if layout.bucket.decode_only:
            return kv, last_token, StepOutput(tokens)
        return kv, last_token, StepOutput(tokens, _broken_sequences(hidden, inputs.cu_q))

    def full(self, layout: UploadLayout, leaves, kv, last_token, seats: SeatState, packed):
        """The step with every sampling option; split, every device samples from all logits, and
        alike.

        It also leaves the logits, float32 [S, V], for `choose`.
        """
        inputs = layout.split(packed)
        logits_of, hidden, kv = self.forward(leaves, kv, last_token, inputs)

        def whole_logits_of(rows: Array) -> Array:
            logits = logits_of(rows)
            if self.split:
                return gather(logits)
            return logits

        rows = _sampling_rows(layout, inputs)
        logits = whole_logits_of(inputs.logit_rows)
        sampled, seats = sample(logits, rows, seats, self.kernels.threshold, None, self.logprobs)
        last_token = last_token.at[inputs.seats].set(sampled.tokens, mode="drop")
        output = StepOutput(sampled)
        if layout.scores:
            block = score_rows_at_once(layout.bucket.tokens, logits.shape[-1])
            scores = score_prompt(
                whole_logits_of,
                inputs.score_rows,
                inputs.score_tokens,
                inputs.score_count[0],
                block,
                self.logprobs,
            )
            output = StepOutput(sampled, _broken_sequences(hidden, inputs.cu_q), scores)
        return kv, last_token, seats, output, logits

    def choose(self, logits, last_token, seats: SeatState, heads, masks):
        """The tokens of rows that are held to grammars, behind a step's own program: logits of
        these rows, float32 [R, V], heads and masks as in `MaskedRows`.
        """
        positions, owners, params = MaskedHeads.of(heads)
        rows = SamplingRows(params, positions, owners)
        allowed = unpack_masks(masks, logits.shape[-1])
        chosen, seats = sample(logits, rows, seats, self.kernels.threshold, allowed, self.logprobs)
        # A row that is not finite may be so where the mask hides it.
        tokens = jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), chosen.tokens, -1)
        last_token = last_token.at[owners].set(tokens, mode="drop")
        return last_token, seats, chosen._replace(tokens=tokens)

    def lower(
        self, layout: UploadLayout, leaves: list[Any], state: DeviceState
    ) -> jax.stages.Lowered:
        """The step of one executable, for weights and state as arrays or shapes; all of the state
        is donated, so addresses stay the same from step to step."""
        packed = shape_on(self.mesh, (layout.size,), jnp.int32, WHOLE)
        if layout.plain:
            step = partial(self.plain, layout)
            args = leaves, state.kv, state.last_token, packed
            results = POOL, WHOLE, WHOLE
        else:
            step = partial(self.full, layout)
            args = leaves, state.kv, state.last_token, state.seats, packed
            results = POOL, WHOLE, WHOLE, WHOLE, WHOLE
        if self.split:
            step = self._on_every_device(step, args, results)
        return jax.jit(step, donate_argnums=tuple(range(1, len(args) - 1))).lower(*args)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile what one of the `lower` methods made, as the engine runs it here."""
        return lowered.compile(compiler_options(jax.default_backend(), self.split))

    def lower_choose(self, rows: int, state: DeviceState) -> jax.stages.Lowered:
        """`choose` for so many rows."""
        vocab = state.seats.counts.shape[1]
        args = (
            self._whole((rows, vocab), jnp.float32),
            state.last_token,
            state.seats,
            self._whole((rows, masked_head_words()), jnp.int32),
            self._whole((rows, mask_words(vocab)), jnp.int32),
        )
        choose = self.choose
        if self.split:
            choose = self._on_every_device(choose, args, (WHOLE, WHOLE, WHOLE))
        return jax.jit(choose, donate_argnums=(1, 2)).lower(*args)

    def lower_pick(self, logit_rows: int, rows: int, state: DeviceState) -> jax.stages.Lowered:
        """The program that picks `rows` of a step's logits for `choose`; numbers past the last one
        bring any of them.
        """
        vocab = state.seats.counts.shape[1]
        args = self._whole((logit_rows, vocab), jnp.float32), self._whole((rows,), jnp.int32)
        pick = partial(jnp.take, axis=0, mode="clip")
        if self.split:
            pick = self._on_every_device(pick, args, WHOLE)
        return jax.jit(pick).lower(*args)

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape of an array that every device has."""
        return shape_on(self.mesh, shape, dtype, WHOLE)

    def _on_every_device(self, step: Callable[..., Any], args: Any, results: Any) -> Any:
        # Unchecked: kernels are opaque to the analysis that would prove the results alike on all
        # devices.
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=jax.tree.map(lambda x: x.sharding.spec, args),
            out_specs=results,
            check_vma=False,
        )


def compiler_options(platform: str, split: bool) -> dict[str, Any]:
    """What XLA is told when it compiles a step for this platform, split over devices or not."""
    options = dict(_COMPILER_OPTIONS.get(platform, {}))
    if platform == "gpu" and split:
        options["xla_gpu_enable_command_buffer"] = _GRAPH_COMMANDS
    return options

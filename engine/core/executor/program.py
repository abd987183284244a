"""The step as a pure function, and its lowering for one device or several.

embed -> layers (write KV page, attend) -> rows that need logits -> sample -> tokens of each seat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jitney.engine.common.requests import REQUEST_MOST, Pooling
from jitney.engine.core.executor.compilations import compilations
from jitney.engine.core.executor.inputs import BatchBuilder, MaskedHeads, UploadLayout
from jitney.engine.core.executor.kept_programs import KeptPrograms, Lowered
from jitney.engine.core.executor.memory import PoolSizes, state_slots
from jitney.engine.core.executor.sampling import (
    RowScores,
    Sampled,
    Sampler,
    SamplingRows,
    SeatState,
    score_rows_at_once,
    unpack_masks,
)
from jitney.engine.core.executor.seat_tokens import Drafting, DraftRows, SeatTokens
from jitney.engine.core.executor.vocabulary import SplitVocabulary, Vocabulary
from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.sharding import DATA, TENSOR, WHOLE, engines_of, of_each_engine
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import mask_words
from jitney.engine.core.weights.checkpoints.files import Shape
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels.delta_net import DeltaState, StateSlots
from jitney.kernels.interface import AttentionMeta, Kernels

#: Pools [N, page, 2K, D]: each device has the rows of its own KV heads.
_POOL = PartitionSpec(None, None, TENSOR.name, None)
#: `DeltaState`: each device has the channels and the memory of its own heads.
_TAPS = PartitionSpec(None, None, TENSOR.name)
_MEMORY = PartitionSpec(None, TENSOR.name, None, None)
#: Logits [S, V]: each device has the columns that it computed.
_COLUMNS = PartitionSpec(None, TENSOR.name)
#: Page table rows are padded to a multiple of this, so that kernels that read chunks of pages never
#: run off them.
_PAGE_CHUNK = 16
#: XLA's options for compiling a step, by platform. If arguments fill 80 % of a GPU's memory, as
#: weights and pool are meant to, XLA would otherwise compute products twice, among them the output
#: head, to save temporaries: a decode step of 32 rows of an 8B model would touch 1.13 times the
#: necessary bytes, not 1.07. And to merge small products of the same rows, such as a router's and a
#: shared expert's, it would copy their weights side by side in every step.
_COMPILER_OPTIONS: dict[str, dict[str, str]] = {
    "gpu": {"xla_disable_hlo_passes": "rematerialization", "xla_gpu_dot_merger_threshold_mb": "0"}
}
#: Operations allowed in a CUDA graph: the default ones, and the all-reduces between devices. There
#: are two a layer, and each would otherwise end one graph and begin another.
_GRAPH_COMMANDS = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES"
)

#: Options for a TPU that sums in halves. All-reduces from 1 MiB on run on its SparseCores, through
#: main memory, because only these can overlap a product; and no all-reduce is delayed to be merged
#: with the next. Smaller ones, as in decode steps, stay in VMEM.
_TPU_SUMS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes": str(1 << 20),
    "xla_jf_crs_combiner_threshold_in_bytes": "1",
}

#: An array, or its shape.
type Shaped = Array | jax.ShapeDtypeStruct
#: A callable that runs a step, with the arguments and results of `Program.greedy_only` or
#: `Program.full`, or that chooses tokens after a step, with those of `Program.choose`.
type StepCall = Callable[..., Any]
#: Computes the logits, float32 [R, V], of token rows, int32 [R].
type _LogitsOf = Callable[[Array], Array]


@jax.tree_util.register_dataclass
@dataclass
class DeviceState:
    """Everything a step replaces: arrays, or their shapes."""

    #: Each layer's cache, a pool or a `DeltaState`; empty for an encoder.
    kv: list[Any]
    seat_tokens: SeatTokens  #: tokens that the next rows of seats read
    seats: SeatState  #: sampling state of each seat
    #: The pools of a draft model's layers, if there is a draft model.
    draft_kv: list[Any] = field(default_factory=list[Any])

    def allocate(self, config: ModelConfig) -> DeviceState:
        """Allocate the initial state from shapes, each array with its shape's sharding."""

        def zeros(shape: Shaped) -> Array:
            return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)

        def place(column: Array, shape: jax.ShapeDtypeStruct) -> Array:
            if shape.sharding is None:
                return column
            values = np.asarray(column)

            def own(at: Any) -> np.ndarray:
                return values[:, *at[1:]]  # the seats of every engine are alike

            return jax.make_array_from_callback(shape.shape, shape.sharding, own)

        seats = SeatState.empty(self._own_seats(), config.output_size)
        return DeviceState(
            kv=jax.tree.map(zeros, self.kv),
            seat_tokens=jax.tree.map(zeros, self.seat_tokens),
            seats=jax.tree.map(place, seats, self.seats),
            draft_kv=jax.tree.map(zeros, self.draft_kv),
        )

    def _own_seats(self) -> int:
        """Number of seats of one engine."""
        last = self.seat_tokens.last
        if last.sharding is None:
            return last.shape[0]
        return last.sharding.shard_shape(last.shape)[0]


@dataclass(frozen=True)
class StateSizes:
    """The sizes of the arrays of `DeviceState`."""

    seats: int  #: M
    n_pages: int  #: pages of the pool, the trash page included
    page_size: int  #: positions of a page
    context_length: int  #: the most tokens of a sequence
    kv_dtype: DTypeLike  #: dtype of the pools
    logprobs: int = REQUEST_MOST.logprobs  #: alternatives that are computed for each token
    has_adapters: bool = False  #: whether steps upload each seat's adapter
    #: Pages of each cache group but the first; empty: all layers share page tables.
    window_pages: tuple[int, ...] = ()
    checkpoints: int = 0  #: slots for recurrent layers' state beside one for each seat
    #: The method of drafting tokens; None: no drafts.
    drafting: Drafting | None = None

    @property
    def pages_per_seat(self) -> int:
        """Number of pages of a sequence with the whole context."""
        return -(-self.context_length // self.page_size)

    def builder(self, config: ModelConfig) -> BatchBuilder:
        """A builder of uploads for an engine of these sizes and this model."""
        return BatchBuilder(
            seats=self.seats,
            pages_per_seat=-(-self.pages_per_seat // _PAGE_CHUNK) * _PAGE_CHUNK,
            page_size=self.page_size,
            pool_rows=self.n_pages * self.page_size,
            has_adapters=self.has_adapters,
            window_rows=[pages * self.page_size for pages in self.window_pages],
            recurrent=config.recurrent is not None,
            drafts=self._most_drafts,
            draft_slots=self.seats + self.checkpoints,
        )

    @property
    def _most_drafts(self) -> int:
        """The most drafts of a sequence in a step."""
        return 0 if self.drafting is None else self.drafting.count

    @property
    def group_pages(self) -> tuple[int, ...]:
        """Pages of each cache group with page tables of its own, the trash page included."""
        return self.n_pages, *self.window_pages

    def with_pools(self, pools: PoolSizes) -> StateSizes:
        """The same sizes with these pools."""
        first, *others = pools.pages
        return replace(
            self, n_pages=first, window_pages=tuple(others), checkpoints=pools.checkpoints
        )

    def pool(self, config: ModelConfig, kernels: Kernels, group: int = 0) -> tuple[int, ...]:
        """Shape of one layer's pool on one device. config: the layer's (`ModelConfig.of_layer`), on
        one device (`ModelConfig.local`).
        """
        n_pages = self.group_pages[group]
        if kernels.pool_shape is None:
            return n_pages, self.page_size, config.pool_rows, config.head_dim
        return kernels.pool_shape(
            n_pages,
            self.page_size,
            config.n_kv_heads,
            config.head_dim,
            self.kv_dtype,
            config.value_dim,
        )

    def page_bytes(self, config: ModelConfig, kernels: Kernels) -> tuple[int, ...]:
        """Bytes of a page of each cache group, in all its layers, on one device."""
        one, size = replace(self, n_pages=1), jnp.dtype(self.kv_dtype).itemsize
        return tuple(
            size * sum(math.prod(one.pool(config.of_layer(i), kernels)) for i in group.layers)
            for group in config.cache_groups
        )

    def shapes(self, config: ModelConfig, kernels: Kernels, mesh: Mesh | None) -> DeviceState:
        """Shapes of the state of all engines on the mesh, with shardings. config: one device's."""
        small = jax.eval_shape(
            lambda: (self._no_tokens(), SeatState.empty(self.seats, config.output_size))
        )
        seat_tokens, seats = jax.tree.map(lambda x: _shape_on(mesh, x.shape, x.dtype, WHOLE), small)
        caches: list[Any] = []
        if config.encoder is None:
            state = self._delta_state(config, mesh)
            caches = [state] * config.n_layers
            for number, group in enumerate(config.cache_groups):
                for layer in group.layers:
                    own = config.of_layer(layer)
                    caches[layer] = self._placed_pool(own, kernels, mesh, number)
        return DeviceState(kv=caches, seat_tokens=seat_tokens, seats=seats)

    def _no_tokens(self) -> SeatTokens:
        """The initial seat tokens."""
        if self.drafting is None:
            return SeatTokens(jnp.zeros(self.seats, jnp.int32))
        return self.drafting.empty(self.seats, self.context_length, self.page_size)

    def _placed_pool(
        self, config: ModelConfig, kernels: Kernels, mesh: Mesh | None, group: int
    ) -> Any:
        """The shape of a layer's pool, in this cache group. config: the layer's."""
        own = group if self.window_pages else 0
        pages, page, rows, width = self.pool(config, kernels, own)
        return _shape_on(mesh, (pages, page, rows * config.shards, width), self.kv_dtype, _POOL)

    def _delta_state(self, config: ModelConfig, mesh: Mesh | None) -> Any:
        """The shapes of the state of a recurrent layer; None if the model has none."""
        if config.recurrent is None:
            return None
        slots = state_slots(self.seats, self._most_drafts, self.checkpoints)
        shapes = config.recurrent.state_shapes(slots, config.shards)
        specs = (_TAPS, _MEMORY, WHOLE)
        placed = zip(shapes, DeltaState.dtypes, specs, strict=True)
        arrays: list[Any] = [
            shape and _shape_on(mesh, shape, dtype, spec) for shape, dtype, spec in placed
        ]
        return DeltaState(*arrays)


def _shape_on(
    mesh: Mesh | None, shape: Shape, dtype: DTypeLike, spec: PartitionSpec
) -> jax.ShapeDtypeStruct:
    """A shape on the mesh, or on the default device. On a mesh of several engines the first axis
    has one part for each engine (`of_each_engine`).
    """
    if mesh is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    engines = engines_of(mesh)
    if engines > 1:
        shape = (engines * shape[0], *shape[1:])
    sharding = NamedSharding(mesh, of_each_engine(mesh, spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


class StepOutput(NamedTuple):
    """The results of a step for the host, without the state that it replaces."""

    #: Tokens int32 [S] of an all-greedy step, else `Sampled`.
    sampled: Array | Sampled
    #: bool [S]: sequences with a non-finite row; None without prompt rows: then tokens show it.
    broken: Array | None = None
    #: `RowScores` of the scored prompt rows; None if the executable scores none.
    scores: RowScores | None = None
    #: Hidden states of all rows, see `Program.left`.
    hidden: Hidden | None = None
    #: See `Taken.guessed`.
    guessed: Array | None = None
    #: [T, C]: values of all rows that a prediction head reads; None without a head.
    for_head: Array | None = None


class Chosen(NamedTuple):
    """The tokens chosen after a step, under masks."""

    sampled: Sampled
    guessed: Array | None  #: see `Taken.guessed`
    drafts: Array | None  #: see `Taken.drafts`


def meta_of(inputs: Any, engines: int) -> AttentionMeta:
    """The upload's metadata as separate arrays; `maximum` only copies, it changes no value.

    With slices, whose addresses change from step to step, a CUDA graph would record their kernels
    anew in every step. engines: number of engines that share experts, or 1.
    """
    row_counts = None
    if engines > 1:
        row_counts = DATA.rows_of_all(inputs.counts[2:3])
    return AttentionMeta(
        kv_lens=jnp.maximum(inputs.kv_lens, 0),
        cu_q=jnp.maximum(inputs.cu_q, 0),
        page_table=jnp.maximum(inputs.page_table, 0),
        write_rows=jnp.maximum(inputs.write_rows, 0),
        positions=jnp.maximum(inputs.positions, 0),
        counts=jnp.maximum(inputs.counts, 0),
        adapted=_adapted(inputs),
        row_counts=row_counts,
        state=_state_slots(inputs),
        other_groups=tuple(
            (jnp.maximum(table, 0), jnp.maximum(rows, 0))
            for table, rows in zip(inputs.window_tables, inputs.window_rows, strict=True)
        ),
    )


def _state_slots(inputs: Any) -> StateSlots | None:
    """The slots of recurrent state; None if no layer is recurrent."""
    if not inputs.state_reads.size:
        return None
    slots = [inputs.state_reads, inputs.state_cuts, inputs.state_writes]
    if inputs.state_drafts.size:
        slots += [inputs.state_ends, inputs.state_drafts]
    return StateSlots(*[jnp.maximum(array, 0) for array in slots])


def _adapted(inputs: Any) -> Array | None:
    """Each row's adapter, int32 [T]; None if the engine has no adapters."""
    if not inputs.seat_adapters.size:
        return None
    return inputs.seat_adapters[inputs.token_seats]


def _sampling_rows(layout: UploadLayout, inputs: Any, drafts: DraftRows | None) -> SamplingRows:
    return SamplingRows(
        params=layout.sampling.columns(inputs.sampling),
        position=inputs.positions[inputs.logit_rows],
        seats=inputs.seats,
        drafts=drafts,
    )


@dataclass
class Program:
    """The step as a pure function of flat weights, for any bucket; its fields are constants.

    On several devices each one runs it with its share of `leaves` and `kv`.
    """

    #: The model's graph from `nnx.split`; on several devices, the graph of one device's share.
    graph: nnx.GraphDef[Model]
    treedef: Any  #: jax's PyTreeDef of the weights
    #: The kernels that the model calls.
    kernels: Kernels
    mesh: Mesh | None = None  #: the devices it runs on; None: the default one
    logprobs: int = REQUEST_MOST.logprobs  #: alternatives that are computed for each token
    pooling: Pooling | None = None  #: how prompts' vectors are made; None: no vectors
    encoder: bool = False  #: whether steps choose no token
    leaves_normed: bool = False  #: whether steps return all rows after the final norm, for a head
    kept: KeptPrograms | None = None  #: stored programs of earlier starts; None: none are stored

    @property
    def vocabulary(self) -> Vocabulary:
        """Operations on the columns of logits that a device has."""
        if self.mesh is None or self.mesh.shape[TENSOR.name] == 1:
            return Vocabulary()
        return SplitVocabulary(self.mesh.shape[TENSOR.name], self.engines)

    @property
    def engines(self) -> int:
        """Number of engines that run this step together."""
        return 1 if self.mesh is None else engines_of(self.mesh)

    @property
    def split(self) -> bool:
        """True when the step runs on several devices."""
        return self.mesh is not None and self.mesh.size > 1

    def model(self, leaves: list[Array]) -> Model:
        """The model with these weights."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))

    def forward(
        self, leaves: list[Array], kv: list[Array], inputs: Any
    ) -> tuple[_LogitsOf, Hidden, list[Array]]:
        """Run the model. inputs: with all tokens, see `SeatTokens.fill`. -> (function that computes
        the logits of rows, with this device's columns if split; hidden states of all rows after the
        last attention; kv)."""
        model = self.model(leaves)
        hidden, kv = model(inputs.tokens, kv, meta_of(inputs, self.engines), self.kernels)
        if self.leaves_normed:
            # Only once, also for the rows that need logits.
            hidden = replace(hidden, normed=model.normed(hidden, self.kernels))

        def logits_of(rows: Array) -> Array:
            return model.logits(hidden[rows], self.kernels)

        return logits_of, hidden, kv

    def greedy_only(
        self,
        layout: UploadLayout,
        leaves: list[Array],
        kv: list[Array],
        seat_tokens: SeatTokens,
        packed: Array,
    ) -> tuple[list[Array], SeatTokens, StepOutput]:
        """The all-greedy step, without a sampler."""
        inputs, drafts = seat_tokens.fill(layout.split(packed))
        logits_of, hidden, kv = self.forward(leaves, kv, inputs)
        logits = logits_of(inputs.logit_rows)
        positions = inputs.positions[inputs.logit_rows]
        chosen = self.vocabulary.greedy(logits)
        taken = seat_tokens.take(inputs.seats, positions, drafts, chosen)
        left = self.left(hidden, layout.bucket)
        output = StepOutput(
            taken.tokens, hidden=left, guessed=taken.guessed, for_head=hidden.for_head
        )
        if not layout.bucket.decode_only:
            output = output._replace(broken=hidden.broken_sequences(inputs.cu_q))
        return kv, taken.seat_tokens, output

    def encode(
        self,
        layout: UploadLayout,
        leaves: list[Array],
        kv: list[Array],
        seat_tokens: SeatTokens,
        packed: Array,
    ) -> tuple[list[Array], SeatTokens, StepOutput]:
        """The step of an encoder, which samples no token."""
        inputs, _ = seat_tokens.fill(layout.split(packed))
        _, hidden, kv = self.forward(leaves, kv, inputs)
        tokens = jnp.zeros((layout.bucket.seats,), jnp.int32)
        broken = hidden.broken_sequences(inputs.cu_q)
        return kv, seat_tokens, StepOutput(tokens, broken, hidden=hidden)

    def full(
        self,
        layout: UploadLayout,
        leaves: list[Array],
        kv: list[Array],
        seat_tokens: SeatTokens,
        seats: SeatState,
        packed: Array,
    ) -> tuple[list[Array], SeatTokens, SeatState, StepOutput, Array]:
        """The step with every sampling option; it returns logits float32 [S, V] for `choose`. On
        several devices each one samples from its columns, and all choose the same tokens.
        """
        inputs, drafts = seat_tokens.fill(layout.split(packed))
        logits_of, hidden, kv = self.forward(leaves, kv, inputs)
        rows = _sampling_rows(layout, inputs, drafts)
        logits = logits_of(inputs.logit_rows)
        sampled = self.sampler.sample(logits, rows, seats)
        taken = seat_tokens.take(rows.seats, rows.position, drafts, sampled.tokens)
        sampled = sampled._replace(tokens=taken.tokens)
        seats = seats.count_tokens(rows, taken.tokens)
        left = self.left(hidden, layout.bucket)
        output = StepOutput(sampled, hidden=left, guessed=taken.guessed, for_head=hidden.for_head)
        if layout.scores:
            block = score_rows_at_once(layout.bucket.tokens, logits.shape[-1])
            count = inputs.score_count[0]
            if self.engines > 1:
                count = DATA.largest(count)  # all engines compute the same blocks
            scores = self.sampler.score_prompt(
                logits_of, inputs.score_rows, inputs.score_tokens, count, block
            )
            broken = hidden.broken_sequences(inputs.cu_q)
            output = output._replace(broken=broken, scores=scores)
        return kv, taken.seat_tokens, seats, output, logits

    @property
    def sampler(self) -> Sampler:
        """The sampler of its steps."""
        return Sampler(self.kernels.threshold, self.logprobs, self.vocabulary)

    def left(self, hidden: Hidden, bucket: Bucket) -> Hidden | None:
        """The hidden states that a step returns for `pool`; None if it pools nothing."""
        pools = self.pooling is not None and not bucket.decode_only
        return hidden.bare if pools else None

    def pool(self, leaves: list[Array], hidden: Hidden, cu_q: Array) -> Array:
        """A step's part of each prompt's vector, float32 [S, E]: the sum of normed hidden states
        (mean), the last one, the first one (cls), or the first one's logits (classify). cu_q: int32
        [S + 1].
        """
        model = self.model(leaves)
        if self.pooling == "classify":
            return model.logits(hidden[_first_rows(hidden, cu_q)], self.kernels)
        if self.pooling != "mean":
            one = jnp.maximum(cu_q[1:] - 1, 0)
            if self.pooling == "cls":
                one = _first_rows(hidden, cu_q)
            return model.normed(hidden[one], self.kernels).astype(jnp.float32)
        rows = model.normed(hidden, self.kernels).astype(jnp.float32)
        owners = jnp.searchsorted(cu_q[1:], jnp.arange(rows.shape[0]), side="right")
        return jax.ops.segment_sum(rows, owners, cu_q.shape[0] - 1)

    def lower_pool(
        self,
        bucket: Bucket,
        leaves: Sequence[Shaped],
        width: int,
        dtype: DTypeLike,
        *,
        has_adapters: bool,
    ) -> jax.stages.Lowered:
        """Lower `pool` for steps of this bucket. width, dtype: of the hidden states."""
        states: Any = self.whole((bucket.tokens, width), dtype)
        adapted: Any = None
        if has_adapters:
            adapted = self.whole((bucket.tokens,), jnp.int32)
        args = (
            leaves,
            Hidden(states, adapted),
            self.whole((bucket.seats + 1,), jnp.int32),
        )
        pool = self.pool
        if self.split:
            pool = self.on_every_device(pool, args, WHOLE)
        return jax.jit(pool).lower(*args)

    def choose(
        self,
        logits: Array,
        seat_tokens: SeatTokens,
        seats: SeatState,
        heads: Array,
        masks: Array,
    ) -> tuple[SeatTokens, SeatState, Chosen]:
        """Choose the tokens of rows under masks, after a step. logits: float32 [R, V]; heads,
        masks: see `MaskedRows`.
        """
        own = MaskedHeads.of(heads)
        drafts = seat_tokens.draft_rows(own.numbers, own.drafts)
        rows = SamplingRows(own.params, own.positions, own.seats, drafts)
        allowed = unpack_masks(masks, seats.counts.shape[1])
        chosen = self.sampler.sample(logits, rows, seats, allowed)
        # Checked before masking: the mask may hide the values that are not finite.
        finite = jnp.isfinite(self.vocabulary.largest(logits)[:, 0])
        tokens = jnp.where(finite, chosen.tokens, -1)
        taken = seat_tokens.take(own.seats, own.positions, drafts, tokens)
        seats = seats.count_tokens(rows, taken.tokens)
        sampled = chosen._replace(tokens=taken.tokens)
        return taken.seat_tokens, seats, Chosen(sampled, taken.guessed, taken.drafts)

    def lower(
        self, layout: UploadLayout, leaves: Sequence[Shaped], state: DeviceState
    ) -> jax.stages.Lowered:
        """Lower the step of one executable, for weights and state as arrays or shapes. All state is
        donated, so addresses stay the same from step to step."""
        packed = self.whole((layout.size,), jnp.int32)
        cache_specs = jax.tree.map(lambda x: x.sharding.spec, state.kv) if self.split else None
        if layout.greedy_only:
            step = partial(self.encode if self.encoder else self.greedy_only, layout)
            args = leaves, state.kv, state.seat_tokens, packed
            results = cache_specs, WHOLE, WHOLE
        else:
            step = partial(self.full, layout)
            args = leaves, state.kv, state.seat_tokens, state.seats, packed
            results = cache_specs, WHOLE, WHOLE, WHOLE, _COLUMNS
        if self.split:
            step = self.on_every_device(step, args, results)
        return jax.jit(step, donate_argnums=tuple(range(1, len(args) - 1))).lower(*args)

    def lowered(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Lowered:
        """A program of this engine, from the store or made by `lower`."""
        return lower() if self.kept is None else self.kept.lowered(name, lower)

    def compile(self, lowered: Lowered) -> jax.stages.Compiled:
        """Compile a program with this engine's options."""
        return compilations.timed(lambda: lowered.compile(self.compiler_options))

    @property
    def compiler_options(self) -> dict[str, str]:
        """XLA's options for its steps."""
        platform, halves = jax.default_backend(), self.kernels.sums_in_halves
        return _compiler_options(platform, self.split, halves)

    def lower_choose(self, rows: int, state: DeviceState) -> jax.stages.Lowered:
        """Lower `choose` for `rows` rows."""
        vocab = state.seats.counts.shape[1]
        args = (
            _shape_on(self.mesh, (rows, vocab), jnp.float32, _COLUMNS),
            state.seat_tokens,
            state.seats,
            self.whole((rows, MaskedHeads.words()), jnp.int32),
            self.whole((rows, mask_words(vocab)), jnp.int32),
        )
        choose = self.choose
        if self.split:
            choose = self.on_every_device(choose, args, (WHOLE, WHOLE, WHOLE))
        return jax.jit(choose, donate_argnums=(1, 2)).lower(*args)

    def lower_pick(self, logit_rows: int, rows: int, state: DeviceState) -> jax.stages.Lowered:
        """Lower the program that picks `rows` of a step's logits for `choose`; indices beyond the
        end are clipped.
        """
        vocab = state.seats.counts.shape[1]
        logits = _shape_on(self.mesh, (logit_rows, vocab), jnp.float32, _COLUMNS)
        args = logits, self.whole((rows,), jnp.int32)
        pick = partial(jnp.take, axis=0, mode="clip")
        if self.split:
            pick = self.on_every_device(pick, args, _COLUMNS)
        return jax.jit(pick).lower(*args)

    def whole(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """The shape of an array that every device has in full."""
        return _shape_on(self.mesh, shape, dtype, WHOLE)

    def on_every_device(self, step: Callable[..., Any], args: Any, results: Any) -> Any:
        """Wrap a function so that each device runs it with its share of the arguments. args: shapes
        on the mesh. results: specs (or trees of them) of how results are split over the devices of
        an engine.
        """
        # Unchecked: the analysis that would prove the results equal on all devices cannot see into
        # kernels.
        assert self.mesh is not None
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=jax.tree.map(lambda x: x.sharding.spec, args),
            out_specs=jax.tree.map(partial(of_each_engine, self.mesh), results),
            check_vma=False,
        )


def _first_rows(hidden: Hidden, cu_q: Array) -> Array:
    """The first row of each sequence, int32 [S]; any row for an absent sequence."""
    return jnp.minimum(cu_q[:-1], hidden.states.shape[0] - 1)


def _compiler_options(platform: str, split: bool, halves: bool) -> dict[str, str]:
    """XLA's options for a step on this platform. halves: `KernelSet.sums_in_halves`."""
    options = dict(_COMPILER_OPTIONS.get(platform, {}))
    if platform == "gpu" and split:
        options["xla_gpu_enable_command_buffer"] = _GRAPH_COMMANDS
    if platform == "tpu" and split and halves:
        options |= _TPU_SUMS
    return options

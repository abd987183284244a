"""An engine with random weights: a model of any shape with its kernels, compiled steps and core."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.records import Ledger
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.proving import served_by
from jitney.engine.core.executor.runner import LaunchedStep, Runner
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.made_up_steps import StepCase
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import KV_TYPES, Packed, quantise, widened
from jitney.engine.core.models.registry import abstract_model, fill_at_random
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.plan import Plan, StepWork
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels import w8a8
from jitney.kernels.interface import AttentionMeta, Kernels, KernelSet
from jitney.kernels.proof_attention import MetaBuilder
from jitney.kernels.proof_shapes import ServedShapes
from jitney.kernels.select import reference_of

#: Share of jax's memory that is left free for temporaries, fragments and uploads.
_SPARE = 0.08
#: Most KV positions: enough for 256 sequences of 1k, and for 8 of 32k.
_MOST_POSITIONS = 1 << 18
#: KV positions if the device does not report its memory.
_FEW_POSITIONS = 1 << 10
#: Programs that are compiled in parallel.
_THREADS = 8

#: Bytes.
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RandomMatrix:
    """A weight matrix [I, O] of random numbers with standard deviation 1 / sqrt(I)."""

    scheme: str  # one of Packed.schemes
    shape: tuple[int, int]
    dtype: DTypeLike
    kernels: KernelSet

    def packed(self, seed: int) -> Packed:
        """The matrix in the kernels' layout: fp8 products need a specific one."""
        plain = self._plain(seed)
        if self.scheme == "fp8" and self.kernels.fp8 is not None:
            return plain._replace(kernel=self.kernels.fp8.pack(plain.kernel))
        return plain

    def exact_product(self, x: jax.Array) -> jax.Array:
        """The product with the widened matrix of seed 0 in float32, with rows rounded if the kernel
        rounds them.
        """
        return jnp.matmul(self._as_multiplied(x), widened(self._plain(0)), precision="highest")

    def _plain(self, seed: int) -> Packed:
        wide = jax.random.normal(jax.random.key(seed), self.shape) / self.shape[0] ** 0.5
        return quantise(wide, scheme=self.scheme, dtype=self.dtype)

    def _as_multiplied(self, x: jax.Array) -> jax.Array:
        """The rows as rounded by the kernel, in float32."""
        if self.scheme == "int8" and self.kernels.int8 is not None:
            codes, steps = w8a8.round_to_int8(x)
            return codes * steps
        if self.scheme == "fp8" and self.kernels.fp8 is not None:
            codes, units = w8a8.round_to_fp8(x)
            return codes.astype(jnp.float32) * units
        return x.astype(jnp.float32)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model with random weights, and its kernels."""

    config: ModelConfig
    kernels: KernelSet
    dtype: DTypeLike  # of activations
    weights: str = "plain"  # or one of Packed.schemes, as they are packed

    @property
    def itemsize(self) -> int:
        """Bytes per number that is not packed."""
        return jnp.dtype(self.dtype).itemsize

    def make(self, kv: str = "auto") -> Model:
        """Build the model. kv: format of keys and values: auto, or one of KV_TYPES."""
        config, dtype = self.config, self.dtype
        return fill_at_random(abstract_model(config, dtype=dtype, weights=self.weights, kv=kv))

    def served(self, buckets: Buckets, *, page_size: int, context: int, kv: str) -> ServedShapes:
        """The shapes in which an engine calls its kernels. context: tokens of a sequence. kv: see
        `make`.
        """
        kv_dtype = KV_TYPES.get(kv, self.dtype)
        sizes = StateSizes(buckets.seats, 1, page_size, context, kv_dtype)
        return served_by(self.make(kv), self.config, sizes, buckets, self.dtype)


class ReferenceModel:
    """A random model on the reference kernels, without an engine."""

    def __init__(self, model: RandomModel, page_size: int, tokens: int):
        """tokens: most of a sequence."""
        config = model.config
        self._page_size, self._tokens = page_size, tokens
        self._model = model.make()
        kernels = reference_of(model.kernels)
        self._pages = -(-tokens // page_size) + 1
        sizes = StateSizes(2, self._pages, page_size, tokens, model.dtype)
        self._states = sizes.shapes(config, kernels, None).allocate(config).kv
        self._logits = jax.jit(partial(_logits_of, kernels))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The logits of each position, float32 [len(ids), V]."""
        padded = np.zeros(self._tokens, np.int32)
        padded[: len(ids)] = ids
        # Two sequences, since with as many rows as sequences it would be a decode-only step.
        shape = (2, self._tokens, self._pages)
        builder = MetaBuilder.empty(shape, self._pages, self._page_size, np.random.default_rng(0))
        builder.add(len(ids), len(ids))
        logits = self._logits(self._model, padded, self._states, builder.meta(0))
        return np.asarray(logits)[: len(ids)]


def _logits_of(
    kernels: Kernels,
    model: Model,
    tokens: jax.Array,
    states: list[Any],
    meta: AttentionMeta,
) -> jax.Array:
    """The logits, float32 [T, V]."""
    hidden, _ = model(tokens, states, meta, kernels)
    return model.logits(hidden, kernels)


@dataclass(frozen=True, slots=True)
class _RepeatedStep:
    """A made-up step with packed inputs, which runs again and again."""

    _runner: Runner
    _plan: Plan
    _packed: Any
    _greedy_only: bool

    @property
    def work(self) -> StepWork:
        return self._plan.work

    def run(self) -> Any:
        """Start its program without waiting. -> the outputs on the device."""
        return self._runner.run(self._plan.bucket, self._greedy_only, self._packed)

    def check(self) -> None:
        """Run it once. Raises RuntimeError if its logits are not finite."""
        launched = LaunchedStep(self._plan, 0, self.run()[0])
        if min(self._runner.fetch(launched).tokens) < 0:
            raise RuntimeError("the step's logits are not finite")


@dataclass(slots=True)
class RandomEngine:
    """The runner of a random model, with the bytes that its steps move, and its core.

    Bytes of a step: every weight except the embedding table once (a tied table counts once, as the
    head), the looked-up rows of the table, each sequence's keys and values once, and the step's own
    ones written once.
    """

    config: ModelConfig
    weight_bytes: int  # read in every step
    embed_bytes: int  # of one token's embedding
    row_bytes: int  # of one token's keys and values in all layers
    positions: int  # KV positions of the pool
    page_size: int
    context: int  # most tokens of a sequence
    _runner: Runner

    @classmethod
    def of(
        cls, random_model: RandomModel, buckets: Buckets, *, page_size: int, context: int
    ) -> RandomEngine:
        """A runner without compiled programs, with as many pages as fit, at most as many as the
        buckets need. Raises ConfigError if the weights leave no room for pages.
        """
        gc.collect()  # reference cycles may keep the previous runner's arrays alive
        config, kernels = random_model.config, random_model.kernels
        model = random_model.make()
        model.pack(kernels)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
        row_bytes = sum(config.kv_numbers) * random_model.itemsize
        pages = _pages_for(buckets.seats, page_size, row_bytes, held)
        sizes = StateSizes(buckets.seats, pages, page_size, context, random_model.dtype)
        programs = StepPrograms(model, buckets, kernels, sizes, greedy_only_mixed=True)
        runner = Runner(programs, end_ids=())
        runner.state = programs.shapes.allocate(programs.config)
        runner.state.kv = [
            _at_random(layer_state, layer) for layer, layer_state in enumerate(runner.state.kv)
        ]
        return cls(
            config=config,
            weight_bytes=held - _unread_bytes(random_model),
            embed_bytes=config.hidden_size * random_model.itemsize,
            row_bytes=row_bytes,
            positions=(pages - 1) * page_size,
            page_size=page_size,
            context=context,
            _runner=runner,
        )

    def compile(self, buckets: Sequence[Bucket]) -> None:
        """Compile the greedy step of these buckets in parallel."""
        programs = self._runner.programs
        kinds = [(bucket, programs.runs_greedy_only(bucket, True)) for bucket in buckets]
        programs.compile_steps(kinds, threads=_THREADS)

    def floor_bytes(self, work: StepWork) -> float:
        """Least bytes of a step."""
        rows = work.decode + work.prompt
        return self.weight_bytes + rows * self.embed_bytes + (work.keys + rows) * self.row_bytes

    def step(self, case: StepCase) -> _RepeatedStep:
        """A made-up step, whose bucket is compiled."""
        plan = case.plan(0, self.page_size)
        greedy_only = self._runner.programs.runs_greedy_only(case.bucket, True)
        return _RepeatedStep(self._runner, plan, self._runner.batch(plan).packed, greedy_only)

    def new_core(self) -> EngineCore:
        """A core for greedy requests, with all buckets compiled."""
        buckets = self._runner.programs.buckets
        self.compile(buckets.all())
        self._runner.warm_up()
        shape = EngineShape(
            SchedulerLimits(max_seats=buckets.seats, context_length=self.context),
            buckets,
            self.positions // self.page_size + 1,
            self.page_size,
            checkpoints=None if self.config.recurrent is None else 0,
        )
        return EngineCore(shape.new_scheduler(), self._runner, Ledger())


def _at_random(layer_state: Any, layer: int) -> Any:
    """A pool of random numbers instead of zeros, with which a device needs less power and is
    faster; recurrent state stays unchanged.
    """
    if not isinstance(layer_state, jax.Array):
        return layer_state
    shape, dtype = layer_state.shape, layer_state.dtype
    layer_state.delete()
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(jax.random.key(layer), shape, -127, 128, dtype)
    return jax.random.normal(jax.random.key(layer), shape, jnp.bfloat16).astype(dtype)


def _unread_bytes(model: RandomModel) -> int:
    """Bytes of weights that a step does not read: the embedding table, unless it is the head."""
    config = model.config
    if config.tie_embeddings:
        return 0
    return config.vocab_size * config.hidden_size * model.itemsize


def _pages_for(seats: int, page_size: int, row_bytes: int, held: int) -> int:
    """Pages that fit. held: bytes of the weights. Raises ConfigError if they leave no room."""
    positions = _MOST_POSITIONS + seats * page_size
    pages = min(positions, _free_positions(row_bytes)) // page_size
    if pages < 2:
        raise ConfigError(f"{held / _GIB:.1f} GiB of weights leave no room for keys and values")
    return pages


def _free_positions(row_bytes: int) -> int:
    """KV positions that fit into the device's free memory."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return _FEW_POSITIONS
    return int((1 - _SPARE) * stats["bytes_limit"] - stats["bytes_in_use"]) // row_bytes

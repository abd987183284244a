"""The device side of a step: executables compiled ahead, donated state, and tokens that come back one step later.

One executable per bucket and kind (all-greedy, or with the sampler): embed -> layers (write KV page, attend) -> rows
that need logits -> sample -> last_token of each seat. The sampled token never waits for the host: the next step reads
it from `last_token` by seat.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jitney.engine.batch import BatchBuilder, Layout
from jitney.engine.buckets import Bucket, Buckets
from jitney.engine.models.llama import Llama
from jitney.engine.plan import Plan, StepResult
from jitney.engine.sampling import Sampled, SeatState, empty_state, greedy, sample, seat_row
from jitney.engine.types import TokenLogprobs
from jitney.kernels.interface import AttentionMeta, Kernels

Progress = Callable[[int, int, str], None]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(slots=True)
class Batch:
    """A plan and its upload, ready to launch."""

    plan: Plan
    packed: np.ndarray


@dataclass(slots=True)
class Ticket:
    """A launched step; `sampled` fills in on the device."""

    plan: Plan
    sampled: Any  # int32 [S] for an all-greedy step, else Sampled


@dataclass
class DeviceState:
    """Everything a step replaces: KV pools, one [N, page, 2K, D] a layer; last_token int32 [M]; per-seat sampling."""

    kv: list[jax.Array]
    last_token: jax.Array
    seats: SeatState


def meta_of(inputs: Any) -> AttentionMeta:
    """The attention's part of a step's upload."""
    return AttentionMeta(kv_lens=inputs.kv_lens, cu_q=inputs.cu_q, page_table=inputs.page_table,
                         write_rows=inputs.write_rows, positions=inputs.positions, counts=inputs.counts)


@dataclass
class Program:
    """The step as a pure function of flat weights, for any bucket; `graph` and `kernels` are its only constants."""

    graph: Any
    treedef: Any
    kernels: Kernels

    def logits(self, leaves: list[jax.Array], kv: list[jax.Array], last_token: jax.Array,
               inputs: Any) -> tuple[jax.Array, list[jax.Array]]:
        """-> (float32 [S, V] of the rows that need logits, kv)."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
        known = inputs.tokens >= 0
        tokens = jnp.where(known, inputs.tokens, jnp.maximum(last_token[inputs.token_seats], 0))
        hidden, kv = model(tokens, kv, meta_of(inputs), self.kernels)
        return model.logits(hidden[inputs.logit_rows], self.kernels), kv

    def plain(self, layout: Layout, leaves, kv, last_token, packed):
        """The all-greedy step: no sampler in it."""
        inputs = layout.split(packed)
        logits, kv = self.logits(leaves, kv, last_token, inputs)
        tokens = greedy(logits)
        return kv, last_token.at[inputs.seats].set(tokens, mode="drop"), tokens

    def full(self, layout: Layout, leaves, kv, last_token, seats: SeatState, packed):
        """The step with every sampling option."""
        inputs = layout.split(packed)
        logits, kv = self.logits(leaves, kv, last_token, inputs)
        floats = jax.lax.bitcast_convert_type(inputs.floats, jnp.float32)
        sampled, seats = sample(logits, floats, inputs.ints, inputs.seats, seats)
        return kv, last_token.at[inputs.seats].set(sampled.tokens, mode="drop"), seats, sampled


def board_seat(state: SeatState, seat: jax.Array, *row: jax.Array) -> SeatState:
    """Give a seat the sampling state of the sequence that boards it."""
    return SeatState(*(column.at[seat].set(new) for column, new in zip(state, row, strict=True)))


class Runner:
    """Runs plans on the default device. `compile()` must come first; after it nothing compiles any more."""

    def __init__(self, model: Llama, buckets: Buckets, kernels: Kernels, *, n_pages: int, page_size: int,
                 context_length: int, kv_dtype: Any, end_ids: tuple[int, ...]):
        config = model.config
        self.config, self.buckets, self.end_ids = config, buckets, end_ids
        graph, weights = nnx.split(model)
        self.leaves, treedef = jax.tree.flatten(weights)
        self.program = Program(graph, treedef, kernels)
        pages_per_seat = round_up(-(-context_length // page_size), 16)  # 16: chunks of kernels never run off the table
        self.builder = BatchBuilder(seats=buckets.seats, pages_per_seat=pages_per_seat, page_size=page_size,
                                    pool_rows=n_pages * page_size)
        shape = (n_pages, page_size, 2 * config.n_kv_heads, config.head_dim)
        self.state = DeviceState(kv=[jnp.zeros(shape, kv_dtype) for _ in range(config.n_layers)],
                                 last_token=jnp.zeros((buckets.seats,), jnp.int32),
                                 seats=empty_state(buckets.seats, config.vocab_size))
        self.executables: dict[tuple[Bucket, bool], Any] = {}
        self.board: Any = None
        self.compiles = 0
        self.compile_seconds = 0.0

    def compile(self, progress: Progress = lambda done, total, what: None, threads: int = 2) -> None:
        """Lower and compile every executable, the largest first; then run each once and start counting compiles."""
        started = time.perf_counter()
        keys = [(bucket, plain) for bucket in reversed(self.buckets.all()) for plain in (True, False)
                if self.is_plain(bucket, plain) == plain]
        done = 0
        progress(0, len(keys), "")
        with no_collection(), ThreadPoolExecutor(threads) as pool:  # XLA compiles outside the interpreter lock
            jobs = [(key, pool.submit(self.lower(*key).compile)) for key in keys]
            for key, job in jobs:
                self.executables[key] = job.result()
                done += 1
                progress(done, len(keys), f"{key[0]}{'' if key[1] else ' sampling'}")
        self.compile_board()
        self.warm_up()
        self.compile_seconds = time.perf_counter() - started
        jax.monitoring.register_event_duration_secs_listener(self.count_compile)

    def largest_temp_bytes(self) -> int:
        """Temporaries of the largest executable, for sizing the pool; they do not depend on the pool's size."""
        bucket = self.buckets.mixed[-1]
        return self.lower(bucket, False).compile().memory_analysis().temp_size_in_bytes

    def is_plain(self, bucket: Bucket, plain: bool) -> bool:
        """Whether an all-greedy step of this bucket has an executable of its own.

        Mixed buckets have not: skipping the sampler's parts on the device costs them nothing measurable, and an
        executable costs seconds of start-up and 95 MB of host memory (30 layers on a CPU).
        """
        return plain and bucket.decode_only

    def lower(self, bucket: Bucket, plain: bool) -> Any:
        """The lowered step of one bucket; every state array is donated, so addresses stay stable."""
        layout = self.builder.layout(bucket, plain)
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        state = self.state
        if plain:
            step = jax.jit(partial(self.program.plain, layout), donate_argnums=(1, 2))
            return step.lower(self.leaves, state.kv, state.last_token, packed)
        step = jax.jit(partial(self.program.full, layout), donate_argnums=(1, 2, 3))
        return step.lower(self.leaves, state.kv, state.last_token, state.seats, packed)

    def compile_board(self) -> None:
        """The small program that installs a boarding sequence's sampling state."""
        row = [jax.ShapeDtypeStruct(column.shape[1:], column.dtype) for column in self.state.seats]
        seat = jax.ShapeDtypeStruct((), jnp.int32)
        self.board = jax.jit(board_seat, donate_argnums=0).lower(self.state.seats, seat, *row).compile()

    def warm_up(self) -> None:
        """Run every executable on an empty batch: first calls set up thread pools and buffers."""
        for bucket, plain in self.executables:
            layout = self.builder.layout(bucket, plain)
            packed = np.zeros(layout.size, np.int32)
            inputs = layout.split(packed)
            inputs.write_rows[:] = self.builder.pool_rows
            inputs.seats[:] = self.builder.seats
            jax.block_until_ready(self.run(bucket, plain, packed))

    def count_compile(self, event: str, duration_secs: float, **_: Any) -> None:
        """jax.monitoring listener: a compilation after ready is a bug worth showing."""
        if event == COMPILE_EVENT:
            self.compiles += 1

    def batch(self, plan: Plan) -> Batch:
        """Pack the plan; numpy only."""
        return Batch(plan, self.builder.build(plan, self.is_plain(plan.bucket, plan.plain)))

    def launch(self, batch: Batch) -> Ticket:
        """Dispatch one step and start the copy of its tokens to the host; returns before it is done."""
        plan = batch.plan
        for seq in plan.boarded:
            params = seq.request.sampling
            if params.penalised or params.biased:
                row = seat_row(params, seq.tokens, seq.n_prompt, self.config.vocab_size, self.end_ids)
                self.state.seats = self.board(self.state.seats, np.int32(seq.seat), *row)
        sampled = self.run(plan.bucket, self.is_plain(plan.bucket, plan.plain), batch.packed)
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()
        return Ticket(plan, sampled)

    def run(self, bucket: Bucket, plain: bool, packed: np.ndarray) -> Any:
        """One call of an executable; replaces the donated state."""
        state, executable = self.state, self.executables[bucket, plain]
        if plain:
            state.kv, state.last_token, sampled = executable(self.leaves, state.kv, state.last_token, packed)
        else:
            state.kv, state.last_token, state.seats, sampled = executable(
                self.leaves, state.kv, state.last_token, state.seats, packed)
        return sampled

    def fetch(self, ticket: Ticket) -> StepResult:
        """Wait for a step's tokens; one entry per logit row in plan order."""
        rows = sum(chunk.logit_rows for chunk in ticket.plan.chunks)
        if not isinstance(ticket.sampled, Sampled):
            return StepResult(tokens=np.asarray(ticket.sampled)[:rows].tolist(), logprobs=None)
        tokens = np.asarray(ticket.sampled.tokens)[:rows].tolist()
        if not any(chunk.seq.request.sampling.scored for chunk in ticket.plan.chunks):
            return StepResult(tokens=tokens, logprobs=None)
        columns = (np.asarray(column)[:rows].tolist() for column in ticket.sampled[1:])
        return StepResult(tokens=tokens, logprobs=[TokenLogprobs(*entry) for entry in zip(*columns, strict=True)])


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: tracing makes millions of small objects and hardly a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple

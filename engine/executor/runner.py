"""The device side of a step: executables compiled ahead, donated state, and tokens that come back
one step later.

One executable per bucket and kind (all-greedy, or with the sampler): embed -> layers (write KV
page, attend) -> rows that need logits -> sample -> last_token of each seat. The sampled token never
waits for the host: the next step reads it from `last_token` by seat.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jitney.engine.executor.program import (
    DeviceState,
    Program,
    StateSizes,
    StepOutput,
    allocate,
    compile_step,
    shape_on,
)
from jitney.engine.executor.sampling import Sampled, SeatState, seat_row
from jitney.engine.models.llama import Llama
from jitney.engine.models.sharding import WHOLE
from jitney.engine.scheduler.buckets import Bucket, Buckets
from jitney.engine.scheduler.plan import Plan, StepResult
from jitney.engine.types import TokenLogprobs
from jitney.kernels.interface import Kernels

Progress = Callable[[int, int, str], None]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Batch(msgspec.Struct):
    """A plan and its upload, ready to launch."""

    plan: Plan
    packed: np.ndarray


class Ticket(msgspec.Struct):
    """A launched step; `sampled` fills in on the device."""

    plan: Plan
    output: StepOutput
    scored: int  # rows that bring prompt log-probabilities


def board_seat(state: SeatState, seat: jax.Array, *row: jax.Array) -> SeatState:
    """Give a seat the sampling state of the sequence that boards it."""
    return SeatState(*(column.at[seat].set(new) for column, new in zip(state, row, strict=True)))


class Runner:
    """Runs plans on the default device, or on those of a mesh. `compile()` must come first; after
    it nothing compiles any more.

    model: with its weights; on a mesh, each in shares as `sharding.Shares` places them, its
    configuration that of one device. plain_mixed: see `is_plain`.
    """

    def __init__(
        self,
        model: Llama,
        buckets: Buckets,
        kernels: Kernels,
        *,
        n_pages: int,
        page_size: int,
        context_length: int,
        kv_dtype: Any,
        end_ids: tuple[int, ...],
        mesh: Mesh | None = None,
        plain_mixed: bool = False,
    ):
        self.config, self.buckets, self.end_ids, self.plain_mixed = (
            model.config,
            buckets,
            end_ids,
            plain_mixed,
        )
        graph, weights = nnx.split(model)
        self.leaves, treedef = jax.tree.flatten(weights)
        self.program = Program(graph, treedef, kernels, mesh)
        sizes = StateSizes(buckets.seats, n_pages, page_size, context_length, kv_dtype)
        self.n_pages, self.builder = n_pages, sizes.builder()
        self.shapes = sizes.shapes(model.config, kernels, mesh)
        self.state: DeviceState = (
            self.shapes
        )  # until `compile` allocates it: compiling needs no arrays
        self.executables: dict[tuple[Bucket, bool], Any] = {}
        self.board: Any = None
        self.compiles = 0
        self.compile_seconds = 0.0

    def compile(
        self, progress: Progress = lambda done, total, what: None, threads: int = 2
    ) -> None:
        """Lower and compile every executable, the largest first, and allocate the state; then run
        each once and start counting compiles."""
        started = time.perf_counter()
        keys = [
            (bucket, plain)
            for bucket in reversed(self.buckets.all())
            for plain in (True, False)
            if self.is_plain(bucket, plain) == plain
        ]
        done = 0
        progress(0, len(keys), "")
        with (
            no_collection(),
            ThreadPoolExecutor(threads) as pool,
        ):  # XLA compiles outside the interpreter lock
            jobs = [
                (
                    key,
                    None
                    if key in self.executables
                    else pool.submit(compile_step, self.lower(*key)),
                )
                for key in keys
            ]
            for key, job in jobs:
                if job is not None:
                    self.executables[key] = job.result()
                done += 1
                progress(done, len(keys), f"{key[0]}{'' if key[1] else ' sampling'}")
        self.compile_board()
        self.state = allocate(self.shapes, self.config)
        self.warm_up()
        self.compile_seconds += time.perf_counter() - started
        jax.monitoring.register_event_duration_secs_listener(self.count_compile)

    def largest_temp_bytes(self) -> int:
        """Temporaries of the largest executable on each device, for sizing the pool, whose size
        they do not depend on.

        `compile` will not compile that executable again.
        """
        started, key = time.perf_counter(), (self.buckets.mixed[-1], False)
        self.executables[key] = compile_step(self.lower(*key))
        self.compile_seconds += time.perf_counter() - started
        return self.executables[key].memory_analysis().temp_size_in_bytes

    def is_plain(self, bucket: Bucket, plain: bool) -> bool:
        """Whether an all-greedy step of this bucket has an executable of its own.

        Mixed buckets have one only with `plain_mixed`. On a CPU, skipping the sampler's parts costs
        them nothing measurable, and an executable costs seconds of start-up and 95 MB of host
        memory (30 layers). On a GPU the sampler's conditions need a driver that runs them inside a
        CUDA graph, else the host waits for each.
        """
        return plain and (bucket.decode_only or self.plain_mixed)

    def lower(self, bucket: Bucket, plain: bool) -> Any:
        """The lowered step of one bucket."""
        return self.program.lower(self.builder.layout(bucket, plain), self.leaves, self.shapes)

    def compile_board(self) -> None:
        """The small program that installs a boarding sequence's sampling state."""
        mesh, seats = self.program.mesh, self.shapes.seats
        row = [shape_on(mesh, column.shape[1:], column.dtype, WHOLE) for column in seats]
        board = jax.jit(
            board_seat,
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda column: column.sharding, seats),
        )
        self.board = board.lower(seats, shape_on(mesh, (), jnp.int32, WHOLE), *row).compile()

    def warm_up(self) -> None:
        """Run every executable on an empty batch: first calls set up thread pools and buffers."""
        for bucket, plain in self.executables:
            packed = self.builder.empty(bucket, plain)
            jax.block_until_ready(self.run(bucket, plain, packed))

    def count_compile(self, event: str, duration_secs: float, **_: Any) -> None:
        """jax.monitoring listener: a compilation after ready is a bug worth showing."""
        if event == COMPILE_EVENT:
            self.compiles += 1

    def batch(self, plan: Plan) -> Batch:
        """Pack the plan; numpy only."""
        return Batch(plan, self.builder.build(plan, self.is_plain(plan.bucket, plan.plain)))

    def launch(self, batch: Batch) -> Ticket:
        """Dispatch one step and start the copy of its tokens to the host; returns before it is
        done.
        """
        plan = batch.plan
        for seq in plan.boarded:
            params = seq.request.sampling
            if params.penalised or params.biased:
                row = seat_row(
                    params, seq.tokens, seq.n_prompt, self.config.vocab_size, self.end_ids
                )
                self.state.seats = self.board(self.state.seats, np.int32(seq.seat), *row)
        output = self.run(plan.bucket, self.is_plain(plan.bucket, plan.plain), batch.packed)
        scored = plan.scored_rows
        for array in jax.tree.leaves(output if scored else output[:2]):
            array.copy_to_host_async()
        return Ticket(plan, output, scored)

    def run(self, bucket: Bucket, plain: bool, packed: np.ndarray) -> StepOutput:
        """One call of an executable; replaces the donated state."""
        state, executable = self.state, self.executables[bucket, plain]
        if plain:
            state.kv, state.last_token, output = executable(
                self.leaves, state.kv, state.last_token, packed
            )
        else:
            state.kv, state.last_token, state.seats, output = executable(
                self.leaves, state.kv, state.last_token, state.seats, packed
            )
        return output

    def fetch(self, ticket: Ticket) -> StepResult:
        """Wait for what a step brought."""
        plan, (sampled, broken, scores) = ticket.plan, ticket.output
        rows = plan.logit_rows
        if isinstance(sampled, Sampled):
            result = StepResult(tokens=np.asarray(sampled.tokens)[:rows].tolist())
            if any([chunk.sample and chunk.seq.logprobs is not None for chunk in plan.chunks]):
                result.logprobs = entries(sampled[1:], rows)
        else:
            result = StepResult(tokens=np.asarray(sampled)[:rows].tolist())
        if broken is not None:
            found = np.asarray(broken)[: len(plan.chunks)]
            if found.any():
                result.broken = found.tolist()
        if ticket.scored:
            result.prompt_logprobs = entries(scores, ticket.scored)
        return result


def entries(columns: Iterable[jax.Array], rows: int) -> list[TokenLogprobs]:
    """The first `rows` entries of log-probabilities, most likely ids and theirs, each an array [R,
    ...].
    """
    lists = [np.asarray(column)[:rows].tolist() for column in columns]
    return [TokenLogprobs(*entry) for entry in zip(*lists, strict=True)]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: tracing makes millions of small objects and hardly a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

"""The device side of a step: executables compiled ahead, donated state, late tokens.

One executable per bucket and kind (all-greedy, or with the sampler); on a CPU made of programs that
buckets share (`step_parts`). The next step reads sampled tokens by seat (`seat_tokens`), so they
never wait for the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jitney.engine.common.engine_info import BucketCompilation
from jitney.engine.common.outputs import TokenLogprobs
from jitney.engine.common.requests import Pooling
from jitney.engine.core.executor.choices import Choices
from jitney.engine.core.executor.compilations import compilations
from jitney.engine.core.executor.compiler_messages import MEANINGLESS, left_out
from jitney.engine.core.executor.draft_model import DraftModel, DraftPrograms, DraftUpload
from jitney.engine.core.executor.inputs import MaskedRows
from jitney.engine.core.executor.kept_programs import KeptPrograms
from jitney.engine.core.executor.program import (
    Chosen,
    DeviceState,
    Program,
    StateSizes,
    StepCall,
    StepOutput,
)
from jitney.engine.core.executor.program_memory import ProgramsMemory, StepMemory, programs_of
from jitney.engine.core.executor.sampling import Sampled, SeatState
from jitney.engine.core.executor.seat_tokens import LookedUpTokens
from jitney.engine.core.executor.step_parts import StepParts
from jitney.engine.core.executor.threads import own_processors
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.sharding import own_mesh
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import MaskedRow, Plan, StepResult
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.weights.checkpoints.names import Path as ModelPath
from jitney.kernels.interface import Kernels

_Report = Callable[[int, int, str], None]
#: Threads that compile, at least and at most: XLA does it outside the interpreter lock, and needs
#: memory for each.
_COMPILERS, _MOST_COMPILERS = 2, 16


class _Batch(msgspec.Struct):
    """A plan and its upload, ready to launch."""

    plan: Plan
    #: For the executable without a sampler.
    greedy_only: bool
    #: int32, the whole upload (`engine.core.executor.inputs`).
    packed: np.ndarray
    #: What a draft model writes before the step; None: nothing.
    drafting: DraftUpload | None = None


class LaunchedStep(msgspec.Struct):
    """A step on the device; `output` fills in there."""

    plan: Plan
    output: StepOutput
    scored: int  #: rows that bring prompt log-probabilities
    #: float32 [S, E] on the device, see `Program.pool`; None where no vector is wanted.
    pooled: Array | None = None
    #: float32 [S, V] on the device, until `choose`; None where they are not needed.
    logits: Array | None = None
    #: int32 [M, K] on the device, those that programs beside the step wrote for it; None where
    #: they are not needed.
    drafts: Array | None = None
    #: What was chosen behind the step, and of each row of it that counts: (its number there, its
    #: number among the logit rows).
    chosen: Chosen | None = None
    chosen_rows: list[tuple[int, int]] = []


def _copy_to_host(output: object) -> None:
    """Start the copies of a step's results."""
    for array in jax.tree.leaves(output):
        array.copy_to_host_async()


def _copy_sampled(sampled: Array | Sampled, *, logprobs: bool) -> None:
    """Start the copies of `StepOutput.sampled`; without log-probabilities only of its tokens."""
    if isinstance(sampled, Sampled) and not logprobs:
        sampled = sampled.tokens
    _copy_to_host(sampled)


def _board_seat(state: SeatState, seat: Array, *row: Array) -> SeatState:
    columns = zip(state, row, strict=True)
    return SeatState(*[column.at[seat].set(new) for column, new in columns])


def _path_of(keys: Iterable[Any]) -> ModelPath:
    """From the keys that jax has for a leaf of a model's state."""
    return tuple(key.key for key in keys if isinstance(key, jax.tree_util.DictKey))


def _report_nothing(done: int, total: int, what: str) -> None:
    pass


class Runner:
    """Runs plans on the default device or a mesh; nothing compiles after `compile()`.

    model: with its weights, on a mesh in shares, and one device's configuration. sizes: of as many
    seats as the buckets. end_ids: tokens that end a sequence. greedy_only_mixed: see
    `runs_greedy_only`. in_parts: run each step as several programs (`StepParts`). pooling: how
    vectors of prompts are made; None: none are. draft_model: what drafts where `sizes.drafting` has
    no drafter. keep: from what programs are made of to where they are kept (`KeptPrograms.of`);
    None: nowhere.
    """

    def __init__(
        self,
        model: Model,
        buckets: Buckets,
        kernels: Kernels,
        sizes: StateSizes,
        *,
        end_ids: tuple[int, ...],
        mesh: Mesh | None = None,
        greedy_only_mixed: bool = False,
        in_parts: bool = False,
        pooling: Pooling | None = None,
        draft_model: DraftModel | None = None,
        keep: Callable[[Iterable[object]], KeptPrograms] | None = None,
    ):
        graph, weights = nnx.split(model)
        self.leaves, treedef = jax.tree.flatten(weights)
        flat, _ = jax.tree_util.tree_flatten_with_path(weights)
        #: By path in the model, which of `leaves` a weight is.
        self._numbers = {_path_of(keys): number for number, (keys, _) in enumerate(flat)}
        encoder = model.config.encoder is not None
        self.program = Program(graph, treedef, kernels, mesh, sizes.logprobs, pooling, encoder)
        self._hidden_dtype = model.hidden_dtype(kernels)
        #: By mixed bucket, what makes vectors of a step's hidden states.
        self.pools: dict[Bucket, jax.stages.Compiled] = {}
        self.config = model.config
        self.buckets = buckets
        self.end_ids = end_ids
        self.greedy_only_mixed = greedy_only_mixed
        #: Of each cache group with page tables of its own.
        self.group_pages = sizes.group_pages
        #: Slots of recurrent layers' state, beside one for each seat.
        self.checkpoints = sizes.checkpoints
        self._sizes = sizes
        self.builder = sizes.builder(model.config)
        self.shapes = sizes.shapes(model.config, kernels, mesh)
        self.draft_model = draft_model
        self._drafts: DraftPrograms | None = None
        if draft_model is not None:
            self.program = replace(self.program, leaves_normed=draft_model.reads_normed)
            self._drafts = draft_model.programs(sizes, self.program, self.leaves)
            self.shapes = replace(self.shapes, draft_kv=self._drafts.pools)
        if keep is not None:
            self.program = replace(
                self.program, kept=keep(self._facts(greedy_only_mixed, in_parts))
            )
        own = own_mesh(mesh)
        #: What runs beside the step, and the state that it has: on the devices of this engine,
        #: where several share experts.
        self.own_program = replace(self.program, mesh=own)
        self.own_shapes = sizes.shapes(model.config, kernels, own)
        #: Shapes until `compile` allocates it: compiling needs no arrays.
        self.state: DeviceState = self.shapes
        #: What runs a step, by (bucket, greedy_only).
        self.executables: dict[tuple[Bucket, bool], StepCall] = {}
        self._parts: StepParts | None = None
        if in_parts:
            counts = {bucket.seats for bucket in buckets.decode}
            # More rows, all of them of one step's drafts, are in no step with prompts.
            row_counts = [count for count in counts if count <= sizes.seats]
            self._parts = StepParts(
                self.program, self.leaves, self.shapes, self.builder.layout, row_counts
            )
        #: Those that choose tokens behind a step.
        self.choices = Choices(buckets.decode[-1].seats)
        #: The weights of all models; and while it sleeps those on the host, and where on the device
        #: each belongs.
        self._all_leaves = [self.leaves, *([] if self._drafts is None else [self._drafts.leaves])]
        self._asleep: list[list[tuple[np.ndarray, jax.sharding.Sharding]]] = []
        # Of the process, when `compile` was done.
        self._compiled_before = 0
        #: Seconds that compiling took.
        self.compile_seconds = 0.0
        #: Installs a boarding sequence's sampling state.
        self._board: jax.stages.Compiled
        #: The same of its tokens, in an engine that speculates.
        self._board_tokens: jax.stages.Compiled

    def _facts(self, *kinds: bool) -> Iterator[object]:
        """What the programs are made of; kinds: of steps."""
        yield from (kinds, self.program, self.program.compiler_options)
        # A function's repr names no module.
        kernels = vars(self.program.kernels).values()
        yield [(type(each).__module__, getattr(each, "__module__", "")) for each in kernels]
        yield [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in self.leaves]
        yield from (self.config, self.buckets, self._sizes, self.shapes, self._numbers)

    def compile(
        self, report: _Report = _report_nothing, meet: Callable[[], None] = lambda: None
    ) -> None:
        """Compile every executable, the largest first, allocate the state, and run each once.

        report: called with the executables done, all of them, and the last one's name. meet: called
        before anything runs; on several hosts it waits for the others.
        """
        started = time.perf_counter()
        steps, others = len(self._kinds()), 0
        if self._drafts is not None:
            others = self._drafts.count(self.buckets)
        self._compile_steps(lambda done, total, what: report(done, total + others, what))
        if self._drafts is not None:
            with _no_collection(), ThreadPoolExecutor(_COMPILERS) as pool:
                self._drafts.compile(
                    pool,
                    self.buckets,
                    self.builder.layout,
                    self.shapes,
                    lambda done, what: report(steps + done, steps + others, what),
                )
        self._compile_board()
        self._compile_pools()
        if not self.program.encoder:
            samplers = None if self._parts is None else self._parts.samplers
            self.choices.compile(self.own_program, self.buckets, self.own_shapes, samplers)
        self.state = self.shapes.allocate(self.config)
        meet()
        try:
            self.warm_up()
        except jax.errors.JaxRuntimeError:
            # The next core compiles its own, if that is what was wrong.
            if self.program.kept is not None:
                self.program.kept.discard()
            raise
        self.compile_seconds += time.perf_counter() - started
        self._compiled_before = compilations.count

    def _kinds(self) -> list[tuple[Bucket, bool]]:
        """(bucket, greedy_only) of every executable, the largest first."""
        if self.program.encoder:
            return [(bucket, True) for bucket in reversed(self.buckets.mixed)]
        kinds = []
        for bucket in reversed(self.buckets.all()):
            if self.runs_greedy_only(bucket, True):
                kinds.append((bucket, True))
            kinds.append((bucket, False))
        return kinds

    def _compile_steps(self, report: _Report) -> None:
        self.compile_steps(self._kinds(), report)

    def compile_steps(
        self,
        kinds: list[tuple[Bucket, bool]],
        report: _Report = _report_nothing,
        threads: int = 0,
    ) -> None:
        """Compile those of these (bucket, greedy_only) that are missing, `threads` at a time; 0: by
        the processors.
        """
        threads = threads or min(_MOST_COMPILERS, max(_COMPILERS, len(own_processors())))
        report(0, len(kinds), "")
        meaningless = MEANINGLESS.get(jax.default_backend())
        with left_out(meaningless), _no_collection(), ThreadPoolExecutor(threads) as pool:
            compiling = {}
            for kind in kinds:
                if kind not in self.executables:
                    compiling[kind] = self._start(pool, *kind)
            for done, kind in enumerate(kinds, start=1):
                if kind in compiling:
                    self.executables[kind] = compiling[kind]()
                report(done, len(kinds), _name_of(*kind))

    def _start(self, pool: Executor, bucket: Bucket, greedy_only: bool) -> Callable[[], StepCall]:
        """Begin to compile a step. -> what waits for that, and returns what runs it."""
        if self._parts is not None:
            return self._parts.start(pool, bucket, greedy_only)
        lowered = self.program.lowered(
            _name_of(bucket, greedy_only), lambda: self.lower(bucket, greedy_only)
        )
        return pool.submit(self.program.compile, lowered).result

    def largest_temp_bytes(self) -> int:
        """Temporaries of the largest step on each device, with the logits of two steps, for sizing
        the pool: of most rows, whose layers need most, or of most seats, whose sampler does.
        `compile` reuses these executables.
        """
        started = time.perf_counter()
        largest = self.buckets.mixed[-1]
        kinds = [(largest, False), (self.buckets.decode[-1], False)]
        self.compile_steps(kinds)
        self.compile_seconds += time.perf_counter() - started
        logits = 4 * largest.seats * self.shapes.seats.counts.shape[1]
        left = 0 if self._drafts is None else largest.tokens * self._drafts.row_bytes
        steps = [StepMemory.of(_name_of(*kind), self.executables[kind]) for kind in kinds]
        return max(step.temporaries for step in steps) + 2 * (logits + left)

    def program_memory(self) -> ProgramsMemory:
        """Memory of the compiled steps."""
        steps = [(_name_of(*kind), step) for kind, step in self.executables.items()]
        return ProgramsMemory.of(
            steps if self._drafts is None else [*steps, *self._drafts.programs]
        )

    def bucket_compilations(self) -> list[BucketCompilation]:
        """How long the programs of each bucket took to compile, with those that buckets share."""
        programs: dict[Bucket, set[jax.stages.Compiled]] = {}
        for (bucket, _), step in self.executables.items():
            programs.setdefault(bucket, set()).update(programs_of(step))
        return [compilations.of_bucket(str(bucket), of_it) for bucket, of_it in programs.items()]

    def runs_greedy_only(self, bucket: Bucket, greedy_only: bool) -> bool:
        """Whether an all-greedy step of this bucket has an executable of its own.

        Mixed buckets have one only with `greedy_only_mixed`: on a GPU, where old drivers run the
        sampler's conditions outside the CUDA graph and the host waits for each, and for steps in
        parts, where it is one more small program. Elsewhere it would cost seconds of start-up and
        save nothing measurable. An encoder has no sampler.
        """
        return self.program.encoder or (
            greedy_only and (bucket.decode_only or self.greedy_only_mixed)
        )

    def lower(self, bucket: Bucket, greedy_only: bool) -> jax.stages.Lowered:
        return self.program.lower(
            self.builder.layout(bucket, greedy_only), self.leaves, self.shapes
        )

    def _compile_board(self) -> None:
        """The small program that installs a boarding sequence's sampling state."""
        whole, seats = self.own_program.whole, self.own_shapes.seats
        row = [whole(column.shape[1:], column.dtype) for column in seats]
        board = jax.jit(
            _board_seat,
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda column: column.sharding, seats),
        )
        seat = whole((), jnp.int32)
        self._board = board.lower(seats, seat, *row).compile()
        tokens = self.own_shapes.seat_tokens
        if isinstance(tokens, LookedUpTokens):
            row = whole(tokens.recent.shape[1:], jnp.int32)
            placed = jax.tree.map(lambda column: column.sharding, tokens)
            board = jax.jit(LookedUpTokens.board, donate_argnums=0, out_shardings=placed)
            self._board_tokens = board.lower(tokens, seat, row).compile()

    def _compile_pools(self) -> None:
        """The programs of vectors, if the engine makes any: one for each bucket with prompts."""
        if self.program.pooling is None:
            return
        width, dtype = self.config.hidden_size, self._hidden_dtype
        for bucket in self.buckets.mixed:
            lowered = self.program.lower_pool(
                bucket, self.leaves, width, dtype, has_adapters=self._sizes.has_adapters
            )
            self.pools[bucket] = self.program.compile(lowered)

    def warm_up(self) -> None:
        """Run every program on an empty batch: first calls set up thread pools and buffers."""
        for bucket, greedy_only in self.executables:
            if self._parts is not None and greedy_only and not bucket.decode_only:
                continue  # its programs are those of the same bucket's sampling and of decode steps
            logits = self._run_empty(bucket, greedy_only)
            if logits is not None:
                self._warm_up_choices(logits)
        if self._drafts is not None:
            self._drafts.warm_up(self.buckets, self.builder, self.state)

    def _run_empty(self, bucket: Bucket, greedy_only: bool) -> Array | None:
        """A step without a row, to its end; its logits."""
        packed = self.builder.empty(bucket, greedy_only)
        output, logits = jax.block_until_ready(self.run(bucket, greedy_only, packed))
        if bucket in self.pools:
            jax.block_until_ready(self._run_pool(bucket, greedy_only, output, packed))
        return logits

    def _run_pool(
        self, bucket: Bucket, greedy_only: bool, output: StepOutput, packed: np.ndarray
    ) -> Array:
        """See `Program.pool`. packed: the step's upload."""
        own = self.builder.layout(bucket, greedy_only).slices["cu_q"]
        # Of its own: the upload is written anew while a device may still read this.
        return self.pools[bucket](self.leaves, output.hidden, packed[own].copy())

    def _warm_up_choices(self, logits: Array) -> None:
        rows = logits.shape[0]
        for size in self.choices.sizes_for(rows):
            numbers = None
            if size != rows:
                numbers = np.zeros(size, np.int32)
            no_rows = MaskedRows.empty(size, self.config.vocab_size, self._sizes.seats)
            jax.block_until_ready(self.run_choice(logits, numbers, no_rows))

    @property
    def compiles(self) -> int:
        """Compilations in this process since `compile`; one after ready is a bug worth showing."""
        return compilations.count - self._compiled_before

    def batch(self, plan: Plan) -> _Batch:
        """Pack the plan; numpy only."""
        return self.pack(plan, self.runs_greedy_only(plan.bucket, plan.greedy_only))

    def pack(self, plan: Plan, greedy_only: bool) -> _Batch:
        """As `batch`, for the executable without a sampler or for the other one."""
        batch = _Batch(plan, greedy_only, self.builder.build(plan, greedy_only))
        if self._drafts is not None:
            batch.drafting = self._drafts.pack(plan, self.buckets, self.builder)
        return batch

    def launch(self, batch: _Batch) -> LaunchedStep:
        """Dispatch one step and start to copy its tokens to the host."""
        plan = batch.plan
        for seq in plan.boarded:
            self._install(seq)
        if self._drafts is not None and batch.drafting is not None:
            self._drafts.draft(batch.drafting, self.state)
        drafts = None
        if self._drafts is not None and any(row.chunk.draft for row in plan.masked):
            drafts = self._drafts.drafted(self.state)
        output, logits = self.run(plan.bucket, batch.greedy_only, batch.packed)
        pooled = None
        if self.pools and plan.pools:
            pooled = self._run_pool(plan.bucket, batch.greedy_only, output, batch.packed)
        # Free the hidden states as soon as they are read.
        output = output._replace(hidden=None, for_head=None)
        step = LaunchedStep(plan, output, plan.scored_rows, pooled=pooled)
        _copy_to_host(pooled)
        if plan.masked:
            step.logits, step.drafts = logits, drafts
            _copy_to_host(drafts)
        _copy_sampled(output.sampled, logprobs=_wants_logprobs(plan))
        _copy_to_host((output.broken, output.scores if step.scored else None, output.guessed))
        return step

    def learn_drafts(self, launched: LaunchedStep) -> None:
        """Wait for the drafts of a step's sequences that are held to grammars, if programs beside
        it wrote them, and note them.
        """
        if launched.drafts is None:
            return
        drafts = np.asarray(launched.drafts).tolist()
        for row in launched.plan.masked:
            row.chunk.seq.drafts = _known(drafts[row.seat])

    def choose(self, launched: LaunchedStep, rows: list[MaskedRow], masks: np.ndarray) -> None:
        """Dispatch the program that chooses the tokens of these rows of the last step."""
        logits, launched.logits = launched.logits, None
        assert logits is not None  # the launch kept them, since the plan has masked rows
        computed = logits.shape[0]
        size = self.choices.size(len(rows))
        upload = MaskedRows.empty(size, self.config.vocab_size, self._sizes.seats)
        for number, (masked, mask) in enumerate(zip(rows, masks, strict=True)):
            # Where all rows of the step are taken, each stays where it is.
            place = masked.row if size == computed else number
            self.builder.put_masked(upload, place, masked, mask)
            launched.chosen_rows.append((place, masked.row))
        numbers = None
        if size != computed:
            numbers = np.zeros(size, np.int32)
            numbers[: len(rows)] = [masked.row for masked in rows]
        chosen = launched.chosen = self.run_choice(logits, numbers, upload)
        _copy_sampled(chosen.sampled, logprobs=_wants_logprobs(launched.plan))
        _copy_to_host((chosen.guessed, chosen.drafts))

    def run_choice(self, logits: Array, numbers: np.ndarray | None, upload: MaskedRows) -> Chosen:
        """Run a program that chooses behind a step; replaces the donated state. numbers: int32 [R],
        the step's logit rows; None: all.
        """
        if numbers is not None:
            logits = self.choices.picks[logits.shape[0], len(numbers)](logits, numbers)
        state, program = self.state, self.choices.programs[logits.shape[0]]
        state.seat_tokens, state.seats, chosen = program(
            logits, state.seat_tokens, state.seats, upload.heads, upload.masks
        )
        return chosen

    def _install(self, seq: Sequence) -> None:
        """Give the seat of a boarding sequence its counts and biases, if it needs any."""
        params = seq.request.sampling
        if params.penalised or params.biased:
            vocab = self.config.vocab_size
            row = SeatState.row(params, seq.tokens, seq.n_prompt, vocab, self.end_ids)
            self.board(seq.seat, row)
        if isinstance(self.state.seat_tokens, LookedUpTokens):
            row = self.state.seat_tokens.row_of(seq.tokens)
            self.state.seat_tokens = self._board_tokens(
                self.state.seat_tokens, np.int32(seq.seat), row
            )

    def board(self, seat: int, row: Iterable[np.ndarray]) -> None:
        """Give a seat its row of `SeatState`."""
        self.state.seats = self._board(self.state.seats, np.int32(seat), *row)

    def run(
        self, bucket: Bucket, greedy_only: bool, packed: np.ndarray
    ) -> tuple[StepOutput, Array | None]:
        """Run an executable; replaces the donated state -> (output, logits or None)."""
        state, executable = self.state, self.executables[bucket, greedy_only]
        if self._drafts is not None:
            self._drafts.read(bucket, packed, state)
        logits = None
        if greedy_only:
            state.kv, state.seat_tokens, output = executable(
                self.leaves, state.kv, state.seat_tokens, packed
            )
        else:
            state.kv, state.seat_tokens, state.seats, output, logits = executable(
                self.leaves, state.kv, state.seat_tokens, state.seats, packed
            )
        if self._drafts is not None:
            self._drafts.take(output.for_head)
        return output, logits

    def exchange(self, arrays: Mapping[ModelPath, Array]) -> None:
        """Steps that are launched from now on have these weights, by their path in the model; those
        that run keep the ones that they have. Each is as large, and laid out, as the one before.
        """
        for path, array in arrays.items():
            number = self._numbers[path]
            before = self.leaves[number]
            if (array.shape, array.dtype) != (before.shape, before.dtype):
                raise ValueError(f"{path} is {array.shape} {array.dtype}, not as it was")
            self.leaves[number] = array

    def restore(self, error: Exception) -> None:
        """Allocate the state anew after `error`: a failed step has consumed what was donated.
        Raises what the device raises if an empty step fails too.
        """
        self._free_state()  # before its room is needed again
        self._start_over()

    def _free_state(self) -> int:
        """Let go of the state; its bytes."""
        if self._drafts is not None:
            self._drafts.forget()
        freed = 0
        for array in jax.tree.leaves(self.state):
            if isinstance(array, Array) and not array.is_deleted():
                freed += array.nbytes
                array.delete()
        self.state = self.shapes
        return freed

    def _start_over(self) -> None:
        """The state as it was at the start, and a step without a row."""
        self.state = self.shapes.allocate(self.config)
        self.builder = self._sizes.builder(self.config)
        buckets = self.buckets.mixed if self.program.encoder else self.buckets.decode
        self._run_empty(buckets[0], True)

    def sleep(self, alive: Callable[[], None]) -> int:
        """Free the device's memory, until `wake`; nothing may be launched. The KV pool and what
        seats keep are let go; weights are copied to the host, unless the device is a CPU, whose
        memory they are in already. alive: called now and then. -> bytes freed.
        """
        freed = self._free_state()
        if jax.default_backend() == "cpu":
            _return_free_memory()
            return freed
        for leaves in self._all_leaves:
            asleep: list[tuple[np.ndarray, jax.sharding.Sharding]] = []
            self._asleep.append(asleep)
            for number, leaf in enumerate(leaves):
                asleep.append((np.asarray(leaf), leaf.sharding))
                freed += leaf.nbytes
                leaf.delete()
                leaves[number] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                alive()
        return freed

    def wake(self, alive: Callable[[], None]) -> None:
        """Take the memory again. Nothing is compiled for it. Raises what the device raises."""
        for leaves, asleep in zip(self._all_leaves, self._asleep, strict=False):
            for number, (weights, sharding) in enumerate(asleep):
                leaves[number] = jax.block_until_ready(jax.device_put(weights, sharding))
                alive()
        self._asleep = []
        self._start_over()

    def fetch(self, launched: LaunchedStep) -> StepResult:
        """Wait for what a step brought."""
        plan, (sampled, broken, scores, _, guessed, _) = launched.plan, launched.output
        result = _sampled(plan, sampled)
        if guessed is not None:
            result.guessed = np.asarray(guessed)[: plan.logit_rows].tolist()
        if launched.chosen is not None:
            _put_chosen(result, launched.chosen, launched.chosen_rows)
        if broken is not None:
            chunks_broken = np.asarray(broken)[: len(plan.chunks)]
            if chunks_broken.any():
                result.broken = chunks_broken.tolist()
        if launched.pooled is not None:
            result.pooled = np.asarray(launched.pooled)
        if scores is not None and launched.scored:
            result.prompt_logprobs = _entries(scores, launched.scored)
        return result


def _return_free_memory() -> None:
    """Give freed memory to the system; glibc keeps some blocks of up to 32 MB, such as pools."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _name_of(bucket: Bucket, greedy_only: bool) -> str:
    if greedy_only:
        return f"{bucket}"
    return f"{bucket} sampling"


def _sampled(plan: Plan, sampled: Array | Sampled) -> StepResult:
    """Results of the plan's logit rows from `StepOutput.sampled`."""
    rows = plan.logit_rows
    if not isinstance(sampled, Sampled):
        return StepResult(tokens=np.asarray(sampled)[:rows].tolist())
    result = StepResult(tokens=np.asarray(sampled.tokens)[:rows].tolist())
    if _wants_logprobs(plan):
        result.logprobs = _entries(sampled[1:], rows)
    return result


def _put_chosen(result: StepResult, chosen: Chosen, rows: list[tuple[int, int]]) -> None:
    """Put what was chosen behind a step in the place of what it chose itself."""
    tokens = np.asarray(chosen.sampled.tokens).tolist()
    for number, row in rows:
        result.tokens[row] = tokens[number]
    if result.logprobs is not None:
        entries = _entries(chosen.sampled[1:], len(tokens))
        for number, row in rows:
            result.logprobs[row] = entries[number]
    if result.guessed is not None and chosen.drafts is not None:
        guessed, drafts = np.asarray(chosen.guessed).tolist(), np.asarray(chosen.drafts).tolist()
        for number, row in rows:
            result.guessed[row] = guessed[number]
            result.drafts[row] = _known(drafts[number])


def _known(drafts: list[int]) -> list[int]:
    """Those before the first -1."""
    return [*takewhile(lambda token: token >= 0, drafts)]


def _wants_logprobs(plan: Plan) -> bool:
    return any([chunk.sample and chunk.seq.logprobs is not None for chunk in plan.chunks])


def _entries(columns: Iterable[Array], rows: int) -> list[TokenLogprobs]:
    """The first `rows` of log-probabilities, and of the most likely ids and theirs."""
    lists = [np.asarray(column)[:rows].tolist() for column in columns]
    return [TokenLogprobs(*entry) for entry in zip(*lists, strict=True)]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: tracing makes millions of small objects and hardly a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

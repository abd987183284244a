"""The compiled programs of an engine: all programs that its steps run, compiled before the first
step.

There is one executable per bucket and kind (all-greedy, or with the sampler); on a CPU it consists
of programs that buckets share (`step_parts`).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jitney.engine.common.engine_info import BucketCompilation
from jitney.engine.common.machine import own_processors
from jitney.engine.common.requests import Pooling
from jitney.engine.core.executor.choices import Choices
from jitney.engine.core.executor.compilations import compilations
from jitney.engine.core.executor.compiler_messages import MEANINGLESS, left_out
from jitney.engine.core.executor.kept_programs import KeptPrograms
from jitney.engine.core.executor.program import Program, StateSizes, StepCall
from jitney.engine.core.executor.program_memory import ProgramsMemory, StepMemory, programs_of
from jitney.engine.core.executor.sampling import SeatState
from jitney.engine.core.executor.seat_tokens import LookedUpTokens
from jitney.engine.core.executor.step_parts import PartedStep, StepParts
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.sharding import own_mesh
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.weights.checkpoints.names import Path as ModelPath
from jitney.kernels.interface import Kernels

if TYPE_CHECKING:
    from jitney.engine.core.executor.draft_model import DraftModel, DraftPrograms

#: Called with the number of executables done, their total, and the name of the last one done.
type Report = Callable[[int, int, str], None]
#: Least and most threads that compile: XLA compiles outside the interpreter lock, and needs memory
#: for each thread.
_COMPILERS, _MOST_COMPILERS = 2, 16


def report_nothing(done: int, total: int, what: str) -> None:
    """A `Report` that does nothing."""


class StepPrograms:
    """The programs of a model on the default device or a mesh, and the shapes of their arguments.

    model: the model with its weights (on a mesh, split into shares) and one device's configuration.
    sizes: with the same number of seats as the buckets. greedy_only_mixed: see `runs_greedy_only`.
    in_parts: run each step as several programs (`StepParts`). pooling: how prompts' vectors are
    made; None: no vectors. draft_model: drafts tokens if `sizes.drafting` has no drafter. keep:
    makes the store of programs from the facts that they depend on (`KeptPrograms.of`); None: no
    store.
    """

    def __init__(
        self,
        model: Model,
        buckets: Buckets,
        kernels: Kernels,
        sizes: StateSizes,
        *,
        mesh: Mesh | None = None,
        greedy_only_mixed: bool = False,
        in_parts: bool = False,
        pooling: Pooling | None = None,
        draft_model: DraftModel | None = None,
        keep: Callable[[Iterable[object]], KeptPrograms] | None = None,
    ):
        graph, weights = nnx.split(model)
        #: The weights as a flat list, the first argument of a step's program.
        self.leaves, treedef = jax.tree.flatten(weights)
        flat, _ = jax.tree_util.tree_flatten_with_path(weights)
        #: Index in `leaves` of each weight, by its path in the model.
        self.leaf_numbers = {_path_of(keys): number for number, (keys, _) in enumerate(flat)}
        encoder = model.config.encoder is not None
        self.step = Program(graph, treedef, kernels, mesh, sizes.logprobs, pooling, encoder)
        self._hidden_dtype = model.hidden_dtype(kernels)
        self.config = model.config
        self.buckets = buckets
        self.sizes = sizes
        self.greedy_only_mixed = greedy_only_mixed
        #: Packs the steps' uploads; no seat is taken yet.
        self.builder = sizes.builder(model.config)
        #: Shapes of the state that steps replace.
        self.shapes = sizes.shapes(model.config, kernels, mesh)
        self.draft_model = draft_model
        self.drafts: DraftPrograms | None = None
        if draft_model is not None:
            self._add_drafts(draft_model)
        if keep is not None:
            facts = self._facts(greedy_only_mixed, in_parts)
            self.step = replace(self.step, kept=keep(facts))
        own = own_mesh(mesh)
        #: Base of the programs that run outside the step, and the shapes of their state. Where
        #: several engines share experts, these use only the devices of this engine.
        self.beside = replace(self.step, mesh=own)
        self.beside_shapes = sizes.shapes(model.config, kernels, own)
        #: Callables that run a step, by (bucket, greedy_only).
        self.executables: dict[tuple[Bucket, bool], StepCall | PartedStep] = {}
        self.parts = self._step_parts() if in_parts else None
        #: Programs that choose tokens under masks after a step.
        self.choices = Choices(buckets.decode[-1].seats)
        #: Programs that make vectors from a step's hidden states, by mixed bucket.
        self.pools: dict[Bucket, jax.stages.Compiled] = {}
        #: Program that writes a boarding sequence's sampling state to its seat.
        self.board: jax.stages.Compiled
        #: Program that writes its recent tokens, in an engine that drafts by prompt lookup.
        self.board_tokens: jax.stages.Compiled
        #: Seconds of compiling and of the first run of all programs.
        self.compile_seconds = 0.0

    def _add_drafts(self, model: DraftModel) -> None:
        self.step = replace(self.step, leaves_normed=model.reads_normed)
        self.drafts = model.programs(self.sizes, self.step, self.leaves)
        self.shapes = replace(self.shapes, draft_kv=self.drafts.pools)

    def _step_parts(self) -> StepParts:
        counts = {bucket.seats for bucket in self.buckets.decode}
        # Larger decode buckets hold drafts; steps with prompts never have that many logit rows.
        row_counts = [count for count in counts if count <= self.sizes.seats]
        return StepParts(
            self.step,
            self.leaves,
            self.shapes,
            self.builder.layout,
            row_counts,
            self.buckets.segments,
        )

    def compile(self, report: Report = report_nothing) -> None:
        """Compile every executable, the largest first."""
        started = time.perf_counter()
        steps, others = len(self.kinds()), 0
        if self.drafts is not None:
            others = self.drafts.count(self.buckets)
        self._compile_all(lambda done, total, what: report(done, total + others, what))
        if self.drafts is not None:
            with _no_collection(), ThreadPoolExecutor(_COMPILERS) as pool:
                self.drafts.compile(
                    pool,
                    self.buckets,
                    self.builder.layout,
                    self.shapes,
                    lambda done, what: report(steps + done, steps + others, what),
                )
        self._compile_board()
        self._compile_pools()
        if not self.step.encoder:
            samplers = None if self.parts is None else self.parts.samplers
            self.choices.compile(self.beside, self.buckets, self.beside_shapes, samplers)
        self.compile_seconds += time.perf_counter() - started

    def _compile_all(self, report: Report) -> None:
        self.compile_steps(self.kinds(), report)

    def compile_steps(
        self,
        kinds: list[tuple[Bucket, bool]],
        report: Report = report_nothing,
        threads: int = 0,
    ) -> None:
        """Compile the missing executables of these (bucket, greedy_only), `threads` at a time; 0:
        as many as suit the number of processors.
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

    def _start(
        self, pool: Executor, bucket: Bucket, greedy_only: bool
    ) -> Callable[[], StepCall | PartedStep]:
        """Begin to compile a step. -> a function that waits and returns the compiled step."""
        if self.parts is not None:
            return self.parts.start(pool, bucket, greedy_only)
        lowered = self.step.lowered(
            _name_of(bucket, greedy_only), lambda: self.lower(bucket, greedy_only)
        )
        return pool.submit(self.step.compile, lowered).result

    def lower(self, bucket: Bucket, greedy_only: bool) -> jax.stages.Lowered:
        return self.step.lower(self.builder.layout(bucket, greedy_only), self.leaves, self.shapes)

    def _compile_board(self) -> None:
        """Compile the small programs that write a boarding sequence's state to its seat."""
        whole, seats = self.beside.whole, self.beside_shapes.seats
        row = [whole(column.shape[1:], column.dtype) for column in seats]
        board = jax.jit(
            _board_seat,
            donate_argnums=0,
            out_shardings=jax.tree.map(lambda column: column.sharding, seats),
        )
        seat = whole((), jnp.int32)
        self.board = board.lower(seats, seat, *row).compile()
        tokens = self.beside_shapes.seat_tokens
        if isinstance(tokens, LookedUpTokens):
            row = whole(tokens.recent.shape[1:], jnp.int32)
            placed = jax.tree.map(lambda column: column.sharding, tokens)
            board = jax.jit(LookedUpTokens.board, donate_argnums=0, out_shardings=placed)
            self.board_tokens = board.lower(tokens, seat, row).compile()

    def _compile_pools(self) -> None:
        """Compile the programs that make vectors of prompts, one for each mixed bucket, if the
        engine pools.
        """
        if self.step.pooling is None:
            return
        width, dtype = self.config.hidden_size, self._hidden_dtype
        for bucket in self.buckets.mixed:
            lowered = self.step.lower_pool(
                bucket, self.leaves, width, dtype, has_adapters=self.sizes.has_adapters
            )
            self.pools[bucket] = self.step.compile(lowered)

    def kinds(self) -> list[tuple[Bucket, bool]]:
        """(bucket, greedy_only) of every executable, the largest first."""
        if self.step.encoder:
            return [(bucket, True) for bucket in reversed(self.buckets.mixed)]
        kinds = []
        for bucket in reversed(self.buckets.all()):
            if self.runs_greedy_only(bucket, True):
                kinds.append((bucket, True))
            kinds.append((bucket, False))
        return kinds

    def distinct_kinds(self) -> Iterator[tuple[Bucket, bool]]:
        """The kinds that have a program of their own. An all-greedy mixed step in parts has none:
        it runs programs of the same bucket's sampling step and of decode steps.
        """
        for bucket, greedy_only in self.executables:
            if self.parts is None or bucket.decode_only or not greedy_only:
                yield bucket, greedy_only

    def runs_greedy_only(self, bucket: Bucket, greedy_only: bool) -> bool:
        """Whether an all-greedy step of this bucket has an executable of its own.

        Mixed buckets have one only with `greedy_only_mixed`: on a GPU, where old drivers run the
        sampler's conditions outside the CUDA graph and the host waits for each, and for steps in
        parts, where it is one more small program. Elsewhere it would cost seconds of start-up and
        save nothing measurable. An encoder has no sampler.
        """
        return self.step.encoder or (greedy_only and (bucket.decode_only or self.greedy_only_mixed))

    def largest_temp_bytes(self) -> int:
        """Bytes of temporaries of the largest step on each device, with the logits of two steps,
        for sizing the pool. The largest step is the one with most rows, whose layers need most
        memory, or with most seats, whose sampler does. `compile` reuses these executables.
        """
        started = time.perf_counter()
        largest = self.buckets.mixed[-1]
        kinds = [(largest, False), (self.buckets.decode[-1], False)]
        self.compile_steps(kinds)
        self.compile_seconds += time.perf_counter() - started
        logits = 4 * largest.seats * self.shapes.seats.counts.shape[1]
        left = 0 if self.drafts is None else largest.tokens * self.drafts.row_bytes
        steps = [StepMemory.of(_name_of(*kind), self.executables[kind]) for kind in kinds]
        return max(step.temporaries for step in steps) + 2 * (logits + left)

    def memory(self) -> ProgramsMemory:
        """Memory of the compiled steps."""
        steps = [(_name_of(*kind), step) for kind, step in self.executables.items()]
        return ProgramsMemory.of(steps if self.drafts is None else [*steps, *self.drafts.programs])

    def bucket_compilations(self) -> list[BucketCompilation]:
        """Compile times of each bucket's programs, including those that buckets share."""
        programs: dict[Bucket, set[jax.stages.Compiled]] = {}
        for (bucket, _), step in self.executables.items():
            programs.setdefault(bucket, set()).update(programs_of(step))
        return [compilations.of_bucket(str(bucket), of_it) for bucket, of_it in programs.items()]

    def _facts(self, *kinds: bool) -> Iterator[object]:
        """Everything that the programs depend on. kinds: flags for the kinds of steps."""
        yield from (kinds, self.step, self.step.compiler_options)
        # The repr of a function does not name its module.
        kernels = vars(self.step.kernels).values()
        yield [(type(each).__module__, getattr(each, "__module__", "")) for each in kernels]
        yield [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in self.leaves]
        yield from (self.config, self.buckets, self.sizes, self.shapes, self.leaf_numbers)


def _board_seat(state: SeatState, seat: Array, *row: Array) -> SeatState:
    columns = zip(state, row, strict=True)
    return SeatState(*[column.at[seat].set(new) for column, new in columns])


def _path_of(keys: Iterable[Any]) -> ModelPath:
    """The path of a model's weight from jax's keys."""
    return tuple(key.key for key in keys if isinstance(key, jax.tree_util.DictKey))


def _name_of(bucket: Bucket, greedy_only: bool) -> str:
    if greedy_only:
        return f"{bucket}"
    return f"{bucket} sampling"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: tracing makes millions of small objects and hardly a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

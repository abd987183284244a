"""The runner is the device side of a step: it packs, launches and fetches steps, and holds the
state that they replace.

The next step reads sampled tokens on the device by seat (`seat_tokens`), so it never waits for the
host.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING

import jax
import msgspec
import numpy as np
from jax import Array

from jitney.engine.common.outputs import TokenLogprobs
from jitney.engine.core.executor.compilations import compilations
from jitney.engine.core.executor.inputs import MaskedRows
from jitney.engine.core.executor.program import Chosen, DeviceState, StepOutput
from jitney.engine.core.executor.sampling import Sampled, SeatState
from jitney.engine.core.executor.seat_tokens import LookedUpTokens
from jitney.engine.core.executor.step_parts import PartedStep, StepRun
from jitney.engine.core.executor.step_programs import Report, StepPrograms, report_nothing
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import MaskedRow, Plan, StepResult
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.weights.checkpoints.names import Path as ModelPath

if TYPE_CHECKING:
    from jitney.engine.core.executor.draft_model import DraftUpload


class _Batch(msgspec.Struct):
    """A plan and its upload, ready to launch."""

    plan: Plan
    #: Whether the executable without a sampler runs it.
    greedy_only: bool
    #: The whole upload, int32 (`engine.core.executor.inputs`).
    packed: np.ndarray
    #: Upload of the draft model's programs that run before the step; None: none run.
    drafting: DraftUpload | None = None


class LaunchedStep(msgspec.Struct):
    """A step that runs on the device, which fills `output`."""

    plan: Plan
    scored: int  #: number of rows that return prompt log-probabilities
    #: None until the last segment is launched.
    output: StepOutput | None = None
    #: float32 [S, E] on the device, see `Program.pool`; None if no vector is requested.
    pooled: Array | None = None
    #: float32 [S, V] on the device, until `choose`; None if no token is chosen under a mask.
    logits: Array | None = None
    #: int32 [M, K] on the device: drafts that a draft model wrote for this step; None if the host
    #: does not need them.
    drafts: Array | None = None
    #: Tokens chosen under masks after the step, and for each of these rows (its index in `chosen`,
    #: its index among the logit rows).
    chosen: Chosen | None = None
    chosen_rows: list[tuple[int, int]] = []
    #: Launches the next segment, and yields a result of it unless it is the last one.
    segments: Iterator[Array] | None = None
    #: A result of each segment that was launched and may not be done yet.
    running: deque[Array] = msgspec.field(default_factory=deque[Array])
    #: Why a segment could not be launched; `fetch` raises it.
    error: Exception | None = None


def _is_ready(output: object) -> bool:
    """Whether the device has computed these arrays."""
    return all([array.is_ready() for array in jax.tree.leaves(output)])


def _copy_to_host(output: object) -> None:
    """Start copying a step's results to the host."""
    for array in jax.tree.leaves(output):
        array.copy_to_host_async()


def _copy_sampled(sampled: Array | Sampled, *, logprobs: bool) -> None:
    """Start copying `StepOutput.sampled` to the host; without log-probabilities only its tokens."""
    if isinstance(sampled, Sampled) and not logprobs:
        sampled = sampled.tokens
    _copy_to_host(sampled)


class Runner:
    """Runs plans with compiled programs; nothing compiles after `compile()`.

    end_ids: tokens that end a sequence.
    """

    def __init__(self, programs: StepPrograms, *, end_ids: tuple[int, ...]):
        self.programs = programs
        self.end_ids = end_ids
        #: The weights, in the same list object as the programs' `leaves`; `exchange`, `sleep` and
        #: `wake` replace its arrays.
        self.leaves = programs.leaves
        self.builder = programs.builder
        #: The device state; shapes until `compile` allocates it, since compiling needs no arrays.
        self.state: DeviceState = programs.shapes
        self._drafts = programs.drafts
        #: The weights of all models, and during sleep their copies on the host, each with its
        #: sharding on the device.
        self._all_leaves = [self.leaves, *([] if self._drafts is None else [self._drafts.leaves])]
        self._asleep: list[list[tuple[np.ndarray, jax.sharding.Sharding]]] = []
        # Compilations of this process at the end of `compile`.
        self._compiled_before = 0

    def compile(
        self, report: Report = report_nothing, meet: Callable[[], None] = lambda: None
    ) -> None:
        """Compile every program, allocate the state, and run each program once.

        meet: called before anything runs; on several hosts it waits for the others.
        """
        programs = self.programs
        programs.compile(report)
        started = time.perf_counter()
        self.state = programs.shapes.allocate(programs.config)
        meet()
        try:
            self.warm_up()
        except jax.errors.JaxRuntimeError:
            # A stored program may be the cause: the next core compiles anew.
            if programs.step.kept is not None:
                programs.step.kept.discard()
            raise
        programs.compile_seconds += time.perf_counter() - started
        self._compiled_before = compilations.count

    def warm_up(self) -> None:
        """Run every program on an empty batch: first calls set up thread pools and buffers."""
        for bucket, greedy_only in self.programs.distinct_kinds():
            logits = self._run_empty(bucket, greedy_only)
            if logits is not None:
                self._warm_up_choices(logits)
        if self._drafts is not None:
            self._drafts.warm_up(self.programs.buckets, self.builder, self.state)

    def _run_empty(self, bucket: Bucket, greedy_only: bool) -> Array | None:
        """Run an empty step to its end. -> its logits."""
        packed = self.builder.empty(bucket, greedy_only)
        output, logits = jax.block_until_ready(self.run(bucket, greedy_only, packed))
        if bucket in self.programs.pools:
            jax.block_until_ready(self._run_pool(bucket, greedy_only, output, packed))
        return logits

    def _run_pool(
        self, bucket: Bucket, greedy_only: bool, output: StepOutput, packed: np.ndarray
    ) -> Array:
        """Run `Program.pool` after a step. packed: the step's upload."""
        own = self.builder.layout(bucket, greedy_only).slices["cu_q"]
        # Copied, because the upload is overwritten while a device may still read this.
        return self.programs.pools[bucket](self.leaves, output.hidden, packed[own].copy())

    def _warm_up_choices(self, logits: Array) -> None:
        rows = logits.shape[0]
        for size in self.programs.choices.sizes_for(rows):
            numbers = None
            if size != rows:
                numbers = np.zeros(size, np.int32)
            no_rows = MaskedRows.empty(
                size, self.programs.config.vocab_size, self.programs.sizes.seats
            )
            jax.block_until_ready(self.run_choice(logits, numbers, no_rows))

    @property
    def compiles(self) -> int:
        """Number of compilations in this process since `compile`; any later one is a bug."""
        return compilations.count - self._compiled_before

    def batch(self, plan: Plan) -> _Batch:
        """Pack the plan; numpy only."""
        return self.pack(plan, self.programs.runs_greedy_only(plan.bucket, plan.greedy_only))

    def pack(self, plan: Plan, greedy_only: bool) -> _Batch:
        """Pack the plan for the executable without a sampler (greedy_only) or for the full one."""
        batch = _Batch(plan, greedy_only, self.builder.build(plan, greedy_only))
        if self._drafts is not None:
            batch.drafting = self._drafts.pack(plan, self.programs.buckets, self.builder)
        return batch

    def launch(self, batch: _Batch) -> LaunchedStep:
        """Dispatch one step and start copying its tokens to the host."""
        step = self._prepared(batch)
        self._close(step, batch, *self.run(batch.plan.bucket, batch.greedy_only, batch.packed))
        return step

    def start(self, batch: _Batch) -> LaunchedStep:
        """Dispatch the first segment of a step, or all of them if another program reads the step's
        results.
        """
        step = self._prepared(batch)
        step.segments = self._dispatch(step, batch)
        self._dispatch_next(step)
        if batch.plan.masked or batch.plan.pools:
            self.finish(step)
        if step.error is not None:
            raise step.error
        return step

    def _prepared(self, batch: _Batch) -> LaunchedStep:
        """The step of a batch, after what is dispatched before it."""
        plan = batch.plan
        for seq in plan.boarded:
            self._install(seq)
        if self._drafts is not None and batch.drafting is not None:
            self._drafts.draft(batch.drafting, self.state)
        step = LaunchedStep(plan, plan.scored_rows)
        if self._drafts is not None and any(row.chunk.draft for row in plan.masked):
            step.drafts = self._drafts.drafted(self.state)
            _copy_to_host(step.drafts)
        return step

    def _dispatch(self, step: LaunchedStep, batch: _Batch) -> Iterator[Array]:
        """Dispatch a step's segments one after another, then what follows the last one."""
        results = yield from self.begin(batch.plan.bucket, batch.greedy_only, batch.packed)
        self._close(step, batch, *results)

    def _close(
        self, step: LaunchedStep, batch: _Batch, output: StepOutput, logits: Array | None
    ) -> None:
        """Dispatch what reads a step's results, and start copying them to the host."""
        plan = step.plan
        if self.programs.pools and plan.pools:
            step.pooled = self._run_pool(plan.bucket, batch.greedy_only, output, batch.packed)
        # Free the hidden states as soon as they are read.
        step.output = output = output._replace(hidden=None, for_head=None)
        _copy_to_host(step.pooled)
        if plan.masked:
            step.logits = logits
        _copy_sampled(output.sampled, logprobs=_wants_logprobs(plan))
        _copy_to_host((output.broken, output.scores if step.scored else None, output.guessed))

    def feed(self, launched: LaunchedStep) -> bool:
        """Dispatch segments until one waits behind the running one. -> whether some are left."""
        running = launched.running
        while launched.segments is not None:
            while running and _is_ready(running[0]):
                running.popleft()
            if len(running) > 1:
                return True
            self._dispatch_next(launched)
        return False

    def has_paused(self, launched: LaunchedStep) -> bool:
        """Whether all dispatched segments are done, while others are left."""
        return launched.segments is not None and _is_ready([*launched.running])

    def finish(self, launched: LaunchedStep) -> None:
        """Dispatch all segments that are left."""
        while launched.segments is not None:
            self._dispatch_next(launched)

    @staticmethod
    def _dispatch_next(launched: LaunchedStep) -> None:
        assert launched.segments is not None
        try:
            result = next(launched.segments, None)
        except Exception as error:
            launched.error, result = error, None
        if result is None:
            launched.segments = None
            launched.running.clear()
        else:
            launched.running.append(result)

    def learn_drafts(self, launched: LaunchedStep) -> None:
        """Wait for the drafts that a draft model wrote for this step, and store those of sequences
        with grammars in `Sequence.drafts`.
        """
        if launched.drafts is None:
            return
        drafts = np.asarray(launched.drafts).tolist()
        for row in launched.plan.masked:
            row.chunk.seq.drafts = _known(drafts[row.seat])

    def choose(self, launched: LaunchedStep, rows: list[MaskedRow], masks: np.ndarray) -> None:
        """Dispatch the program that chooses the tokens of these rows of the last step, under
        masks.
        """
        logits, launched.logits = launched.logits, None
        assert logits is not None  # the launch kept them, since the plan has masked rows
        computed = logits.shape[0]
        size = self.programs.choices.size(len(rows))
        upload = MaskedRows.empty(size, self.programs.config.vocab_size, self.programs.sizes.seats)
        for number, (masked, mask) in enumerate(zip(rows, masks, strict=True)):
            # If the program takes all rows of the step, each keeps its index.
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
        """Run a program that chooses tokens after a step; replaces the donated state. numbers:
        int32 [R], indices of the step's logit rows; None: all rows.
        """
        if numbers is not None:
            logits = self.programs.choices.picks[logits.shape[0], len(numbers)](logits, numbers)
        state, program = self.state, self.programs.choices.programs[logits.shape[0]]
        state.seat_tokens, state.seats, chosen = program(
            logits, state.seat_tokens, state.seats, upload.heads, upload.masks
        )
        return chosen

    def _install(self, seq: Sequence) -> None:
        """Write the token counts, biases and recent tokens of a boarding sequence to its seat."""
        params = seq.request.sampling
        if params.penalised or params.biased:
            vocab = self.programs.config.vocab_size
            row = SeatState.row(params, seq.tokens, seq.n_prompt, vocab, self.end_ids)
            self.board(seq.seat, row)
        if isinstance(self.state.seat_tokens, LookedUpTokens):
            row = self.state.seat_tokens.row_of(seq.tokens)
            self.state.seat_tokens = self.programs.board_tokens(
                self.state.seat_tokens, np.int32(seq.seat), row
            )

    def board(self, seat: int, row: Iterable[np.ndarray]) -> None:
        """Write a seat's row of `SeatState`."""
        self.state.seats = self.programs.board(self.state.seats, np.int32(seat), *row)

    def run(
        self, bucket: Bucket, greedy_only: bool, packed: np.ndarray
    ) -> tuple[StepOutput, Array | None]:
        """Run an executable; replaces the donated state. -> (output, logits or None)."""
        running = self.begin(bucket, greedy_only, packed)
        while True:
            try:
                next(running)
            except StopIteration as end:
                return end.value

    def begin(self, bucket: Bucket, greedy_only: bool, packed: np.ndarray) -> StepRun:
        """Like `run`, but stops before each further segment of a step that is cut."""
        state, executable = self.state, self.programs.executables[bucket, greedy_only]
        if self._drafts is not None:
            self._drafts.read(bucket, packed, state)
        logits = None
        if isinstance(executable, PartedStep):
            output, logits = yield from executable.run(self.leaves, state, packed)
        elif greedy_only:
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
        """Replace weights, given by their path in the model, for all steps launched from now on;
        running steps keep the old ones. Raises ValueError unless shape and dtype stay the same.
        """
        for path, array in arrays.items():
            number = self.programs.leaf_numbers[path]
            before = self.leaves[number]
            if (array.shape, array.dtype) != (before.shape, before.dtype):
                raise ValueError(f"{path} is {array.shape} {array.dtype}, not as it was")
            self.leaves[number] = array

    def restore(self, error: Exception) -> None:
        """Allocate the state anew after `error`, because a failed step has consumed the donated
        arrays. Raises the device's error if an empty step fails too.
        """
        self._free_state()  # first, so that both states need not fit the memory
        self._start_over()

    def _free_state(self) -> int:
        """Free the state. -> bytes freed."""
        if self._drafts is not None:
            self._drafts.forget()
        freed = 0
        for array in jax.tree.leaves(self.state):
            if isinstance(array, Array) and not array.is_deleted():
                freed += array.nbytes
                array.delete()
        self.state = self.programs.shapes
        return freed

    def _start_over(self) -> None:
        """Allocate the initial state and run an empty step."""
        programs = self.programs
        self.state = programs.shapes.allocate(programs.config)
        self.builder = programs.sizes.builder(programs.config)
        smallest, _ = programs.kinds()[-1]
        self._run_empty(smallest, True)

    def sleep(self, alive: Callable[[], None]) -> int:
        """Free the device's memory until `wake`; no step may be launched meanwhile. The KV pool and
        the state of seats are dropped; weights are copied to the host, unless the device is a CPU
        and they are in its memory already. alive: called from time to time. -> bytes freed.
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
        """Allocate the memory again, without compiling. Raises the device's error if that fails."""
        for leaves, asleep in zip(self._all_leaves, self._asleep, strict=False):
            for number, (weights, sharding) in enumerate(asleep):
                leaves[number] = jax.block_until_ready(jax.device_put(weights, sharding))
                alive()
        self._asleep = []
        self._start_over()

    def is_done(self, launched: LaunchedStep) -> bool:
        """Whether the device has computed a step's tokens."""
        output = launched.output
        if output is None:
            return launched.error is not None
        return _is_ready(output.sampled)

    def fetch(self, launched: LaunchedStep) -> StepResult:
        """Wait for the results of a step."""
        self.finish(launched)
        if launched.error is not None:
            raise launched.error
        assert launched.output is not None
        plan, (sampled, broken, scores, _, guessed, _) = launched.plan, launched.output
        # On all devices: a result is read from one, while another may still read the step's upload.
        jax.block_until_ready(sampled)
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
    """Replace the step's own tokens by those chosen under masks after it."""
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
    """The drafts before the first -1."""
    return [*takewhile(lambda token: token >= 0, drafts)]


def _wants_logprobs(plan: Plan) -> bool:
    return any([chunk.sample and chunk.seq.logprobs is not None for chunk in plan.chunks])


def _entries(columns: Iterable[Array], rows: int) -> list[TokenLogprobs]:
    """The entries of the first `rows` rows. columns: log-probabilities, then ids and
    log-probabilities of the likeliest tokens.
    """
    lists = [np.asarray(column)[:rows].tolist() for column in columns]
    return [TokenLogprobs(*entry) for entry in zip(*lists, strict=True)]

"""Runners for several hosts that run one engine, and for several engines that share experts.

Several hosts run one program over one mesh. The leader's runner sends `run`, `board` and
`run_choice` as messages before it executes them, and the followers execute them too; only the
leader fetches results. Loading, compiling and warming up happen on every host in the same order
without messages.

The step of several engines is one program over all devices. Each engine has its own scheduler,
seats, pages and row of the mesh, uploads its own rows and reads its own results. Each engine does
boarding and choosing under masks alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jitney.engine.common.errors import EngineDead, RequestError
from jitney.engine.core.distributed import messages
from jitney.engine.core.distributed.adapters import WorkerAdapters
from jitney.engine.core.distributed.link import Leader
from jitney.engine.core.distributed.messages import (
    Accept,
    Board,
    Choose,
    DropAdapter,
    InstallAdapter,
    PackedArray,
    ReadAdapters,
    Refused,
    Step,
    StepSize,
    UseAdapter,
)
from jitney.engine.core.distributed.step_barrier import StepBarrier
from jitney.engine.core.executor.inputs import MaskedRows
from jitney.engine.core.executor.program import Chosen, StepOutput
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.models.sharding import WHOLE, engines_of
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import Plan


class _RunnerWithOthers(Runner):
    """A runner whose steps other hosts take part in."""

    def restore(self, error: Exception) -> None:
        """Raise EngineDead: the step may have failed on some hosts only, so all start anew."""
        raise EngineDead(
            f"a step failed ({type(error).__name__}), and several hosts do not go on after that"
        ) from error

    def sleep(self, alive: Callable[[], None]) -> int:
        raise RequestError(
            "an engine over several hosts (n_hosts) does not sleep", code="unsupported_parameter"
        )


class LeaderRunner(_RunnerWithOthers):
    """The first host's runner. `lead` is called after `compile`, and before the first step."""

    _hosts: Leader | None = None

    def lead(self, hosts: Leader) -> None:
        """Send the steps to these hosts from now on."""
        self._hosts = hosts

    def _send(self, message: messages.Command) -> None:
        if self._hosts is not None:
            self._hosts.send(message)

    def run(
        self, bucket: Bucket, greedy_only: bool, packed: np.ndarray
    ) -> tuple[StepOutput, Array | None]:
        self._send(Step(bucket.tokens, bucket.seats, greedy_only, PackedArray.of(packed)))
        return super().run(bucket, greedy_only, packed)

    def board(self, seat: int, row: Iterable[np.ndarray]) -> None:
        columns = list(row)
        self._send(Board(seat, [PackedArray.of(column) for column in columns]))
        super().board(seat, columns)

    def run_choice(self, logits: Array, numbers: np.ndarray | None, upload: MaskedRows) -> Chosen:
        picked = None
        if numbers is not None:
            picked = PackedArray.of(numbers)
        heads, masks = PackedArray.of(upload.heads), PackedArray.of(upload.masks)
        self._send(Choose(picked, heads, masks))
        return super().run_choice(logits, numbers, upload)


class Follower:
    """A follower: executes the leader's steps on another host."""

    def __init__(self, runner: Runner, adapters: WorkerAdapters | None = None):
        self._runner = runner
        #: None if the engine has no adapters and no room for any.
        self.adapters = adapters
        #: Logits of the last step, if it returns any.
        self._logits: Array | None = None
        #: Output of the last step; it is not read, only awaited.
        self._output: StepOutput | None = None

    def do(self, message: messages.Message) -> None:
        """Execute a message of the leader."""
        match message:
            case Step():
                self._run(message)
            case Board(seat=seat, row=row):
                self._runner.board(seat, [column.unpacked() for column in row])
            case Choose():
                self._choose(message)
            case (
                ReadAdapters()
                | InstallAdapter()
                | UseAdapter()
                | DropAdapter()
                | Accept()
                | Refused()
            ) if self.adapters is not None:
                self.adapters.take(message)
            case _:
                raise ConnectionError(f"host 0 said {message} where a step was expected")

    def _run(self, step: Step) -> None:
        """Launch a step, then wait for the one before: the host stays one step ahead of its
        device.
        """
        bucket = Bucket(step.tokens, step.seats)
        before = self._output
        self._output, self._logits = self._runner.run(
            bucket, step.greedy_only, step.packed.unpacked()
        )
        jax.block_until_ready(before)

    def _choose(self, choice: Choose) -> None:
        numbers = None
        if choice.numbers is not None:
            numbers = choice.numbers.unpacked()
        assert self._logits is not None  # host 0 only chooses after a step that returns them
        upload = MaskedRows(choice.heads.unpacked(), choice.masks.unpacked())
        self._runner.run_choice(self._logits, numbers, upload)


def _size_of(plan: Plan) -> StepSize:
    """The size of an engine's next step."""
    bucket = plan.bucket
    return StepSize(bucket.tokens, bucket.seats, bucket.decode_only, plan.greedy_only)


def _bucket_of(size: StepSize, buckets: Buckets) -> Bucket:
    """The bucket that holds a step of this size, the largest of all engines' steps."""
    return buckets.choose(
        tokens=size.tokens,
        sequences=size.seats,
        decode_only=size.decode_only,
        logit_rows=0,
    )


class LockstepRunner(_RunnerWithOthers):
    """The runner of one of several engines that share experts. `join` is called after `compile`,
    before the first step.

    All engines compile, warm up and run steps in the same order.
    """

    #: Output of the last empty step; it is not read, only awaited.
    _last: Any = None

    def join(self, barrier: StepBarrier) -> None:
        """Run steps together with the other engines from now on."""
        #: The barrier at which the engines agree on each step.
        self.barrier = barrier
        #: Uploads of empty steps.
        self._empty: dict[tuple[Bucket, bool], np.ndarray] = {}

    def batch(self, plan: Plan) -> Any:
        """Agree on the step's size, and pack the plan for it."""
        plan.bucket, greedy_only = self._agree(_size_of(plan))
        return self.pack(plan, greedy_only)

    def run_empty_step(self) -> None:
        """Run a step in which only other engines have rows. Then wait for the step before, so that
        the host is only one step ahead of its device.
        """
        bucket, greedy_only = kind = self._agree(None)
        if kind not in self._empty:
            self._empty[kind] = self.builder.empty(bucket, greedy_only)
        before = self._last
        self._last, _ = self.run(bucket, greedy_only, self._empty[kind])
        jax.block_until_ready(before)

    def _agree(self, size: StepSize | None) -> tuple[Bucket, bool]:
        """Agree on the executable that all engines run now. size: of this engine's own step."""
        agreed = self.barrier.agree(size)
        bucket = _bucket_of(agreed, self.programs.buckets)
        return bucket, self.programs.runs_greedy_only(bucket, agreed.greedy_only)

    @property
    def _own_mesh(self) -> Mesh:
        mesh = self.programs.beside.mesh
        assert mesh is not None  # several engines always have a mesh
        return mesh

    def run(self, bucket: Bucket, greedy_only: bool, packed: Any) -> tuple[StepOutput, Any]:
        own = jax.device_put(packed, NamedSharding(self._own_mesh, WHOLE))
        shape = self.programs.step.whole(packed.shape, packed.dtype)
        whole: Any = _of_all(own, shape)
        output, logits = super().run(bucket, greedy_only, whole)
        if logits is not None:
            logits = _own_part(logits, self._own_mesh)
        # Each device of this engine holds a copy of the results.
        return jax.tree.map(lambda array: array.addressable_data(0), output), logits

    def board(self, seat: int, row: Iterable[np.ndarray]) -> None:
        with self._own_state():
            super().board(seat, row)

    def run_choice(self, logits: Array, numbers: np.ndarray | None, upload: MaskedRows) -> Chosen:
        with self._own_state():
            return super().run_choice(logits, numbers, upload)

    @contextlib.contextmanager
    def _own_state(self) -> Iterator[None]:
        """Inside, the seats' state is only this engine's part of the arrays of all engines."""
        state, mesh = self.state, self._own_mesh
        both = state.seat_tokens, state.seats
        state.seat_tokens, state.seats = jax.tree.map(lambda array: _own_part(array, mesh), both)
        yield
        both = state.seat_tokens, state.seats
        shapes = self.programs.shapes.seat_tokens, self.programs.shapes.seats
        state.seat_tokens, state.seats = jax.tree.map(_of_all, both, shapes)


def _pieces(array: Array) -> list[Array]:
    """The parts of an array that the devices of this process hold."""
    return [shard.data for shard in array.addressable_shards]


def _own_part(array: Array, mesh: Mesh) -> Array:
    """This engine's part of an array of all engines, in place. mesh: its own devices."""
    first, *rest = array.shape
    sharding: Any = array.sharding
    engines = engines_of(sharding.mesh)
    own = NamedSharding(mesh, PartitionSpec(None, *sharding.spec[1:]))
    return jax.make_array_from_single_device_arrays((first // engines, *rest), own, _pieces(array))


def _of_all(own: Array, shape: jax.ShapeDtypeStruct) -> Array:
    """The array of all engines, with `own` as this engine's part. shape: of the whole array."""
    assert shape.sharding is not None
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, _pieces(own))

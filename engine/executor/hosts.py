"""The step on several hosts: the first one's runner says what it does before it does it, and the
others do the same.

All run one program over one mesh, and every device brings the same results, so only the first host
fetches them. What is said is what `Runner` does to the device while it serves: `run`, `board` and
`run_choice`, three kinds of messages. What happens before, every host does by itself in the same
order: load, compile, warm up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax import Array

from jitney.engine.errors import EngineDead, RequestError
from jitney.engine.executor.inputs import MaskedRows
from jitney.engine.executor.program import StepOutput
from jitney.engine.executor.runner import Runner
from jitney.engine.executor.sampling import Sampled
from jitney.engine.hosts import messages
from jitney.engine.hosts.link import FirstHost
from jitney.engine.hosts.messages import Board, Choose, PackedArray, Step
from jitney.engine.scheduler.buckets import Bucket


class RunnerWithOthers(Runner):
    """Of a host whose steps others take part in."""

    def restore(self, error: Exception) -> None:
        """Whether a step failed on all hosts alike nobody knows, so all start anew."""
        raise EngineDead(
            f"a step failed ({type(error).__name__}), and several hosts do not go on after that"
        ) from error

    def sleep(self, alive: Callable[[], None]) -> int:
        raise RequestError(
            "an engine over several hosts (n_hosts) does not sleep", code="unsupported_parameter"
        )


class LeadingRunner(RunnerWithOthers):
    """Of the first host. `lead` comes after `compile`, and before the first step."""

    _hosts: FirstHost | None = None

    def lead(self, hosts: FirstHost) -> None:
        """From here on say what is done."""
        self._hosts = hosts

    def _send(self, message: messages.Command) -> None:
        if self._hosts is not None:
            self._hosts.send(message)

    def run(
        self, bucket: Bucket, plain: bool, packed: np.ndarray
    ) -> tuple[StepOutput, Array | None]:
        self._send(Step(bucket.tokens, bucket.seats, plain, PackedArray.of(packed)))
        return super().run(bucket, plain, packed)

    def board(self, seat: int, row: Iterable[np.ndarray]) -> None:
        columns = list(row)
        self._send(Board(seat, [PackedArray.of(column) for column in columns]))
        super().board(seat, columns)

    def run_choice(self, logits: Array, numbers: np.ndarray | None, upload: MaskedRows) -> Sampled:
        picked = None
        if numbers is not None:
            picked = PackedArray.of(numbers)
        heads, masks = PackedArray.of(upload.heads), PackedArray.of(upload.masks)
        self._send(Choose(picked, heads, masks))
        return super().run_choice(logits, numbers, upload)


class Follower:
    """One of the other hosts, while it serves."""

    def __init__(self, runner: Runner):
        self._runner = runner
        #: Logits of the step that was run last, if it leaves any.
        self._logits: Array | None = None
        #: What it brings; nobody reads it, but it says when the step is done.
        self._output: StepOutput | None = None

    def do(self, message: messages.Message) -> None:
        """Do what the first host does."""
        match message:
            case Step():
                self._run(message)
            case Board(seat=seat, row=row):
                self._runner.board(seat, [column.unpacked() for column in row])
            case Choose():
                self._choose(message)
            case _:
                raise ConnectionError(f"host 0 said {message} where a step was expected")

    def _run(self, step: Step) -> None:
        """Launch it, and then wait for the one before: the host is to be a step ahead of its
        device, and no more.
        """
        bucket = Bucket(step.tokens, step.seats)
        before = self._output
        self._output, self._logits = self._runner.run(bucket, step.plain, step.packed.unpacked())
        jax.block_until_ready(before)

    def _choose(self, choice: Choose) -> None:
        numbers = None
        if choice.numbers is not None:
            numbers = choice.numbers.unpacked()
        assert self._logits is not None  # host 0 only chooses behind a step that leaves them
        upload = MaskedRows(choice.heads.unpacked(), choice.masks.unpacked())
        self._runner.run_choice(self._logits, numbers, upload)

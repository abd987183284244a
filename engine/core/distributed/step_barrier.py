"""Agreement of engines that share experts: on the size of each step and on when to end. No jax.

A round is one step. It begins when an engine proposes a step to host 0, which asks the others for
theirs; an engine without work proposes none. When all have answered, all run a step of the largest
proposed size. No messages are sent while no engine has a step to run.

No engine can run without the others, so they drain together: when one is told to end, all are, and
each stays until none has an open request.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from jitney.engine.core.distributed.messages import (
    AskForStep,
    BarrierMessage,
    DrainState,
    ProposeStep,
    RunStep,
    StepSize,
    Stragglers,
)

#: Seconds after which a waiting engine asks which engines it waits for.
_ASK_S = 1.0


def _ignore(hosts: list[int]) -> None:
    """The default of `on_wait`."""


def _largest(sizes: Sequence[StepSize]) -> StepSize:
    """The size that holds all of these steps (at least one)."""
    return StepSize(
        tokens=max([size.tokens for size in sizes]),
        seats=max([size.seats for size in sizes]),
        decode_only=all([size.decode_only for size in sizes]),
        greedy_only=all([size.greedy_only for size in sizes]),
    )


class Coordinator:
    """Collects the proposals of all engines, on host 0. Thread-safe."""

    def __init__(self, send: Mapping[int, Callable[[BarrierMessage], None]]):
        """send: sends a message to the engine of a host, by host id."""
        self._send = send
        self._lock = threading.Lock()
        self._round = 0
        #: Proposals of this round, by host id.
        self._proposals: dict[int, StepSize | None] = {}
        #: An engine drains; the hosts whose engines have no open request.
        self._draining = False
        self._drained: set[int] = set()

    def take(self, number: int, message: BarrierMessage) -> None:
        """Handle a message of the engine on host `number`."""
        match message:
            case ProposeStep():
                self._take_proposal(number, message)
            case Stragglers():
                self._send_stragglers(number, message)
            case DrainState():
                self._take_drain_state(number, message)
            case AskForStep() | RunStep():
                raise ConnectionError(f"host {number} sent a message that only host 0 sends")

    def _send_stragglers(self, number: int, question: Stragglers) -> None:
        """Answer with the hosts that have not proposed; none if the round is over."""
        with self._lock:
            stragglers: list[int] = []
            if question.round == self._round:
                stragglers = [other for other in self._send if other not in self._proposals]
            self._send[number](Stragglers(question.round, stragglers))

    def _take_drain_state(self, number: int, drain_state: DrainState) -> None:
        with self._lock:
            is_first = not self._draining
            self._draining = True
            if drain_state.drained:
                self._drained.add(number)
            if is_first:
                self._send_to_all(DrainState(drained=False))
            if len(self._drained) == len(self._send):
                self._send_to_all(DrainState(drained=True))

    def _take_proposal(self, number: int, proposal: ProposeStep) -> None:
        with self._lock:
            if proposal.round != self._round or number in self._proposals:
                raise ConnectionError(
                    f"host {number} is in round {proposal.round}, not {self._round}"
                )
            is_first = not self._proposals
            self._proposals[number] = proposal.size
            if len(self._proposals) == len(self._send):
                self._decide()
            elif is_first:
                self._ask_others()

    def _ask_others(self) -> None:
        for number, send in self._send.items():
            if number not in self._proposals:
                send(AskForStep(self._round))

    def _decide(self) -> None:
        size = _largest([size for size in self._proposals.values() if size is not None])
        decision = RunStep(self._round, size)
        self._round += 1
        self._proposals = {}
        self._send_to_all(decision)

    def _send_to_all(self, message: BarrierMessage) -> None:
        for send in self._send.values():
            send(message)


class StepBarrier:
    """An engine's side of the agreement. The core's thread calls `agree`; any thread `take`."""

    def __init__(self, send: Callable[[ProposeStep | Stragglers | DrainState], None]):
        """send: sends a message to the coordinator."""
        self._send = send
        #: Called by `agree` every `_ASK_S` seconds of waiting, with the hosts that have not
        #: proposed a step in this round, as far as is known.
        self.on_wait: Callable[[list[int]], None] = _ignore
        #: These hosts, by host 0's last report.
        self._stragglers: list[int] = []
        #: Drain states that were received and not yet returned.
        self._drain_states: queue.SimpleQueue[DrainState] = queue.SimpleQueue()
        #: The round that this engine has not answered yet; written by the core's thread.
        self._round = 0
        #: The last round in which this engine was asked.
        self._asked_round = -1
        self._answers: queue.SimpleQueue[RunStep] = queue.SimpleQueue()
        #: The first is readable once this engine has been asked.
        self._waking, self._waker = socket.socketpair()
        for end in (self._waking, self._waker):
            end.setblocking(False)

    def take(self, message: BarrierMessage) -> None:
        """Handle a message of the coordinator."""
        match message:
            case RunStep():
                self._answers.put(message)
            case AskForStep(round=number):
                self._asked_round = number
                self._wake()
            case Stragglers():
                self._stragglers = message.hosts or []
            case DrainState():
                self._drain_states.put(message)
                self._wake()
            case ProposeStep():
                raise ConnectionError("host 0 sent a proposal instead of a decision")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # already awake
            self._waker.send(b".")

    def drain(self, *, drained: bool) -> None:
        """Tell the others that this engine drains, or has drained. It goes on running steps until
        all have drained (`next_drain_state`).
        """
        self._send(DrainState(drained))

    def next_drain_state(self) -> DrainState | None:
        """The next drain state that was received; None if there is none."""
        with contextlib.suppress(queue.Empty):
            return self._drain_states.get_nowait()
        return None

    def is_asked(self) -> bool:
        """Whether other engines wait for this engine's proposal. Clears the wake-up."""
        with contextlib.suppress(BlockingIOError):
            self._waking.recv(64)
        return self._asked_round == self._round

    def fileno(self) -> int:
        """File descriptor that is readable once this engine is asked."""
        return self._waking.fileno()

    def agree(self, size: StepSize | None) -> StepSize:
        """Propose a step, or None, and wait for all engines. Returns the size of the step that all
        run now. Propose None only if `is_asked`: otherwise no engine may have a step.
        """
        number = self._round
        self._round += 1
        self._send(ProposeStep(number, size))
        self._stragglers = []
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_ASK_S).size
            self.on_wait(self._stragglers)
            self._send(Stragglers(number))

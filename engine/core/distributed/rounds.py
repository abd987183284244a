"""How engines that share experts agree upon the size of each step that they run together, and upon
their end. Jax-free.

A round is one step. It begins when an engine has a step to run and says so to host 0, which asks
those who have said nothing yet. Who has nothing to run says that. Once all have answered, the
largest of what they want is what all run. While nobody has a step to run, nothing is said.

No engine can go on without the others, so they drain together: once one is told to end all are, and
each stays until none has a request left.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence

from jitney.engine.core.distributed.messages import (
    Meeting,
    Missing,
    Parting,
    StepSize,
    Together,
    Want,
    Wanted,
)

#: Seconds after which an engine that waits asks for whom.
_ASK_S = 1.0


def _ignore(hosts: list[int]) -> None:
    """Nobody asks for whom an engine waits."""


def _largest(sizes: Sequence[StepSize]) -> StepSize:
    """What holds all of these steps, at least one."""
    return StepSize(
        tokens=max([size.tokens for size in sizes]),
        seats=max([size.seats for size in sizes]),
        decode_only=all([size.decode_only for size in sizes]),
        greedy_only=all([size.greedy_only for size in sizes]),
    )


class Referee:
    """Hears what all engines want, on host 0; its methods may be called by any thread."""

    def __init__(self, send: Mapping[int, Callable[[Meeting], None]]):
        """send: what sends a message to each engine, by the ids of their hosts."""
        self._send = send
        self._lock = threading.Lock()
        self._round = 0
        #: What the engines want that have said it in this round, by their hosts.
        self._wants: dict[int, StepSize | None] = {}
        #: Some engine has been told to end, and those that have no requests any more.
        self._parting = False
        self._drained: set[int] = set()

    def take(self, number: int, message: Meeting) -> None:
        """Hear the engine of a host."""
        match message:
            case Want():
                self._take_want(number, message)
            case Missing():
                self._send_missing(number, message)
            case Parting():
                self._take_parting(number, message)
            case Wanted() | Together():
                raise ConnectionError(f"host {number} decided what is host 0's to decide")

    def _send_missing(self, number: int, asked: Missing) -> None:
        """Who has not answered yet; nobody, if the round is over."""
        with self._lock:
            missing: list[int] = []
            if asked.round == self._round:
                missing = [other for other in self._send if other not in self._wants]
            self._send[number](Missing(asked.round, missing))

    def _take_parting(self, number: int, parting: Parting) -> None:
        with self._lock:
            is_first = not self._parting
            self._parting = True
            if parting.drained:
                self._drained.add(number)
            if is_first:
                self._send_to_all(Parting(drained=False))
            if len(self._drained) == len(self._send):
                self._send_to_all(Parting(drained=True))

    def _take_want(self, number: int, want: Want) -> None:
        with self._lock:
            if want.round != self._round or number in self._wants:
                raise ConnectionError(f"host {number} is in round {want.round}, not {self._round}")
            is_first = not self._wants
            self._wants[number] = want.size
            if len(self._wants) == len(self._send):
                self._decide()
            elif is_first:
                self._ask_others()

    def _ask_others(self) -> None:
        for number, send in self._send.items():
            if number not in self._wants:
                send(Wanted(self._round))

    def _decide(self) -> None:
        size = _largest([want for want in self._wants.values() if want is not None])
        together = Together(self._round, size)
        self._round += 1
        self._wants = {}
        self._send_to_all(together)

    def _send_to_all(self, message: Meeting) -> None:
        for send in self._send.values():
            send(message)


class Rounds:
    """One engine's part. Its core's thread calls `agree`; messages come by any."""

    def __init__(self, send: Callable[[Want | Missing | Parting], None]):
        """send: what brings a message to the referee."""
        self._send = send
        #: Called by `agree` every `_ASK_S` seconds of a wait, with the hosts whose engines have
        #: said nothing in this round, as far as is known.
        self.on_wait: Callable[[list[int]], None] = _ignore
        #: These, since the last time that host 0 said it.
        self._missing: list[int] = []
        #: What was heard of the end and not yet handed out.
        self._partings: queue.SimpleQueue[Parting] = queue.SimpleQueue()
        #: The one that this engine has not answered in yet; written by the core's thread.
        self._round = 0
        #: The last one in which this engine was asked.
        self._asked = -1
        self._answers: queue.SimpleQueue[Together] = queue.SimpleQueue()
        #: There is a byte to read from the first once this engine has been asked.
        self._waking, self._waker = socket.socketpair()
        for end in (self._waking, self._waker):
            end.setblocking(False)

    def take(self, message: Meeting) -> None:
        """Hear the referee."""
        match message:
            case Together():
                self._answers.put(message)
            case Wanted(round=number):
                self._asked = number
                self._wake()
            case Missing():
                self._missing = message.hosts or []
            case Parting():
                self._partings.put(message)
                self._wake()
            case Want():
                raise ConnectionError("host 0 said what it wants where it was to decide")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._waker.send(b".")

    def part(self, *, drained: bool) -> None:
        """This engine has been told to end: say so, and, once it has no requests, that. It goes on
        taking part until all have said that (`next_parting`).
        """
        self._send(Parting(drained))

    def next_parting(self) -> Parting | None:
        """What was heard of the end since; None: nothing more."""
        with contextlib.suppress(queue.Empty):
            return self._partings.get_nowait()
        return None

    def is_asked(self) -> bool:
        """Whether others wait for this engine's answer; what woke it is read."""
        with contextlib.suppress(BlockingIOError):
            self._waking.recv(64)
        return self._asked == self._round

    def fileno(self) -> int:
        """What a core that sleeps may wait for: can be read once this engine is asked."""
        return self._waking.fileno()

    def agree(self, size: StepSize | None) -> StepSize:
        """Say what this engine wants, or None, and wait until all have. -> the step that all run
        now. None only where `is_asked`: else nobody might want one.
        """
        number = self._round
        self._round += 1
        self._send(Want(number, size))
        self._missing = []
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_ASK_S).size
            self.on_wait(self._missing)
            self._send(Missing(number))

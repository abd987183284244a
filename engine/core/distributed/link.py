"""How the hosts of one engine come together, agree, and notice that one of them is gone. Jax-free.

The first host listens at the coordinator's address; each of the others connects to it, and to
nobody else. Whoever is of another version, or was told another configuration, is sent away before
jax's own runtime hears of it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.ports import free_port
from jitney.engine.common.worker_pipe import framed
from jitney.engine.core.distributed import messages
from jitney.engine.core.distributed.connection import Connection, HostAddress
from jitney.engine.core.distributed.messages import (
    Accept,
    AskForStep,
    BarrierMessage,
    DrainState,
    Heartbeat,
    Hello,
    Leave,
    Propose,
    ProposeStep,
    Refused,
    RunStep,
    Stragglers,
    Welcome,
)
from jitney.engine.core.distributed.step_barrier import Coordinator, StepBarrier

_log = logging.getLogger("jitney.hosts")

#: Seconds in which all hosts must have come; those behind them may still be fetching an image.
_JOIN_S = 600.0
#: Seconds between two tries to reach the first host, between two reports of who is missing, and
#: that a newcomer has to say who it is.
_RETRY_S, _REPORT_S, _HELLO_S = 0.5, 10.0, 5.0
#: Seconds in which the end of another host is noticed, once something that we did with it failed;
#: and that an ending host gives the others to hear of it.
_NOTICE_S, _FAREWELL_S = 3.0, 2.0
#: Seconds between two signs of life.
_BEAT_S = 1.0
#: Most bytes of a message from somebody who has not been let in.
_STRANGERS_MOST = 4096
#: What may go wrong with a connection.
_BROKEN = (OSError, EOFError, msgspec.DecodeError)

#: Called by another thread when a host is gone, with one line and whether that host said itself
#: that it could not go on. It ends the process: work that others take part in never ends alone.
type Lost = Callable[[str, bool], None]
#: Called with the hosts that are there, all of them, and a detail.
type _Report = Callable[[int, int, str], None]


class Hosts(Protocol):
    """What either kind of host can do. What it does with the others once it serves is one of two:
    the first one plans for all, or each has an engine of its own (`rounds`).
    """

    host_id: int
    n_hosts: int
    #: HOST:PORT of jax's own service, on the first host.
    jax_address: str

    def least(self, what: str, value: int) -> int:
        """The least value of all hosts; each asks for it at the same point of its start."""
        ...

    def same(self, what: str, value: str) -> None:
        """Raise ConfigError unless all hosts have the same."""
        ...

    def step_barrier(self) -> StepBarrier:
        """How the engines of all hosts agree upon their steps; called once, before the first."""
        ...

    def wait_for_loss(self) -> None:
        """After something failed that others took part in: give a loss the time to be noticed,
        which is the better reason.
        """
        ...

    def leave(self, reason: str, *, failed: bool) -> None:
        """Tell the others that this host ends, and let them go first. Where a loss was noticed
        before, that is why it ends: returns only if `Lost` did.
        """
        ...


class _Ending:
    """Why this host ends is told once, by whoever comes first: a thread that notices a loss, or the
    one that leaves. Else the one that leaves ends the process while the other still reports it.
    """

    def __init__(self, lost: Lost):
        self._lost = lost
        #: Held while it is decided who comes first.
        self._deciding = threading.Lock()
        #: This host ends.
        self._begun = False
        #: It ends because another is gone; and that has been reported.
        self._noticed, self._reported = threading.Event(), threading.Event()

    def notice(self) -> bool:
        """Another host is gone; False: that is not why this one ends."""
        with self._deciding:
            if self._begun:
                return False
            self._begun = True
            self._noticed.set()
            return True

    def report(self, reason: str, failed: bool) -> None:
        """Of the loss that was noticed."""
        try:
            self._lost(reason, failed)
        finally:
            self._reported.set()

    def wait_for_loss(self) -> None:
        """See `Hosts`."""
        self._noticed.wait(_NOTICE_S)

    def leave(self) -> None:
        """This host ends by itself; or else wait until the loss has been reported."""
        with self._deciding:
            self._begun = True
        if self._noticed.is_set():
            self._reported.wait()


@dataclass(eq=False)
class _Watched:
    """A host at the other end, read by a thread of its own."""

    connection: Connection
    #: Such as "host 1".
    name: str
    #: What has come, but for signs of life; None: nothing more comes.
    inbox: queue.SimpleQueue[messages.Message | None] = field(default_factory=queue.SimpleQueue)
    #: Set when the connection has ended.
    ended: threading.Event = field(default_factory=threading.Event)
    #: Its last words, if it said any.
    goodbye: Leave | None = None
    #: What hears of rounds once there are some; before, they wait in line.
    _meeting: Callable[[Any], None] | None = None
    _early: list[BarrierMessage] = field(default_factory=list[BarrierMessage])
    _switching: threading.Lock = field(default_factory=threading.Lock)

    def start(self, on_end: Callable[[_Watched, str, bool], None]) -> None:
        """Read it until it ends. on_end: called with why, and whether it says so itself."""
        threading.Thread(target=self._read, args=(on_end,), daemon=True).start()

    def _read(self, on_end: Callable[[_Watched, str, bool], None]) -> None:
        reason = self._read_to_end()
        failed = False
        if self.goodbye is not None:
            reason = self.goodbye.reason
            failed = self.goodbye.failed
        self.ended.set()
        on_end(self, reason, failed)
        self.inbox.put(None)

    def _read_to_end(self) -> str:
        """Why it ended."""
        try:
            while self.goodbye is None:
                self._take(self.connection.receive())
        except TimeoutError:
            return f"{self.name} said nothing for {Connection.silent_s:g} s"
        except _BROKEN:
            return f"{self.name} is gone: its connection ended"
        return ""

    def _take(self, message: messages.Message) -> None:
        match message:
            case Heartbeat():
                pass
            case Leave(failed=True):
                self.goodbye = message
            case Leave():
                self.goodbye = message
                self.inbox.put(message)
            case ProposeStep() | AskForStep() | RunStep() | Stragglers() | DrainState():
                self._take_round(message)
            case _:
                self.inbox.put(message)

    def _take_round(self, message: BarrierMessage) -> None:
        with self._switching:
            if self._meeting is None:
                self._early.append(message)
            else:
                self._meeting(message)

    def meet(self, take: Callable[[Any], None]) -> None:
        """From here on have what is said of rounds heard at once, by the thread that reads."""
        with self._switching:
            for message in self._early:
                take(message)
            self._meeting = take

    def hear(self, timeout_s: float | None = None) -> messages.Message | None:
        """The next message; None if none came in time. Raises ConnectionError at the end."""
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            self.inbox.put(None)
            raise ConnectionError(f"{self.name} is gone")
        return message


class Leader:
    """The host that plans. Its methods are called by one thread."""

    host_id = 0

    def __init__(self, connections: dict[int, Connection], jax_address: str, lost: Lost):
        """connections: to the others, by their ids."""
        self.n_hosts = len(connections) + 1
        self.jax_address = jax_address
        self._ending = _Ending(lost)
        self._others = [
            _Watched(connection, f"host {number}")
            for number, connection in sorted(connections.items())
        ]
        for other in self._others:
            other.start(self._ended)
        threading.Thread(target=_beat, args=(self._others,), daemon=True).start()

    @classmethod
    def gather(
        cls, coordinator: str, n_hosts: int, own: Hello, report: _Report, lost: Lost
    ) -> Leader:
        """Wait for the others. Raises ConfigError if they do not come."""
        waiting = _Waiting(n_hosts, own, report)
        address = HostAddress.read(coordinator)
        with address.listen() as listener:
            try:
                waiting.wait(listener)
            except BaseException:
                waiting.close()
                raise
        port = free_port(address.host)
        for connection in waiting.connections.values():
            connection.send(Welcome(port))
        return cls(waiting.connections, str(address._replace(port=port)), lost)

    def send(self, message: messages.Message) -> None:
        """Send a message to all others; one that cannot hear it any more is noticed elsewhere."""
        frame = framed(message)
        for other in self._others:
            _send(other, frame)

    def least(self, what: str, value: int) -> int:
        """See `Hosts`."""
        values = [self._said(other, what) for other in self._others]
        least = min([value, *map(int, values)])
        self.send(Accept(what, least))
        return least

    def same(self, what: str, value: str) -> None:
        """See `Hosts`."""
        for other in self._others:
            said = self._said(other, what)
            if said != value:
                reason = f"{other.name} has other {what} than host 0: {said}, not {value}"
                self.send(Refused(reason))
                raise ConfigError(reason)
        self.send(Accept(what, value))

    def step_barrier(self) -> StepBarrier:
        """See `Hosts`."""
        own = StepBarrier(lambda message: coordinator.take(0, message))
        send: dict[int, Callable[[BarrierMessage], None]] = {0: own.take}
        for number, other in enumerate(self._others, 1):
            send[number] = partial(_say, other)
        coordinator = Coordinator(send)
        for number, other in enumerate(self._others, 1):
            other.meet(partial(coordinator.take, number))
        return own

    def _said(self, other: _Watched, what: str) -> int | str:
        message = other.hear()
        if not isinstance(message, Propose) or message.what != what:
            raise ConnectionError(f"{other.name} said {message} where {what} was to be agreed upon")
        return message.value

    def wait_for_loss(self) -> None:
        """See `Hosts`."""
        self._ending.wait_for_loss()

    def leave(self, reason: str, *, failed: bool) -> None:
        """See `Hosts`."""
        self._ending.leave()
        self.send(Leave(reason, failed))
        until = time.monotonic() + _FAREWELL_S
        for other in self._others:
            other.ended.wait(max(0.0, until - time.monotonic()))
            other.connection.close()

    def _ended(self, other: _Watched, reason: str, failed: bool) -> None:
        """By the thread that reads a host."""
        if self._ending.notice():
            self.send(Leave(reason, True))
            self._ending.report(reason, failed)


class Worker:
    """A host that does what the first one does."""

    def __init__(self, connection: Connection, own: Hello, n_hosts: int, address: str, lost: Lost):
        self.host_id = own.host_id
        self.n_hosts = n_hosts
        self.jax_address = address
        self._ending = _Ending(lost)
        #: The first host plans for this one.
        self._follows = True
        self._first = _Watched(connection, "host 0")
        self._first.start(self._ended)
        threading.Thread(target=_beat, args=([self._first],), daemon=True).start()

    @classmethod
    def join(
        cls, coordinator: str, n_hosts: int, own: Hello, report: _Report, lost: Lost
    ) -> Worker:
        """Find the first host and wait until all are there. Raises ConfigError if it cannot be
        found, or sends this host away.
        """
        address = HostAddress.read(coordinator)
        until = time.monotonic() + _JOIN_S
        reported = 0.0
        while time.monotonic() < until:
            if time.monotonic() - reported > _REPORT_S:
                report(0, n_hosts, f"waiting for host 0 at {coordinator}")
                reported = time.monotonic()
            try:
                connection = Connection(socket.create_connection(address, _HELLO_S))
                welcome = _ask_in(connection, own, report, n_hosts)
            except _BROKEN:
                time.sleep(_RETRY_S)
                continue
            jax_address = str(address._replace(port=welcome.jax_port))
            return cls(connection, own, n_hosts, jax_address, lost)
        raise ConfigError(f"host 0 at {coordinator} was not there within {_JOIN_S:g} s")

    def next(self, timeout_s: float) -> messages.Message | None:
        """What the first host does next; None if that took longer."""
        return self._first.hear(timeout_s)

    @property
    def dismissed(self) -> str:
        """Why the first host has ended in order; empty: it has not, or this one does not follow
        it.
        """
        goodbye = self._first.goodbye
        if goodbye is None or goodbye.failed or not self._follows:
            return ""
        return goodbye.reason

    def least(self, what: str, value: int) -> int:
        """See `Hosts`."""
        return int(self._agree(what, value))

    def same(self, what: str, value: str) -> None:
        """See `Hosts`."""
        self._agree(what, value)

    def _agree(self, what: str, value: int | str) -> int | str:
        _send(self._first, framed(Propose(what, value)))
        answer = self._first.hear()
        match answer:
            case Accept():
                return answer.value
            case Refused():
                raise ConfigError(answer.reason)
        raise ConnectionError(f"host 0 said {answer} where {what} was to be agreed upon")

    def step_barrier(self) -> StepBarrier:
        """See `Hosts`."""
        self._follows = False
        if self._first.goodbye is not None:
            raise ConnectionError(self._first.goodbye.reason)
        own = StepBarrier(partial(_say, self._first))
        self._first.meet(own.take)
        return own

    def wait_for_loss(self) -> None:
        """See `Hosts`."""
        self._ending.wait_for_loss()

    def leave(self, reason: str, *, failed: bool) -> None:
        """See `Hosts`."""
        self._ending.leave()
        _send(self._first, framed(Leave(reason, failed)))
        self._first.connection.close()

    def _ended(self, first: _Watched, reason: str, failed: bool) -> None:
        """By the thread that reads the first host."""
        if not self.dismissed and self._ending.notice():
            self._ending.report(reason, failed)


def _say(other: _Watched, message: messages.Message) -> None:
    _send(other, framed(message))


def _send(other: _Watched, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # its reader says so
        other.connection.send_frame(frame)


def _beat(others: list[_Watched]) -> None:
    """Propose that we live, for as long as somebody hears it."""
    frame = framed(Heartbeat())
    while not all(other.ended.wait(_BEAT_S / len(others)) for other in others):
        for other in others:
            _send(other, frame)


class _Waiting:
    """The first host while others are missing."""

    def __init__(self, n_hosts: int, own: Hello, report: _Report):
        self.connections: dict[int, Connection] = {}
        self._n_hosts = n_hosts
        self._own = own
        self._report = report

    def wait(self, listener: socket.socket) -> None:
        until = time.monotonic() + _JOIN_S
        listener.settimeout(_BEAT_S)
        reported = 0.0
        while self._missing:
            now = time.monotonic()
            if now > until:
                raise ConfigError(f"{self._missing_ones} did not come within {_JOIN_S:g} s")
            if now - reported > _REPORT_S:
                self._report_missing()
                reported = now
            self._accept(listener)
        self._report_missing()

    def close(self) -> None:
        """Let those go who wait in vain; they will look for another first host."""
        for connection in self.connections.values():
            connection.close()

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(1, self._n_hosts) if number not in self.connections]

    @property
    def _missing_ones(self) -> str:
        return "host " + ", ".join(map(str, self._missing))

    def _report_missing(self) -> None:
        detail = f"waiting for {self._missing_ones}" if self._missing else ""
        self._report(len(self.connections) + 1, self._n_hosts, detail)

    def _accept(self, listener: socket.socket) -> None:
        """Take a newcomer, if one comes within a second; see who has left meanwhile."""
        try:
            connected, (address, *_) = listener.accept()
        except TimeoutError:
            pass
        else:
            self._greet(connected, str(address))
        for number, connection in list(self.connections.items()):
            if not _is_there(connection):
                del self.connections[number]
                connection.close()

    def _greet(self, connected: socket.socket, address: str) -> None:
        connection = Connection(connected)
        connected.settimeout(_HELLO_S)
        try:
            hello = connection.receive(_STRANGERS_MOST)
            connected.settimeout(Connection.silent_s)
            self._take(hello, connection)
        except _BROKEN:
            _log.warning("somebody at %s connected who is no host of this engine", address)
            connection.close()

    def _take(self, hello: messages.Message, connection: Connection) -> None:
        reason = self._refusal(hello)
        if not isinstance(hello, Hello) or reason:
            _log.warning("a host was refused: %s", reason)
            connection.send(Refused(reason))
            connection.close()
            return
        self.connections[hello.host_id] = connection
        self._report_missing()

    def _refusal(self, hello: messages.Message) -> str:
        """Why a newcomer cannot take part; empty if it can."""
        if not isinstance(hello, Hello):
            return "its first message was no hello"
        name = f"host {hello.host_id}"
        if not 0 < hello.host_id < self._n_hosts:
            return f"{name} is none of the {self._n_hosts} hosts of this engine"
        if hello.versions != self._own.versions:
            return f"{name} runs {hello.versions}, host 0 {self._own.versions}"
        if hello.digest != self._own.digest:
            return (
                f"{name} was told other settings of [model], [engine] or [sampling] than host 0, "
                f"or has another model (digest {hello.digest}, not {self._own.digest})"
            )
        earlier = self.connections.get(hello.host_id)
        if earlier is not None and _is_there(earlier):
            return f"{name} is there already: each host needs a host_id of its own"
        return ""


def _is_there(connection: Connection) -> bool:
    """Whether a host that waits still does."""
    if connection.ended:
        return False
    try:
        connection.send(Heartbeat())
    except OSError:
        return False
    return True


def _ask_in(connection: Connection, own: Hello, report: _Report, n_hosts: int) -> Welcome:
    """Propose who we are, and wait for everybody. Raises ConfigError if we are not wanted."""
    connection.send(own)
    report(1, n_hosts, "waiting for the others")
    reported = time.monotonic()
    while True:
        answer = connection.receive()
        match answer:
            case Welcome():
                return answer
            case Refused():
                raise ConfigError(answer.reason)
        if time.monotonic() - reported > _REPORT_S:
            report(1, n_hosts, "waiting for the others")
            reported = time.monotonic()

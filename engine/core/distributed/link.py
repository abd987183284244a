"""Joins the hosts of an engine, lets them agree on values, and detects the loss of one. No jax.

Host 0 listens at the coordinator's address and the others connect to it. A host of another version
or configuration is refused before jax's own runtime starts.
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
from jitney.engine.common.ports import HostAddress, free_port
from jitney.engine.common.worker_pipe import framed
from jitney.engine.core.distributed import messages
from jitney.engine.core.distributed.connection import Connection, listen_at
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

#: Timeout for all hosts to join; some may still be pulling an image.
_JOIN_S = 600.0
#: Seconds between attempts to reach host 0, between reports of missing hosts, and for a `Hello`.
_RETRY_S, _REPORT_S, _HELLO_S = 0.5, 10.0, 5.0
#: Seconds to wait for the loss of a host after a failure that it may explain; and for the others to
#: receive `Leave`.
_LOSS_S, _LEAVE_S = 3.0, 2.0
#: Seconds between heartbeats.
_HEARTBEAT_S = 1.0
#: Most bytes of a host's first message.
_HELLO_BYTES = 4096
#: Errors of a broken connection.
_BROKEN = (OSError, EOFError, msgspec.DecodeError)

#: Called by another thread when a host is lost, with a line of text and whether that host reported
#: a failure. It ends the process, since work that involves a lost host never ends.
type Lost = Callable[[str, bool], None]
#: Called with the number of hosts that joined, the number of all hosts, and a detail.
type _Report = Callable[[int, int, str], None]


class Hosts(Protocol):
    """A host of an engine. While serving, either host 0 plans for all, or each host has an engine
    and they agree on steps (`step_barrier`).
    """

    host_id: int
    n_hosts: int
    #: HOST:PORT of jax's own service, on host 0.
    jax_address: str

    def least(self, what: str, value: int) -> int:
        """The least value of all hosts; all call it at the same point of their start."""
        ...

    def same(self, what: str, value: str) -> None:
        """Raise ConfigError unless all hosts have the same value."""
        ...

    def step_barrier(self) -> StepBarrier:
        """The agreement of the hosts' engines on steps; called once, before the first step."""
        ...

    def wait_for_loss(self) -> None:
        """Wait a moment after a failed collective, whose cause may be the loss of a host."""
        ...

    def leave(self, reason: str, *, failed: bool) -> None:
        """Tell the others that this host ends. If a loss was noticed first, wait until `Lost` has
        returned.
        """
        ...


class _Ending:
    """Decides why this host ends: the loss of another host or its own leaving, whichever is first.

    Without it, leaving would end the process while the other thread still reports a loss.
    """

    def __init__(self, lost: Lost):
        self._lost = lost
        self._deciding = threading.Lock()
        #: This host ends.
        self._begun = False
        #: It ends because another is lost; the loss has been reported.
        self._noticed, self._reported = threading.Event(), threading.Event()

    def notice(self) -> bool:
        """Record the loss of another host; False if this host ends for another reason."""
        with self._deciding:
            if self._begun:
                return False
            self._begun = True
            self._noticed.set()
            return True

    def report(self, reason: str, failed: bool) -> None:
        """Report the loss."""
        try:
            self._lost(reason, failed)
        finally:
            self._reported.set()

    def wait_for_loss(self) -> None:
        """See `Hosts`."""
        self._noticed.wait(_LOSS_S)

    def leave(self) -> None:
        """Record that this host ends by itself, or wait until the loss has been reported."""
        with self._deciding:
            self._begun = True
        if self._noticed.is_set():
            self._reported.wait()


@dataclass(eq=False)
class _Peer:
    """Another host, read by a thread of its own."""

    connection: Connection
    #: Such as "host 1".
    name: str
    #: Received messages except heartbeats and those of steps; None: the end.
    inbox: queue.SimpleQueue[messages.Message | None] = field(default_factory=queue.SimpleQueue)
    #: Set when the connection has ended.
    ended: threading.Event = field(default_factory=threading.Event)
    #: Its last message, if it left.
    left: Leave | None = None
    #: Takes messages of steps, which are kept before it is set.
    _take_step: Callable[[Any], None] | None = None
    _early: list[BarrierMessage] = field(default_factory=list[BarrierMessage])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, on_end: Callable[[_Peer, str, bool], None]) -> None:
        """Read messages until the end. on_end: called with the reason, and whether the peer
        reported a failure.
        """
        threading.Thread(target=self._read, args=(on_end,), daemon=True).start()

    def _read(self, on_end: Callable[[_Peer, str, bool], None]) -> None:
        reason = self._read_to_end()
        failed = False
        if self.left is not None:
            reason = self.left.reason
            failed = self.left.failed
        self.ended.set()
        on_end(self, reason, failed)
        self.inbox.put(None)

    def _read_to_end(self) -> str:
        """Read messages; returns why they ended."""
        try:
            while self.left is None:
                self._take(self.connection.receive())
        except TimeoutError:
            return f"{self.name} sent nothing for {Connection.silent_s:g} s"
        except _BROKEN:
            return f"{self.name} is gone: its connection ended"
        return ""

    def _take(self, message: messages.Message) -> None:
        match message:
            case Heartbeat():
                pass
            case Leave(failed=True):
                self.left = message
            case Leave():
                self.left = message
                self.inbox.put(message)
            case ProposeStep() | AskForStep() | RunStep() | Stragglers() | DrainState():
                self._take_barrier_message(message)
            case _:
                self.inbox.put(message)

    def _take_barrier_message(self, message: BarrierMessage) -> None:
        with self._lock:
            if self._take_step is None:
                self._early.append(message)
            else:
                self._take_step(message)

    def on_step_message(self, take: Callable[[Any], None]) -> None:
        """Pass messages of steps to `take`, in the reading thread."""
        with self._lock:
            for message in self._early:
                take(message)
            self._take_step = take

    def receive(self, timeout_s: float | None = None) -> messages.Message | None:
        """The next message; None after `timeout_s`. Raises ConnectionError at the end."""
        try:
            message = self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            self.inbox.put(None)
            raise ConnectionError(f"{self.name} is gone")
        return message


class Leader:
    """Host 0. Values are agreed on by one thread at a time; any may send."""

    host_id = 0

    def __init__(self, connections: dict[int, Connection], jax_address: str, lost: Lost):
        """connections: to the other hosts, by id."""
        self.n_hosts = len(connections) + 1
        self.jax_address = jax_address
        self._ending = _Ending(lost)
        self._workers = [
            _Peer(connection, f"host {number}")
            for number, connection in sorted(connections.items())
        ]
        for worker in self._workers:
            worker.start(self._ended)
        threading.Thread(target=_send_heartbeats, args=(self._workers,), daemon=True).start()

    @classmethod
    def gather(
        cls,
        coordinator: str,
        n_hosts: int,
        own: Hello,
        report: _Report,
        lost: Lost,
        adapters: dict[str, int] | None = None,
    ) -> Leader:
        """Wait for the other hosts. adapters: see `Welcome`. Raises ConfigError if one does not
        join in time.
        """
        gathering = _Gathering(n_hosts, own, report)
        address = HostAddress.read(coordinator)
        with listen_at(address) as listener:
            try:
                gathering.wait(listener)
            except BaseException:
                gathering.close()
                raise
        port = free_port(address.host)
        for connection in gathering.connections.values():
            connection.send(Welcome(port, adapters or {}))
        return cls(gathering.connections, str(address._replace(port=port)), lost)

    def send(self, message: messages.Message) -> None:
        """Send a message to all workers; the reading threads notice lost ones."""
        frame = framed(message)
        for worker in self._workers:
            _send_frame(worker, frame)

    def least(self, what: str, value: int) -> int:
        """See `Hosts`."""
        proposals = [self._checked(worker, worker.receive(), what) for worker in self._workers]
        least = min([value, *map(int, proposals)])
        self.send(Accept(what, least))
        return least

    def same(self, what: str, value: str) -> None:
        """See `Hosts`."""
        reasons = [self._refusal(worker, what, value) for worker in self._workers]
        for reason in filter(None, reasons):
            self.send(Refused(reason))
            raise ConfigError(reason)
        self.send(Accept(what, value))

    def _refusal(self, worker: _Peer, what: str, value: str) -> str:
        """The difference of a worker's value, or ""."""
        message = worker.receive()
        if isinstance(message, Refused):
            return f"{worker.name}: {message.reason}"
        proposal = self._checked(worker, message, what)
        if proposal == value:
            return ""
        return f"{worker.name} has other {what} than host 0: {proposal}, not {value}"

    def step_barrier(self) -> StepBarrier:
        """See `Hosts`."""
        own = StepBarrier(lambda message: coordinator.take(0, message))
        send: dict[int, Callable[[BarrierMessage], None]] = {0: own.take}
        for number, worker in enumerate(self._workers, 1):
            send[number] = partial(_send, worker)
        coordinator = Coordinator(send)
        for number, worker in enumerate(self._workers, 1):
            worker.on_step_message(partial(coordinator.take, number))
        return own

    @staticmethod
    def _checked(worker: _Peer, message: messages.Message | None, what: str) -> int | str:
        """The value that a worker proposed. Raises ConnectionError for anything else."""
        if not isinstance(message, Propose) or message.what != what:
            raise ConnectionError(f"{worker.name} sent {message} instead of its {what}")
        return message.value

    def wait_for_loss(self) -> None:
        """See `Hosts`."""
        self._ending.wait_for_loss()

    def leave(self, reason: str, *, failed: bool) -> None:
        """See `Hosts`."""
        self._ending.leave()
        self.send(Leave(reason, failed))
        deadline = time.monotonic() + _LEAVE_S
        for worker in self._workers:
            worker.ended.wait(max(0.0, deadline - time.monotonic()))
            worker.connection.close()

    def _ended(self, worker: _Peer, reason: str, failed: bool) -> None:
        """Called by the thread that reads a worker."""
        if self._ending.notice():
            self.send(Leave(reason, True))
            self._ending.report(reason, failed)


class Worker:
    """A host that runs the steps of host 0, or shares experts with it."""

    def __init__(
        self,
        connection: Connection,
        own: Hello,
        n_hosts: int,
        address: str,
        lost: Lost,
        adapters: dict[str, int] | None = None,
    ):
        self.host_id = own.host_id
        self.n_hosts = n_hosts
        self.jax_address = address
        #: See `Welcome`.
        self.adapters = adapters or {}
        self._ending = _Ending(lost)
        #: Host 0 plans for this one.
        self._follows = True
        self._leader = _Peer(connection, "host 0")
        self._leader.start(self._ended)
        threading.Thread(target=_send_heartbeats, args=([self._leader],), daemon=True).start()

    @classmethod
    def join(
        cls, coordinator: str, n_hosts: int, own: Hello, report: _Report, lost: Lost
    ) -> Worker:
        """Connect to host 0 and wait until all hosts have joined. Raises ConfigError if host 0
        cannot be reached or refuses this host.
        """
        address = HostAddress.read(coordinator)
        deadline = time.monotonic() + _JOIN_S
        reported = 0.0
        while time.monotonic() < deadline:
            if time.monotonic() - reported > _REPORT_S:
                report(0, n_hosts, f"waiting for host 0 at {coordinator}")
                reported = time.monotonic()
            try:
                connection = Connection(socket.create_connection(address, _HELLO_S))
                welcome = _wait_for_welcome(connection, own, report, n_hosts)
            except _BROKEN:
                time.sleep(_RETRY_S)
                continue
            jax_address = str(address._replace(port=welcome.jax_port))
            return cls(connection, own, n_hosts, jax_address, lost, welcome.adapters)
        raise ConfigError(f"host 0 at {coordinator} could not be reached within {_JOIN_S:g} s")

    def send(self, message: messages.Message) -> None:
        """Send a message to host 0; the reading thread notices its loss."""
        _send(self._leader, message)

    def next(self, timeout_s: float) -> messages.Message | None:
        """The next message of host 0; None after `timeout_s`."""
        return self._leader.receive(timeout_s)

    @property
    def dismissed(self) -> str:
        """The reason of host 0's end without failure; "": none, or this host plans itself."""
        leave = self._leader.left
        if leave is None or leave.failed or not self._follows:
            return ""
        return leave.reason

    def least(self, what: str, value: int) -> int:
        """See `Hosts`."""
        return int(self._agree(what, value))

    def same(self, what: str, value: str) -> None:
        """See `Hosts`."""
        self._agree(what, value)

    def _agree(self, what: str, value: int | str) -> int | str:
        _send(self._leader, Propose(what, value))
        answer = self._leader.receive()
        match answer:
            case Accept():
                return answer.value
            case Refused():
                raise ConfigError(answer.reason)
        raise ConnectionError(f"host 0 sent {answer} instead of the agreed {what}")

    def step_barrier(self) -> StepBarrier:
        """See `Hosts`."""
        self._follows = False
        if self._leader.left is not None:
            raise ConnectionError(self._leader.left.reason)
        own = StepBarrier(partial(_send, self._leader))
        self._leader.on_step_message(own.take)
        return own

    def wait_for_loss(self) -> None:
        """See `Hosts`."""
        self._ending.wait_for_loss()

    def leave(self, reason: str, *, failed: bool) -> None:
        """See `Hosts`."""
        self._ending.leave()
        _send(self._leader, Leave(reason, failed))
        self._leader.connection.close()

    def _ended(self, leader: _Peer, reason: str, failed: bool) -> None:
        """Called by the thread that reads host 0."""
        if not self.dismissed and self._ending.notice():
            self._ending.report(reason, failed)


def _send(peer: _Peer, message: messages.Message) -> None:
    _send_frame(peer, framed(message))


def _send_frame(peer: _Peer, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the reading thread reports it
        peer.connection.send_frame(frame)


def _send_heartbeats(peers: list[_Peer]) -> None:
    """Send heartbeats until all connections have ended."""
    frame = framed(Heartbeat())
    while not all(peer.ended.wait(_HEARTBEAT_S / len(peers)) for peer in peers):
        for peer in peers:
            _send_frame(peer, frame)


class _Gathering:
    """Host 0 while it waits for the others to join."""

    def __init__(self, n_hosts: int, own: Hello, report: _Report):
        self.connections: dict[int, Connection] = {}
        self._n_hosts = n_hosts
        self._own = own
        self._report = report

    def wait(self, listener: socket.socket) -> None:
        """Accept hosts until all have joined. Raises ConfigError after `_JOIN_S`."""
        deadline = time.monotonic() + _JOIN_S
        listener.settimeout(_HEARTBEAT_S)
        reported = 0.0
        while self._missing:
            now = time.monotonic()
            if now > deadline:
                raise ConfigError(f"{self._missing_names} did not join within {_JOIN_S:g} s")
            if now - reported > _REPORT_S:
                self._report_missing()
                reported = now
            self._accept(listener)
        self._report_missing()

    def close(self) -> None:
        """Close the connections of hosts that have joined; they will try to join again."""
        for connection in self.connections.values():
            connection.close()

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(1, self._n_hosts) if number not in self.connections]

    @property
    def _missing_names(self) -> str:
        return "host " + ", ".join(map(str, self._missing))

    def _report_missing(self) -> None:
        detail = f"waiting for {self._missing_names}" if self._missing else ""
        self._report(len(self.connections) + 1, self._n_hosts, detail)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection, if one comes within a second, and drop lost hosts."""
        try:
            connected, (address, *_) = listener.accept()
        except TimeoutError:
            pass
        else:
            self._greet(connected, str(address))
        for number, connection in list(self.connections.items()):
            if not _is_alive(connection):
                del self.connections[number]
                connection.close()

    def _greet(self, connected: socket.socket, address: str) -> None:
        connection = Connection(connected)
        connected.settimeout(_HELLO_S)
        try:
            hello = connection.receive(_HELLO_BYTES)
            connected.settimeout(Connection.silent_s)
            self._take(hello, connection)
        except _BROKEN:
            _log.warning("a connection from %s is no host of this engine", address)
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
        """The reason why a host may not join, or ""."""
        if not isinstance(hello, Hello):
            return "its first message was not a hello"
        name = f"host {hello.host_id}"
        if not 0 < hello.host_id < self._n_hosts:
            return f"{name} is not one of the {self._n_hosts} hosts of this engine"
        if hello.versions != self._own.versions:
            return f"{name} runs {hello.versions}, host 0 {self._own.versions}"
        if hello.digest != self._own.digest:
            return (
                f"{name} has other settings of [model], [engine] or [sampling] than host 0, or "
                f"another model (digest {hello.digest}, not {self._own.digest})"
            )
        earlier = self.connections.get(hello.host_id)
        if earlier is not None and _is_alive(earlier):
            return f"{name} has already joined: each host needs a host_id of its own"
        return ""


def _is_alive(connection: Connection) -> bool:
    """Whether a host that has joined is still connected."""
    if connection.ended:
        return False
    try:
        connection.send(Heartbeat())
    except OSError:
        return False
    return True


def _wait_for_welcome(connection: Connection, own: Hello, report: _Report, n_hosts: int) -> Welcome:
    """Join host 0 and wait until all hosts have. Raises ConfigError if it refuses."""
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

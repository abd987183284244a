"""The parent's side of a core process, with two sockets in a private folder."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from jitney.engine.common import messages
from jitney.engine.common.child_process import start_child
from jitney.engine.common.core_start import SOCKET_NAMES, Start, core_environ, remove_folder
from jitney.engine.common.errors import EngineDead, ErrorInfo, RequestError
from jitney.engine.config import Config

#: File descriptors of a link: sockets, their connections, lock, pipe, process, and some at a start.
_DESCRIPTORS = 16
_FOLDER_PREFIX = "jitney-core-"
#: Attempts to make a folder: another server's cleanup may remove it before it is locked.
_FOLDER_TRIES = 3
_decode = msgspec.msgpack.Decoder(messages.FromCore).decode


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    """A new, locked folder in the temporary directory, removed at the end. The lock ends with this
    process; `_remove_left_folders` and cleaning services respect it. Raises OSError.
    """
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)
        os.close(lock)


def _remove_left_folders() -> None:
    """Remove killed servers' folders: ours, unlocked, with nothing but sockets."""
    for path in Path(tempfile.gettempdir()).glob(_FOLDER_PREFIX + "*"):
        with contextlib.suppress(OSError):
            _remove_if_left(str(path))


def _locked_folder() -> tuple[str, int]:
    """A new folder and the descriptor that locks it."""
    for _ in range(_FOLDER_TRIES):
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError:
            remove_folder(folder)
            raise
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)
    raise OSError(f"folders in {tempfile.gettempdir()} vanish as soon as they are made")


def _remove_if_left(folder: str) -> None:
    """Remove one folder, if it is ours and not in use. Raises OSError if it is in use."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        ours = os.fstat(lock).st_uid == os.geteuid()
        if ours and set(os.listdir(lock)) <= set(SOCKET_NAMES):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(folder)
    finally:
        os.close(lock)


@dataclass(slots=True)
class CoreLink:
    """A core process and its sockets. A restart makes a new link; messages of the old one are
    lost.
    """

    to_core: zmq.Socket
    from_core: zmq.asyncio.Socket
    process: asyncio.subprocess.Process
    #: The core has sent `Ready`. This and the following fields are written by the supervisor.
    ready: bool = False
    #: The core has got the tokenizer.
    learned: bool = False
    #: The reason of its end that the core reported.
    fatal: ErrorInfo | None = None
    #: The leader's reason for ending the core; empty: it has not.
    left: str = ""
    #: The core was killed because it was silent for too long.
    hung: bool = False
    #: Hosts that the core waits for, from its newest message about that.
    awaits: list[int] = field(default_factory=list)
    #: Futures of questions without an answer yet, by ticket.
    tickets: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _new_tickets: Iterator[int] = field(default_factory=itertools.count)

    def send(self, message: messages.ToCore) -> None:
        """Queue a message; it is dropped if the core is dead, as its death is handled elsewhere."""
        with contextlib.suppress(zmq.Again):
            self.to_core.send(messages.encode(message), zmq.NOBLOCK)

    async def receive(self) -> messages.FromCore:
        """The next message."""
        return _decode(await self.from_core.recv())

    async def ask(self, question: Callable[[int], messages.ToCore], wait_s: float | None) -> Any:
        """Send a question and wait for its answer (wait_s None: for ever). Raises RequestError."""
        ticket = next(self._new_tickets)
        waiter = asyncio.get_running_loop().create_future()
        self.tickets[ticket] = waiter
        self.send(question(ticket))
        try:
            return await asyncio.wait_for(waiter, wait_s)
        except EngineDead:
            raise RequestError("the engine died over it", code="engine_dead") from None
        except TimeoutError:
            raise RequestError(
                "the engine is busy and did not answer in time", code="internal_error"
            ) from None
        finally:
            self.tickets.pop(ticket, None)

    def answer(self, message: messages.SeatMap | messages.Done | messages.AdaptersSet) -> None:
        """Complete the question with this ticket, if it is still open."""
        waiter = self.tickets.pop(message.ticket, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(message)

    def lost(self) -> None:
        """Fail all questions: the core is gone."""
        for waiter in self.tickets.values():
            if not waiter.done():
                waiter.set_exception(EngineDead("the engine process ended"))

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class LinkRuntime:
    """Resources for links when the process is out of file descriptors: ZeroMQ's threads and spare
    descriptors. libzmq aborts if a new context gets none, so all links share one context.
    """

    def __init__(self) -> None:
        _remove_left_folders()
        self.context = zmq.Context()
        self.context.socket(zmq.PUSH).close()  # the first socket starts the threads
        self._spare: list[int] = []
        self.keep_spare()

    def keep_spare(self) -> None:
        """Reserve the descriptors that the next link will need, as far as possible."""
        with contextlib.suppress(OSError):
            while len(self._spare) < _DESCRIPTORS:
                self._spare.append(os.open(os.devnull, os.O_RDONLY))

    def free_spare(self) -> None:
        """Release the spare descriptors, right before a link is opened."""
        while self._spare:
            os.close(self._spare.pop())

    @contextlib.asynccontextmanager
    async def open_link(
        self, config: Config, builder: str, adapters: dict[str, int]
    ) -> AsyncIterator[CoreLink]:
        """A running core process with its sockets in a private folder, killed on leaving. adapters:
        see `Start`. Raises OSError or ZMQError.
        """
        context = self.context
        with (
            _private_folder() as folder,
            context.socket(zmq.PUSH) as to_core,
            zmq.asyncio.Context.shadow(context).socket(zmq.PULL) as from_core,
        ):
            settings = config.model_dump(mode="json", exclude={"server"})
            start = Start(settings, folder, builder, config.server.log_level, adapters)
            for socket, address in ((to_core, start.to_core), (from_core, start.from_core)):
                socket.set_hwm(0)
                socket.linger = 0
                socket.bind(address)
            link = CoreLink(to_core, from_core, await _spawn(config, start))
            try:
                yield link
            finally:
                link.kill()
                await link.process.wait()

    def close(self) -> None:
        """Release everything; links must be closed before."""
        self.free_spare()
        self.context.destroy(linger=0)


async def _spawn(config: Config, start: Start) -> asyncio.subprocess.Process:
    process = await start_child(
        "jitney.engine.core.process",
        stdout=None,
        env=core_environ(config.engine.jax_environment),
    )
    assert process.stdin is not None  # requested above; open for the life of this process
    process.stdin.write(msgspec.json.encode(start) + b"\n")
    return process

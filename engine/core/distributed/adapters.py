"""Adapters that change on all hosts of an engine. Imports no jax.

Host 0 reads its files and decides; the workers read their own, and all compare what they have read
before any takes it. From then on weights are exchanged between the same two steps everywhere, since
these messages and the steps come over one connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from jitney.engine.common.errors import JitneyError
from jitney.engine.core.distributed.messages import (
    ADAPTER_FILES,
    Accept,
    AdapterMessage,
    DropAdapter,
    InstallAdapter,
    Message,
    Propose,
    ReadAdapters,
    Refused,
    UseAdapter,
)

if TYPE_CHECKING:
    from jax import Array

    from jitney.engine.core.weights.adapters import AdapterBank, AdapterColumns
    from jitney.engine.core.weights.checkpoints.names import Path

type _Identity = Callable[[Mapping[str, str]], str]


class _Weights(Protocol):
    def exchange(self, arrays: Mapping[Path, Array]) -> None: ...


class WorkerAdapters:
    """A worker's side: reads its own files, and exchanges weights when host 0 does.

    folders: those of the start, by adapter. send: sends a message to host 0.
    """

    def __init__(
        self,
        bank: AdapterBank,
        weights: _Weights,
        folders: Mapping[str, str],
        identity_of: _Identity,
        send: Callable[[Message], None],
    ):
        self._bank = bank
        self._weights = weights
        self._folders = dict(folders)
        self._identity_of = identity_of
        self._send = send
        #: Adapters that are read but not in use, by number.
        self._coming: dict[int, AdapterColumns] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._reading: Future[list[AdapterColumns]] | None = None
        #: The folders to use if host 0 accepts the change.
        self._next_folders: dict[str, str] = {}
        self._installing: Future[list[dict[Path, Array]]] | None = None
        #: Called with the adapters' folders once a change is accepted.
        self.on_accepted: Callable[[dict[str, str]], None] | None = None

    def take(self, message: AdapterMessage | Accept | Refused) -> None:
        """Handle a message of host 0, between two steps. Raises the device's error if weights
        cannot be copied to it.
        """
        match message:
            case ReadAdapters():
                self._next_folders = {
                    name: message.folders.get(name) or self._folders[name]
                    for name in message.numbers
                }
                self._reading = self._thread.submit(self._read, message, self._next_folders)
            case Accept():
                self._accept()
            case Refused():
                self._reading = None
            case InstallAdapter(number=number):
                columns = self._coming.pop(number)
                self._installing = self._thread.submit(self._bank.install, columns, [None])
            case UseAdapter():
                assert self._installing is not None  # host 0 has told it before
                (arrays,) = self._installing.result()
                self._installing = None
                self._weights.exchange(arrays)
            case DropAdapter(number=number):
                self._coming.pop(number, None)
                self._bank.free(number)

    def _read(self, message: ReadAdapters, folders: dict[str, str]) -> list[AdapterColumns]:
        """Read adapters, on the thread, and answer host 0; empty if they cannot be read."""
        columns: list[AdapterColumns] = []
        try:
            for name, folder in message.folders.items():
                columns.append(self._bank.read(name, folder, message.numbers[name]))
            answer = Propose(ADAPTER_FILES, self._identity_of(folders))
        except JitneyError as error:
            answer = Refused(str(error))
        except Exception as error:  # the present adapters stay in use
            answer = Refused(f"{type(error).__name__}: {error}")
        self._send(answer)
        return columns

    def _accept(self) -> None:
        assert self._reading is not None  # host 0 accepts only answers
        for columns in self._reading.result():
            self._coming[columns.adapter.number] = columns
        self._reading = None
        self._folders = self._next_folders
        if self.on_accepted is not None:
            self.on_accepted(self._folders)

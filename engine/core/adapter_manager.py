"""Loads and removes adapters while an engine serves.

A thread reads and checks files and copies weights to the device; the core's loop only exchanges
arrays between two steps. A removed adapter keeps its columns until its requests have ended. A new
adapter waits for free columns, and its requests wait here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from jitney.engine.common.errors import ErrorInfo, JitneyError
from jitney.engine.common.messages import AdaptersSet, SetAdapters
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.distributed.messages import (
    ADAPTER_FILES,
    AdapterMessage,
    DropAdapter,
    InstallAdapter,
    ReadAdapters,
    UseAdapter,
)
from jitney.engine.core.held_request import HeldRequest
from jitney.engine.core.weights.checkpoints.adapter import stamp_of
from jitney.engine.core.weights.checkpoints.names import Path

if TYPE_CHECKING:
    from jax import Array

    from jitney.engine.core.distributed.link import Leader
    from jitney.engine.core.weights.adapters import AdapterBank, AdapterColumns, LoadedAdapter
    from jitney.kernels.interface import Kernels

_REMOVED = ErrorInfo("model_not_found", "the adapter was removed; see /v1/models", "model")
_log = logging.getLogger("jitney.core")


class _Weights(Protocol):
    """The runner of a model."""

    def exchange(self, arrays: Mapping[Path, Array]) -> None: ...


class ServedModel(NamedTuple):
    """A model with adapters."""

    weights: _Weights
    #: The kernels that its matrices are packed for; None: not packed.
    layout: Kernels | None


@dataclass(frozen=True, slots=True)
class _Change:
    """A checked list of adapters to serve."""

    ticket: int
    #: All adapters, in the list's order.
    adapters: list[LoadedAdapter]
    #: The adapters that are not loaded yet.
    new: list[AdapterColumns]
    config_digest: str
    #: Names of adapters that a fixed engine would have to read again.
    needs_restart: list[str] = field(default_factory=list[str])

    def answer(self, before: Mapping[str, LoadedAdapter]) -> AdaptersSet:
        names = {adapter.name for adapter in self.adapters}
        new = [columns.adapter.name for columns in self.new]
        return AdaptersSet(
            self.ticket,
            adapters={adapter.name: adapter.number for adapter in self.adapters},
            config_digest=self.config_digest,
            added=[name for name in new if name not in before],
            removed=[name for name in before if name not in names],
            replaced=[name for name in new if name in before],
            needs_restart=self.needs_restart,
        )


class AdapterManager:
    """Changes the adapters of an engine.

    loaded: the adapters that the models already have. identity_of: maps adapters (name -> folder)
    to the identity of the model's files with theirs, and digest_of that to the configuration's
    digest. hosts: the connections to the engine's other hosts, if any. fixed: the engine keeps the
    adapters of its start, and changes are only named.
    """

    def __init__(
        self,
        bank: AdapterBank,
        loaded: Iterable[LoadedAdapter],
        models: Sequence[ServedModel],
        identity_of: Callable[[Mapping[str, str]], str],
        digest_of: Callable[[str], str],
        *,
        hosts: Leader | None = None,
        fixed: bool = False,
    ):
        self._bank = bank
        self._models = models
        self._identity_of = identity_of
        self._digest_of = digest_of
        self._hosts = hosts
        self._fixed = fixed
        #: Name -> served adapter.
        self._served = {adapter.name: adapter for adapter in loaded}
        self._next_number = 1 + max((one.number for one in self._served.values()), default=0)
        #: Number of a removed adapter -> number of its replacement, if any.
        self._retired: dict[int, int | None] = {}
        #: Numbers of adapters whose columns are in the models.
        self._installed = {adapter.number for adapter in self._served.values()}
        #: Adapters that are read but not installed, oldest first.
        self._coming: list[AdapterColumns] = []
        #: Requests whose adapters are not installed yet.
        self.waiting: list[HeldRequest] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._changes: list[SetAdapters] = []
        self._reading: tuple[int, Future[_Change]] | None = None
        self._installing: Future[list[dict[Path, Array]]] | None = None
        self._answers: list[AdaptersSet] = []

    @property
    def is_busy(self) -> bool:
        """True while `tend` must be called between steps."""
        return bool(self._changes or self._reading or self._coming or self._answers)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the served adapters."""
        return {adapter.number for adapter in self._served.values()}

    def ask(self, message: SetAdapters) -> None:
        """Queue a change; `take_answers` returns its answer once the files are read."""
        self._changes.append(message)

    def take_answers(self) -> list[AdaptersSet]:
        answers, self._answers = self._answers, []
        return answers

    def current(self, request: EngineRequest) -> EngineRequest:
        """The request, with its adapter's number updated if its files were just replaced."""
        number = request.adapter
        while (successor := self._retired.get(number)) is not None:
            number = successor
        if number == request.adapter:
            return request
        return msgspec.structs.replace(request, adapter=number)

    def refusal(self, request: EngineRequest) -> ErrorInfo | None:
        """The error of a new request whose adapter was removed. Earlier requests are served."""
        return _REMOVED if request.adapter in self._retired else None

    def hold(self, request: EngineRequest) -> bool:
        """Hold a request whose adapter is not installed yet, until `tend` returns it. False if it
        need not wait.
        """
        if not request.adapter or request.adapter in self._installed:
            return False
        if all(request.adapter != one.adapter.number for one in self._coming):
            return False  # an unknown adapter
        self.waiting.append(HeldRequest(request))
        return True

    def tend(self, open_adapters: Callable[[], set[int]]) -> list[HeldRequest]:
        """Advance changes between two steps; returns the requests that need not wait any more.

        open_adapters: numbers that open requests use. Raises the device's error if weights cannot
        be copied to it.
        """
        if self._reading is None and self._changes:
            self._begin_reading(self._changes.pop(0))
        if self._reading is not None and self._reading[1].done():
            ticket, reading = self._reading
            self._reading = None
            self._take_change(ticket, reading)
        if self._installing is not None and self._installing.done():
            self._install(self._installing.result())
        if self._installing is None:
            self._free(open_adapters)
            self._begin_installing()
        return self._released()

    def _begin_reading(self, message: SetAdapters) -> None:
        self._next_number = max(self._next_number, message.first_number)
        served, first = dict(self._served), self._next_number
        self._next_number += len(message.folders)
        reading = self._thread.submit(self._read, message, served, first)
        self._reading = message.ticket, reading

    def _read(self, message: SetAdapters, served: dict[str, LoadedAdapter], number: int) -> _Change:
        """Read adapters, on the thread. number: of the first new one. Raises ModelError."""
        if self._fixed:
            return self._compared(message, served)
        adapters: list[LoadedAdapter] = []
        new: list[AdapterColumns] = []
        for name, folder in message.folders.items():
            before = served.get(name)
            if before is not None and before.stamp == stamp_of(folder):
                adapters.append(before)
                continue
            columns = self._bank.read(name, folder, number + len(new))
            new.append(columns)
            adapters.append(columns.adapter)
        self._bank.check_room(adapters)
        identity = self._identity_of(message.folders)
        if self._hosts is not None:
            numbers = {adapter.name: adapter.number for adapter in adapters}
            folders = {one.adapter.name: message.folders[one.adapter.name] for one in new}
            self._hosts.send(ReadAdapters(numbers, folders))
            # Raises ConfigError, naming the host, if one cannot read them or has other files.
            self._hosts.same(ADAPTER_FILES, identity)
        return _Change(message.ticket, adapters, new, self._digest_of(identity))

    def _compared(self, message: SetAdapters, served: dict[str, LoadedAdapter]) -> _Change:
        """A result without changes, with the names of adapters that are not served, or whose files
        or folders differ from those at the start.
        """
        others = [
            name
            for name, folder in message.folders.items()
            if name not in served or served[name].stamp != stamp_of(folder)
        ]
        return _Change(message.ticket, list(served.values()), [], "", needs_restart=others)

    def _take_change(self, ticket: int, reading: Future[_Change]) -> None:
        """Serve the new list from now on; an error changes nothing."""
        try:
            change = reading.result()
        except JitneyError as error:
            self._answers.append(AdaptersSet(ticket, ErrorInfo("invalid_value", str(error))))
            return
        except Exception as error:  # the present adapters stay in use
            _log.exception("adapters were not read")
            reason = f"adapters: {type(error).__name__}: {error}"
            self._answers.append(AdaptersSet(ticket, ErrorInfo("internal_error", reason)))
            return
        answer = change.answer(self._served)
        for name in answer.removed + answer.replaced:
            self._retired[self._served[name].number] = answer.adapters.get(name)
        self._served = {adapter.name: adapter for adapter in change.adapters}
        self._coming += change.new
        self._answers.append(answer)

    def _free(self, open_adapters: Callable[[], set[int]]) -> None:
        """Free the columns of removed adapters that no open request uses."""
        removed = self._installed & self._retired.keys()
        if not removed:
            return
        for number in sorted(removed - open_adapters()):
            self._tell_others(DropAdapter(number))
            self._bank.free(number)
            self._installed.discard(number)

    def _begin_installing(self) -> None:
        """Begin to install the oldest new adapter if it has room. Every list of adapters fits, so
        each adapter is installed in the end.
        """
        while self._coming and self._is_needless(self._coming[0].adapter):
            self._tell_others(DropAdapter(self._coming.pop(0).adapter.number))
        if self._coming and self._bank.has_room(self._coming[0].adapter):
            layouts = [model.layout for model in self._models]
            self._tell_others(InstallAdapter(self._coming[0].adapter.number))
            self._installing = self._thread.submit(self._bank.install, self._coming[0], layouts)

    def _is_needless(self, adapter: LoadedAdapter) -> bool:
        """True if the adapter was removed again and no request waits for it."""
        waiting = {entry.request.adapter for entry in self.waiting}
        return adapter.number in self._retired and adapter.number not in waiting

    def _install(self, arrays: list[dict[Path, Array]]) -> None:
        """Use the copied adapter in steps from now on."""
        self._installing = None
        self._tell_others(UseAdapter())
        for model, own in zip(self._models, arrays, strict=True):
            model.weights.exchange(own)
        adapter = self._coming.pop(0).adapter
        self._installed.add(adapter.number)
        _log.info("adapter %s is loaded", adapter.name)

    def _tell_others(self, message: AdapterMessage) -> None:
        if self._hosts is not None:
            self._hosts.send(message)

    def _released(self) -> list[HeldRequest]:
        waiting, self.waiting = self.waiting, []
        free: list[HeldRequest] = []
        for one in waiting:
            is_free = one.is_over or one.request.adapter in self._installed
            (free if is_free else self.waiting).append(one)
        return free

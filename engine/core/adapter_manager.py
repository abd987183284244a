"""Adapters that come and go while an engine serves, as the core's loop sees them.

Files are read and checked, and weights are brought to the device, on a thread of their own; the
loop only exchanges arrays between two steps. An adapter that is gone keeps its columns until the
requests that ask for it have ended. One that needs these columns waits for them, and its requests
wait here.
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
from jitney.engine.common.outputs import FinishReason
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.weights.checkpoints.adapter import stamp_of
from jitney.engine.core.weights.checkpoints.names import Path

if TYPE_CHECKING:
    from jax import Array

    from jitney.engine.core.weights.adapters import AdapterBank, AdapterColumns, LoadedAdapter
    from jitney.kernels.interface import Kernels

_REMOVED = ErrorInfo(
    "model_not_found", "the adapter was removed; /v1/models lists what there is", "model"
)
_log = logging.getLogger("jitney.core")


class _Weights(Protocol):
    """What runs steps."""

    def exchange(self, arrays: Mapping[Path, Array]) -> None: ...


class ServedModel(NamedTuple):
    """A model that is to have the adapters."""

    weights: _Weights
    #: Its matrices are laid out by these; None: they are as they came.
    layout: Kernels | None


@dataclass(frozen=True, slots=True)
class _Change:
    """A list of adapters that was read and is sound."""

    ticket: int
    #: All that are to be served, in the list's order.
    adapters: list[LoadedAdapter]
    #: Those of them that are not loaded yet.
    new: list[AdapterColumns]
    config_digest: str

    def answer(self, before: Mapping[str, LoadedAdapter]) -> AdaptersSet:
        names = {adapter.name for adapter in self.adapters}
        come = [columns.adapter.name for columns in self.new]
        return AdaptersSet(
            self.ticket,
            adapters={adapter.name: adapter.number for adapter in self.adapters},
            config_digest=self.config_digest,
            added=[name for name in come if name not in before],
            removed=[name for name in before if name not in names],
            replaced=[name for name in come if name in before],
        )


@dataclass(slots=True)
class _HeldRequest:
    """A request whose adapter is not loaded yet, and ends that its sequences have had meanwhile."""

    request: EngineRequest
    ended: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])

    @property
    def is_over(self) -> bool:
        return len(self.ended) >= self.request.sampling.n


class AdapterManager:
    """Changes the adapters of an engine. models: which have the bank's adapters, loaded ones.
    digest_of: from adapters, folders by name, to the configuration's digest.
    """

    def __init__(
        self,
        bank: AdapterBank,
        loaded: Iterable[LoadedAdapter],
        models: Sequence[ServedModel],
        digest_of: Callable[[Mapping[str, str]], str],
    ):
        self._bank = bank
        self._models = models
        self._digest_of = digest_of
        #: Those that are served, by name.
        self._served = {adapter.name: adapter for adapter in loaded}
        self._next_number = 1 + max((one.number for one in self._served.values()), default=0)
        #: Those that are served no more, by number, and the numbers of those that took their place.
        self._retired: dict[int, int | None] = {}
        #: Numbers of those whose columns are in the models.
        self._installed = {adapter.number for adapter in self._served.values()}
        #: Read, and not installed yet, oldest first.
        self._coming: list[AdapterColumns] = []
        self._held: list[_HeldRequest] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._asked: list[SetAdapters] = []
        self._reading: tuple[int, Future[_Change]] | None = None
        self._installing: Future[list[dict[Path, Array]]] | None = None
        self._answers: list[AdaptersSet] = []

    @property
    def is_busy(self) -> bool:
        """`tend` is to be called until this is false."""
        return bool(self._asked or self._reading or self._coming or self._answers)

    @property
    def numbers(self) -> set[int]:
        """Of those that are served."""
        return {adapter.number for adapter in self._served.values()}

    def ask(self, message: SetAdapters) -> None:
        """The answer is among `take_answers` once the files have been read."""
        self._asked.append(message)

    def take_answers(self) -> list[AdaptersSet]:
        answers, self._answers = self._answers, []
        return answers

    def current(self, request: EngineRequest) -> EngineRequest:
        """The request, or if it was made a moment before its adapter's files were replaced, one for
        the new files.
        """
        number = request.adapter
        while (successor := self._retired.get(number)) is not None:
            number = successor
        if number == request.adapter:
            return request
        return msgspec.structs.replace(request, adapter=number)

    def refusal(self, request: EngineRequest) -> ErrorInfo | None:
        """Why a request that comes now is not answered; None: it is. Those that came before their
        adapter was removed are.
        """
        return _REMOVED if request.adapter in self._retired else None

    def hold(self, request: EngineRequest) -> bool:
        """Keep a request whose adapter is not installed yet; `tend` gives it back. False: it need
        not wait.
        """
        if not request.adapter or request.adapter in self._installed:
            return False
        if all(request.adapter != one.adapter.number for one in self._coming):
            return False  # of none that there is
        self._held.append(_HeldRequest(request))
        return True

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """Note that a request (index None) or one of its sequences is ended, if it waits here."""
        for held in self._held:
            if held.request.id == request_id:
                ended = range(held.request.sampling.n) if index is None else (index,)
                for number in ended:
                    held.ended.setdefault(number, reason)

    def tend(self, open_adapters: Callable[[], set[int]]) -> list[_HeldRequest]:
        """Do what can be done between two steps. open_adapters: numbers that open requests ask for.
        -> requests that need not wait any more.

        Raises what the device raises where weights cannot be brought there.
        """
        if self._reading is None and self._asked:
            self._begin_reading(self._asked.pop(0))
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
        """On the thread. number: of the first adapter that is new. Raises ModelError."""
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
        return _Change(message.ticket, adapters, new, self._digest_of(message.folders))

    def _take_change(self, ticket: int, reading: Future[_Change]) -> None:
        """Serve what was read from now on; what is not sound changes nothing."""
        try:
            change = reading.result()
        except JitneyError as error:
            self._answers.append(AdaptersSet(ticket, ErrorInfo("invalid_value", str(error))))
            return
        except Exception as error:  # the adapters that are there go on
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
        """Let go of the columns of those that are gone and that no request asks for."""
        gone = self._installed & self._retired.keys()
        if not gone:
            return
        for number in gone - open_adapters():
            self._bank.free(number)
            self._installed.discard(number)

    def _begin_installing(self) -> None:
        """In the order in which they came: each list of adapters has room, so that each gets its
        turn.
        """
        while self._coming and self._is_needless(self._coming[0].adapter):
            del self._coming[0]
        if self._coming and self._bank.has_room(self._coming[0].adapter):
            layouts = [model.layout for model in self._models]
            self._installing = self._thread.submit(self._bank.install, self._coming[0], layouts)

    def _is_needless(self, adapter: LoadedAdapter) -> bool:
        """Whether it is gone again, and no request waits for it."""
        waiting = {held.request.adapter for held in self._held}
        return adapter.number in self._retired and adapter.number not in waiting

    def _install(self, arrays: list[dict[Path, Array]]) -> None:
        """Steps from now on compute with the adapter that was brought to the device."""
        self._installing = None
        for model, own in zip(self._models, arrays, strict=True):
            model.weights.exchange(own)
        adapter = self._coming.pop(0).adapter
        self._installed.add(adapter.number)
        _log.info("adapter %s is loaded", adapter.name)

    def _released(self) -> list[_HeldRequest]:
        if not self._held:
            return []
        held, self._held = self._held, []
        free: list[_HeldRequest] = []
        for one in held:
            is_free = one.is_over or one.request.adapter in self._installed
            (free if is_free else self._held).append(one)
        return free

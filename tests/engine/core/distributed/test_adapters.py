"""Adapters that change on two hosts, in this process over a real connection; nobody has a device.

Each host's bank logs what is done to its columns: both logs are to be equal, steps included.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from jitney.engine.common.errors import ModelError
from jitney.engine.common.messages import AdaptersSet, SetAdapters
from jitney.engine.core.adapter_manager import AdapterManager, ServedModel
from jitney.engine.core.distributed.adapters import WorkerAdapters
from jitney.engine.core.distributed.connection import Connection
from jitney.engine.core.distributed.link import Leader, Worker
from jitney.engine.core.distributed.messages import Hello
from jitney.engine.core.weights.adapters import AdapterColumns, LoadedAdapter


@dataclass
class Host:
    """A host's disk (folder -> content), its columns and its model."""

    disk: dict[str, str]
    log: list[tuple[str, object]] = field(default_factory=list)

    def read(self, name: str, folder: str, number: int) -> AdapterColumns:
        if folder not in self.disk:
            raise ModelError(f"adapter {name}: {folder} is not a folder")
        return AdapterColumns(LoadedAdapter(name, number, (0,), {}), {})

    def identity(self, folders: Mapping[str, str]) -> str:
        return " ".join(f"{name}={self.disk[folder]}" for name, folder in folders.items())

    def check_room(self, adapters: Sequence[LoadedAdapter]) -> None:
        pass

    def has_room(self, adapter: LoadedAdapter) -> bool:
        return True

    def install(self, new: AdapterColumns, layouts: Sequence[None]) -> list[dict[Any, Any]]:
        self.log.append(("install", new.adapter.number))
        return [{} for _ in layouts]

    def free(self, number: int) -> None:
        self.log.append(("free", number))

    def exchange(self, arrays: Mapping[Any, Any]) -> None:
        self.log.append(("exchange", None))


class Engine:
    """Host 0's manager and host 1's follower; `step` is one step of both."""

    def __init__(self, first: Host, other: Host, leader: Leader, worker: Worker):
        self.other, self.worker = other, worker
        bank, other_bank, model = first, other, ServedModel(first, None)
        self.manager = AdapterManager(bank, [], [model], first.identity, str, hosts=leader)  # type: ignore[arg-type]
        self.followed = WorkerAdapters(other_bank, other, {}, other.identity, worker.send)  # type: ignore[arg-type]
        self.accepted: list[dict[str, str]] = []
        self.followed.on_accepted = self.accepted.append

    def set(self, ticket: int, folders: dict[str, str]) -> AdaptersSet:
        """Change the adapters, to the end of all exchanges."""
        self.manager.ask(SetAdapters(ticket, folders, 0))
        answers: list[AdaptersSet] = []
        while self.manager.is_busy or not answers:
            self.manager.tend(set)
            answers += self.manager.take_answers()
            self.follow(0.01)
        self.manager.tend(set)
        self.follow(0.1)
        return answers[0]

    def follow(self, timeout_s: float) -> None:
        while (message := self.worker.next(timeout_s)) is not None:
            self.followed.take(message)  # type: ignore[arg-type]


@pytest.fixture
def hosts() -> list[Host]:
    return [Host({"/fr": "1", "/de": "2"}), Host({"/fr": "1", "/de": "2"})]


@pytest.fixture
def engine(hosts: list[Host]) -> Iterator[Engine]:
    ends = _ends()
    lost: list[str] = []
    leader = Leader({1: ends[0]}, "", lambda reason, _: lost.append(reason))
    worker = Worker(ends[1], Hello(1, "", ""), 2, "", lambda reason, _: lost.append(reason))
    yield Engine(hosts[0], hosts[1], leader, worker)
    worker.leave("the test is over", failed=False)
    leader.leave("the test is over", failed=False)


def _ends() -> list[Connection]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return [Connection(one), Connection(other)]


def test_all_hosts_do_the_same_in_the_same_order(engine: Engine, hosts: list[Host]):
    assert engine.set(1, {"fr": "/fr", "de": "/de"}).adapters == {"fr": 1, "de": 2}
    assert engine.set(2, {"de": "/de"}).removed == ["fr"]
    expected = [("install", 1), ("exchange", None), ("install", 2), ("exchange", None)]
    assert hosts[0].log[:4] == expected and ("free", 1) in hosts[0].log
    assert hosts[1].log == hosts[0].log
    assert engine.accepted == [{"fr": "/fr", "de": "/de"}, {"de": "/de"}]


def test_a_host_that_cannot_read_one_refuses_for_all(engine: Engine, hosts: list[Host]):
    del hosts[1].disk["/de"]
    error = engine.set(1, {"fr": "/fr", "de": "/de"}).error
    assert error is not None
    assert error.message == "host 1: adapter de: /de is not a folder"
    assert not hosts[0].log and not hosts[1].log and not engine.accepted
    assert engine.set(2, {"fr": "/fr"}).added == ["fr"]
    assert hosts[1].log == hosts[0].log


def test_other_files_of_a_host_are_refused(engine: Engine, hosts: list[Host]):
    hosts[1].disk["/fr"] = "other"
    error = engine.set(1, {"fr": "/fr"}).error
    assert error is not None
    assert "host 1 has other files of adapters than host 0" in error.message
    assert not hosts[0].log and not hosts[1].log

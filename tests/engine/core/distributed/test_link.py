"""Hosts that come together, agree, and lose each other, all in this process; nobody here has a
device.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.ports import HostAddress, free_port
from jitney.engine.common.worker_pipe import framed
from jitney.engine.core.distributed import link
from jitney.engine.core.distributed.connection import Connection, listen_at
from jitney.engine.core.distributed.link import Leader, Worker
from jitney.engine.core.distributed.messages import Hello, Leave, PackedArray, Step, StepSize

LIMIT_S = 30.0
OWN = Hello(0, "jitney 1, jax 2", "abc")


@dataclass
class Meeting:
    """Where hosts meet, and what they said of it."""

    pool: ThreadPoolExecutor
    port: int = field(default_factory=free_port)
    #: (who noticed, why, whether the lost one said so itself)
    losses: queue.SimpleQueue[tuple[int, str, bool]] = field(default_factory=queue.SimpleQueue)
    reports: list[tuple[int, int, str]] = field(default_factory=list)
    #: Cleared: a host that noticed a loss is still about to report it.
    told: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.told.set()

    @property
    def coordinator(self) -> str:
        return f"127.0.0.1:{self.port}"

    def lost_by(self, number: int) -> Callable[[str, bool], None]:
        def lost(reason: str, failed: bool) -> None:
            self.losses.put((number, reason, failed))
            self.told.wait(LIMIT_S)

        return lost

    def report(self, done: int, total: int, detail: str) -> None:
        self.reports.append((done, total, detail))

    def first(self, n_hosts: int = 2) -> Future[Leader]:
        return self.pool.submit(
            Leader.gather, self.coordinator, n_hosts, OWN, self.report, self.lost_by(0)
        )

    def other(
        self,
        number: int = 1,
        n_hosts: int = 2,
        versions: str = OWN.versions,
        digest: str = OWN.digest,
    ) -> Future[Worker]:
        hello = Hello(number, versions, digest)
        lost = self.lost_by(number)
        return self.pool.submit(Worker.join, self.coordinator, n_hosts, hello, self.report, lost)

    def pair(self) -> tuple[Leader, Worker]:
        first, other = self.first(), self.other()
        return first.result(LIMIT_S), other.result(LIMIT_S)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setattr(link, "_JOIN_S", LIMIT_S)  # so long does a failed test wait
    with ThreadPoolExecutor(8) as pool:
        yield Meeting(pool)


@pytest.fixture
def pair(meeting: Meeting) -> Iterator[tuple[Leader, Worker]]:
    first, other = meeting.pair()
    yield first, other
    part([first, other])


def part(hosts: list[Leader | Worker]) -> None:
    """The first host last: it waits for the others."""
    for host in reversed(hosts):
        host.leave("the test is over", failed=False)


def step(number: int) -> Step:
    return Step(number, 4, True, PackedArray.of(np.arange(number, dtype=np.int32)))


def test_what_the_first_host_says_comes_in_order(pair: tuple[Leader, Worker]):
    first, other = pair
    for number in range(50):
        first.send(step(number))
    for number in range(50):
        message = other.next(LIMIT_S)
        assert isinstance(message, Step) and message.tokens == number
        np.testing.assert_array_equal(message.packed.unpacked(), np.arange(number))
    assert other.next(0.01) is None
    assert first.jax_address == other.jax_address


@pytest.mark.parametrize(
    "array", [np.zeros((2, 0), np.int32), np.array([[1.5], [-0.0]], np.float32)]
)
def test_an_array_arrives_as_it_was(array: np.ndarray):
    arrived = PackedArray.of(array).unpacked()
    np.testing.assert_array_equal(arrived, array)
    assert arrived.dtype == array.dtype


def test_hosts_agree_on_the_least(meeting: Meeting):
    first, others = meeting.first(3), [meeting.other(number, 3) for number in (2, 1)]
    hosts = [first.result(LIMIT_S), *[other.result(LIMIT_S) for other in others]]
    asked = [
        meeting.pool.submit(host.least, "pages", value)
        for host, value in zip(hosts, (70, 50, 60), strict=True)
    ]
    assert [answer.result(LIMIT_S) for answer in asked] == [50, 50, 50]
    part(hosts)


def test_hosts_that_found_different_things_all_say_so(
    meeting: Meeting, pair: tuple[Leader, Worker]
):
    asked = [
        meeting.pool.submit(host.same, "kernels", value)
        for host, value in zip(pair, ("fast", "slow"), strict=True)
    ]
    for answer in asked:
        with pytest.raises(ConfigError, match="host 1 has other kernels than host 0: slow, not"):
            answer.result(LIMIT_S)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            Hello(1, "jitney 2, jax 2", OWN.digest),
            "host 1 runs jitney 2, jax 2, host 0 jitney 1, jax 2",
        ),
        (
            Hello(1, OWN.versions, "abd"),
            "host 1 has other settings of .model., .engine. or .sampling. than host 0",
        ),
    ],
)
def test_a_host_that_does_not_fit_is_sent_away_and_others_still_join(
    meeting: Meeting, hello: Hello, reason: str
):
    first = meeting.first()
    with pytest.raises(ConfigError, match=reason) as caught:
        meeting.other(versions=hello.versions, digest=hello.digest).result(LIMIT_S)
    assert "\n" not in str(caught.value)
    other = meeting.other().result(LIMIT_S)
    other.leave("the test is over", failed=False)
    assert first.result(LIMIT_S).n_hosts == 2


def test_an_id_is_given_once(meeting: Meeting):
    first = meeting.first(3)
    one = meeting.other(1, 3)
    wait_for(lambda: any("host 2" in detail for _, _, detail in meeting.reports))
    with pytest.raises(ConfigError, match="host 1 has already joined"):
        meeting.other(1, 3).result(LIMIT_S)
    with pytest.raises(ConfigError, match="host 3 is not one of the 3 hosts"):
        meeting.other(3, 3).result(LIMIT_S)
    two = meeting.other(2, 3).result(LIMIT_S)
    part([first.result(LIMIT_S), one.result(LIMIT_S), two])


def wait_for(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(LIMIT_S / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("it did not come to that")


def test_a_host_that_left_before_all_had_joined_may_join_again(meeting: Meeting):
    first = meeting.first(3)
    with connected(meeting.port) as early:
        early.sendall(framed(hello_of(1)))
        wait_for(lambda: (2, 3, "waiting for host 2") in meeting.reports)
    one, two = meeting.other(1, 3), meeting.other(2, 3)
    hosts = [future.result(LIMIT_S) for future in (first, one, two)]
    assert isinstance(hosts[0], Leader) and hosts[0].n_hosts == 3
    assert isinstance(hosts[1], Worker) and isinstance(hosts[2], Worker)
    part(hosts)


def hello_of(number: int) -> Hello:
    return Hello(number, OWN.versions, OWN.digest)


def connected(port: int) -> socket.socket:
    """A connection, once somebody listens."""
    for _ in range(int(LIMIT_S / 0.05)):
        try:
            return socket.create_connection(("127.0.0.1", port), LIMIT_S)
        except OSError:
            threading.Event().wait(0.05)
    raise AssertionError("nobody listens")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\xff\xff\xff\xff",
        framed(Leave("no hello", False)),
        b"\x00\x00\x00\x02\xc1\xc1",
        b"",
    ],
    ids=["HTTP", "4 GB", "no hello", "no msgpack", "nothing"],
)
def test_strangers_change_nothing(meeting: Meeting, said: bytes):
    first = meeting.first()
    with connected(meeting.port) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    other = meeting.other().result(LIMIT_S)
    first.result(LIMIT_S).send(step(3))
    assert isinstance(other.next(LIMIT_S), Step)
    other.leave("the test is over", failed=False)


@pytest.mark.parametrize(
    ("failed", "reason"), [(True, "it ran out of memory"), (False, "it was told to end")]
)
def test_the_last_words_of_a_host_are_the_reason(meeting: Meeting, failed: bool, reason: str):
    first, other = meeting.pair()
    other.leave(reason, failed=failed)
    assert meeting.losses.get(timeout=LIMIT_S) == (0, reason, failed)
    first.wait_for_loss()


def test_a_host_that_is_killed_is_noticed_by_all(meeting: Meeting):
    first, one, two = meeting.first(3), meeting.other(1, 3), meeting.other(2, 3)
    hosts = (first.result(LIMIT_S), one.result(LIMIT_S), two.result(LIMIT_S))
    hosts[2]._leader.connection.close()  # as the system does for a process that it ends
    losses = {meeting.losses.get(timeout=LIMIT_S) for _ in hosts}
    gone = "host 2 is gone: its connection ended"
    assert {(0, gone, False), (1, gone, True)} < losses


@pytest.mark.parametrize("number", [0, 1])
def test_no_host_leaves_while_a_loss_is_reported(meeting: Meeting, number: int):
    """It ends the process, and a step that failed for it would end it in other words."""
    pair = meeting.pair()
    meeting.told.clear()
    pair[1]._leader.connection.close()
    assert {meeting.losses.get(timeout=LIMIT_S)[0] for _ in pair} == {0, 1}
    host = pair[number]
    host.wait_for_loss()
    leaving = meeting.pool.submit(host.leave, "a step failed", failed=True)
    with pytest.raises(TimeoutError):
        leaving.result(0.2)
    meeting.told.set()
    leaving.result(LIMIT_S)


def test_a_host_that_says_nothing_is_gone(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Connection, "silent_s", 0.5)
    monkeypatch.setattr(link, "_HEARTBEAT_S", 60.0)
    first, _ = meeting.pair()
    losses = {meeting.losses.get(timeout=LIMIT_S) for _ in range(2)}
    # Whoever notices it first tells the other, who may hear of it before noticing.
    noticed = {(number, f"host {1 - number} sent nothing for 0.5 s", False) for number in (0, 1)}
    assert noticed & losses
    first.wait_for_loss()


def test_the_end_of_the_first_host_in_order_is_no_loss(meeting: Meeting):
    first, other = meeting.pair()
    first.send(step(1))
    leaving = meeting.pool.submit(first.leave, "host 0 was told to end", failed=False)
    assert isinstance(other.next(LIMIT_S), Step)
    assert other.next(LIMIT_S) == Leave("host 0 was told to end", False)
    other.leave("the first host is gone", failed=False)
    leaving.result(LIMIT_S)
    assert meeting.losses.empty()


SIZE = StepSize(tokens=4, seats=4, decode_only=True, greedy_only=True)


def test_engines_of_several_hosts_agree_upon_steps(meeting: Meeting):
    futures = [meeting.first(3), meeting.other(1, 3), meeting.other(2, 3)]
    hosts = [future.result(LIMIT_S) for future in futures]
    early = meeting.pool.submit(hosts[2].step_barrier().agree, SIZE)  # host 0 may not be there yet
    idle = [host.step_barrier() for host in hosts[:2]]
    for barrier in idle:
        wait_for(barrier.is_asked)
    agreed = [meeting.pool.submit(barrier.agree, None) for barrier in idle]
    assert [future.result(LIMIT_S) for future in (early, *agreed)] == [SIZE] * 3
    part(hosts)


def test_the_end_of_a_host_in_order_is_a_loss_to_engines_of_their_own(meeting: Meeting):
    first, other = meeting.pair()
    other.step_barrier()
    leaving = meeting.pool.submit(first.leave, "host 0 was told to end", failed=False)
    assert meeting.losses.get(timeout=LIMIT_S) == (1, "host 0 was told to end", False)
    other.leave("the first host is gone", failed=False)
    leaving.result(LIMIT_S)


def test_a_first_host_that_ended_has_no_rounds(meeting: Meeting):
    first, other = meeting.pair()
    leaving = meeting.pool.submit(first.leave, "host 0 was told to end", failed=False)
    assert other.next(LIMIT_S) == Leave("host 0 was told to end", False)
    with pytest.raises(ConnectionError, match="host 0 was told to end"):
        other.step_barrier()
    other.leave("the first host is gone", failed=False)
    leaving.result(LIMIT_S)


def test_hosts_that_never_come(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "_JOIN_S", 1.0)
    with pytest.raises(
        ConfigError, match=r"host 0 at 127.0.0.1:\d+ could not be reached within 1 s"
    ):
        meeting.other().result(LIMIT_S)
    first, one = meeting.first(4), meeting.other(2, 4)
    with pytest.raises(ConfigError, match="host 1, 3 did not join within 1 s"):
        first.result(LIMIT_S)
    with pytest.raises(ConfigError, match="could not be reached"):
        one.result(LIMIT_S)


def test_a_coordinator_that_is_not_here():
    with pytest.raises(
        ConfigError, match=r"coordinator 192\.0\.2\.1:9 must be an address of the first"
    ):
        listen_at(HostAddress("192.0.2.1", 9))

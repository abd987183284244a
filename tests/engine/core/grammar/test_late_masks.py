"""Masks that are not there in time: steps go on without their sequences, nobody's tokens change,
and a request whose masks take too much ends by itself.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fakes import (
    FakeRunner,
    StepFailed,
    code_of,
    device_of,
    ends_of,
    make_request,
    tokens_of,
    watch,
)
from grammars import BYTES, CODE, WORDS, core_with_grammars

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest, Grammar
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.grammar import matchers
from jitney.engine.core.grammar.compiling import new_matcher
from jitney.engine.core.grammar.matchers import _MaskThreads

PAIRS = Grammar("json_schema", '{"type":"array","items":{"enum":["a","b",10]},"maxItems":6}')
#: Seconds after which a test has failed.
LONG_S = 20.0


def held(id: str, wanted: Grammar | None, seed: int = 0, n: int = 1) -> EngineRequest:
    return make_request(id, [5, 6, 7], grammar=wanted, seed=seed, n=n, max_tokens=24)


def finish(core: EngineCore, *ids: str) -> list[SequenceOutput]:
    """Step until these requests have ended; all, if none is named."""
    outputs: list[SequenceOutput] = []
    most = time.monotonic() + LONG_S
    while core.has_work and not (ids and {id for id, _ in ends_of(outputs)} >= set(ids)):
        outputs += core.step().outputs
        core.check()
        for seq in core.scheduler.sequences.seats.decoding:
            assert len(seq.pages) <= core.scheduler.pool.pages_for(seq.scheduled + 1)
        time.sleep(core.pause_s)
        assert time.monotonic() < most
    return outputs


def served(core: EngineCore, *requests: EngineRequest) -> dict[tuple[str, int], list[int]]:
    """Tokens of each sequence."""
    for request in requests:
        core.add(request)
    outputs = finish(core)
    return {key: tokens_of(outputs, *key) for key in ends_of(outputs)}


def several() -> list[EngineRequest]:
    kinds = itertools.cycle([CODE, None, PAIRS, WORDS])
    return [held(f"r{i}", next(kinds), seed=i, n=1 + i % 3) for i in range(9)]


class Lock:
    """Holds up the first mask that a thread computes."""

    def __init__(self, fill: Any):
        self._fill = fill
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> None:
        if threading.current_thread().name.endswith("masks") and not self.reached.is_set():
            self.reached.set()
            self.open.wait(LONG_S)
        self._fill(*args)


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lock]:
    lock = Lock(matchers.fill_next_token_bitmask)
    monkeypatch.setattr(matchers, "fill_next_token_bitmask", lock)
    yield lock
    lock.open.set()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch):
    """Steps wait for every mask."""
    monkeypatch.setattr(matchers, "_STEP_S", LONG_S)


@pytest.fixture(params=["waits for none", "all are slow"])
def impatient(request: pytest.FixtureRequest, patient: None) -> Callable[[], None]:
    """From its call on, steps go on without masks."""
    monkeypatch = request.getfixturevalue("monkeypatch")
    if request.param == "all are slow":
        return lambda: monkeypatch.setattr(matchers, "_SLOW_S", -1.0)
    return lambda: monkeypatch.setattr(matchers, "_STEP_S", 0.0)


def test_steps_go_on_without_a_mask_that_takes_long(lock: Lock):
    core = core_with_grammars()
    core.add(held("slow", CODE))
    outputs: list[SequenceOutput] = []
    while not lock.reached.is_set():
        outputs += core.step().outputs
    for request in (make_request("free", [1, 2, 3], max_tokens=20), held("held", PAIRS, seed=3)):
        core.add(request)
    outputs += finish(core, "free", "held")
    assert not lock.open.is_set() and "slow" not in {id for id, _ in ends_of(outputs)}
    lock.open.set()
    outputs += finish(core)
    lock.reached.set()
    [(_, expected)] = served(core_with_grammars(), held("slow", CODE)).items()
    assert tokens_of(outputs, "slow") == expected


def test_an_engine_whose_masks_are_all_awaited_does_not_spin(lock: Lock):
    core = core_with_grammars()
    core.add(held("slow", CODE))
    while not lock.reached.is_set() or core.pause_s == 0:
        core.step()
    assert core.has_work and not core.step().outputs


@pytest.mark.parametrize("share_outputs", [True, False])
def test_sequences_that_sit_out_get_the_same_tokens(
    impatient: Callable[[], None], share_outputs: bool
):
    core = core_with_grammars(share_outputs=share_outputs)
    plans = watch(core)
    expected = served(core, *several())
    steps_before = len(plans)
    impatient()
    assert served(core, *several()) == expected
    assert len(plans) - steps_before > steps_before


@pytest.mark.parametrize("method", ["launch", "choose"])
def test_a_step_that_fails_while_some_sit_out(
    impatient: Callable[[], None], monkeypatch: pytest.MonkeyPatch, method: str
):
    expected = served(core_with_grammars(), *several())
    impatient()
    core, steps = core_with_grammars(), itertools.count()
    runner, original = device_of(core), getattr(FakeRunner, method)

    def failing(*args: Any) -> Any:
        if next(steps) == 4:
            raise StepFailed
        return original(runner, *args)

    monkeypatch.setattr(runner, method, failing)
    assert served(core, *several()) == expected


def test_an_answer_of_another_core_is_continued(impatient: Callable[[], None]):
    [whole] = served(core_with_grammars(), held("a", PAIRS, seed=3)).values()
    impatient()
    for told in range(len(whole)):
        for share_outputs in (True, False):  # computed like a prompt, or generated again
            again = msgspec.structs.replace(held("a", PAIRS, seed=3), resumed=[whole[:told]])
            [rest] = served(core_with_grammars(share_outputs=share_outputs), again).values()
            assert whole[:told] + rest == whole


def test_random_requests_and_aborts_lose_nothing(impatient: Callable[[], None]):
    impatient()
    rng = random.Random(7)
    core = core_with_grammars(pages=20, seats=4)
    outputs: list[SequenceOutput] = []
    opened: dict[str, int] = {}
    for number in range(120):
        id, n = f"r{number}", rng.choice((1, 1, 2, 3))
        core.add(held(id, rng.choice((None, CODE, WORDS, PAIRS)), seed=number, n=n))
        opened[id] = n
        if rng.random() < 0.3:
            core.abort(rng.choice(list(opened)), rng.choice((None, 0)))
        for _ in range(rng.randrange(4)):
            outputs += core.step().outputs
            core.check()
    outputs += finish(core)
    ends = ends_of(outputs)
    assert ends.keys() == {(id, index) for id, n in opened.items() for index in range(n)}
    assert not any(end.error for end in ends.values())


def test_a_text_that_is_whole_with_its_last_token_is(monkeypatch: pytest.MonkeyPatch):
    """Also where the token before took its time."""
    ticks = itertools.count(step=0.001)
    clock = SimpleNamespace(thread_time=lambda: next(ticks), monotonic=time.monotonic)
    monkeypatch.setattr(matchers, "time", clock)
    for length in (1, 3):
        core = core_with_grammars()
        wanted = Grammar("regex", f"[a-f]{{{length}}}")
        core.add(make_request("a", [5, 6], grammar=wanted, max_tokens=length))
        [end] = ends_of(finish(core)).values()
        assert end.finish == "stop"


def test_masks_that_take_too_long_in_all_end_their_request_alone(monkeypatch: pytest.MonkeyPatch):
    """Each mask takes 0.4 s by the processor's clock, which a test can do without."""
    expected = served(core_with_grammars(), make_request("free", [1, 2, 3], max_tokens=20))
    ticks = itertools.count(step=0.2)
    clock = SimpleNamespace(thread_time=lambda: next(ticks), monotonic=time.monotonic)
    monkeypatch.setattr(matchers, "time", clock)
    core = core_with_grammars()
    core.add(held("slow", Grammar("regex", "[a-f]{20}"), n=2))
    core.add(make_request("free", [1, 2, 3], max_tokens=20))
    outputs = finish(core)
    ends = ends_of(outputs)
    assert [code_of(ends["slow", index]) for index in (0, 1)] == ["grammar_too_complex"] * 2
    assert 0 < len(tokens_of(outputs, "slow")) + len(tokens_of(outputs, "slow", 1)) <= 2 * 5
    assert tokens_of(outputs, "free") == expected["free", 0]


def test_a_mask_that_breaks_the_library_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        if threading.current_thread().name.endswith("masks"):
            raise SystemError("a panic of the library's")
        original(*_)

    original = matchers.fill_next_token_bitmask
    monkeypatch.setattr(matchers, "fill_next_token_bitmask", broken)
    core = core_with_grammars()
    core.add(held("bad", CODE))
    core.add(make_request("free", [1, 2, 3]))
    ends = ends_of(finish(core))
    assert code_of(ends["bad", 0]) == "grammar_too_complex" and ends["free", 0].error is None


@pytest.mark.parametrize("text", [b"abc-12", b"abx", b"abc-12345678"])
def test_going_on_beside_the_interpreter_is_going_on(text: bytes):
    one = new_matcher(CODE, BYTES)
    other = one.deep_copy()
    allowed = _MaskThreads(BYTES).advance(one, list(text))
    assert allowed == other.consume_tokens(list(text))
    assert one.is_error() == other.is_error()
    if allowed:
        assert one.compute_bitmask() == other.compute_bitmask()

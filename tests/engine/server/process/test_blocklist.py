"""How long a request that failed is refused, and what counts as the same one."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeClock, make_request

from jitney.engine.common.errors import RequestError
from jitney.engine.server.process.faults import Blocklist


def refused(blocklist: Blocklist, *tokens: int, **sampling: Any) -> bool:
    try:
        blocklist.check(make_request("again", list(tokens), **sampling))
    except RequestError as error:
        assert error.info.code == "request_quarantined"
        return True
    return False


def test_the_same_prompt_and_parameters_are_refused_whoever_asks():
    blocklist = Blocklist(FakeClock())
    blocklist.add(make_request("a", [1, 2, 3], tenant="one", seed=5))
    assert refused(blocklist, 1, 2, 3, seed=5)
    assert refused(blocklist, 1, 2, 3, seed=None)  # the seed was drawn here
    assert not refused(blocklist, 1, 2)
    assert not refused(blocklist, 1, 2, 3, temperature=0.5)


def test_it_ends_after_a_minute():
    clock = FakeClock()
    blocklist = Blocklist(clock)
    blocklist.add(make_request("a", [1]))
    clock.now = 59.0
    assert refused(blocklist, 1)
    clock.now = 60.0
    assert not refused(blocklist, 1)


def test_it_remembers_so_many():
    blocklist = Blocklist(FakeClock())
    for number in range(300):
        blocklist.add(make_request("a", [number]))
    assert not refused(blocklist, 0) and refused(blocklist, 299)


@pytest.mark.parametrize("again", [10.0, 59.0])
def test_another_failure_starts_the_minute_anew(again: float):
    clock = FakeClock()
    blocklist = Blocklist(clock)
    blocklist.add(make_request("a", [1]))
    blocklist.add(make_request("b", [2]))
    clock.now = again
    blocklist.add(make_request("a", [1]))
    clock.now = 60.0
    assert refused(blocklist, 1) and not refused(blocklist, 2)

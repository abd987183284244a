"""How much silence of a core is too much."""

from __future__ import annotations

import numpy as np
import pytest

from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.server.process.watchdog import Watchdog


def record(seconds: float, *, compiled: bool = False) -> np.void:
    made = np.zeros(1, STEP_DTYPE)[0]
    made["device_s"], made["compiled"] = seconds, compiled
    return made


def test_the_limit_learns_from_the_longest_step():
    watchdog = Watchdog(0.0)
    limits = [watchdog.limit]
    for step, seconds in enumerate((0.1, 2.0, 0.5, 30.0, 0.1), start=1):
        watchdog.step_done(step, record(seconds))
        limits.append(watchdog.limit)
    assert limits == pytest.approx([10, 10, 16, 16, 150, 150])


def test_a_named_limit_does_not_learn():
    watchdog = Watchdog(3.0)
    watchdog.step_done(1, record(5.0))
    assert watchdog.limit == 3.0


def test_a_step_that_compiled_teaches_nothing():
    watchdog = Watchdog(0.0)
    watchdog.step_done(1, record(60.0, compiled=True))
    assert watchdog.limit == 10.0


def test_the_first_step_of_a_bucket_has_time_until_it_is_done():
    watchdog = Watchdog(1.0)
    watchdog.first_step(7)
    watchdog.waited(50.0)
    assert not watchdog.overdue
    watchdog.heard()
    watchdog.step_done(6, record(0.1))  # it came while step 7 ran
    watchdog.waited(50.0)
    assert not watchdog.overdue
    watchdog.step_done(7, record(0.1))
    assert watchdog.overdue


def test_silence_adds_up_until_something_is_heard():
    watchdog = Watchdog(1.0)
    for _ in range(3):
        watchdog.waited(0.5)
    assert watchdog.overdue
    watchdog.heard()
    assert not watchdog.overdue
    watchdog.waited(2.0)
    watchdog.core_ready()
    assert not watchdog.overdue


def test_a_first_start_is_held_to_its_own_limit():
    watchdog = Watchdog(1.0, 600.0)
    watchdog.core_starts()
    for _ in range(3):
        watchdog.waited(599.0)
        assert not watchdog.overdue
        watchdog.heard()
    watchdog.waited(601.0)
    assert watchdog.overdue


def test_a_start_is_measured_by_those_before_it():
    watchdog = Watchdog(1.0)
    watchdog.core_starts()
    for _ in range(3):
        watchdog.waited(1000.0)
        assert not watchdog.overdue
        watchdog.heard()
    watchdog.core_ready()
    watchdog.core_starts()
    watchdog.waited(8999.0)
    assert not watchdog.overdue
    watchdog.waited(2.0)
    assert watchdog.overdue


def test_a_wait_for_other_engines_is_no_silence_of_the_cores():
    """Who supervises the one that hangs has as long as a silence may be, and as long again."""
    watchdog = Watchdog(2.0)
    for _ in range(16):
        watchdog.heard(awaits_others=True)
        watchdog.waited(0.25)
    assert not watchdog.overdue and watchdog.awaited == 3.75 + 0.25
    watchdog.heard(awaits_others=True)
    watchdog.waited(0.25)
    assert watchdog.overdue and watchdog.others_overdue
    watchdog.heard()
    assert not watchdog.overdue and watchdog.awaited == 0.0


def test_who_waits_and_then_says_nothing_hangs_itself():
    watchdog = Watchdog(2.0)
    watchdog.heard(awaits_others=True)
    watchdog.waited(2.25)
    assert watchdog.overdue and not watchdog.others_overdue

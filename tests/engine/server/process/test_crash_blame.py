"""Which request ended the cores: found by giving those that were there to a core one by one."""

from __future__ import annotations

from fakes import make_request

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.server.process.faults import CrashBlame
from jitney.engine.server.process.stream import Stream


def streams(*names: str) -> list[Stream]:
    return [Stream(make_request(name, [1]), lambda stream: None) for name in names]


def names(some: list[Stream]) -> list[str]:
    return [stream.id for stream in some]


def say(stream: Stream, tokens: int) -> None:
    stream.put(SequenceOutput(stream.id, 0, [1] * tokens))


def crashed_twice(blame: CrashBlame, some: list[Stream]) -> None:
    for _ in range(2):
        assert blame.core_crashed(some) is None


def test_after_one_crash_all_go_on_at_once():
    blame, some = CrashBlame(), streams("a", "b")
    blame.core_crashed(some)
    assert names(blame.core_ready(some)) == ["a", "b"]


def test_after_two_they_go_one_by_one_and_newcomers_at_once():
    blame, some = CrashBlame(), streams("a", "b", "c")
    crashed_twice(blame, some)
    (new,) = streams("new")
    assert names(blame.core_ready([*some, new])) == ["new", "a"]
    say(some[0], 3)
    assert blame.progressed(some[0]) == [] and blame.waits(some[1])
    say(some[0], 1)
    assert names(blame.progressed(some[0])) == ["b"]
    assert blame.core_crashed([*some, new]) is some[1]
    assert names(blame.core_ready([some[0], some[2], new])) == ["a", "c", "new"]


def test_who_ends_or_is_left_makes_room_for_the_next():
    blame, some = CrashBlame(), streams("a", "b", "c", "d")
    crashed_twice(blame, some)
    assert names(blame.core_ready(some)) == ["a"]
    some[1].closed = True  # its client left while it waited
    some[0].closed = True
    assert names(blame.progressed(some[0])) == ["c"]
    some[2].closed = some[3].closed = True
    assert blame.progressed(some[2]) == [] and blame.on_trial is None


def test_a_core_that_is_killed_meanwhile_changes_nothing():
    blame, some = CrashBlame(), streams("a", "b")
    crashed_twice(blame, some)
    assert names(blame.core_ready(some)) == ["a"]
    assert names(blame.core_ready(some)) == ["a"]
    assert blame.waits(some[1])

"""Layers with a window beside layers that see all: each group has its pages, no page is lost, and
no row reads a page that was given back or never written.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from core_runs import alike_requests, assert_solo_tokens, forgetful_run
from fakes import (
    FakeClock,
    FakeRunner,
    Rows,
    make_core,
    make_request,
    solo,
    tokens_of,
    watch,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.inputs import BatchBuilder
from jitney.engine.core.executor.memory import PoolShares
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.scheduler.page_keys import keys_of
from jitney.engine.core.scheduler.page_tables import least_window_pages

PAGE, SEATS, BUDGET, CONTEXT = 4, 3, 11, 64
SIZES: dict[str, int] = {
    "page_size": PAGE,
    "seats": SEATS,
    "token_budget": BUDGET,
    "context_length": CONTEXT,
}
LEAST = {window: least_window_pages(window, **SIZES) for window in (13, 3)}


class GroupsRunner(FakeRunner):
    """Its first group sees all positions; what a row finds in the pages of the others must be the
    last of these.
    """

    windows = MappingProxyType(LEAST)

    def __init__(self, n_pages: int, page_size: int, seats: int):
        super().__init__(n_pages, page_size, seats)
        self.stores: list[np.ndarray] = []
        self._before: list[np.ndarray] = []
        self._clear()

    def _clear(self) -> None:
        """[group][rows, (token, position)]"""
        sizes = [n_pages * self.page_size for n_pages in self.windows.values()]
        self.stores = [np.full((size, 2), -1) for size in sizes]

    def launch(self, batch: Any) -> Any:
        self._before = [store.copy() for store in self.stores]
        return super().launch(batch)

    def restore(self, error: Exception) -> None:
        super().restore(error)
        self._clear()

    def wake(self, alive: Any) -> None:
        super().wake(alive)
        self._clear()

    def _places(self, pages: list[int], positions: range) -> list[int]:
        return [
            pages[at // self.page_size] * self.page_size + at % self.page_size for at in positions
        ]

    def _write(self, rows: list[Rows]) -> None:
        super()._write(rows)
        for group, store in enumerate(self.stores):
            written: set[int] = set()
            for chunk in rows:
                positions = range(chunk.start, chunk.start + len(chunk.tokens))
                places = self._places(chunk.windows[group], positions)
                assert min(places) >= self.page_size, "the trash page belongs to nobody"
                assert not written.intersection(places), "two rows write to one place"
                written.update(places)
                store[places] = list(zip(chunk.tokens, positions, strict=True))

    def _read(self, chunk: Rows, tokens: np.ndarray, positions: np.ndarray) -> list[int]:
        history = super()._read(chunk, tokens, positions)
        for window, pages, store in zip(self.windows, chunk.windows, self._before, strict=True):
            seen = range(max(0, chunk.start - window + 1), chunk.start)
            expected = [(history[at], at) for at in seen]
            assert [tuple(row) for row in store[self._places(pages, seen)].tolist()] == expected
        return history


class RoomyRunner(GroupsRunner):
    """With room for cached prefixes."""

    windows = MappingProxyType({window: 3 * pages for window, pages in LEAST.items()})


class DraftingRunner(GroupsRunner):
    """Two of three of its drafts are right."""

    drafted = 3


def new_core(device: type[FakeRunner] = GroupsRunner, **settings: Any) -> EngineCore:
    return make_core(
        **{
            "max_drafts": device.drafted,
            "seats": SEATS,
            "pages": 40,
            "page_size": PAGE,
            "budget": BUDGET,
            "context": CONTEXT,
            "device": device,
            **settings,
        }
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 20),
            st.integers(0, 2),
            st.integers(1, 3),
            st.sampled_from(["", "", "background", "leaves"]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(17, 50),
    st.booleans(),
    st.booleans(),
    st.sampled_from([GroupsRunner, RoomyRunner, DraftingRunner]),
    st.integers(0, 99),
)
def test_each_sequence_has_its_own_tokens(
    shapes: list[tuple[int, int, int, int, str]],
    pages: int,
    retain: bool,
    rash: bool,
    device: type[FakeRunner],
    seed: int,
):
    """Prompts that start alike, siblings, background, few pages, preemption, drafts, requests that
    leave: the tokens are those of a request alone.
    """
    core = new_core(device, pages=pages, retain=retain, clock=FakeClock(tick=0.01))
    requests = alike_requests(shapes)
    with pytest.MonkeyPatch.context() as patch:
        if rash:
            patch.setattr(PageDemand, "lasts", lambda *_: True)
        outputs = forgetful_run(core, requests, random.Random(seed))
    assert_solo_tokens(requests, outputs)


def used_pages(core: EngineCore) -> list[int]:
    return [group.pool.used for group in core.scheduler.sequences.pages._groups]


def test_a_long_prompt_holds_no_more_than_its_windows():
    core = new_core(seats=1, budget=8, pages=33, retain=False)
    core.add(make_request("long", [1] * 56, max_tokens=8))
    held: list[list[int]] = []
    while core.has_work:
        core.step()
        held.append(used_pages(core))
    full, wide, narrow = (max(column) for column in zip(*held, strict=True))
    # Rows of a step, and the window before them.
    assert (full, wide, narrow) == (16, 5, 3)
    assert used_pages(core) == [0, 0, 0]


def test_a_prefix_is_found_where_every_group_still_has_what_its_next_row_reads():
    core = new_core(RoomyRunner, seats=1, pages=33)
    prompt = list(range(1, 33))

    def found(id: str, tokens: list[int]) -> int:
        core.add(make_request(id, tokens, max_tokens=1))
        return next(output.cached_tokens for output in core.run_until_idle() if output.tokens)

    assert found("cold", [*prompt, 5]) == 0
    assert found("warm", [*prompt, 6]) == 32
    full, wide, narrow = core.scheduler.sequences.pages._groups
    # Positions 29 to 31 are the narrow group's last page, 20 to 31 the wide group's last three.
    narrow.pool.withdraw([_key_of(core, prompt, 7)])
    assert found("without the narrow group's last page", [*prompt, 7]) == 28
    wide.pool.withdraw([_key_of(core, prompt, 5)])
    assert found("without one of the wide group's pages", [*prompt, 8]) == 20
    full.pool.withdraw([_key_of(core, prompt, 2)])
    assert found("without an early page of the full group", [*prompt, 9]) == 8


def _key_of(core: EngineCore, prompt: list[int], page: int) -> bytes:
    """The key of a page of a prompt."""
    leader = core.scheduler.factory.leader(make_request("key", [*prompt, 1]), 10**6)
    return keys_of(leader, PAGE, page + 1)[page]


def test_the_upload_has_a_table_and_rows_for_each_group():
    core = new_core(seats=2, budget=8, pages=33)
    builder = BatchBuilder(
        seats=2,
        pages_per_seat=16,
        page_size=PAGE,
        pool_rows=33 * PAGE,
        window_rows=[pages * PAGE for pages in LEAST.values()],
    )
    batch, checked = core.runner.batch, 0

    def packed(plan: Any) -> Any:
        nonlocal checked
        words = builder.build(plan, True)
        inputs = builder.layout(plan.bucket, True).split(words)
        for group, pages_here in enumerate(LEAST.values()):
            written = []
            for number, chunk in enumerate(plan.chunks):
                pages = chunk.seq.windows[group].pages
                assert inputs.window_tables[group, number, : len(pages)].tolist() == pages
                written += [
                    pages[at // PAGE] * PAGE + at % PAGE for at in range(chunk.start, chunk.end)
                ]
            absent = plan.bucket.tokens - len(written)
            expected = [*written, *[pages_here * PAGE] * absent]
            assert inputs.window_rows[group].tolist() == expected
            checked += len(written)
        return batch(plan)

    core.runner.batch = packed
    for number in range(3):
        core.add(make_request(f"r{number}", [number + 1] * 30, max_tokens=20, ignore_eos=True))
    core.run_until_idle()
    assert checked == 2 * sum((30 + 19, 30 + 19, 30 + 19))


def test_too_few_pages_of_a_window_are_refused():
    class Short(FakeRunner):
        windows: Mapping[int, int] = MappingProxyType({13: LEAST[13] - 1})

    with pytest.raises(
        ConfigError, match=f"window of 13 are less than the {LEAST[13]} that 3 seats"
    ):
        new_core(Short)


def shares(**changes: Any) -> PoolShares:
    sizes: dict[str, Any] = SIZES | {"windows": (0, 16), "page_bytes": (10, 50)}
    return PoolShares(**(sizes | changes))


def test_memory_goes_to_windows_first_and_the_rest_to_the_layers_that_see_all():
    needed = 3 * (16 // PAGE + 2) + 3 + 1
    assert shares().fit(60 * 100).pages == ((6000 - 50 * needed) // 10, needed)
    assert shares(prefix_cache=True).fit(60 * 100).pages[1] == needed + 6000 // 8 // 50
    assert shares(prefix_cache=True).fit(60 * 1000).pages[1] == needed + 3 * 6
    assert shares().fit(60 * 100, useful=40).pages == (40, needed)
    # Where windows would need as many pages as there are, all layers share them.
    assert shares().fit(60 * 20).pages == (20,)
    assert shares().counted(40).pages == (40, needed) and shares().counted(needed).pages == (
        needed,
    )
    assert shares(windows=(0,), page_bytes=(60,)).fit(6000).pages == (100,)


def test_checkpoints_take_a_quarter_of_what_seats_leave_and_no_more_than_is_of_use():
    own = shares(windows=(0,), page_bytes=(60,), slot_bytes=100.0, prefix_cache=True)
    assert own.checkpoint_tokens == 2048
    assert own.fit(300 + 1000) == ((800 // 60,), 2)
    # Two for each seat, and one for every 512 pages.
    assert own.fit(10**6)[1] == 6 + (10**6 - 300) // 60 // 512
    assert own.fit(10**6, useful=40) == ((40,), 6) and own.counted(40) == ((40,), 6)
    # A checkpoint as large as the keys and values of 3,200 tokens.
    assert replace(own, slot_bytes=800 * 60.0).checkpoint_tokens == 3200
    assert replace(own, prefix_cache=False).fit(300 + 1000) == ((1000 // 60,), 0)


@given(st.integers(600, 20_000), st.integers(1, 30), st.booleans())
def test_windows_never_leave_fewer_pages_nor_take_more_bytes(limit: int, seats: int, cache: bool):
    own = shares(seats=seats, prefix_cache=cache)
    fit = own.fit(limit)
    assert fit.pages[0] >= limit // 60
    assert own.bytes_of(fit) <= limit


def test_preempted_sequences_find_their_windows_again():
    core = new_core(RoomyRunner, seats=2, pages=20)
    plans = watch(core)
    for number in range(2):
        core.add(make_request(f"r{number}", [number + 1] * 24, max_tokens=30, ignore_eos=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageDemand, "lasts", lambda *_: True)
        outputs = core.run_until_idle()
    assert core.ledger.totals["preempted"] > 0
    assert sum(plan.recomputed for plan in plans) < 24
    for number in range(2):
        request = make_request("", [number + 1] * 24, max_tokens=30, ignore_eos=True)
        assert tokens_of(outputs, f"r{number}") == solo(request, 0, CONTEXT)


def test_a_long_prompt_leaves_the_windows_of_cached_prefixes():
    """What lies between two likely branches goes first: the prompt that all share, and the end of
    each, are found after many times more rows than the groups have pages for.
    """
    core = new_core(RoomyRunner, seats=1, pages=160)

    def found(tokens: list[int], max_tokens: int = 1) -> int:
        core.add(make_request("a", tokens, max_tokens=max_tokens, ignore_eos=True))
        outputs = core.run_until_idle()
        return next(output.cached_tokens for output in outputs if output.tokens)

    shared = [1] * 24
    assert [found([*shared, 2, 3]), found([*shared, 4, 5])] == [0, 24]
    for number in range(6, 14):
        assert found([number] * 56) == 0
    assert found([*shared, 6, 7]) == 24
    # The end of a prompt outlasts the answer that follows it.
    assert found([*shared, 2, 3] * 2, max_tokens=10) == 24
    assert found([*shared, 2, 3] * 2) == 48

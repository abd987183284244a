"""Slots of recurrent layers' state: no row reads another state than that of its own tokens, no slot
is lost, and prompts that begin alike go on from checkpoints.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from core_runs import alike_requests, assert_solo_tokens, forgetful_run
from fakes import FakeClock, FakeRunner, Rows, StepFailed, make_core, make_request, watch
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.inputs import BatchBuilder
from jitney.engine.core.scheduler.page_demand import PageDemand

PAGE, SEATS = 4, 3


class StateRunner(FakeRunner):
    """Keeps in each slot the tokens that its state has seen, and compares them with those in the
    pages. fails: the number of a launch that fails.
    """

    checkpoints: int | None = 9
    every = 6

    def __init__(self, n_pages: int, page_size: int, seats: int):
        super().__init__(n_pages, page_size, seats)
        self.states: dict[int, list[int]] = {}
        self._before: dict[int, list[int]] = {}
        self.fails = -1

    def launch(self, batch: Any) -> Any:
        self.fails -= 1
        if self.fails == 0:
            raise StepFailed
        self._before = dict(self.states)
        return super().launch(batch)

    def restore(self, error: Exception) -> None:
        super().restore(error)
        self.states = {}

    def wake(self, alive: Any) -> None:
        super().wake(alive)
        self.states = {}

    def _write(self, rows: list[Rows]) -> None:
        super()._write(rows)
        readers = {chunk.slots.reads: chunk for chunk in rows if chunk.slots is not None}
        written: set[int] = set()
        for chunk in rows:
            held = chunk.slots
            assert held is not None
            state = self._before[held.reads][: chunk.start] if chunk.start else []
            state = state + chunk.tokens
            ends = [(end * self.page_size, slot) for end, slot in held.saves]
            for end, slot in [*ends, (len(state), held.writes)]:
                assert chunk.start < end <= len(state)
                assert slot not in written, "two sequences write one slot"
                assert readers.get(slot, chunk) is chunk, "a slot is read and written in one step"
                self.states[slot] = state[:end]
                written.add(slot)

    def _read(self, chunk: Rows, tokens: np.ndarray, positions: np.ndarray) -> list[int]:
        history = super()._read(chunk, tokens, positions)
        held = chunk.slots
        if held is not None and chunk.start:
            assert self._before[held.reads][: chunk.start] == history
            assert len(self._before[held.reads]) == chunk.start
        return history


class CrampedRunner(StateRunner):
    """With few checkpoints for its seats."""

    checkpoints: int | None = 2


class BareRunner(StateRunner):
    """Without room for a checkpoint."""

    checkpoints: int | None = 0


def new_core(device: type[FakeRunner] = StateRunner, **more: Any) -> EngineCore:
    settings: dict[str, Any] = {
        "seats": SEATS,
        "pages": 60,
        "page_size": PAGE,
        "budget": 11,
        "context": 128,
    }
    return make_core(**(settings | more), device=device)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 50),
            st.integers(1, 24),
            st.integers(0, 2),
            st.integers(1, 2),
            st.sampled_from(["", "", "background", "leaves"]),
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(22, 60),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([StateRunner, StateRunner, CrampedRunner, BareRunner]),
    st.integers(0, 99),
)
def test_each_sequence_has_its_own_tokens(
    shapes: list[tuple[int, int, int, int, str]],
    pages: int,
    retain: bool,
    share_outputs: bool,
    rash: bool,
    device: type[StateRunner],
    seed: int,
):
    """Prompts that start alike, siblings, background, few pages, preemption, requests that leave, a
    step that fails: the tokens are those of a request alone.
    """
    core = new_core(
        device,
        pages=pages,
        retain=retain,
        share_outputs=share_outputs,
        clock=FakeClock(tick=0.01),
    )
    assert isinstance(core.runner, StateRunner)
    core.runner.fails = seed
    requests = alike_requests(shapes)
    with pytest.MonkeyPatch.context() as patch:
        if rash:
            patch.setattr(PageDemand, "lasts", lambda *_: True)
        outputs = forgetful_run(core, requests, random.Random(seed))
    assert_solo_tokens(requests, outputs)


def answer(core: EngineCore, tokens: list[int], max_tokens: int = 1, **more: Any) -> Any:
    """(prompt tokens that were found, the answer)"""
    core.add(make_request("a", tokens, max_tokens=max_tokens, ignore_eos=True, **more))
    outputs = core.run_until_idle()
    core.check()
    found = next(output.cached_tokens for output in outputs if output.tokens)
    return found, [token for output in outputs for token in output.tokens]


def test_a_conversation_goes_on_from_the_end_of_its_last_answer():
    core = new_core()
    text = [1] * 22
    found, tokens = answer(core, text, 30)
    assert found == 0
    text += tokens
    # The 51 rows of prompt and answer end behind page 12.
    found, tokens = answer(core, [*text, 2, 3, 4], 2)
    assert found == 48
    private = new_core(share_outputs=False)
    answer(private, text[:22], 30)
    assert answer(private, [*text, 2, 3, 4], 2) == (20, tokens)


def test_prompts_that_begin_alike_leave_a_checkpoint_where_they_part():
    core = new_core(budget=50)
    head = [1] * 18
    founds = [answer(core, [*head, *[number] * 20])[0] for number in (2, 3, 4, 3)]
    # The second finds the pages of the first and no state, its end is found by itself again.
    assert founds == [0, 0, 16, 36]
    # On the way of a long prompt there is one now and then, whatever its chunks were.
    assert answer(core, [5] * 60)[0] == 0
    assert answer(core, [5] * 50 + [6] * 10)[0] == 48


def test_siblings_and_preempted_sequences_go_on_from_the_prompt():
    core = new_core()
    plans = watch(core)
    core.add(make_request("r", [1] * 30, n=3, max_tokens=20))
    core.run_until_idle()
    # Behind page 7 each sibling computes the last two rows.
    assert sum(plan.prefill for plan in plans) == 30 + 2 + 2
    recomputed = []
    for device in (StateRunner, BareRunner):
        core = new_core(device, pages=30)
        plans = watch(core)
        for number in range(2):
            core.add(make_request(f"r{number}", [number] * 30, max_tokens=40, ignore_eos=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageDemand, "lasts", lambda *_: True)
            core.run_until_idle()
        core.check()
        assert core.ledger.totals["preempted"] > 0
        recomputed.append(sum(plan.recomputed for plan in plans))
    assert 0 < recomputed[0] < 0.6 * recomputed[1]


def test_tenants_find_their_own_checkpoints_and_no_wrong_ones():
    core = new_core()
    assert isinstance(core.runner, StateRunner)
    assert [answer(core, [1] * 30, tenant=name)[0] for name in ("a", "b", "a")] == [0, 0, 28]
    core.runner.poisoned = {"nan"}
    core.add(make_request("nan", [2] * 30, max_tokens=3))
    core.run_until_idle()
    assert answer(core, [2] * 30)[0] == 0
    core.scheduler.forget_prefixes()
    assert answer(core, [1] * 30, tenant="a")[0] == 0


def test_the_upload_says_where_each_sequence_reads_and_writes():
    core = new_core(budget=40)
    builder = BatchBuilder(
        seats=SEATS, pages_per_seat=32, page_size=PAGE, pool_rows=60 * PAGE, recurrent=True
    )
    batch, saves = core.runner.batch, 0

    def packed(plan: Any) -> Any:
        nonlocal saves
        inputs = builder.layout(plan.bucket, True).split(builder.build(plan, True))
        for number, chunk in enumerate(plan.chunks):
            held = chunk.seq.state
            cuts, writes = inputs.state_cuts[number], inputs.state_writes[number]
            own = [] if chunk.decode else held.saves
            assert inputs.state_reads[number] == held.reads - 1
            assert writes[-1] == held.writes - 1 and len(writes) == len(cuts) + 1
            assert [(int(cut), int(slot)) for cut, slot in zip(cuts, writes, strict=False)][
                len(cuts) - len(own) :
            ] == [(end * PAGE - chunk.start, slot - 1) for end, slot in own]
            assert not cuts[: len(cuts) - len(own)].any()
            saves += len(own)
        return batch(plan)

    core.runner.batch = packed
    for number in range(6):
        tokens = [1] * 20 + [number] * 30
        core.add(make_request(f"r{number}", tokens, max_tokens=20, ignore_eos=True))
    core.run_until_idle()
    assert saves > 6

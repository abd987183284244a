"""The packed upload: a fake device that knows nothing but the array, and reads it as late as a real
one may.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from core_runs import assert_solo_tokens, cramped_core, random_events
from fakes import FakeClock, FakeRunner, next_token, score

from jitney.engine.common.requests import SamplingParams
from jitney.engine.core.executor.inputs import (
    BIASED,
    PENALISED,
    SAMPLING,
    SCORED,
    BatchBuilder,
    UploadLayout,
)
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import Plan, StepResult

#: The sampler's parameters that are no whole numbers.
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class PackedRunner(FakeRunner):
    """Computes a step when its result is fetched, hence after the next one was packed, from its
    packed array alone.
    """

    def __init__(self, n_pages: int, page_size: int, seats: int):
        super().__init__(n_pages, page_size, seats)
        self.builder = BatchBuilder(
            seats=seats, pages_per_seat=16, page_size=page_size, pool_rows=n_pages * page_size
        )

    def batch(self, plan: Plan) -> Any:
        super().batch(plan)  # for its assertions
        wanted = [
            (chunk.seq.seat, chunk.sample, chunk.seq.request.sampling) for chunk in plan.chunks
        ]
        layout, packed = self.builder.layout(plan.bucket, False), self.builder.build(plan, False)
        n_decode, _, _, again = layout.split(packed).counts
        for chunk in plan.chunks[n_decode + again :]:
            own = chunk.seq.own_pages
            assert own is None or chunk.end <= own.start, "output is computed by decode rows alone"
        return layout, packed, wanted

    def launch(self, batch: Any) -> Any:
        self.rows_run += batch[0].bucket.tokens
        return batch

    def is_done(self, launched: Any) -> bool:
        return True

    def fetch(self, launched: Any) -> StepResult:
        layout, packed, wanted = launched
        return self.run(layout, packed, wanted)

    def run(
        self,
        layout: UploadLayout,
        packed: np.ndarray,
        wanted: list[tuple[int, bool, SamplingParams]],
    ) -> StepResult:
        x, page = layout.split(packed), self.page_size
        n_decode, n_seqs, n_rows, _ = x.counts
        owners = [seat for seat, _, _ in wanted]
        params = [sampling for _, sample, sampling in wanted if sample]
        samplers = [seat for seat, sample, _ in wanted if sample]
        assert (
            n_seqs == len(owners) and x.cu_q[n_seqs] == n_rows and (x.cu_q[n_seqs:] == n_rows).all()
        )
        assert (x.write_rows[n_rows:] == self.builder.pool_rows).all(), "padding writes nothing"
        assert not x.kv_lens[n_seqs:].any() and not x.page_table[n_seqs:].any()
        for s, seat in enumerate(owners):
            rows = slice(x.cu_q[s], x.cu_q[s + 1])
            positions = np.arange(x.kv_lens[s] - (rows.stop - rows.start), x.kv_lens[s])
            assert s >= n_decode or len(positions) == 1
            np.testing.assert_array_equal(x.token_seats[rows], seat)
            np.testing.assert_array_equal(x.positions[rows], positions)
            flat = x.page_table[s, positions // page] * page + positions % page
            np.testing.assert_array_equal(x.write_rows[rows], flat)
            self.tokens[flat] = np.where(x.tokens[rows] < 0, self.last_token[seat], x.tokens[rows])
            self.positions[flat] = positions
        n = len(params)
        assert not x.sampling[n:].any()
        sampling = SAMPLING.columns(x.sampling[:n])
        assert (x.seats[n:] == len(self.seeds)).all()
        np.testing.assert_array_equal(
            [sampling[name] for name in FLOATS],
            np.array(
                [
                    [0 if p.greedy else p.temperature for p in params],
                    [p.top_p for p in params],
                    [p.min_p for p in params],
                    [p.repetition_penalty for p in params],
                    [p.presence_penalty for p in params],
                    [p.frequency_penalty for p in params],
                ],
                np.float32,
            ),
        )
        assert sampling["top_k"].tolist() == [max(p.top_k, 0) for p in params]
        assert sampling["parts"].tolist() == [
            PENALISED * p.penalised | BIASED * p.biased | SCORED * (p.logprobs is not None)
            for p in params
        ]

        def history_of(row: int) -> list[int]:
            """Tokens up to a row's own, read through the page table."""
            s = int(np.searchsorted(x.cu_q[1 : n_seqs + 1], row, "right"))
            last = x.kv_lens[s] - x.cu_q[s + 1] + row
            assert x.positions[row] == last
            at = np.arange(last + 1)
            flat = x.page_table[s, at // page] * page + at % page
            np.testing.assert_array_equal(self.positions[flat], at)
            return self.tokens[flat].tolist()

        assert x.seats[:n].tolist() == samplers
        tokens: list[int] = []
        entries = []
        for i, row in enumerate(x.logit_rows[:n].tolist()):
            history = history_of(row)
            token = next_token(history, int(sampling["seed"][i].copy().view(np.int64)[0]))
            self.last_token[samplers[i]] = token
            tokens.append(token)
            entries.append(score(history, token))
        scores = []
        if layout.scores:
            count = int(x.score_count[0])
            for row, target in zip(
                x.score_rows[:count].tolist(), x.score_tokens[:count].tolist(), strict=True
            ):
                scores.append(score(history_of(row), target))
        return StepResult(tokens, entries, scores or None)


@pytest.mark.usefixtures("rash")
@pytest.mark.parametrize(
    ("policy", "seed", "share_outputs"),
    [("continuous", 1, True), ("continuous", 2, False), ("static", 3, True), ("static", 4, False)],
)
def test_a_reader_of_the_array_alone_gets_all_tokens(policy: str, seed: int, share_outputs: bool):
    """Random submits, aborts and steps with preemption, prefix hits and scored prompts, two steps
    always in flight.
    """
    rng, clock = random.Random(seed), FakeClock(tick=0.001)
    core = cramped_core(
        policy=policy,
        share_outputs=share_outputs,
        clock=clock,
        static_timeout_ms=2000.0,
        device=PackedRunner,
    )
    requests, outputs = random_events(core, clock, rng, 3000)
    assert_solo_tokens(requests, outputs)
    records = core.ledger.since(0)
    assert (
        records["preempted"].sum() > 10
        and records["recomputed"].sum() > 30
        and records["cancelled"].sum() > 5
    )


def test_fields_follow_one_another_without_a_gap():
    """What a step writes anew lies in one piece before the page table, and an upload of the step
    without a sampler is how the other's begins.
    """
    plain, full = (UploadLayout(Bucket(64, 8), 12, plain) for plain in (True, False))
    assert list(full.slices.items())[: len(plain.slices)] == list(plain.slices.items())
    assert list(plain.slices)[-2:] == ["page_table", "window_tables"]
    for layout in (plain, full):
        slices = list(layout.slices.values())
        assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])] and slices[
            -1
        ].stop == layout.size
        assert layout.size == (
            4 * 64 + 4 * 8 + 1 + 4 + 12 * 8 + (0 if layout.greedy_only else 8 * 10 + 1 + 2 * 64)
        )
    assert not UploadLayout(Bucket(8, 8), 12, False).scores, "a decode step has no prompt to score"

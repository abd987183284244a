"""`bench step`: the steps it makes up could be the engine's own, and what it writes is what a
simulation reads.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jitney.engine import LLM
from jitney.engine.bench import step
from jitney.engine.bench.step import StepCase, StepTiming, cases, measured_floor, plan_of, table_of
from jitney.engine.checkpoints.families import tiny_config
from jitney.engine.cli.bench_step import show
from jitney.engine.scheduler.buckets import Bucket, make_buckets
from jitney.engine.scheduler.plan import StepWork
from jitney.engine.simulation.step_table import HostTimes, StepTable
from jitney.engine.types import SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.mark.parametrize(
    ("seats", "budget", "room", "context"),
    [(32, 512, 20_000, 8192), (1, 8, 64, 32), (256, 2048, 10**6, 4096), (4, 16, 300, 40)],
)
def test_every_case_is_a_step_the_engine_could_plan(
    seats: int, budget: int, room: int, context: int
):
    buckets = make_buckets(max_seats=seats, token_budget=budget)
    made = cases(buckets, room, context)
    assert {case.bucket for case in made} == set(buckets.all())
    assert len(set(made)) == len(made)
    for number, case in enumerate(made):
        plan = plan_of(case, number, 16)
        assert plan.rows <= case.bucket.tokens and 0 < len(plan.chunks) <= case.bucket.seats
        assert all(chunk.end <= context for chunk in plan.chunks)
        assert plan.n_decode == plan.rows or not case.bucket.decode_only
        pages = Counter(page for chunk in plan.chunks for page in chunk.seq.pages)
        assert max(pages.values()) == 1 and 0 not in pages and case.positions <= room
        assert [chunk.decode for chunk in plan.chunks] == sorted(
            (c.decode for c in plan.chunks), reverse=True
        )


def test_the_work_of_a_case_by_hand():
    plan = plan_of(StepCase(Bucket(64, 8), (100, 20), ((0, 10), (30, 4))), 0, 16)
    # pairs: 1 + 2 + ... + 10, and 31 + 32 + 33 + 34
    assert plan.work == StepWork(decode=2, prompt=14, keys=101 + 21, longest=101, pairs=55 + 130)
    assert [len(chunk.seq.pages) for chunk in plan.chunks] == [7, 2, 1, 3]


def test_the_table_goes_through_the_medians():
    bucket = Bucket(4, 4)
    timings = [
        StepTiming(
            StepCase(bucket, (length,) * 4),
            StepWork(4, 0, 4 * length, length),
            [0.9 * t, t, 5 * t],
        )
        for length in (10, 100, 1000)
        for t in [0.01 + 1e-5 * length]
    ]
    table = table_of(timings, HostTimes(), "here")
    for timing in timings:
        assert table.seconds(bucket, timing.work) == pytest.approx(timing.median, rel=1e-3)
    assert table.noise["decode"][-1] > 2 * table.noise["decode"][0] and "mixed" not in table.noise


def test_the_floor_counts_bytes_and_operations():
    floor = measured_floor(tiny_config(), "float32", 1e9, 1e12)
    config = tiny_config()
    layers = 2 * (64 * config.qkv_size + 64 * 64 + 3 * 64 * 128)
    assert floor.memory_seconds(Bucket(4, 4), StepWork(decode=4, keys=40)) == pytest.approx(
        (4 * (layers + 512 * 64) + 44 * 2 * 2 * 2 * 16 * 4) / 1e9
    )
    assert floor.compute_seconds(Bucket(4, 4), StepWork()) == pytest.approx(
        2 * 4 * (layers + 512 * 64) / 1e12
    )
    assert floor.link_seconds(4) == floor.assumed.overhead_s == 0


@pytest.fixture(scope="module")
def report() -> dict:
    """A tiny model, measured for real."""
    llm = LLM(
        "tiny-random",
        dtype="float32",
        max_seats=4,
        token_budget=16,
        context=256,
        seat_buckets=[4],
        token_buckets=[16],
        prefix_cache=False,
        pages=80,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step.COPY_BYTES, True, 1 << 22)
        patch.setitem(step.PRODUCT_SIDE, True, 128)
        before = greedy_answer(llm)
        made = step.measure(llm, tiny_config(), repeats=3, seconds=20)
    assert greedy_answer(llm) == before  # the engine is as good as it was
    llm.close()
    return made


def greedy_answer(llm: LLM) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    return llm.generate([[5, 6, 7]], sampling)[0].outputs[0].token_ids


def test_what_is_written_is_what_a_simulation_reads(report: dict, tmp_path: Path):
    (file := tmp_path / "t.json").write_text(json.dumps(report))
    table = StepTable.load(file)
    for case in report["cases"]:
        work = StepWork(
            case["decode"], case["prompt"], case["keys"], case["longest"], case["pairs"]
        )
        fitted = table.seconds(Bucket(case["tokens"], case["seats"]), work)
        assert case["repeats"] == 3 and 0 < case["least_s"] <= case["median_s"] <= case["most_s"]
        assert fitted == pytest.approx(case["fitted_s"]) and 0 < fitted < 1
        assert case["bytes_floor_s"] > 0 and case["flops_floor_s"] > 0
    assert {case["bucket"] for case in report["cases"]} == {"decode-4", "mixed-16"}
    assert table.host.before > 0 and "tiny-random" in table.source
    assert np.isfinite(report["copy_bytes_s"]) and report["product_flops_s"] > 0


def test_the_report_fits_a_terminal(report: dict, capsys):
    show(report)
    out = capsys.readouterr().out
    assert "decode-4" in out and "of the sum" in out and max(map(len, out.splitlines())) <= 80

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
from jitney.engine.common.requests import SamplingParams
from jitney.engine.core.executor import ceiling
from jitney.engine.core.measuring.made_up_steps import StepCase
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import StepWork
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.lab.bench import step
from jitney.engine.lab.bench.step import _cases, _measured_floor
from jitney.engine.lab.bench.step_parts import _part_cases, measure_parts
from jitney.engine.lab.commands.bench_step import _DECODING
from jitney.engine.lab.simulation.step_table import StepTable

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.mark.parametrize(
    ("seats", "budget", "room", "context"),
    [(32, 512, 20_000, 8192), (1, 8, 64, 32), (256, 2048, 10**6, 4096), (4, 16, 300, 40)],
)
def test_every_case_is_a_step_the_engine_could_plan(
    seats: int, budget: int, room: int, context: int
):
    buckets = Buckets.of(max_seats=seats, token_budget=budget)
    made = _cases(buckets, room, context)
    assert {case.bucket for case in made} == set(buckets.all())
    assert len(set(made)) == len(made)
    for number, case in enumerate(made):
        plan = case.plan(number, 16)
        assert plan.rows <= case.bucket.tokens and 0 < len(plan.chunks) <= case.bucket.seats
        assert all(chunk.end <= context for chunk in plan.chunks)
        assert plan.n_decode == plan.rows or not case.bucket.decode_only
        pages = Counter(page for chunk in plan.chunks for page in chunk.seq.pages)
        assert max(pages.values()) == 1 and 0 not in pages and case.positions <= room
        assert [chunk.decode for chunk in plan.chunks] == sorted(
            (c.decode for c in plan.chunks), reverse=True
        )


def test_the_work_of_a_case_by_hand():
    plan = StepCase(Bucket(64, 8), (100, 20), ((0, 10), (30, 4))).plan(0, 16)
    # pairs: 1 + 2 + ... + 10, and 31 + 32 + 33 + 34
    assert plan.work == StepWork(decode=2, prompt=14, keys=101 + 21, longest=101, pairs=55 + 130)
    assert [len(chunk.seq.pages) for chunk in plan.chunks] == [7, 2, 1, 3]


def test_the_floor_counts_bytes_and_operations():
    floor = _measured_floor(tiny_config(), "float32", 1e9, 1e12)
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
        patch.setitem(ceiling._READ_BYTES, True, 1 << 20)
        patch.setitem(ceiling._PRODUCT, True, (16, 128))
        before = greedy_answer(llm)
        made = step.measure(llm, tiny_config(), repeats=3, seconds=20)
        made["parts"] = measure_parts(llm, tiny_config(), 3)
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
    # Of a step of four sequences: beside other work all of it may seem to be theirs.
    assert table.host.before + 4 * table.host.before_per_row > 0 and "tiny-random" in table.source
    assert np.isfinite(report["read_bytes_s"]) and report["product_flops_s"] > 0


def test_the_parts_of_a_step_are_those_it_has_and_no_more_than_it_took(report: dict):
    if not report["kernels"].startswith("native"):
        pytest.skip("these kernels have no clocks")
    rows = {(row["decode"], row["prompt"]): row for row in report["parts"]}
    assert set(rows) == {(1, 0), (0, 16), (3, 13)}
    for (decode, prompt), row in rows.items():
        parts = row["parts_s"]
        assert sum(parts.values()) + row["rest_s"] == pytest.approx(row["step_s"])
        assert row["rest_s"] > 0 and parts["norms"] > 0
        assert (parts[_DECODING] > 0) == (decode > 0)
        assert (parts["attention of prompts"] > 0) == (prompt > 0)
    # float32 products of so few rows are ours; this model's head is a matrix like any other.
    assert rows[1, 0]["parts_s"]["products"] > 0
    # 255 positions and the new one; 2 layers, keys and values, 2 heads of 16 float32.
    assert rows[1, 0]["kv_read_bytes"] == 256 * 2 * 2 * 2 * 16 * 4


def test_parts_are_measured_at_few_and_many_seats_and_with_a_prompt():
    made = _part_cases(Buckets.of(max_seats=32, token_budget=512), 2048)
    decoding = [(len(case.decode), case.decode[0]) for case in made if case.bucket.decode_only]
    long = [384, 1024, 2047]
    assert decoding == [*((1, n) for n in long), *((8, n) for n in long), (32, 384)]
    assert [(len(case.decode), case.prompts) for case in made[-2:]] == [
        (0, ((0, 512),)),
        (31, ((0, 481),)),
    ]

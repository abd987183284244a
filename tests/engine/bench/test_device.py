"""`bench device`: its arithmetic by hand, all of its parts at the tiny shape on this CPU, and what
it does when one fails."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jitney.engine.bench.device import kernels, worker
from jitney.engine.bench.device.kernels import Contexts, attend_row, make_inputs
from jitney.engine.bench.device.report import goals, markdown, report_of, write
from jitney.engine.bench.device.rows import GOALS, About, Floors, PartJob, Row, Task, goal_values
from jitney.engine.bench.device.run import (
    PARTS,
    DevicePlan,
    DeviceResults,
    check_parts,
    measure,
    run_apart,
)
from jitney.engine.bench.device.worker import PartMessage, lines_of, rows_of
from jitney.engine.checkpoints.families import tiny_config
from jitney.engine.cli.bench_device import run
from jitney.engine.errors import ConfigError, JitneyError
from jitney.kernels.interface import KernelSet
from jitney.kernels.select import reference

FLOORS = Floors(copy_bytes_s=1e9, product_flops_s=1e12, launch_s=1e-5)
CPU = About(
    device="cpu",
    platform="cpu",
    kernels="native (avx2)",
    kernel_set="native",
    dtype="float32",
    memory=0,
    versions={"jax": "0"},
)
GPU = About(
    device="A Card 80GB",
    platform="gpu",
    kernels="triton",
    kernel_set="triton",
    dtype="bfloat16",
    memory=60 << 30,
    versions={"jax": "0"},
)


def job(part: str, **changes: object) -> PartJob:
    fields = {
        "part": part,
        "shape": "tiny",
        "dtype": "float32",
        "kernels": "reference",
        "page_size": 16,
        "seconds": 60.0,
        "floors": FLOORS,
    } | changes
    return PartJob(**fields)  # type: ignore[arg-type]


def row(**changes: object) -> Row:
    fields = {"part": "steps", "name": "decode step", "case": "1 x 1", "by": "triton"} | changes
    return Row(**fields)  # type: ignore[arg-type]


# Arithmetic


def test_a_floor_is_the_larger_of_bytes_and_operations():
    assert FLOORS.of(2e9, 1e12) == (2.0, "bytes")
    assert FLOORS.of(2e9, 3e12) == (3.0, "operations")


def test_the_bytes_and_operations_of_attention_by_hand():
    config = tiny_config()  # H 4, K 2, D 16
    load = Contexts((100, 20), ((12, 10),))
    # pairs: 100 + 20, and 3 + 4 + ... + 12
    assert load.pairs == 120 + 75
    assert load.operations(config) == 4 * 4 * 16 * 195
    assert load.moved(config, 4, 1) == (100 + 20 + 12) * 2 * 2 * 16 + 4 * 2 * 12 * 4 * 16


def test_inputs_are_a_batch_the_engine_could_make():
    given = make_inputs(Contexts((33, 1), ((40, 7),)), job("attention"), jnp.float32, 0)
    meta = given.meta
    assert meta.counts.tolist() == [2, 3, 9] and meta.kv_lens.tolist() == [33, 1, 40]
    assert meta.cu_q.tolist() == [0, 1, 2, 9] and meta.positions.tolist() == [32, 0, *range(33, 40)]
    used = [
        page
        for table, length in zip(meta.page_table.tolist(), (33, 1, 40), strict=True)
        for page in table[: -(-length // 16)]
    ]
    assert sorted(used) == list(range(1, 8)) and given.kv.shape == (8, 16, 4, 16)
    at = np.asarray(meta.positions)
    seq = np.array([0, 1] + [2] * 7)
    assert np.array_equal(
        meta.write_rows, np.asarray(meta.page_table)[seq, at // 16] * 16 + at % 16
    )


@pytest.mark.parametrize(
    ("goal", "values", "first", "then"),
    [
        ("decode", [0.9, 0.86], True, True),
        ("decode", [0.9, 0.71], True, False),
        ("decode", [0.9, 0.69], False, False),
        ("gap", [0.02], True, False),
        ("gap", [0.005], True, True),
        ("gap", [0.06], False, False),
    ],
)
def test_a_goal_is_met_when_every_figure_meets_it(
    goal: str, values: list[float], first: bool, then: bool
):
    name = "share" if goal == "gap" else "x"
    rows = [row(goal=goal, seconds=1.0, floor_s=value, figures={name: value}) for value in values]
    judged = next(
        g for g in goals(DeviceResults(DevicePlan(), GPU, FLOORS, rows)) if g["goal"] == goal
    )
    assert (judged["met_first"], judged["met_then"]) == (first, then)
    assert judged["worst"] == (max if GOALS[goal].most else min)(values) and judged[
        "counted"
    ] == len(values)


def test_the_peer_goal_is_a_ratio_of_tokens_per_second():
    ours, theirs = (
        row(goal="peer", figures={"tokens_s": 5000.0}),
        row(goal="peer's", figures={"tokens_s": 2000.0}),
    )
    assert goal_values([ours, theirs], "peer") == [2.5]
    assert goal_values([ours, row(goal="peer's", note="torch is not installed")], "peer") == []


def test_goals_are_not_judged_on_the_tiny_shape():
    found = DeviceResults(DevicePlan(), CPU, FLOORS, [row(goal="decode", seconds=1.0, floor_s=2.0)])
    assert found.shape == "tiny" and all(g["met_first"] is None for g in goals(found))
    assert DeviceResults(DevicePlan(), GPU, FLOORS).shape == "llama-3.1-8b"
    assert found.job("steps", 1.0).kernels == "native"  # without its instructions


# All parts, in this process


def in_process(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
    yield from lines_of(job)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceResults, Path]:
    """Everything at the tiny shape, with the CPU's own kernels."""
    folder, saved = tmp_path_factory.mktemp("out"), []
    plan = DevicePlan(dtype="float32", seconds=300.0)
    measured = measure(
        plan, lambda found: saved.append(len(found.rows)), lambda news: None, in_process
    )
    assert saved == sorted(saved) and saved[-1] == len(measured.rows)  # saved after every row
    write(measured, folder)
    return measured, folder


def test_every_part_yields_figures_or_says_why_not(found: tuple[DeviceResults, Path]):
    rows = found[0].rows
    assert {r.part for r in rows} == set(PARTS) - {"floors"}
    assert not [r for r in rows if "failed" in r.note or "WRONG" in r.note]
    silent = {r.part for r in rows if r.seconds is None}
    assert all(r.note for r in rows if r.seconds is None)
    assert silent <= {"graphs", "write", "sampling", "transformers", "torch"}
    for part in (
        "steps",
        "attention",
        "loop",
        "prefill",
        "contexts",
        "quantised",
        "products",
        "sampling",
    ):
        assert any(r.part == part and r.seconds for r in rows), part


def test_a_second_kernel_set_is_timed_beside_the_first_and_counts_for_no_goal():
    sets = [replace(reference(), name=name) for name in ("one", "two")]
    tasks = list(kernels.attention(job("attention", shape="qwen3-8b"), sets, jnp.float32))
    rows = [task.row for task in tasks]
    assert [row.by for row in rows] == ["one", "two"] * (len(rows) // 2)
    assert {row.case for row in rows[::2]} == {row.case for row in rows[1::2]}
    assert {row.goal for row in rows[1::2]} == {""}
    assert {row.goal for row in rows[::2]} == {"", "decode", "long", "prefill"}


def test_figures_are_finite_and_fractions_follow_from_their_parts(
    found: tuple[DeviceResults, Path],
):
    measured = found[0]
    floors = measured.floors
    assert floors and min(floors.copy_bytes_s, floors.product_flops_s, floors.launch_s) > 0
    for r in report_of(measured)["rows"]:
        numbers = [r[name] for name in ("seconds", "least", "most", "floor_s", "error", "fraction")]
        assert all(math.isfinite(x) for x in [*numbers, *r["figures"].values()] if x is not None), r
        if r["seconds"] is None:
            continue
        assert r["least"] <= r["seconds"] <= r["most"]
        if r["floor_s"] is not None:
            assert r["floor_s"] > 0 and r["fraction"] == r["floor_s"] / r["seconds"]
        if r["name"] in ("decode step", "prompt step"):
            rows = int(r["case"].split(" ")[0])
            assert r["figures"]["tokens_s"] == pytest.approx(rows / r["seconds"])


def test_the_floor_of_a_decode_step_by_hand(found: tuple[DeviceResults, Path]):
    measured = found[0]
    assert measured.floors
    step = next(r for r in measured.rows if r.part == "steps")
    assert step.case == "2 x 16, float32"
    c = tiny_config()
    layer = c.hidden_size * (c.qkv_size + c.n_heads * c.head_dim + 3 * c.intermediate_size)
    norms = 2 * c.n_layers * c.hidden_size + c.hidden_size
    weights = 4 * (c.n_layers * layer + norms + c.hidden_size * c.vocab_size)
    per_token = c.n_layers * 2 * c.n_kv_heads * c.head_dim * 4
    moved = (
        weights + 2 * 4 * c.hidden_size + (2 * 16 + 2) * per_token
    )  # two seats of 16 keys, this step's own included
    products = c.n_layers * layer + c.hidden_size * c.vocab_size
    attention = 4 * c.n_layers * c.n_heads * c.head_dim * 2 * 16
    operations = 2 * 2 * products + attention
    floors = measured.floors
    # Which of the two is larger depends on the machine that runs this.
    least = {
        "bytes": moved / floors.copy_bytes_s,
        "operations": operations / floors.product_flops_s,
    }
    assert step.bound == max(least, key=lambda what: least[what])
    assert step.floor_s == pytest.approx(least[step.bound])
    assert Floors(1.0, 1e30, 1.0).of(moved, operations) == (moved, "bytes")
    assert Floors(1e30, 1.0, 1.0).of(moved, operations) == (operations, "operations")


def test_the_loop_gives_every_request_its_tokens(found: tuple[DeviceResults, Path]):
    loop = {r.name: r for r in found[0].rows if r.part == "loop"}
    batch = loop["batch of equal requests"]
    assert batch.seconds and batch.figures["tokens_s"] * batch.seconds == pytest.approx(4 * 8)
    assert loop["host gap"].figures["share"] < 1 and loop["closed loop"].figures["steps"] >= 8


def test_both_files_say_the_same(found: tuple[DeviceResults, Path]):
    measured, folder = found
    report = json.loads((folder / "device_cpu_tiny.json").read_text())
    page = (folder / "device_cpu_tiny.md").read_text()
    assert len(report["rows"]) == len(measured.rows) and report["about"]["platform"] == "cpu"
    assert len(report["goals"]) == len(GOALS)
    for part in PARTS:
        assert f"## {part}:" in page or part == "floors"
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    assert all(line.count("|") in (8, 10) for line in tables) and "nan" not in page.lower().split(
        "|"
    )
    assert "shows that everything runs" in page


# What goes wrong


def test_a_wrong_kernel_is_said_and_not_timed():
    def attend(q: jnp.ndarray, kv: object, meta: object, **options: object) -> jnp.ndarray:
        return q

    broken = KernelSet(**{**vars(reference()), "name": "broken", "attend": attend})
    base = row(part="attention", case="1 x 64", goal="decode")
    (told,) = attend_row(job("attention"), broken, jnp.float32, Contexts((64,)), "auto", base)
    assert told.note.startswith("WRONG") and told.seconds is None and told.goal == "" and told.error
    assert "WRONG" in markdown(DeviceResults(DevicePlan(), GPU, FLOORS, [told]))


def test_nan_counts_as_wrong():
    def attend(q: jnp.ndarray, kv: object, meta: object, **options: object) -> jnp.ndarray:
        return q * jnp.nan

    broken = KernelSet(**{**vars(reference()), "name": "broken", "attend": attend})
    base = row(part="attention", case="1 x 64")
    (told,) = attend_row(job("attention"), broken, jnp.float32, Contexts((64,)), "auto", base)
    assert told.note.startswith("WRONG") and told.seconds is None


def test_a_case_that_raises_is_a_row_and_the_next_one_runs():
    def bad(row: Row) -> Iterator[Row]:
        raise MemoryError("out of\nmemory")

    first, second = row(name="a", goal="step"), row(name="b")
    tasks = iter([Task(first, bad), Task(second, lambda row: [row])])
    first, second = rows_of(job("steps"), tasks)
    assert first.note == "failed: MemoryError: out of memory" and second.name == "b"
    assert first.name == "a" and first.goal == ""
    late = list(rows_of(job("steps", seconds=-1.0), iter([Task(first, bad)])))
    assert [r.note for r in late] == ["not run: the time was up"]


def test_nothing_begins_when_the_time_is_up():
    ran = []

    def start(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
        ran.append(job.part)
        yield from (
            (PartMessage(about=GPU), PartMessage(floors=FLOORS)) if job.part == "floors" else ()
        )

    found = measure(DevicePlan(seconds=0.0), lambda found: None, lambda news: None, start)
    assert ran == ["floors"]
    assert {r.part: r.note for r in found.rows} == dict.fromkeys(
        list(PARTS)[1:], "not run: the time was up"
    )


def test_parts_run_in_order_with_what_was_found_first():
    seen: list[tuple[PartJob, Mapping[str, str]]] = []

    def start(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
        seen.append((job, environment))
        yield from (
            (PartMessage(about=GPU), PartMessage(floors=FLOORS)) if job.part == "floors" else ()
        )

    measure(
        DevicePlan(only=("graphs", "steps"), environment={"A": "b"}),
        lambda found: None,
        lambda news: None,
        start,
    )
    assert [job.part for job, _ in seen] == ["floors", "steps", "graphs"]
    assert (seen[0][0].shape, seen[1][0].shape, seen[1][0].page_size) == ("", "llama-3.1-8b", 64)
    assert seen[1][0].floors == FLOORS and (seen[1][0].kernels, seen[1][0].dtype) == (
        "triton",
        "bfloat16",
    )
    assert seen[1][1] == {"A": "b"} and "command_buffer" in seen[2][1]["XLA_FLAGS"]


def test_a_large_shape_on_a_cpu_and_no_floors_are_one_line():
    def start(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
        yield from (PartMessage(about=CPU), PartMessage(floors=FLOORS))

    with pytest.raises(ConfigError, match="needs a GPU or TPU"):
        measure(DevicePlan(shape="qwen3-8b"), lambda found: None, lambda news: None, start)
    with pytest.raises(JitneyError, match="could not be measured"):
        measure(
            DevicePlan(), lambda found: None, lambda news: None, lambda job, environment: iter(())
        )
    with pytest.raises(ConfigError, match=r"unknown part 'step'; known: floors, steps"):
        check_parts(["step"])


def test_a_process_that_dies_becomes_a_row(tmp_path: Path):
    lines = list(run_apart(job("steps", kernels="nonesuch"), {"JAX_PLATFORMS": "cpu"}))
    (told,) = [line.row for line in lines if line.row]
    assert (
        told.note.startswith("failed: the process ended with status 1") and "nonesuch" in told.note
    )


def test_the_command_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        run(
            [
                "--only",
                "write",
                "--platform",
                "cpu",
                "--dtype",
                "float32",
                "--out-dir",
                str(tmp_path),
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "no GPU or TPU here" in said.err and "| goal |" in said.out
    assert json.loads((tmp_path / "device_cpu_tiny.json").read_text())["rows"]
    with pytest.raises(ConfigError, match="no such folder"):
        run(["--out-dir", str(tmp_path / "absent")])


def test_what_the_worker_runs_is_what_the_parts_are():
    for module, name in {**worker.OURS, **worker.PEERS}.values():
        assert callable(
            getattr(__import__(f"jitney.engine.bench.device.{module}", fromlist=[name]), name)
        )
    assert kernels.WRONG[2] > kernels.WRONG[4]

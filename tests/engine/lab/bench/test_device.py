"""`bench device`: its arithmetic by hand, all of its parts at the tiny shape on this CPU, and what
it does when one fails."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jitney.engine.common.cache_folder import compilation_cache_dir
from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.core import ModelSource, Tokenizer
from jitney.engine.core.executor.autotuning import RESULTS
from jitney.engine.core.measuring.random_engine import _at_random
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.lab.commands.bench_device import bench_device
from jitney.engine.lab.device import peers, timing
from jitney.engine.lab.device import run as device_run
from jitney.engine.lab.device.check import checks
from jitney.engine.lab.device.kernels import Contexts, _make_inputs, attend_row
from jitney.engine.lab.device.parts import PARTS
from jitney.engine.lab.device.report import _GOALS, DeviceReport
from jitney.engine.lab.device.rows import About, Floors, PartJob, Row, Task
from jitney.engine.lab.device.run import (
    _PART_S,
    DevicePlan,
    DeviceResults,
    _run_apart,
)
from jitney.engine.lab.device.saved import ResultFiles, _Choices
from jitney.engine.lab.device.serving import _write_model
from jitney.engine.lab.device.worker import PartMessage, _lines_of, _rows_of
from jitney.kernels import case_proofs, experts
from jitney.kernels.interface import KernelSet
from jitney.kernels.select import reference

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

ROOT = Path(__file__).parents[4]
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


def test_the_bytes_and_operations_of_attention_by_hand():
    config = tiny_config()  # H 4, K 2, D 16
    load = Contexts((100, 20), ((12, 10),))
    # pairs: 100 + 20, and 3 + 4 + ... + 12
    assert load.pairs == 120 + 75
    assert load.operations(config) == 4 * 4 * 16 * 195
    assert load.moved(config, 4, 1) == (100 + 20 + 12) * 2 * 2 * 16 + 4 * 2 * 12 * 4 * 16


def test_inputs_are_a_batch_the_engine_could_make():
    given = _make_inputs(Contexts((33, 1), ((40, 7),)), job("attention"), jnp.float32, 0)
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
        g
        for g in DeviceReport(DeviceResults(DevicePlan(), GPU, FLOORS, rows)).goals()
        if g["goal"] == goal
    )
    assert (judged["met_first"], judged["met_then"]) == (first, then)
    assert judged["worst"] == (max if _GOALS[goal].most else min)(values) and judged[
        "counted"
    ] == len(values)


# All parts, in this process


#: Cases of attention that the rehearsal compares.
COMPARED = ("decode", "head dim 80", "group of seven", "window in mixed", "fp8 e5m2 pool")


def in_process(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
    yield from _lines_of(job)


class Kept:
    """A store that keeps nothing but how often it was asked to."""

    def __init__(self):
        self.saved: list[int] = []

    def take_up(self, results: DeviceResults) -> None:
        return

    def save(self, results: DeviceResults) -> None:
        self.saved.append(len(results.rows))


def quiet(news: str) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceResults, Path]:
    """The rehearsal: everything at the tiny shape, with the CPU's own kernels."""
    folder = tmp_path_factory.mktemp("out")
    parts = tuple(part for part in PARTS if part != "serve")  # which starts two servers
    plan = DevicePlan(shape="tiny", platform="cpu", dtype="float32", seconds=math.inf, only=parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_run, "_PART_S", math.inf)  # a busy machine leaves out none
        # Nobody reads these times: programs of few repeats are compiled and run sooner.
        patch.setattr(timing, "_MOST_UNROLLED", 2)
        patch.setattr(timing, "_REPEATS", 3)
        # `kernels/` compares every case of attention; here each would be compiled for one answer.
        patch.setattr(case_proofs, "CASES", {name: case_proofs.CASES[name] for name in COMPARED})
        return plan.measure(ResultFiles(folder), quiet, in_process), folder


def test_every_part_yields_figures_or_says_why_not(found: tuple[DeviceResults, Path]):
    rows = found[0].rows
    assert {r.part for r in rows} == set(PARTS) - {"floors", "serve"}
    assert not [r for r in rows if "failed" in r.note or "WRONG" in r.note]
    silent = {r.part for r in rows if r.seconds is None}
    assert all(r.note for r in rows if r.seconds is None)
    others = {"transformers", "vllm", "flashinfer"}
    assert silent <= {"check", "graphs", "cublas", "write", "sampling", *others}
    for part in (
        "steps",
        "attention",
        "loop",
        "prefill",
        "contexts",
        "quantised",
        "products",
        "sampling",
        "crowds",
        "smoke",
        "kernels-of-a-step",
    ):
        assert any(r.part == part and r.seconds for r in rows), part


def test_figures_are_finite_and_fractions_follow_from_their_parts(
    found: tuple[DeviceResults, Path],
):
    measured = found[0]
    floors = measured.floors
    assert floors and min(floors.copy_bytes_s, floors.product_flops_s, floors.launch_s) > 0
    for r in DeviceReport(measured).as_json()["rows"]:
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


class _Answering:
    """A model of transformers that answers with as many tokens as it is asked for."""

    def __init__(self):
        self.pools: list[Any] = []

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: dict[str, Any],
        continuous_batching_config: Any = None,
    ) -> dict[int, Any]:
        self.pools.append(continuous_batching_config)
        tokens = [0] * generation_config["max_new_tokens"]
        return {number: SimpleNamespace(generated_tokens=tokens) for number in range(len(inputs))}


@pytest.mark.parametrize("missing", ["", "psutil is not installed"])
def test_on_a_cpu_transformers_gets_a_small_pool(monkeypatch: pytest.MonkeyPatch, missing: str):
    model = _Answering()
    library = SimpleNamespace(ContinuousBatchingConfig=dict, GenerationConfig=dict)
    monkeypatch.setattr(peers, "_module", lambda name: library)
    monkeypatch.setattr(peers, "_missing", lambda *names: missing if "psutil" in names else "")
    monkeypatch.setattr(peers, "_make_model", lambda job: model)
    given = job("transformers", platform="cpu")
    rows = list(_rows_of(given, peers.batching(given)))
    assert [bool(r.figures) for r in rows] == [not missing] * 2
    assert all(r.note.startswith(missing) for r in rows)
    # Each batch twice: of four streams, and of one.
    pools = [] if missing else [(8, 256)] * 2 + [(2, 256)] * 2
    assert [(pool["num_blocks"], pool["max_batch_tokens"]) for pool in model.pools] == pools


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


def test_kernels_of_a_step_add_up(found: tuple[DeviceResults, Path]):
    whole, *each = [r for r in found[0].rows if r.part == "kernels-of-a-step"]
    assert whole.figures["kernels"] >= len(each) > 5
    seconds = [r.seconds or 0.0 for r in each]
    assert seconds == sorted(seconds, reverse=True)
    assert 0.9 * whole.figures["busy_s"] < sum(seconds) <= 1.001 * whole.figures["busy_s"]
    assert sum(r.figures["share"] for r in each) <= 1.001


def test_pools_of_steps_hold_random_numbers():
    kept = _at_random(jnp.zeros((4, 16, 4, 16), jnp.bfloat16), 0)
    assert kept.dtype == jnp.bfloat16 and 0.9 < float(kept.astype(jnp.float32).std()) < 1.1
    assert len(set(np.asarray(_at_random(jnp.zeros((64, 4), jnp.int8), 1)).ravel().tolist())) > 90


def test_a_served_model_has_the_measured_shape_and_a_text_for_every_token(tmp_path: Path):
    asked = job("serve")
    _write_model(asked, tmp_path)
    source = ModelSource.resolve(str(tmp_path), weights=False)
    wanted, config = asked.config, source.config
    for name in ("vocab_size", "hidden_size", "n_layers", "n_heads", "n_kv_heads", "head_dim"):
        assert getattr(config, name) == getattr(wanted, name), name
    tokenizer = Tokenizer.load(source)
    assert all(tokenizer.token_bytes(id) for id in range(wanted.vocab_size))


def test_answers_are_compared_before_anything_is_timed(found: tuple[DeviceResults, Path]):
    rows = found[0].rows
    checked = [r for r in rows if r.part == "check"]
    assert rows[0].part == "smoke" and rows[0].note == "right"
    assert rows[1] in checked and all(r.note.startswith("right") for r in checked)
    cases = {r.case for r in checked if r.name == "attention"}
    assert cases >= {f"{name}, float32" for name in COMPARED}
    tokens = {r.case: r.figures for r in checked if r.name == "tokens of the engine"}
    assert {case.split()[0] for case in tokens} == {"plain", "int8", "fp8", "int4"}
    assert all(figures["tokens"] == 128 for figures in tokens.values())
    assert tokens["plain weights, float32"]["of them the reference's own"] > 100
    assert DeviceReport(found[0]).numerics().startswith("No wrong answer in ")


def test_what_serves_is_compared_first():
    both = replace(reference(), experts=experts.experts)
    rows = [task.row for task in checks(job("check"), [both], jnp.dtype(jnp.bfloat16))]
    kinds = [(r.name, r.name == "attention" and r.case.endswith("bfloat16")) for r in rows]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        ("tokens of the engine", False),
        ("attention", True),
        ("kernels", False),
        ("attention", False),
        ("experts", False),
    ]


def test_a_wrong_attention_is_wrong_in_tokens_and_cases():
    def late(*args: Any, **options: Any) -> Any:
        q, *others = args
        return reference().paged_attention(jnp.roll(q, 1, axis=1), *others, **options)

    broken = replace(reference(), name="broken", paged_attention=late)
    tasks = {task.row.case: task for task in checks(job("check"), [broken], jnp.float32)}
    for case in ("plain weights, float32", "mixed, float32"):
        (row,) = tasks[case].run(tasks[case].row)
        assert row.note.startswith("WRONG") and row.wrong and row.error
    results = DeviceResults(DevicePlan(), CPU, FLOORS, [row])
    assert DeviceReport(results).numerics().startswith("**WRONG ANSWERS** in 1: attention, mixed")


def test_products_with_experts_are_compared_where_a_set_has_them():
    def tasks(kernels: KernelSet) -> dict[str, Task]:
        found = checks(job("check"), [kernels], jnp.float32)
        return {task.row.case: task for task in found if task.row.name == "experts"}

    def late(x: jax.Array, *args: Any) -> jax.Array:
        return experts.experts(jnp.roll(x, 1, axis=0), *args)

    assert not tasks(reference())
    right, wrong = (
        tasks(replace(reference(), name="other", experts=one)) for one in (experts.experts, late)
    )
    assert {"gelu", "fp8", "no rows", "Qwen3-30B-A3B, blocks of 16, int8"} <= right.keys()
    for found, note in ((right, "right"), (wrong, "WRONG")):
        (row,) = found["int8"].run(found["int8"].row)
        assert row.note.startswith(note)


# What goes wrong


@pytest.mark.parametrize("factor", [2.0, math.nan])
def test_a_wrong_kernel_is_said_and_not_timed(factor: float):
    def attend(q: jnp.ndarray, kv: object, meta: object, **options: object) -> jnp.ndarray:
        return factor * q

    broken = KernelSet(**{**vars(reference()), "name": "broken", "attend": attend})
    base = row(part="attention", case="1 x 64", goal="decode")
    (told,) = attend_row(job("attention"), broken, jnp.float32, Contexts((64,)), "auto", base)
    assert told.note.startswith("WRONG") and told.seconds is None and told.goal == "" and told.error
    assert "WRONG" in DeviceReport(DeviceResults(DevicePlan(), GPU, FLOORS, [told])).markdown()


def test_a_case_that_raises_is_a_row_and_the_next_one_runs():
    def bad(row: Row) -> Iterator[Row]:
        raise MemoryError("out of\nmemory")

    first, second = row(name="a", goal="step"), row(name="b")
    tasks = iter([Task(first, bad), Task(second, lambda row: [row])])
    first, second = _rows_of(job("steps"), tasks)
    assert first.note == "failed: MemoryError: out of memory" and second.name == "b"
    assert first.name == "a" and first.goal == ""
    late = list(_rows_of(job("steps", seconds=-1.0), iter([Task(first, bad)])))
    assert [r.note for r in late] == ["not run: the time was up"]


class Device:
    """Parts of a device that answer at once; what they were asked is kept."""

    def __init__(self, about: About = GPU, floors: Floors | None = FLOORS):
        self.about, self.floors = about, floors
        self.jobs: list[PartJob] = []
        self.environments: list[Mapping[str, str]] = []
        self.notes: dict[str, str] = {}  # of rows, by part

    @property
    def parts(self) -> list[str]:
        return [job.part for job in self.jobs]

    def __call__(self, job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
        self.jobs.append(job)
        self.environments.append(environment)
        if job.part == PartJob.ABOUT:
            yield PartMessage(about=self.about)
        elif job.part == "floors":
            if self.floors is not None:
                yield PartMessage(floors=self.floors)
        else:
            cases = [row(part=job.part, case=case) for case in ("first", "second")]
            tasks = [Task(case, self._answer) for case in cases]
            for answer in _rows_of(job, iter(tasks)):
                yield PartMessage(row=answer)

    def _answer(self, asked: Row) -> list[Row]:
        note = self.notes.get(f"{asked.part} {asked.case}", "")
        seconds = None if note else float(len(self.jobs))
        return [msgspec.structs.replace(asked, seconds=seconds, note=note)]


def test_nothing_begins_when_the_time_is_up():
    device = Device()
    found = DevicePlan(seconds=0.0).measure(Kept(), quiet, device)
    assert device.parts == [PartJob.ABOUT, "floors"]
    assert {r.part: r.note for r in found.rows} == dict.fromkeys(
        [part for part in PARTS if part != "floors"], "not run: the time was up"
    )
    assert found.finished == ["floors"]


def test_parts_run_in_order_with_what_was_found_first():
    device = Device()
    plan = DevicePlan(only=("graphs", "steps"), environment={"A": "b"})
    plan.measure(Kept(), quiet, device)
    assert device.parts == [PartJob.ABOUT, "smoke", "floors", "graphs", "steps"]
    first, _, _, _, steps = device.jobs
    assert (first.shape, steps.shape, steps.page_size) == ("", "llama-3.1-8b", 64)
    assert steps.floors == FLOORS and (steps.kernels, steps.dtype) == ("triton", "bfloat16")
    assert device.environments[4] == {"A": "b"}
    assert "command_buffer" in device.environments[3]["XLA_FLAGS"]


def test_xla_knows_the_options_of_the_parts():
    """It ends a process at an option that it does not know."""
    options = [
        environment.get("XLA_FLAGS", "")
        for environment in [part.environment for part in PARTS.values()]
    ]
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(options)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_part_has_more_than_five_minutes_and_all_have_25():
    device = Device()
    DevicePlan().measure(Kept(), quiet, device)
    assert DevicePlan.TOTAL_S == 1500 and _PART_S == 300
    assert device.parts[1:] == list(PARTS)
    assert all(job.seconds < job.limit_s <= _PART_S for job in device.jobs)
    short = Device()
    DevicePlan(seconds=100.0).measure(Kept(), quiet, short)
    assert all(
        job.limit_s <= 100 for job in short.jobs if job.part not in (PartJob.ABOUT, "floors")
    )


def test_in_a_short_call_no_part_takes_the_time_of_those_behind_it():
    device = Device()
    DevicePlan(only=("check", "steps", "loop"), seconds=480.0).measure(Kept(), quiet, device)
    limits = {job.part: job.limit_s for job in device.jobs}
    assert limits["check"] == 160
    assert limits["steps"] == pytest.approx(240, abs=1)  # half of what is left
    assert limits["loop"] == _PART_S
    alone = Device()
    DevicePlan(only=("check",), seconds=200.0).measure(Kept(), quiet, alone)
    assert alone.jobs[-1].limit_s == pytest.approx(200, abs=1)


def test_what_was_cut_short_for_others_is_taken_up_with_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
):
    real, spent = time.monotonic, [0.0]
    monkeypatch.setattr(device_run.time, "monotonic", lambda: real() + spent[0])
    limits: list[tuple[str, float]] = []

    def start(job: PartJob, environment: Mapping[str, str]) -> Iterator[PartMessage]:
        if job.part == PartJob.ABOUT:
            yield PartMessage(about=GPU)
        elif job.part == "floors":
            yield PartMessage(floors=FLOORS)
        else:
            limits.append((job.part, round(job.limit_s)))
            needed = {"smoke": 0.0, "check": 150.0, "steps": 10.0}[job.part]
            spent[0] += min(needed, job.limit_s)
            note = "" if needed <= job.limit_s else "not finished: the time was up"
            yield PartMessage(row=row(part=job.part, seconds=None if note else 1.0, note=note))

    plan = DevicePlan(only=("check", "steps"), seconds=300.0)
    found = plan.measure(Kept(), quiet, start)
    assert limits[1:] == [("check", 100), ("steps", 200), ("check", 190)]
    assert found.finished == ["smoke", "floors", "steps", "check"]
    assert [(r.part, r.note) for r in found.rows[1:]] == [("steps", ""), ("check", "")]


def test_what_a_call_left_is_handed_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two machines: nothing but the folder of results reaches the second."""
    gpu = msgspec.structs.replace(GPU, choices="a-card-9.0-jaxlib-0.1")
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        monkeypatch.setenv("JITNEY_CACHE", str(tmp_path / f"cache {number}"))
        measured = compilation_cache_dir() / "a-card-9.0-jaxlib-0.1" / RESULTS
        measured.mkdir(parents=True)
        (measured / f"{number}.txt").write_text(f"measured by {number}")
        folder.mkdir()
        device = Device(gpu)
        monkeypatch.setattr("jitney.engine.lab.device.run._run_apart", device)
        earlier = ["--from", str(folders[0])] if number else []
        assert bench_device(["--only", "steps", "--out-dir", str(folder), *earlier]) == 0
        assert ("steps" in device.parts) == (number == 0)
    assert [path.name for path in sorted(folders[1].iterdir())] == [
        "autotuned_a-card-9.0-jaxlib-0.1.tar.gz",
        "device_a_card_80gb_llama-3.1-8b.json",
        "device_a_card_80gb_llama-3.1-8b.md",
    ]
    brought = compilation_cache_dir() / "a-card-9.0-jaxlib-0.1" / RESULTS / "0.txt"
    assert brought.read_text() == "measured by 0"
    with tarfile.open(folders[1] / "autotuned_a-card-9.0-jaxlib-0.1.tar.gz") as archive:
        names = [f"a-card-9.0-jaxlib-0.1/{number}.txt" for number in range(2)]
        assert archive.getnames() == names
    with pytest.raises(ConfigError, match="no results of an earlier call"):
        bench_device(["--out-dir", str(folder), "--from", str(brought.parent)])


def test_an_archive_puts_files_into_its_own_folder_alone(tmp_path: Path):
    with tarfile.open(tmp_path / "autotuned_card.tar.gz", "w:gz") as archive:
        for name in ("card/right", "card/../../wrong", "other/wrong", "card/deep/wrong"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    _Choices(tmp_path, tmp_path / "programs", "card").take_up()
    files = [path for path in (tmp_path / "programs").rglob("*") if path.is_file()]
    assert files == [tmp_path / "programs" / "card" / RESULTS / "right"]
    assert not list(tmp_path.glob("wrong"))


def test_a_second_call_goes_on_where_the_first_one_stopped(tmp_path: Path):
    first = Device()
    first.notes = {"steps second": "not run: the time was up", "loop first": "failed: OSError: no"}
    DevicePlan(only=("steps", "loop")).measure(ResultFiles(tmp_path), quiet, first)
    second = Device()
    found = DevicePlan(only=("steps", "loop")).measure(ResultFiles(tmp_path), quiet, second)
    assert second.parts == [PartJob.ABOUT, "steps"]  # what failed by itself would fail again
    measured = {(r.part, r.case): r.seconds for r in found.rows if r.part == "steps"}
    assert measured == {("steps", "first"): 4.0, ("steps", "second"): 2.0}
    report = json.loads((tmp_path / "device_a_card_80gb_llama-3.1-8b.json").read_text())
    assert report["calls"] == 2 and set(report["finished"]) == {"smoke", "floors", "steps", "loop"}
    third = Device()
    merged = DevicePlan(only=("graphs",)).measure(ResultFiles(tmp_path), quiet, third)
    assert {r.part for r in merged.rows} == {"smoke", "steps", "loop", "graphs"}


@pytest.mark.parametrize("again", [True, False], ids=["again", "another program"])
def test_no_call_overwrites_another_measurement(tmp_path: Path, again: bool):
    plan = DevicePlan(only=("steps",))
    plan.measure(ResultFiles(tmp_path), quiet, Device())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    about = GPU if again else msgspec.structs.replace(GPU, versions={"jax": "1"})
    plan.measure(ResultFiles(tmp_path, again=again), quiet, Device(about))
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) == 2 and len(after) == 4
    assert {name: after[name] for name in before} == before
    assert "device_a_card_80gb_llama-3.1-8b-2.json" in after


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "A card 80GB"},
        {"kernels": "triton (fp8)"},
        {"dtype": "float32"},
        {"versions": {"jax": "0", "triton": "1"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_decides_figures_begins_a_file_of_its_own(tmp_path: Path, fields: dict[str, Any]):
    plan = DevicePlan(only=("steps",))
    plan.measure(ResultFiles(tmp_path), quiet, Device())
    second = Device(msgspec.structs.replace(GPU, **fields))
    plan.measure(ResultFiles(tmp_path), quiet, second)
    assert second.parts == [PartJob.ABOUT, "smoke", "floors", "steps"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_of_something_else_is_left_alone(tmp_path: Path):
    (file := tmp_path / "device_a_card_80gb_llama-3.1-8b.json").write_text("[]")
    DevicePlan(only=("steps",)).measure(ResultFiles(tmp_path), quiet, Device())
    assert file.read_text() == "[]" and len(list(tmp_path.iterdir())) == 3


def test_the_reference_is_never_measured_in_silence():
    plain = msgspec.structs.replace(GPU, platform="METAL", kernel_set="reference")
    with pytest.raises(ConfigError, match="no kernels of our own for METAL"):
        DevicePlan().measure(Kept(), quiet, Device(plain))
    asked = DevicePlan(kernels="reference", only=("check",)).measure(Kept(), quiet, Device(plain))
    assert asked.finished == ["smoke", "check"]
    said: list[str] = []
    slow = msgspec.structs.replace(CPU, kernel_set="reference")
    DevicePlan(only=("check",)).measure(Kept(), said.append, Device(slow))
    assert any("REFERENCE kernels are measured" in line for line in said)


def test_a_large_shape_on_a_cpu_and_no_floors_are_one_line():
    with pytest.raises(ConfigError, match="needs a GPU or TPU"):
        DevicePlan(shape="qwen3-8b").measure(Kept(), quiet, Device(CPU))
    with pytest.raises(JitneyError, match="could not be described"):
        DevicePlan().measure(Kept(), quiet, lambda job, environment: iter(()))
    with pytest.raises(JitneyError, match="could not be measured"):
        DevicePlan().measure(Kept(), quiet, Device(floors=None))
    with pytest.raises(ConfigError, match=r"unknown part 'step'; known: smoke, check, floors"):
        DevicePlan(only=("step",))


def test_a_process_that_dies_becomes_a_row(tmp_path: Path):
    lines = list(_run_apart(job("steps", kernels="nonesuch"), {"JAX_PLATFORMS": "cpu"}))
    (told,) = [line.row for line in lines if line.row]
    assert (
        told.note.startswith("failed: the process ended with status 1") and "nonesuch" in told.note
    )


@pytest.mark.usefixtures("hurried_processes")
def test_the_command_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        bench_device(
            shlex.split(f"--only smoke --platform cpu --dtype float32 --out-dir {tmp_path}")
        )
        == 0
    )
    said = capsys.readouterr()
    assert "no GPU or TPU here" in said.err and "| smoke | 1 | 0 | |" in said.out
    assert json.loads((tmp_path / "device_cpu_tiny.json").read_text())["rows"]
    with pytest.raises(ConfigError, match="no such folder"):
        bench_device(["--out-dir", str(tmp_path / "absent")])


#: Distributions on the machine that docs/benchmarks/first_device.sh is for: jax, Triton, torch and
#: transformers with their needs.
THERE = {
    "click",
    "filelock",
    "httpx",
    "idna",
    "jax",
    "jaxlib",
    "ml_dtypes",
    "numpy",
    "opt_einsum",
    "packaging",
    "pyyaml",
    "scipy",
    "setuptools",
    "triton",
    "typing_extensions",
}
#: Prints the distributions that the bench loads, beside ours.
LOADED = """
import sys
from importlib.metadata import packages_distributions
from jitney.engine.lab.device import (
    check, kernels, loop, peers, products, prompt_peers, smoke, step_kernels, steps, vllm_peer,
    worker,
)
from jitney.engine.lab.commands import bench_device
from jitney.kernels.triton_gpu.launch import _jax_triton

_jax_triton()
names = packages_distributions()
print(*{name for module in sys.modules for name in names.get(module.partition(".")[0], ())})
"""


def test_the_wheels_to_bring_are_all_that_is_loaded():
    pytest.importorskip("triton")
    script = (ROOT / "docs" / "benchmarks" / "first_device.sh").read_text()
    brought = {name.lower().replace("-", "_") for name in re.findall(r"^    (\S+)==", script, re.M)}
    assert "jax_triton" in brought
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded = {name.lower().replace("-", "_") for name in done.stdout.split()}
    assert not loaded - brought - THERE - {"jitney"}

"""Programs kept under our own key: which starts find them, and that no other does."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jitney.engine.core.executor import kept_programs
from jitney.engine.core.executor.compilations import compilations
from jitney.engine.core.executor.kept_programs import KeptPrograms
from jitney.engine.core.executor.program import Program, StateSizes
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.measuring.made_up_steps import StepCase
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

KERNELS = select("cpu", "reference")
BUCKETS = Buckets.of(max_seats=4, token_budget=32, seat_sizes=(4,), token_sizes=(32,))
SIZES = StateSizes(
    seats=4, n_pages=16, page_size=16, context_length=64, kv_dtype=jnp.dtype("float32")
)
MIXED = Bucket(32, 4)


@pytest.fixture(autouse=True)
def without_jaxs_own_folder() -> Iterator[None]:
    """Programs that it holds are not kept; an engine of another file may have set it."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def keep(folder: Path, facts: Iterable[object], **more: Any) -> KeptPrograms:
    return KeptPrograms.of(folder, jax.devices()[0], facts, **more)


def make_runner(folder: Path, *, in_parts: bool = True, **changes: Any) -> Runner:
    given: dict[str, Any] = {"buckets": BUCKETS, "kernels": KERNELS, "sizes": SIZES, **changes}
    model = random_model(tiny_config())
    programs = StepPrograms(model, **given, in_parts=in_parts, keep=partial(keep, folder))
    return Runner(programs, end_ids=())


def tokens_of(runner: Runner, *, greedy_only: bool) -> list[Any]:
    plan = StepCase(MIXED, prompts=((0, 9), (0, 17))).plan(0, SIZES.page_size)
    batch = runner.pack(plan, greedy_only and runner.programs.runs_greedy_only(MIXED, True))
    return runner.fetch(runner.launch(batch)).tokens


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_start_that_finds_its_programs_traces_none(
    in_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jax.clear_caches()  # what this process has in memory is not kept
    first = make_runner(tmp_path, in_parts=in_parts)
    first.compile()

    def traced(*_: object) -> None:
        raise AssertionError("a step was traced")

    monkeypatch.setattr(Program, "forward", traced)
    second = make_runner(tmp_path, in_parts=in_parts)
    second.compile()
    assert all(each.from_cache for each in second.programs.bucket_compilations())
    assert second.programs.memory().largest == first.programs.memory().largest
    for greedy_only in (True, False):
        assert tokens_of(second, greedy_only=greedy_only) == tokens_of(
            first, greedy_only=greedy_only
        )


def test_no_other_runner_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def folder_of(**changes: Any) -> Path:
        kept = make_runner(tmp_path, **changes).programs.step.kept
        assert kept is not None
        return kept.folder

    same = folder_of()
    assert folder_of() == same
    wider = Buckets.of(max_seats=4, token_budget=64, seat_sizes=(4,), token_sizes=(64,))
    others = [
        folder_of(in_parts=False),
        folder_of(sizes=replace(SIZES, n_pages=17)),
        folder_of(sizes=replace(SIZES, kv_dtype=jnp.dtype("bfloat16"))),
        folder_of(buckets=wider),
        folder_of(kernels=replace(KERNELS, float32_residual=not KERNELS.float32_residual)),
        folder_of(greedy_only_mixed=True),
    ]
    machine: list[Callable[[], None]] = [
        lambda: monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_thunk_runtime=false"),
        lambda: monkeypatch.setattr(kept_programs, "cpu_features", lambda: "fpu sse"),
        lambda: monkeypatch.setattr(kept_programs, "own_processors", lambda: {0, 1, 2, 3, 4}),
        lambda: monkeypatch.setattr(kept_programs, "version", lambda _: "0.0"),
        lambda: monkeypatch.setattr(kept_programs, "_code", lambda: "other sources"),
    ]
    for change in machine:
        change()
        others.append(folder_of())
    assert len({same, *others}) == 1 + len(others)


def test_sources_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for part in ("engine/core", "kernels/cpu/__pycache__"):
        (tmp_path / part).mkdir(parents=True)
    source = tmp_path / "kernels" / "cpu" / "attention.cpp"
    source.write_text("float x;")

    def digest() -> str:
        kept_programs._code.cache_clear()
        return kept_programs._code()

    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "_ENGINE", tmp_path / "engine")
        patch.setattr(kept_programs, "_KERNELS", tmp_path / "kernels")
        first = digest()
        (tmp_path / "kernels" / "cpu" / "__pycache__" / "a.pyc").write_text("")
        assert digest() == first
        source.write_text("double x;")
        assert digest() != first
    kept_programs._code.cache_clear()


class Doubling:
    """A small program that counts how often it is lowered."""

    def __init__(self, kept: KeptPrograms):
        self.kept = kept
        self.lowered = 0

    def lower(self) -> jax.stages.Lowered:
        self.lowered += 1
        return jax.jit(lambda x: {"two": 2 * x}).lower(np.zeros(3, np.float32))

    def result(self) -> list[float]:
        lowered = self.kept.lowered("double", self.lower)
        assert lowered.out_info["two"].shape == (3,)
        program = compilations.timed(lowered.compile)
        return program(np.array([1, 2, 3], np.float32))["two"].tolist()

    @property
    def file(self) -> Path:
        [file] = self.kept.folder.iterdir()
        return file


def test_a_damaged_file_costs_a_compilation(tmp_path: Path):
    program = Doubling(keep(tmp_path, ["facts"]))
    for _ in range(2):
        assert program.result() == [2, 4, 6]
    assert program.lowered == 1
    whole = program.file.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:-9] + b"#" + whole[-8:]):
        program.file.write_bytes(damaged)
        before = program.lowered
        assert program.result() == [2, 4, 6]
        assert program.lowered == before + 1
        assert program.result() == [2, 4, 6]
        assert program.lowered == before + 1, "it was written anew"


def test_a_program_that_the_runtime_refuses_is_compiled(tmp_path: Path):
    program = Doubling(keep(tmp_path, ["facts"]))
    program.result()
    stored = kept_programs._read(program.file)
    assert stored is not None
    of_another_runtime = replace(
        stored, executable=(pickle.dumps(("no executable", [], True)), *stored.executable[1:])
    )
    data = pickle.dumps(of_another_runtime)
    program.file.write_bytes(kept_programs.hashlib.sha256(data).digest() + data)
    for _ in range(2):
        assert program.result() == [2, 4, 6]
        assert program.lowered == 2, "it was written anew"


def test_nothing_is_written_without_room(tmp_path: Path):
    program = Doubling(keep(tmp_path, ["facts"], writes=False))
    assert program.result() == program.result() == [2, 4, 6]
    assert (program.lowered, program.kept.folder.exists()) == (2, False)


def test_what_xla_has_not_made_now_is_not_written(tmp_path: Path):
    """What jax has read from its own folder, or has in memory, which it may have read."""
    lowered = jax.jit(lambda x: 2 * x).lower(np.zeros(3, np.float32))
    first = keep(tmp_path, ["first"])

    def read() -> jax.stages.Compiled:
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return first.lowered("double", lambda: lowered).compile()

    compilations.timed(read)
    assert not any(first.folder.iterdir())
    second = keep(tmp_path, ["second"])
    compilations.timed(second.lowered("double", lambda: lowered).compile)
    assert not any(second.folder.iterdir())


def test_programs_that_do_not_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_: Runner) -> None:
        raise jax.errors.JaxRuntimeError("NOT_FOUND: Function fusion not found")

    runner = make_runner(tmp_path, in_parts=False)
    kept = runner.programs.step.kept
    assert kept is not None
    monkeypatch.setattr(Runner, "warm_up", fail)
    with pytest.raises(jax.errors.JaxRuntimeError):
        runner.compile()
    assert not kept.folder.exists()


def test_the_oldest_keys_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_programs, "_MOST_KEYS", 2)
    first, second = keep(tmp_path, ["first"]), keep(tmp_path, ["second"])
    os.utime(second.folder, (0, 0))
    assert keep(tmp_path, ["first"]) == first
    third = keep(tmp_path, ["third"])
    assert set(first.folder.parent.iterdir()) == {first.folder, third.folder}

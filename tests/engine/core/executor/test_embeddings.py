"""Vectors of prompts: what the naive forward pass says, alone, in a crowd, in chunks, and after a
preemption.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import naive_normed
from programs import await_use

from jitney.engine.common.errors import RequestError
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest, Pooling, SamplingParams
from jitney.engine.config.schema import Config, EngineSection
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.setup import Setup
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

KERNELS = select("cpu", "reference")
BUCKETS = Buckets.of(max_seats=4, token_budget=16, seat_sizes=(4,), token_sizes=(16,))
SIZES = StateSizes(
    seats=4, n_pages=24, page_size=4, context_length=64, kv_dtype=jnp.dtype("float32")
)
VOCAB = 512
KINDS = [("last", True), ("mean", True), ("mean", False)]
#: Longer than a step's rows, shorter than a page, and in between.
LENGTHS = (41, 3, 1, 17)


#: One layer: what is asked here lies behind the last one.
CONFIG = replace(tiny_config(), n_layers=1)


@cache
def model():
    return random_model(CONFIG)


@cache
def runner(pooling: Pooling, in_parts: bool) -> Runner:
    programs = StepPrograms(
        random_model(CONFIG),
        BUCKETS,
        KERNELS,
        SIZES,
        greedy_only_mixed=in_parts,
        in_parts=in_parts,
        pooling=pooling,
    )
    made = Runner(programs, end_ids=())
    with pytest.MonkeyPatch.context() as patch:
        if not in_parts:
            # They take seconds to compile; that none compiles late is asked of the parts.
            patch.setattr(StepPrograms, "_compile_all", await_use)
        made.compile()
    return made


def core_of(pooling: Pooling, in_parts: bool = True, pages: int = 24) -> EngineCore:
    own = runner(pooling, in_parts)
    own.state = own.programs.shapes.allocate(own.programs.config)
    limits = SchedulerLimits(4, SIZES.context_length, embedding_pooling=pooling)
    scheduler = Scheduler(
        limits, BUCKETS, PageTables(PagePool(pages, SIZES.page_size)), vocab_size=VOCAB
    )
    return EngineCore(scheduler, own, Ledger())


def prompt(length: int) -> list[int]:
    return [(31 * length + 7 * at) % VOCAB for at in range(length)]


def wanted(name: str, length: int, pooling: Pooling | None) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=1 if pooling else 12)
    return EngineRequest(
        id=name, prompt=prompt(length), sampling=sampling, arrival=0.0, pooling=pooling
    )


def vector(output: SequenceOutput) -> np.ndarray:
    assert output.error is None and output.finish == "stop"
    assert not output.tokens and output.embedding is not None
    return np.frombuffer(output.embedding, np.float32)


def naive(length: int, pooling: Pooling) -> np.ndarray:
    """From hidden states of a forward pass over the whole prompt, without pages or steps."""
    states = naive_normed(model(), prompt(length)).astype(np.float64)
    pooled = states[-1] if pooling == "last" else states.mean(0)
    return pooled / np.linalg.norm(pooled)


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, SequenceOutput]:
    for request in requests:
        core.add(request)
    ended = {}
    for output in core.run_until_idle():
        if output.finish is not None:
            ended[output.request_id] = output
    core.check()
    return ended


@pytest.mark.parametrize(("pooling", "in_parts"), KINDS)
def test_a_vector_is_what_the_naive_forward_pass_says(pooling: Pooling, in_parts: bool):
    core = core_of(pooling, in_parts)
    compiled = runner(pooling, in_parts).compiles
    requests = [wanted(str(length), length, pooling) for length in LENGTHS]
    ended = run(core, [*requests, wanted("words", 9, None)])
    if in_parts:
        assert runner(pooling, in_parts).compiles == compiled, "nothing compiles while it serves"
    for length in LENGTHS:
        own = vector(ended[str(length)])
        assert np.linalg.norm(own) == pytest.approx(1.0, abs=1e-6)
        np.testing.assert_allclose(own, naive(length, pooling), atol=2e-5)
    assert ended["words"].finish == "length"


def test_a_bfloat16_model_whose_residuals_are_float32_makes_vectors(
    monkeypatch: pytest.MonkeyPatch,
):
    """As on a CPU: the hidden states are wider than the weights."""
    monkeypatch.setattr(StepPrograms, "_compile_all", await_use)
    kernels = replace(KERNELS, float32_residual=True)
    model = random_model(CONFIG, dtype=jnp.bfloat16)
    own = Runner(StepPrograms(model, BUCKETS, kernels, SIZES, pooling="last"), end_ids=())
    own.compile()
    limits = SchedulerLimits(4, SIZES.context_length, embedding_pooling="last")
    scheduler = Scheduler(
        limits, BUCKETS, PageTables(PagePool(24, SIZES.page_size)), vocab_size=VOCAB
    )
    ended = run(EngineCore(scheduler, own, Ledger()), [wanted("own", 17, "last")])
    np.testing.assert_allclose(vector(ended["own"]), naive(17, "last"), atol=0.02)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_alone_and_in_a_crowd_it_is_the_same(pooling: Pooling):
    alone = vector(run(core_of(pooling), [wanted("own", 23, pooling)])["own"])
    others = [wanted(f"other {length}", length, pooling) for length in LENGTHS]
    words = [wanted("words", 9, None), wanted("more words", 5, None)]
    crowd = run(core_of(pooling), [*words, *others, wanted("own", 23, pooling)])
    np.testing.assert_allclose(vector(crowd["own"]), alone, atol=2e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prefix_is_shared_only_where_no_row_of_it_is_needed(pooling: Pooling):
    core = core_of(pooling)
    first = run(core, [wanted("first", 41, pooling)])["first"]
    again = run(core, [wanted("again", 41, pooling)])["again"]
    assert (again.cached_tokens > 0) == (pooling == "last")
    np.testing.assert_allclose(vector(again), vector(first), atol=2e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_rows_that_were_computed_before_a_failed_step_count_once(pooling: Pooling):
    """A step fails after the first chunks: the prompt is computed from its first row on."""
    core = core_of(pooling)
    core.add(wanted("own", 41, pooling))
    own, launch = core.runner, core.runner.launch
    steps = []

    def failing(batch):
        steps.append(batch)
        if len(steps) == 2:
            raise RuntimeError("the device is gone")
        return launch(batch)

    own.launch = failing
    try:
        ended = [output for output in core.run_until_idle() if output.finish is not None]
    finally:
        del own.launch
    np.testing.assert_allclose(vector(ended[0]), naive(41, pooling), atol=2e-5)


def test_an_abort_frees_the_seat_and_the_pages():
    core = core_of("mean")
    core.add(wanted("own", 41, "mean"))
    core.step()
    core.abort("own")
    ended = [output for output in core.run_until_idle() if output.finish is not None]
    assert [output.finish for output in ended] == ["abort"] and ended[0].embedding is None
    assert core.scheduler.pool.used == 0
    core.check()


def test_what_the_engine_does_not_make_is_refused_by_the_setting_s_name():
    core = core_of("mean")
    with pytest.raises(RequestError, match="embedding-pooling"):
        core.scheduler.add(wanted("own", 5, "last"))


@pytest.mark.parametrize(
    ("asked", "stated", "made"),
    [
        ("auto", "lasttoken", "last"),
        ("auto", "mean", "mean"),
        ("auto", "cls", "off"),
        ("auto", None, "off"),
        ("mean", "lasttoken", "mean"),
        ("off", "lasttoken", "off"),
    ],
)
def test_vectors_are_made_as_the_files_of_the_model_say(
    tmp_path: Path, asked: Literal["auto", "mean", "off"], stated: str | None, made: str
):
    if stated is not None:
        listed = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": stated}))
    setup = Setup(
        config=Config(engine=EngineSection(embedding_pooling=asked)),
        source=ModelSource("hf", str(tmp_path), "", tiny_config()),
        devices=[],
        mesh=None,
        dtype=np.dtype(np.float32),
        kv_dtype=np.dtype(np.float32),
        context=64,
        hosts=None,
    )
    assert setup.pooling == made

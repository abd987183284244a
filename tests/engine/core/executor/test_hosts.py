"""What the first host's runner says is all that another needs to do the same on its device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jitney.engine.common.errors import EngineDead, RequestError
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest, Grammar, SamplingParams
from jitney.engine.common.worker_pipe import LENGTH, framed
from jitney.engine.core.distributed import messages
from jitney.engine.core.distributed.connection import _decode
from jitney.engine.core.distributed.messages import Board, Choose, Step
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.hosts import Follower, LeaderRunner
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

BUCKETS = Buckets.of(max_seats=4, token_budget=32, seat_sizes=(4,), token_sizes=(32,))
SIZES = StateSizes(
    seats=4, n_pages=16, page_size=16, context_length=64, kv_dtype=jnp.dtype("float32")
)


class Wire:
    """Both ends of the connection between two hosts; what is said crosses it as bytes."""

    def __init__(self) -> None:
        self.said: list[messages.Message] = []

    def send(self, message: messages.Message) -> None:
        self.said.append(_decode(framed(message)[LENGTH.size :]))


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@pytest.fixture(scope="module")
def leading(wire: Wire) -> LeaderRunner:
    model = random_model(tiny_config())
    programs = StepPrograms(model, BUCKETS, select("cpu", "reference"), SIZES)
    runner = LeaderRunner(programs, end_ids=())
    runner.compile()
    runner.lead(wire)  # type: ignore[arg-type]
    return runner


@pytest.fixture(scope="module")
def core(leading: LeaderRunner) -> EngineCore:
    scheduler = Scheduler(
        SchedulerLimits(max_seats=4, context_length=64),
        BUCKETS,
        PageTables(PagePool(16, 16, retain=True)),
        eos_ids=(),
        vocab_size=tiny_config().vocab_size,
    )
    core = EngineCore(scheduler, leading, Ledger())
    core.learn(Tokenizer.load(ModelSource.resolve("tiny-random")).json)
    return core


def served(core: EngineCore, *samplings: SamplingParams) -> list[int]:
    """Tokens of all requests."""
    for number, sampling in enumerate(samplings):
        prompt = np.random.default_rng(number).integers(0, 256, 5 + 9 * number).tolist()
        core.add(EngineRequest(id=f"{number}", prompt=prompt, sampling=sampling, arrival=0.0))
    return [token for output in core.run_until_idle() for token in output.tokens]


def state_of(runner: Runner) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(runner.state)]


def test_a_follower_ends_up_with_the_same_state(
    core: EngineCore, leading: LeaderRunner, wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    tokens = served(
        core,
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(seed=1, max_tokens=9, frequency_penalty=0.5, logit_bias={7: 2.0}),
        SamplingParams(seed=2, top_p=0.8, max_tokens=4, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=5, allowed_token_ids=(3, 4, 5)),
        SamplingParams(seed=3, max_tokens=7, grammar=Grammar("regex", "[a-z]{99}")),
    )
    assert len(tokens) == 31
    said, wire.said = wire.said, []
    assert {type(message) for message in said} == {Step, Board, Choose}
    leads = state_of(leading)
    Runner.restore(leading, RuntimeError())  # another host's device, at the start
    assert not all(map(np.array_equal, state_of(leading), leads))
    with monkeypatch.context() as patch:
        patch.setattr(leading, "_hosts", None)
        follower = Follower(leading)
        for message in said:
            follower.do(message)
    for own, lead in zip(state_of(leading), leads, strict=True):
        np.testing.assert_array_equal(own, lead)
    assert leading.compiles == 0
    core.reset_prefix_cache()


def test_a_follower_takes_nothing_but_steps(leading: LeaderRunner):
    follower = Follower(leading)
    with pytest.raises(ConnectionError, match="where a step was expected"):
        follower.do(messages.Heartbeat())


def test_several_hosts_do_not_sleep(core: EngineCore):
    with pytest.raises(RequestError, match=r"several hosts \(n_hosts\) does not sleep"):
        core.sleep(lambda: None)
    assert len(served(core, SamplingParams(temperature=0.0, max_tokens=2))) == 2


@pytest.mark.parametrize("part", ["launch", "fetch"])
def test_a_step_that_fails_ends_the_engine(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, part: str
):
    def broken(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(Runner, part, broken)
    with pytest.raises(EngineDead, match=r"a step failed \(RuntimeError\), and several hosts"):
        served(core, SamplingParams(temperature=0.0, max_tokens=2))

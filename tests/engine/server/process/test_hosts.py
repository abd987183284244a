"""One engine in two processes, as on two hosts: the same tokens as in one, also after a process is
lost, and an end in order.

Each process has one CPU device; Gloo joins them. The test is their supervisor on both hosts, as
`jitney serve` is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from joint_processes import (
    LIMIT_S,
    TINY,
    alone_in_a_hurry,
    compiled_in_a_hurry,
    drawn_prompts,
    request,
    run_logged,
    tokens_of,
    two_processes,
)
from outputs import Outputs

from jitney.engine import LLM
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar, SamplingParams
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.server.process.process_client import ProcessClient

MODEL = "tiny-random:qwen3"
SETTINGS = TINY | {"model": MODEL}
pytestmark = pytest.mark.timeout(600)
TOKENS = 8
SAMPLINGS = (
    SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(
        seed=3,
        top_p=0.9,
        top_k=40,
        max_tokens=TOKENS,
        ignore_eos=True,
        frequency_penalty=0.5,
        logit_bias={7: 1.0},
    ),
    SamplingParams(
        seed=3, max_tokens=TOKENS, presence_penalty=0.5, grammar=Grammar("regex", "[a-z]{99}")
    ),
)
#: Of the answer during which a process is lost.
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


PROMPTS = drawn_prompts(3, 11)


@dataclass
class Story:
    """What came of it."""

    answers: list[list[int]] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    asleep: str = ""
    devices: list[str] = field(default_factory=list)
    #: Of host 0 and host 1.
    restarts: list[int] = field(default_factory=list)
    dismissed: bool = False


async def live(story: Story) -> None:
    tokenizer = Tokenizer.load(ModelSource.resolve(MODEL)).json
    async with two_processes(SETTINGS | {"tensor_parallel": 2}) as (first, other):
        first.learn(tokenizer)
        for client in (first, other):
            story.devices.append((await client.wait_ready()).device.name)
        for sampling in SAMPLINGS:
            streams = [
                Outputs(first, request(f"{sampling.seed} {i}", prompt, sampling))
                for i, prompt in enumerate(PROMPTS)
            ]
            story.answers += [await tokens_of(stream) for stream in streams]
        try:
            await first.sleep()
        except RequestError as error:
            story.asleep = str(error)
        await lose_a_process(story, first, other)
        await first.close()
        await other.until("dead")
        story.dismissed = other.dismissed


async def lose_a_process(story: Story, first: ProcessClient, other: ProcessClient) -> None:
    """In the middle of an answer, which goes on in the next life of the engine."""
    stream = Outputs(first, request("long", PROMPTS[2], LONG))
    output = await anext(aiter(stream))
    other.kill()
    story.resumed = output.tokens + await tokens_of(stream)
    await other.until("ready")
    story.restarts = [len(client._restarts.restarts) for client in (first, other)]


@pytest.fixture(scope="module")
def log() -> list[str]:
    """Lines of the supervisors."""
    return []


@pytest.fixture(scope="module")
def quickly() -> Iterator[None]:
    """Four processes start."""
    with compiled_in_a_hurry():
        yield


@pytest.fixture(scope="module")
def story(log: list[str], quickly: None) -> Story:
    story = Story()
    run_logged(live(story), LIMIT_S, log)
    return story


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The same model in one process."""
    return alone_in_a_hurry(SETTINGS)


def test_tokens_are_those_of_one_process(story: Story, alone: LLM):
    expected = [
        output.outputs[0].token_ids
        for sampling in SAMPLINGS
        for output in alone.generate(PROMPTS, sampling)
    ]
    assert story.answers == expected
    assert len({tuple(answer) for answer in expected}) == 9
    assert {len(answer) for answer in expected} == {TOKENS}


def test_an_answer_goes_on_after_a_host_was_lost(story: Story, alone: LLM):
    (output,) = alone.generate(PROMPTS[2:], LONG)
    assert story.resumed == output.outputs[0].token_ids


def test_the_loss_of_a_host_is_one_line(story: Story, log: list[str]):
    assert story.restarts == [1, 1]
    first, other = (line for line in log if "starting it again" in line)
    lines = sorted((first, other))
    assert lines[0].startswith("host 1 is gone: its connection ended; starting it again in 0.5 s")
    assert lines[1].startswith("the engine process died (killed by SIGKILL, signal 9)")
    assert "1 open requests go on in the new one" in lines[0]


def test_both_hosts_know_what_runs(story: Story):
    assert story.devices[0] == story.devices[1]
    assert story.devices[0].startswith("2 x ") and story.devices[0].endswith(" on 2 hosts")


def test_several_hosts_do_not_sleep(story: Story):
    assert story.asleep == "an engine over several hosts (n_hosts) does not sleep"


def test_the_end_of_the_first_host_ends_the_other_in_order(story: Story):
    assert story.dismissed

"""Two engines that share a mixture's experts, in two processes, with keys and values in int8 and
with adapters: each answers its own requests with the tokens of an engine alone, whatever the other
does; they are lost and start again together.

Each process has two CPU devices, with different experts each; Gloo joins them. The test is the
supervisor of both, as `jitney serve` is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from adapter_files import write_adapter
from joint_processes import (
    LIMIT_S,
    TINY,
    alone_in_a_hurry,
    compiled_in_a_hurry,
    drawn_prompts,
    outputs_of,
    request,
    run_logged,
    tokens_of,
    two_processes,
)
from outputs import Outputs

from jitney.engine import LLM
from jitney.engine.common.errors import RequestError
from jitney.engine.common.outputs import TokenLogprobs
from jitney.engine.common.requests import Grammar, SamplingParams
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.server.process.process_client import ProcessClient

MODEL = "tiny-random:qwen3_moe"
#: Of each of the two engines, beside those of one alone.
JOINED = {"tensor_parallel": 2, "expert_parallel": 2, "data_parallel": 2}
pytestmark = pytest.mark.timeout(600)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONGEST = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
DRAWN = SamplingParams(
    seed=3,
    top_p=0.9,
    max_tokens=8,
    ignore_eos=True,
    frequency_penalty=0.5,
    logit_bias={7: 1.0},
)
HELD = SamplingParams(seed=3, max_tokens=8, grammar=Grammar("regex", "[a-z]{99}"))
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
#: What both engines are asked at once, prompts by their numbers: load that is even, one engine
#: alone, either one, and load that differs in kind.
ROUNDS: tuple[tuple[list[tuple[int, SamplingParams]], list[tuple[int, SamplingParams]]], ...] = (
    ([(0, GREEDY), (1, GREEDY)], [(2, GREEDY), (3, GREEDY)]),
    ([(2, GREEDY)], []),
    ([], [(1, GREEDY), (0, GREEDY), (3, GREEDY)]),
    ([(number, LONG) for number in range(4)], [(3, SHORT)]),
    ([(1, DRAWN)], [(3, GREEDY)]),
    ([(3, GREEDY)], [(2, HELD), (1, DRAWN)]),
    ([(3, SCORED)], [(2, GREEDY)]),
)
#: The same with adapters, by their numbers.
ADAPTED: tuple[list[tuple[int, int]], ...] = ([(0, 1), (1, 0), (2, 2)], [(1, 2), (1, 1), (2, 0)])


PROMPTS = drawn_prompts(4, 19)


@dataclass
class Story:
    """What came of it."""

    #: Of each round, for each engine.
    answers: list[list[list[list[int]]]] = field(default_factory=list)
    #: With adapters, for each engine.
    adapted: list[list[list[int]]] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    asleep: str = ""
    devices: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    #: Of both engines, after the loss of one and at the end.
    restarts: list[list[int]] = field(default_factory=list)
    #: Of the first engine and of the other, while both drained.
    last: list[list[int]] = field(default_factory=list)
    #: Whose answer was whole when, and when all had drained.
    order: list[str] = field(default_factory=list)
    refused: str = ""
    dismissed: bool = False


async def scored(stream: Outputs, story: Story) -> list[int]:
    """The tokens of an answer; scores of its prompt go into the story."""
    outputs = await outputs_of(stream)
    for output in outputs:
        story.scores += output.prompt_logprobs or []
    return [token for output in outputs for token in output.tokens]


async def live(story: Story, settings: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(ModelSource.resolve(MODEL)).json
    async with two_processes(settings | JOINED) as clients:
        for client in clients:
            client.learn(tokenizer)
            info = await client.wait_ready()
            story.devices.append(info.device.name)
            assert (list(info.model.adapters), info.formats.kv_dtype) == (["fr", "de"], "int8")
        for number, asked in enumerate(ROUNDS):
            story.answers.append(await answered(clients, asked, number, story))
        streams = [
            [
                Outputs(client, request(f"adapted {place}", PROMPTS[prompt], GREEDY, adapter))
                for place, (prompt, adapter) in enumerate(asked)
            ]
            for client, asked in zip(clients, ADAPTED, strict=True)
        ]
        for own in streams:
            story.adapted.append(await asyncio.gather(*map(tokens_of, own)))
        try:
            await clients[1].sleep()
        except RequestError as error:
            story.asleep = str(error)
        await lose_a_process(story, *clients)
        await drain_together(story, *clients)


async def answered(
    clients: list[ProcessClient],
    asked: tuple[list[tuple[int, SamplingParams]], list[tuple[int, SamplingParams]]],
    number: int,
    story: Story,
) -> list[list[list[int]]]:
    streams = [
        [
            Outputs(client, request(f"{number} {place}", PROMPTS[prompt], sampling))
            for place, (prompt, sampling) in enumerate(own)
        ]
        for client, own in zip(clients, asked, strict=True)
    ]
    found = await asyncio.gather(*(scored(stream, story) for own in streams for stream in own))
    return [found[: len(streams[0])], found[len(streams[0]) :]]


async def lose_a_process(story: Story, first: ProcessClient, other: ProcessClient) -> None:
    """In the middle of an answer of the other engine, which goes on in the next life of both."""
    stream = Outputs(first, request("long", PROMPTS[2], LONG))
    output = await anext(aiter(stream))
    other.kill()
    story.resumed = output.tokens + await tokens_of(stream)
    await other.until("ready")
    story.restarts.append([len(client._restarts.restarts) for client in (first, other)])


async def drain_together(story: Story, first: ProcessClient, other: ProcessClient) -> None:
    """One is told to end: both drain, and who has nothing left takes part until the other has."""

    async def drained(name: str, client: ProcessClient, stream: Outputs) -> list[int]:
        tokens = await tokens_of(stream)
        story.order.append(name)
        await client.drained_together()
        story.order.append("all")
        return tokens

    streams = [
        Outputs(first, request("last 0", PROMPTS[2], SHORT)),
        Outputs(other, request("last 1", PROMPTS[3], LONGEST)),
    ]
    await anext(aiter(streams[1]))
    first.drain()
    await other.until_others_drain()
    other.drain()
    try:
        Outputs(other, request("late", PROMPTS[0], SHORT))
    except RequestError as error:
        story.refused = str(error)
    names = ("first", "other")
    waiting = map(drained, names, (first, other), streams)
    story.last = await asyncio.gather(*waiting)
    await first.close()
    await other.until("dead")
    story.dismissed = other.dismissed
    story.restarts.append([len(client._restarts.restarts) for client in (first, other)])


@pytest.fixture(scope="module")
def log() -> list[str]:
    """Lines of the supervisors."""
    return []


@pytest.fixture(scope="module")
def quickly() -> Iterator[None]:
    """Four processes start."""
    with compiled_in_a_hurry("--xla_force_host_platform_device_count=2"):
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one engine alone."""
    folder, config = tmp_path_factory.mktemp("adapters"), ModelSource.resolve(MODEL).config
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapters = [
        f"{name}={write_adapter(folder / name, config, seed, modules=modules)}"
        for seed, name in enumerate(("fr", "de"), 1)
    ]
    sizes = TINY | {"model": MODEL, "seat_buckets": (1, 4)}
    return sizes | {"kv_dtype": "int8", "adapters": adapters}


@pytest.fixture(scope="module")
def story(log: list[str], quickly: None, settings: dict[str, Any]) -> Story:
    story = Story()
    run_logged(live(story, settings), LIMIT_S, log)
    return story


@pytest.fixture(scope="module")
def alone(settings: dict[str, Any]) -> LLM:
    """The same model in one process."""
    return alone_in_a_hurry(settings)


def tokens_alone(alone: LLM, number: int, sampling: SamplingParams) -> list[int]:
    (output,) = alone.generate([PROMPTS[number]], sampling)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("number", range(len(ROUNDS)))
def test_tokens_are_those_of_an_engine_alone(story: Story, alone: LLM, number: int):
    expected = [[tokens_alone(alone, *each) for each in own] for own in ROUNDS[number]]
    assert story.answers[number] == expected


def test_tokens_of_adapters_are_those_of_an_engine_alone(story: Story, alone: LLM):
    def tokens(prompt: int, adapter: int) -> list[int]:
        name = ("", "fr", "de")[adapter]
        [output] = alone.generate([PROMPTS[prompt]], GREEDY, adapter=name)
        return output.outputs[0].token_ids

    assert story.adapted == [[tokens(*each) for each in own] for own in ADAPTED]
    assert len({tuple(tokens(1, adapter)) for adapter in range(3)}) == 3


def test_scores_of_a_prompt_are_those_of_an_engine_alone(story: Story, alone: LLM):
    (output,) = alone.generate([PROMPTS[3]], SCORED)
    assert output.prompt_logprobs is not None
    expected = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
    found = [entry.logprob for entry in story.scores if entry is not None]
    assert len(found) == len(PROMPTS[3]) - 1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_an_answer_goes_on_after_the_other_engine_was_lost(story: Story, alone: LLM):
    assert story.resumed == tokens_alone(alone, 2, LONG)


def test_the_loss_of_an_engine_is_one_line(story: Story, log: list[str]):
    assert story.restarts[0] == [1, 1]
    (line,) = (line for line in log if line.startswith("host 1 "))
    assert line.startswith("host 1 is gone: its connection ended; starting it again in 0.5 s")
    assert "1 open requests go on in the new one" in line
    assert any("killed by SIGKILL" in line for line in log)


def test_engines_drain_together(story: Story, alone: LLM):
    """No token is lost at the one that had more to do."""
    assert story.last[0] == tokens_alone(alone, 2, SHORT)
    longest = tokens_alone(alone, 3, LONGEST)
    assert 0 < len(story.last[1]) < len(longest) and longest[-len(story.last[1]) :] == story.last[1]
    assert story.order == ["first", "other", "all", "all"]
    assert story.refused == "the server is shutting down"
    assert story.dismissed and story.restarts[1] == [1, 1]


def test_both_engines_know_what_runs(story: Story):
    assert story.devices[0] == story.devices[1]
    assert story.devices[0].startswith("4 x ")
    assert story.devices[0].endswith(" on 2 hosts, an engine on each")


def test_engines_that_share_experts_do_not_sleep(story: Story):
    assert story.asleep == "an engine over several hosts (n_hosts) does not sleep"

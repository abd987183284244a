"""Two engines that share a mixture's experts, with keys and values in int8 and with adapters: each
answers with the tokens of an engine alone that has the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from adapter_files import write_adapter
from joint_processes import (
    LIMIT_S,
    TINY,
    compiled_once,
    drawn_prompts,
    request,
    run_logged,
    tokens_of,
    two_processes,
)
from outputs import Outputs
from places import SUPPORT

from jitney.engine import LLM
from jitney.engine.common.requests import SamplingParams
from jitney.engine.core.weights.checkpoints.sources import ModelSource

MODEL = "tiny-random:qwen3_moe"
pytestmark = pytest.mark.timeout(600)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = drawn_prompts(3, 19)
#: By engine: prompts, by their numbers, and the adapters that they are answered with, at once.
ASKED: tuple[list[tuple[int, int]], ...] = ([(0, 1), (1, 0), (2, 2)], [(1, 2), (1, 1), (2, 0)])


@dataclass
class Story:
    """What came of it: by engine, the tokens of each answer."""

    answers: list[list[list[int]]] = field(default_factory=list)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one engine alone."""
    folder, config = tmp_path_factory.mktemp("adapters"), ModelSource.resolve(MODEL).config
    adapters = [
        f"{name}={write_adapter(folder / name, config, seed, modules=_ATTENTION)}"
        for seed, name in enumerate(("fr", "de"), 1)
    ]
    return TINY | {"model": MODEL, "kv_dtype": "int8", "adapters": adapters}


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two processes start, which find `programs` on their path."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    with (
        compiled_once(tmp_path_factory.mktemp("cache"), "--xla_force_host_platform_device_count=2"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


@pytest.fixture(scope="module")
def story(settings: dict[str, Any], quickly: None) -> Story:
    story = Story()
    run_logged(live(story, settings), LIMIT_S, [])
    return story


async def live(story: Story, settings: dict[str, Any]) -> None:
    several = {"tensor_parallel": 2, "expert_parallel": 2, "data_parallel": 2}
    # All answers are greedy: half of the programs are for others.
    builder = "programs:build_awaiting"
    async with two_processes(settings | several, builder) as clients:
        for client in clients:
            info = await client.wait_ready()
            assert (list(info.model.adapters), info.formats.kv_dtype) == (["fr", "de"], "int8")
        streams = [
            [
                Outputs(client, request(f"{place}", PROMPTS[prompt], GREEDY, adapter))
                for place, (prompt, adapter) in enumerate(asked)
            ]
            for client, asked in zip(clients, ASKED, strict=True)
        ]
        for own in streams:
            story.answers.append(await asyncio.gather(*map(tokens_of, own)))


@pytest.fixture(scope="module")
def alone(settings: dict[str, Any], programs_when_used: None, compiled_in_a_hurry: None) -> LLM:
    """The same model in one process."""
    return LLM(**settings, compilation_cache=False)


@pytest.mark.parametrize("engine", range(2))
def test_tokens_are_those_of_an_engine_alone(story: Story, alone: LLM, engine: int):
    names = ("", "fr", "de")
    expected = []
    for prompt, adapter in ASKED[engine]:
        [output] = alone.generate([PROMPTS[prompt]], GREEDY, adapter=names[adapter])
        expected.append(output.outputs[0].token_ids)
    assert story.answers[engine] == expected


def test_each_adapter_changes_the_answer(alone: LLM):
    """Else the test above would say nothing."""
    answers = [
        alone.generate([PROMPTS[1]], GREEDY, adapter=name)[0].outputs[0].token_ids
        for name in ("", "fr", "de")
    ]
    assert len({tuple(answer) for answer in answers}) == 3

"""Models made of models made of models, by their names."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from scripted_models import ScriptedModels, always, chat, chunks, fails, said_in

from jitney.engine.common.errors import ConfigError
from jitney.engine.fleet.compositions import pipeline as pipeline_module
from jitney.engine.fleet.compositions.cascade import CascadeSettings
from jitney.engine.fleet.compositions.composed import COMPOSED_KINDS, ComposedModels
from jitney.engine.fleet.compositions.ensemble import EnsembleSettings
from jitney.engine.fleet.compositions.pipeline import PipelineSettings
from jitney.engine.fleet.sections import ReplicasSection
from jitney.engine.server.http.errors import HttpError


def cascade(small: str, large: str) -> CascadeSettings:
    return CascadeSettings(kind="cascade", small=small, large=large, threshold=0.5)


def ensemble(*models: str, **fields) -> EnsembleSettings:
    return EnsembleSettings(kind="ensemble", models=list(models), **fields)


def pipeline(*models: str) -> PipelineSettings:
    stages = [
        {"kind": "generate", "name": f"s{place}", "model": model, "prompt": "{{ question }}"}
        for place, model in enumerate(models)
    ]
    return PipelineSettings.model_validate({"kind": "pipeline", "stages": stages})


def scripts(sure: bool = True) -> ScriptedModels:
    return ScriptedModels(
        tiny=always("small", math.log(0.9 if sure else 0.1)), big=always("large", -0.1)
    )


SERVED: dict[str, Any] = dict.fromkeys(("tiny", "big"), ReplicasSection(replicas=1))
NESTED = SERVED | {
    "smart": cascade("tiny", "big"),
    "panel": ensemble("smart", "big"),
    "notes": pipeline("tiny", "smart"),
}


@pytest.mark.parametrize("sure, stage", [(True, "small"), (False, "large")])
def test_a_cascade_in_a_pipeline(sure: bool, stage: str):
    async def scene():
        models = ComposedModels(NESTED, scripts(sure))
        await models.start()
        try:
            question = chat("notes", stream=True, stream_options={"include_usage": True})
            streamed = await chunks(models, question)
            return await models.answer(chat("notes")), streamed
        finally:
            await models.close()

    answer, (headers, came) = asyncio.run(asyncio.wait_for(scene(), 60))
    assert answer.body["model"] == ("tiny" if sure else "big")
    assert answer.headers["x-jitney-stage"] == headers["x-jitney-stage"] == f"s1/{stage}"
    assert answer.body["jitney"]["inner"]["kind"] == "cascade"
    assert came[0]["jitney"]["inner"]["stage"] == stage
    assert said_in(came) == answer.choices[0]["message"]["content"] == stage
    stages = ["s0", "s1/small"] if sure else ["s0", "s1/small", "s1/large"]
    for usage in (answer.usage, came[-1]["usage"]):
        assert [entry["stage"] for entry in usage["stages"]] == stages
        assert usage["completion_tokens"] == len(stages)


def test_an_error_names_all_stages_on_the_way():
    async def scene():
        broken = scripts(sure=False)
        broken.models["big"] = fails(HttpError(503, "gone", code="engine_dead"))
        models = ComposedModels(NESTED, broken)
        try:
            await models.answer(chat("notes"))
        finally:
            await models.close()

    with pytest.raises(HttpError, match="stage s1: stage large: gone"):
        asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize(
    "composed, complaint",
    [
        ({"a": cascade("tiny", "huge")}, r"\[models.a\] is made of 'huge', which is no model"),
        ({"a": cascade("a", "tiny")}, "made of itself: a -> a;"),
        (
            {"a": cascade("tiny", "b"), "b": pipeline("c"), "c": ensemble("a", "tiny")},
            "made of itself: a -> b -> c -> a;",
        ),
        (
            {
                "a": cascade("tiny", "big"),
                "b": ensemble("a", "big", choose="score", scorer="a"),
            },
            "scores or embeds texts by 'a', which is made of models",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(composed: dict, complaint: str):
    with pytest.raises(ConfigError, match=complaint) as raised:
        ComposedModels.check(SERVED | composed)
    assert "\n" not in str(raised.value)


def test_the_page_lists_every_field():
    page = (Path(__file__).parents[3] / "docs" / "fleet_models.md").read_text()
    stages = get_args(pipeline_module._Stage)
    for kind in (*COMPOSED_KINDS.values(), *stages):
        for name, field in kind.model_fields.items():
            if name != "kind":
                assert f"| `{name}` | " in page and f" | {field.description} |" in page, name

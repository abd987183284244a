"""Where the sampling of a request that names none comes from: a setting, else the model's file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf_files
import msgspec
import pytest
from engine_infos import changed
from history_fakes import INFO

from jitney.engine import LLM, SamplingParams
from jitney.engine.common import messages
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.schema import SamplingSection
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sampling_defaults import sampling_defaults
from jitney.engine.core.weights.checkpoints.sources import _DEFAULT_MODEL, ModelSource

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

FILE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def folder_with(tmp_path: Path, values: dict[str, Any]) -> ModelSource:
    """A model folder whose generation_config.json says this."""
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return ModelSource("hf", str(tmp_path), "m", tiny_config())


def test_the_file_gives_the_defaults_and_settings_override_them(tmp_path: Path):
    source = folder_with(tmp_path, FILE | {"eos_token_id": 2, "do_sample": True})
    assert sampling_defaults(SamplingSection(), source) == FILE
    override = SamplingSection(temperature=0.0, top_k=0)
    assert sampling_defaults(override, source) == FILE | {"temperature": 0.0, "top_k": 0}
    assert sampling_defaults(SamplingSection(generation_config="none"), source) == {}
    assert sampling_defaults(SamplingSection(generation_config="none", top_p=0.5), source) == {
        "top_p": 0.5
    }


def test_whole_numbers_stay_whole_between_processes(tmp_path: Path):
    found = sampling_defaults(
        SamplingSection(), folder_with(tmp_path, {"top_k": 20.0, "temperature": 1})
    )
    ready = messages.Ready(changed(INFO, sampling_defaults=found))
    told = msgspec.msgpack.decode(messages.encode(ready), type=messages.FromCore)
    assert (
        isinstance(told, messages.Ready) and type(told.info.model.sampling_defaults["top_k"]) is int
    )
    assert told.info.model.sampling_defaults == {"top_k": 20, "temperature": 1}


def test_null_and_absent_values_are_not_given(tmp_path: Path):
    source = folder_with(tmp_path, {"temperature": None, "top_k": 7})
    assert sampling_defaults(SamplingSection(), source) == {"top_k": 7}
    (tmp_path / "generation_config.json").unlink()
    assert (
        sampling_defaults(SamplingSection(), ModelSource("hf", str(tmp_path), "m", tiny_config()))
        == {}
    )


def test_a_file_can_be_named(tmp_path: Path):
    tiny = ModelSource("tiny", "", "tiny-random", tiny_config())
    folder_with(tmp_path, {"temperature": 0.3})
    for path in (tmp_path, tmp_path / "generation_config.json"):
        assert sampling_defaults(SamplingSection(generation_config=str(path)), tiny) == {
            "temperature": 0.3
        }
    with pytest.raises(ConfigError, match=r"generation_config: .*lacks absent\.json"):
        sampling_defaults(SamplingSection(generation_config=str(tmp_path / "absent.json")), tiny)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 2.5, "temperature must be at least 0.0 and at most 2.0"),
        ("temperature", "warm", "temperature must be a number, not 'warm'"),
        ("top_p", 0, "top_p must be more than 0.0"),
        ("top_p", True, "top_p must be a number"),
        ("top_k", 1.5, "top_k must be a whole number"),
        ("top_k", float("inf"), "top_k must be a whole number"),
        ("min_p", float("nan"), "min_p must be at least 0.0"),
        ("repetition_penalty", -1, "repetition_penalty must be at least 0.001"),
    ],
)
def test_a_bad_value_names_the_file_and_the_field(
    tmp_path: Path, field: str, value: object, message: str
):
    with pytest.raises(ConfigError) as caught:
        sampling_defaults(SamplingSection(), folder_with(tmp_path, {field: value}))
    assert str(caught.value).startswith(f"generation_config.json: {message}")


def test_what_is_not_done_is_said_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        sampling_defaults(
            SamplingSection(),
            folder_with(
                tmp_path,
                {
                    "num_beams": 4,
                    "no_repeat_ngram_size": 3,
                    "do_sample": False,
                    "length_penalty": 1.0,
                    "typical_p": None,
                },
            ),
        )
    assert [record.message for record in caplog.records] == [
        "generation_config.json also asks for do_sample, num_beams, no_repeat_ngram_size, which is "
        "not done here"
    ]


def test_gguf_files_say_it_in_their_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "m.gguf"
    writer = gguf_files.open_writer(path, "llama", layers=1, size=32, inner=32, heads=2, kv_heads=1)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 30)
    writer.add_int32("general.sampling.mirostat", 2)
    gguf_files.close(writer)
    source = ModelSource("gguf", str(path), "m", tiny_config())
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(SamplingSection(), source) == {"temperature": 0.5, "top_k": 30}
    assert "m.gguf (general.sampling.*) also asks for mirostat" in caplog.text


def test_the_built_in_model_brings_its_own():
    source = ModelSource("gguf", "/nowhere.gguf", _DEFAULT_MODEL, tiny_config())
    assert sampling_defaults(SamplingSection(), source) == {
        "temperature": 0.2,
        "top_p": 0.5,
        "repetition_penalty": 1.05,
    }


def test_offline_parameters_made_by_hand_win_entirely():
    llm = LLM(
        "tiny-random",
        max_seats=4,
        token_budget=32,
        context=128,
        seat_buckets=[4],
        token_buckets=[32],
        default_temperature=0.0,
    )
    assert llm.info.model.sampling_defaults == {"temperature": 0.0}
    assert llm.default_params() == SamplingParams(temperature=0.0)
    ids = list(range(3, 20))

    def tokens(params: SamplingParams | None) -> list[int]:
        return llm.generate([ids], params)[0].outputs[0].token_ids

    greedy = tokens(SamplingParams(temperature=0.0))
    assert tokens(None) == greedy
    assert len({tuple(tokens(SamplingParams(seed=seed))) for seed in range(3)}) == 3, (
        "temperature 1, as it says"
    )

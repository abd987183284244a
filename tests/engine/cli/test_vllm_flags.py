"""vLLM's flags: each is a setting of ours, or says what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitney.engine.cli import main
from jitney.engine.cli.vllm_flags import (
    _VLLM_FLAGS,
    _Accepted,
    _Mapped,
    _Refused,
    _table,
    add_vllm_flags,
)
from jitney.engine.config.arguments import Arguments
from jitney.engine.config.flags import _add_settings, _Parser
from jitney.engine.config.layers import settings
from jitney.engine.config.schema import Config

ROOT = Path(__file__).parents[3]


def parsed(line: str) -> Config:
    parser = _Parser("serve", "")
    _add_settings(parser)
    add_vllm_flags(parser)
    return parser.parse(line.split(), Arguments).load_config()


def complaint(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *line.split()])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_every_flag_leads_to_a_setting_that_exists_or_to_a_reason():
    flags = {setting.flag for setting in settings().values()}
    for flag, meaning in _VLLM_FLAGS.items():
        match meaning:
            case _Mapped() as mapped:
                setting = settings()[mapped.setting]
                assert (mapped.switch is not None) == (setting.kind is bool), flag
                for ours in mapped.values.values():
                    assert not setting.choices or ours in setting.choices, flag
            case _Accepted(reason=reason) | _Refused(reason=reason):
                named = [word.strip(",.:;()") for word in reason.split() if word.startswith("--")]
                assert not set(named) - flags, flag


def test_drafts_are_configured_by_an_object(capsys: pytest.CaptureFixture[str]):
    asked = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}'
    engine = parsed(f"--speculative-config {asked}").engine
    assert (engine.speculative, engine.speculative_tokens) == ("ngram", 5)
    assert (engine.prompt_lookup_max, engine.prompt_lookup_min) == (4, 1)
    engine = parsed('--speculative-config {"method":"draft_model","model":"a/b"}').engine
    assert (engine.speculative, engine.draft_model) == ("draft", "a/b")
    for method in ("mtp", "deepseek_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp"):
        engine = parsed(f'--speculative-config {{"method":"{method}"}}').engine
        assert engine.speculative == "mtp"
    engine = parsed('--speculative-config {"method":"eagle3","model":"a/b"}').engine
    assert (engine.speculative, engine.draft_model) == ("eagle3", "a/b")
    line = '--speculative-config {"draft_tensor_parallel_size":1}'
    assert "draft_tensor_parallel_size is not supported" in complaint(line, capsys)
    assert "must be a JSON object" in complaint("--speculative-config ngram", capsys)


def test_a_command_line_of_vllms():
    config = parsed(
        "acme/model --max-model-len 8k --max-num-seqs 8 --max-num-batched-tokens=1K "
        "--gpu-memory-utilization 0.5 -tp 2 --dtype float --kv-cache-dtype fp8_e4m3 "
        "--block-size 32 --quantization awq --served-model-name one two --revision v1 "
        "--scheduling-policy priority --generation-config vllm --uvicorn-log-level critical "
        "--enable-chunked-prefill --no-enable-prefix-caching --task generate --root-path /x "
        '--allowed-origins ["https://example.org"] --disable-log-requests --max_num_seqs 9'
    )
    model, engine, server = config.model, config.engine, config.server
    assert (model.id, model.context, model.dtype, model.revision) == (
        "acme/model",
        8000,
        "float32",
        "v1",
    )
    assert (engine.max_seats, engine.token_budget, engine.memory_share) == (9, 1024, 0.5)
    assert (engine.tensor_parallel, engine.kv_dtype, engine.page_size) == (2, "fp8", 32)
    assert (engine.order, engine.prefix_cache, model.weights) == ("priority", False, "auto")
    assert (server.served_model_name, server.log_level) == (("one", "two"), "error")
    assert (server.cors_origins, server.root_path) == (("https://example.org",), "/x")
    assert config.sampling.generation_config == "none"


def test_adapters_as_vllm_has_them():
    words = ["--enable-lora", "--lora-modules", "fr=/a/fr", '{"name":"de","path":"/a/de"}']
    parser = _Parser("serve", "")
    _add_settings(parser)
    add_vllm_flags(parser)
    config = parser.parse(words, Arguments).load_config()
    assert config.model.adapter_folders == {"fr": "/a/fr", "de": "/a/de"}
    assert parsed("--adapters fr=/a/fr de=/a/de").model == config.model


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--lora-modules fr", "--adapters: 'fr' is not NAME=FOLDER"),
        ("--adapters fr=/a fr=/b", "--adapters: two adapters are called 'fr'"),
        ('--lora-modules {"name":"de"}', "--lora-modules: must be NAME=FOLDER, or an object with"),
        ("--max-loras 4", "every step serves all adapters: leave it out"),
    ],
)
def test_an_adapter_that_is_not_named_is_refused(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
):
    try:
        assert main(["serve", *line.split()]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("-1", 0), ("auto", 0)]
)
def test_lengths_as_people_write_them(text: str, tokens: int):
    assert parsed(f"--max-model-len={text}").model.context == tokens


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--api-key secret", "--api-key is vLLM's: other users can read a key"),
        ("--api-key=secret", "--api-key-file FILE"),
        ("--enforce-eager", "--enforce-eager is vLLM's: every step is compiled"),
        ("--seed 1", "requests set `seed`"),
        ("--trust-remote-code", "no code of a model's is ever run"),
        ("--download_dir /x", "JITNEY_CACHE"),
        ("--swap-space 4", "nothing is swapped"),
        ("--dtype half", "--dtype half: float16 is not computed here"),
        ("--quantization bitsandbytes", "--weights int8"),
        ("--max-model-len many", "--max-model-len: must be a whole number"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2: there is no pipeline"),
        ("--task embed", "--task embed: it generates"),
        ("--allowed-origins x", "must be a JSON list"),
        ("--otlp-traces-endpoint http://x", "--otel"),
        ("--max-model-lens 4", "did you mean --max-model-len?"),
    ],
)
def test_what_is_not_there_says_what_is(line: str, words: str, capsys: pytest.CaptureFixture[str]):
    assert words in complaint(line, capsys)


def test_values_are_still_held_to_the_setting(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--max-num-seqs", "0"]) == 2
    assert "must be greater than or equal to 1" in capsys.readouterr().err
    assert main(["serve", "--gpu-memory-utilization", "1.5"]) == 2
    assert "must be less than or equal to 1" in capsys.readouterr().err


def test_the_page_of_flags_is_the_table():
    assert _table() in (ROOT / "docs" / "from_vllm.md").read_text()

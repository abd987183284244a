"""The layers of the configuration, their errors, and the way back to TOML."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from jitney.engine.common.cache_folder import cache_dir
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import ResolvedConfig, settings
from jitney.engine.config.schema import (
    Config,
    EngineSection,
    SamplingSection,
    ServerSection,
    _KernelsName,
    _ModelSection,
)


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("table", "environ", "flags", "order", "origin"),
    [
        ("", {}, {}, "fcfs", None),
        ("", {"JITNEY_API_KEYS": "a,b"}, {}, "fair", "default with API keys"),
        ("", {"JITNEY_ADMIN_KEYS": "a"}, {}, "fair", "default with API keys"),
        ("[server]\napi_key_file = 'keys'", {}, {}, "fair", "default with API keys"),
        ("", {"JITNEY_API_KEYS": ""}, {}, "fcfs", None),
        ("", {"JITNEY_API_KEYS": "a"}, {"order": "fcfs"}, "fcfs", "--order"),
        ("", {"JITNEY_API_KEYS": "a", "JITNEY_ORDER": "fcfs"}, {}, "fcfs", "JITNEY_ORDER"),
    ],
)
def test_keys_board_in_turns_unless_an_order_is_given(
    tmp_path: Path,
    table: str,
    environ: dict[str, str],
    flags: dict[str, str],
    order: str,
    origin: str | None,
):
    resolved = ResolvedConfig.load(write(tmp_path, table), environ, flags)
    assert (resolved.config.engine.order, resolved.origins.get("order")) == (order, origin)
    again = ResolvedConfig.load(write(tmp_path, resolved.to_toml())).config
    assert again.engine == resolved.config.engine


def test_layers_override_each_other_in_order(tmp_path: Path):
    file = write(tmp_path, "[engine]\nmax_seats = 2\npage_size = 32\ntoken_budget = 64\n")
    config = ResolvedConfig.load(
        file, {"JITNEY_MAX_SEATS": "3", "JITNEY_PAGE_SIZE": "64"}, {"max_seats": "4"}
    ).config
    assert (config.engine.max_seats, config.engine.page_size, config.engine.token_budget) == (
        4,
        64,
        64,
    )
    assert ResolvedConfig.load().config.engine.max_seats == 32


def test_values_of_every_kind_come_from_the_environment():
    config = ResolvedConfig.load(
        environ={
            "JITNEY_MODEL": "tiny-random",
            "JITNEY_PREFIX_CACHE": "off",
            "JITNEY_MEMORY_GIB": "1.5",
            "JITNEY_SEAT_BUCKETS": "4, 8",
            "JITNEY_API_KEYS": "one,two",
            "JITNEY_CACHE": "/somewhere",
            "PATH": "/bin",
        }
    ).config
    assert config.model.id == "tiny-random"
    assert config.engine.prefix_cache is False
    assert config.engine.memory_gib == 1.5
    assert config.engine.seat_buckets == (4, 8)
    assert config.server.api_keys == ("one", "two")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (
            "[engine]\nmax_seat = 3\n",
            ["run.toml", "[engine]", "max_seat is unknown", "did you mean max_seats?"],
        ),
        ("[engines]\n", ["run.toml", "[engines] is unknown", "did you mean [engine]?"]),
        ("max_seats = 3\n", ["run.toml", "unknown"]),
        ("[engine]\nmax_seats = '3'\n", ["run.toml", "[engine] max_seats", "'3'"]),
        ("[engine]\nmax_seats = true\n", ["[engine] max_seats", "True"]),
        ("[engine]\nmax_seats = 0\n", ["[engine] max_seats", "greater than or equal to 1"]),
        ("[engine\n", ["run.toml", "not TOML"]),
        ("[server]\nread_timeout_s = nan\n", ["[server] read_timeout_s"]),
    ],
)
def test_a_bad_file_is_one_line_with_the_place(tmp_path: Path, toml: str, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        ResolvedConfig.load(write(tmp_path, toml))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        ResolvedConfig.load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JITNEY_MAX_SEAT": "1"}, "JITNEY_MAX_SEAT is unknown; did you mean JITNEY_MAX_SEATS?"),
        ({"JITNEY_ID": "x"}, "JITNEY_ID is unknown"),
        ({"JITNEY_MAX_SEATS": "many"}, "JITNEY_MAX_SEATS: must be a whole number, not many"),
        ({"JITNEY_PREFIX_CACHE": "maybe"}, "JITNEY_PREFIX_CACHE: must be true or false, not maybe"),
        ({"JITNEY_MEMORY_GIB": "inf"}, "JITNEY_MEMORY_GIB: "),
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ResolvedConfig.load(environ=environ)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"page_size": "24"}, "--page-size: must be a power of two from 8 to 256"),
        ({"page_size": "4"}, "--page-size: must be a power of two"),
        (
            {"policy": "psychic"},
            "--policy: must be 'continuous', 'static' or 'dynamic', not 'psychic'",
        ),
        (
            {"order": "size"},
            "--order: must be 'fcfs', 'priority', 'shortest' or 'fair', not 'size'",
        ),
        ({"batch_size": "33"}, "batch_size must not exceed max_seats (32)"),
        ({"prefill_share": "0"}, "--prefill-share: must be greater than 0"),
        ({"prefill_share": "1.1"}, "--prefill-share: must be less than or equal to 1"),
        ({"key_tokens_per_minute": "-1"}, "--key-tokens-per-minute"),
        ({"dtype": "int8"}, "--dtype: must be 'auto', 'bfloat16' or 'float32', not 'int8'"),
        ({"token_budget": "32"}, "token_budget (32) must be more than max_seats (32)"),
        ({"seat_buckets": "8,4"}, "--seat-buckets: must be positive and ascending"),
        ({"seat_buckets": "0,4"}, "--seat-buckets: must be positive and ascending"),
        ({"seat_buckets": "4,64"}, "seat_buckets must not exceed max_seats (32)"),
        ({"token_buckets": "3,64"}, "token_buckets must be at least 4"),
        ({"token_buckets": "64,1024"}, "not exceed token_budget (512)"),
        ({"host": "0.0.0.0"}, "no API key is set"),
        ({"platform": "cpu", "device": "1"}, "device chooses a GPU or TPU chip"),
        ({"device": "-1"}, "--device"),
        ({"port": "65536"}, "--port"),
        ({"nonsense": "1"}, "nonsense is unknown"),
    ],
)
def test_values_that_cannot_be_are_refused(flags: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ResolvedConfig.load(flags=flags)


def test_an_open_host_needs_a_key_or_a_decision():
    for extra in ({"api_key_file": "keys"}, {"admin_key_file": "keys"}, {"insecure": True}):
        assert ResolvedConfig.load(flags={"host": "0.0.0.0"} | extra).config.server.open_to_others
    assert ResolvedConfig.load(
        environ={"JITNEY_API_KEYS": "k"}, flags={"host": "::"}
    ).config.server.open_to_others
    assert not ResolvedConfig.load(flags={"host": "localhost"}).config.server.open_to_others


@given(
    st.builds(
        Config,
        engine=st.builds(
            EngineSection,
            max_seats=st.integers(1, 256),
            token_budget=st.integers(300, 4096),
            memory_gib=st.floats(0, 1e6),
            prefix_cache=st.booleans(),
            kernels=st.sampled_from(get_args(_KernelsName)),
        ),
        model=st.builds(_ModelSection, id=st.text(min_size=1)),
        server=st.builds(
            ServerSection,
            api_key_file=st.text(),
            allowed_hosts=st.lists(st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True)).map(tuple),
            read_timeout_s=st.floats(1e-9, 1e9),
        ),
    )
)
def test_toml_reads_back_to_the_same(tmp_path_factory: pytest.TempPathFactory, config: Config):
    file = tmp_path_factory.mktemp("toml") / "out.toml"
    file.write_text(ResolvedConfig(config, {}).to_toml(), encoding="utf-8")
    assert ResolvedConfig.load(file).config == config


def test_keys_are_not_printed():
    text = ResolvedConfig.load(environ={"JITNEY_API_KEYS": "sesame"}).to_toml()
    assert "sesame" not in text
    assert "api_keys: 1 set" in text


def test_every_field_has_its_own_flat_name_and_a_description():
    parts = (_ModelSection, EngineSection, SamplingSection, ServerSection)
    fields = [field for part in parts for field in part.model_fields.values()]
    assert [setting.field for setting in settings().values()] == fields
    assert all(field.description for field in fields)


def test_the_cpu_file_states_the_defaults():
    file = ROOT / "configs" / "cpu.toml"
    assert tomllib.loads(file.read_text())["engine"]
    assert ResolvedConfig.load(file).config == Config()


def test_the_documentation_says_of_every_setting_what_the_code_says():
    text = (ROOT / "docs" / "configuration.md").read_text()
    for setting in settings().values():
        flag = "none" if setting.secret else f"`{setting.flag}`"
        default = toml_line(setting.field.default)
        row = f"| `{setting.key}` | {flag} | `{default}` | {setting.field.description} |"
        assert row in text, f"docs/configuration.md lacks the row\n{row}"
        named = setting.flag.removeprefix("--").upper().replace("-", "_")
        assert setting.env == f"JITNEY_{named}", "the page derives variables from flags"


def toml_line(value: object) -> str:
    return {bool: lambda: str(value).lower(), str: lambda: f'"{value}"', tuple: lambda: "[]"}.get(
        type(value), lambda: str(value)
    )()


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("JITNEY_CACHE", raising=False)
    assert cache_dir() == Path("/xdg/jitney")
    monkeypatch.setenv("JITNEY_CACHE", "/mine")
    assert cache_dir() == Path("/mine")


def test_a_platform_becomes_variables_that_jax_reads():
    assert EngineSection().jax_environment == {}
    assert EngineSection(platform="cpu").jax_environment == {"JAX_PLATFORMS": "cpu"}
    assert EngineSection(platform="cuda", device="1").jax_environment == {
        "JAX_PLATFORMS": "cuda,cpu",
        "CUDA_VISIBLE_DEVICES": "1",
        "TPU_VISIBLE_DEVICES": "1",
    }

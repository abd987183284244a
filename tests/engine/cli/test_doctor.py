"""`jitney doctor` proves kernels in the shapes of the model that is configured, without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from wrong_kernels import choose

from jitney.engine.cli import doctor
from jitney.engine.common import machine
from jitney.engine.config.layers import ResolvedConfig
from jitney.kernels import reference
from jitney.kernels.select import reference as reference_set

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

#: Two heads of 32, where those of tiny-random are of 16.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
SETTINGS: dict[str, Any] = dict(
    max_seats=2,
    token_budget=16,
    seat_buckets=(2,),
    token_buckets=(16,),
    dtype="float32",
)


def model_folder(folder: Path, **values: Any) -> str:
    """A model whose weights are not there."""
    (folder / "config.json").write_text(json.dumps(CONFIG | values))
    return str(folder)


def found(model: str, **settings: Any) -> dict[str, tuple[str, bool | None]]:
    """What `doctor` says of kernels: values and marks by name."""
    config = ResolvedConfig.load(flags={"model": model, **SETTINGS, **settings}).config
    return {one.name.strip(): (one.value, one.ok) for one in doctor._kernels(config)}


def wrong_at_heads_of_32(q: jax.Array, *args: Any, **options: Any) -> Any:
    o, kv = reference.paged_attention(q, *args, **options)
    if q.shape[-1] == 32:
        o = o[:, ::-1]
    return o, kv


def wrong_head(x: jax.Array, table: jax.Array) -> jax.Array:
    return -reference.project(x, table)


def test_a_kernel_that_is_wrong_at_the_models_head_size_alone_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    choose(monkeypatch, replace(reference_set(), paged_attention=wrong_at_heads_of_32))
    of_model = found(model_folder(tmp_path))
    value, right = of_model["attention"]
    assert right is False and "not used" in value
    assert of_model["kernels"] == (f"reference, in the shapes of {tmp_path}", True)
    assert found("tiny-random")["attention"][1] is True


def test_bfloat16_of_an_arm_cpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n")
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    values = {one.name: one.value for one in doctor._processor(ResolvedConfig.load().config)}
    assert values["cpu bfloat16"] == "bf16"


def test_doctor_ends_with_1_where_a_kernel_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    choose(monkeypatch, replace(reference_set(), paged_attention=wrong_at_heads_of_32))
    monkeypatch.setattr(doctor, "_CHECKS", {"kernels": doctor._kernels})
    flags = ["--dtype", "float32", "--max-seats", "2", "--token-budget", "16"]
    assert doctor.run(["--json", "--model", model_folder(tmp_path), *flags]) == 1
    assert json.loads(capsys.readouterr().out)["  attention"]["ok"] is False
    assert doctor.run(["--json", "--model", "tiny-random", *flags]) == 0


def test_the_output_head_is_proved_where_it_is_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    choose(monkeypatch, replace(reference_set(), project=wrong_head))
    folder = model_folder(tmp_path, tie_word_embeddings=True)
    assert found(folder)["head"][1] is False
    assert "head" not in found("tiny-random")


def test_the_rows_proved_are_those_of_the_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong_at_24_rows(x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        y = reference.matmul(x, *args, **options)
        return -y if x.shape[0] == 24 else y

    choose(monkeypatch, replace(reference_set(), matmul=wrong_at_24_rows))
    folder = model_folder(tmp_path)
    assert found(folder)["products"][1] is True
    assert found(folder, token_budget=24, token_buckets=(24,))["products"][1] is False


def test_a_model_that_is_not_here_is_not_fetched(monkeypatch: pytest.MonkeyPatch):
    """Whoever has the repository's configuration would look for its files next."""
    choose(monkeypatch, replace(reference_set(), paged_attention=wrong_at_heads_of_32))
    name = "jitney-tests/no-such-model"
    said = found(name)
    words = f"reference, in the shapes of tiny-random, as {name} is not on this machine"
    assert said["kernels"] == (words, True)
    assert said["attention"][1] is True


def test_a_model_over_devices_that_are_not_here_is_proved_in_the_shapes_of_one(
    monkeypatch: pytest.MonkeyPatch,
):
    def wrong_at_one_kv_head(q: jax.Array, *args: Any, **options: Any) -> Any:
        o, kv = reference.paged_attention(q, *args, **options)
        if q.shape[1] == 2:
            o = o[:, ::-1]
        return o, kv

    choose(monkeypatch, replace(reference_set(), paged_attention=wrong_at_one_kv_head))
    assert found("tiny-random")["attention"][1] is True
    assert found("tiny-random", tensor_parallel=2)["attention"][1] is False


def test_the_tiny_engine_takes_no_adapter_of_the_model():
    config = ResolvedConfig.load(
        flags={"model": "tiny-random", "adapters": ("own=/nowhere",)}
    ).config
    assert doctor._tiny(config).model.adapters == ()


@pytest.mark.parametrize("named,tried", [("flashinfer", "triton"), ("reference", "reference")])
def test_a_token_of_small_heads_is_not_asked_of_kernels_for_large_ones(named: str, tried: str):
    config = ResolvedConfig.load(flags={"model": "m", "kernels": named}).config
    assert doctor._tiny(config).engine.kernels == tried

"""An engine whose kernels are wrong here: it serves with the reference and says so, or refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from adapter_files import write_adapter
from api_fakes import FakeClient, call, make_app, run
from programs import await_use
from served_shapes import shapes_served
from wrong_kernels import SMALL, choose, wrong_set

from jitney.engine import LLM, SamplingParams
from jitney.engine.cli.doctor import _proof_finding
from jitney.engine.common.engine_info import KernelProof
from jitney.engine.common.errors import ConfigError
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.weights.adapters import load_adapters
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import WeightStorage, load_model, load_shapes
from jitney.kernels import reference
from jitney.kernels.proof_shapes import Matrix
from jitney.kernels.select import reference as reference_set

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

PROMPT = [[1, 2, 3, 4, 5, 6, 7]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def answer(llm: LLM) -> list[int]:
    try:
        (output,) = llm.generate(PROMPT, GREEDY)
    finally:
        llm.close()
    return output.outputs[0].token_ids


def test_a_wrong_kernel_is_taken_out_and_the_answer_is_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    right = answer(LLM("tiny-random", kernels="reference", **SMALL))
    choose(monkeypatch, wrong_set())
    caplog.clear()
    with caplog.at_level(logging.ERROR, "jitney.core"):
        llm = LLM("tiny-random", **SMALL)
    assert llm.info.kernels.out == ["attention"] and llm.info.kernels.label == "wrong"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("KERNELS TAKEN OUT: attention is off by ") and "kernels wrong" in line
    assert answer(llm) == right


def test_a_set_that_was_named_refuses_to_start(monkeypatch: pytest.MonkeyPatch):
    choose(monkeypatch, wrong_set())
    with pytest.raises(ConfigError) as refused:
        LLM("tiny-random", kernels="native", **SMALL)
    assert "kernels wrong compute wrong numbers on this machine: attention is off" in str(
        refused.value
    )


PROOFS = [
    KernelProof("attention", 3.5, 0.125),
    KernelProof("norm", 0.007, 0.125),
    KernelProof("head", float("inf"), 0.125, "RuntimeError: no such instruction"),
]


def test_version_and_metrics_tell_of_each_kernel():
    app = make_app(FakeClient(kernels="native", proofs=PROOFS))
    told = run(call(app, "/version", method="GET")).json()
    assert told["kernels"] == "native" and told["kernels_out"] == ["attention", "head"]
    rows = [(proof["kernel"], proof["ok"], proof["error"]) for proof in told["kernel_proofs"]]
    assert rows == [("attention", False, 3.5), ("norm", True, 0.007), ("head", False, None)]
    assert told["kernel_proofs"][2]["reason"] == "RuntimeError: no such instruction"
    text = run(call(app, "/metrics", method="GET")).body.decode()
    for line in (
        'jitney_kernel_error{kernel="attention"} 3.5',
        'jitney_kernel_error{kernel="head"} +Inf',
        'jitney_kernel_out{kernel="attention"} 1.0',
        'jitney_kernel_out{kernel="norm"} 0.0',
    ):
        assert line in text.splitlines()


def test_doctor_prints_the_largest_error_of_each_kernel():
    found = [_proof_finding(proof) for proof in PROOFS]
    assert [(one.name.strip(), one.ok) for one in found] == [
        ("attention", False),
        ("norm", True),
        ("head", False),
    ]
    assert found[1].value == "largest error 0.007, rounding explains 0.125"
    assert found[2].value.startswith("could not run: RuntimeError: no such instruction")


def test_doctor_runs_the_proof(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from jitney.engine.cli import doctor

    choose(monkeypatch, wrong_set())
    checks = {"kernels": doctor._kernels, "one token": doctor._one_token}
    monkeypatch.setattr(doctor, "_CHECKS", checks)
    assert doctor.run(["--json", "--model", "tiny-random"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["  attention"]["ok"] is False and "not used" in told["  attention"]["value"]
    assert told["one token"]["ok"] is True


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama", "plain"), ("qwen3_moe", "int8"), ("gemma3", "int4"), ("olmo2", "int8")],
)
def test_shapes_without_weights_are_those_of_the_loaded_model(family: str, scheme: str):
    source = ModelSource.resolve(f"tiny-random:{family}")
    storage = WeightStorage(scheme)
    loaded = load_model(source, source.config, storage=storage)
    shapes = load_shapes(source, source.config, 1, jnp.float32, storage)
    assert shapes_served(shapes, source.config) == shapes_served(loaded, source.config)
    assert {matrix.scheme for matrix in shapes_served(shapes, source.config).matrices} == {scheme}


@pytest.mark.parametrize(("devices", "widths"), [(1, (64, 32)), (2, ())])
def test_norms_over_all_heads_are_proved_where_a_kernel_computes_them(
    devices: int, widths: tuple[int, ...]
):
    """Over several devices none does: each has a share of a row."""
    source = ModelSource.resolve("tiny-random:olmo2")
    shapes = load_shapes(source, source.config, devices, jnp.float32, WeightStorage())
    assert shapes_served(shapes, source.config.local(devices)).norms.widths == widths


def test_a_checkpoint_that_stays_in_4_bits_is_known_by_its_first_layer(smollm2: ModelSource):
    storage = WeightStorage("plain", frozenset({"int4"}))
    shapes = load_shapes(smollm2, smollm2.config, 1, jnp.float32, storage)
    loaded = load_model(smollm2, smollm2.config, storage=storage)
    assert shapes_served(shapes, smollm2.config) == shapes_served(loaded, smollm2.config)
    assert "int4" in {matrix.scheme for matrix in shapes_served(shapes, smollm2.config).matrices}


def test_adapters_are_proved_without_weights(tmp_path: Path):
    source = ModelSource.resolve("tiny-random")
    folders = {"own": str(write_adapter(tmp_path / "own", source.config, 1))}
    shapes = load_shapes(source, source.config, 1, jnp.float32, WeightStorage())
    loaded = load_model(source, source.config)
    for model in (shapes, loaded):
        load_adapters(model, source.config, folders, jnp.float32)
    assert shapes_served(shapes, source.config) == shapes_served(loaded, source.config)
    assert Matrix(64, 16) in shapes_served(shapes, source.config).matrices  # padded to 16 columns


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_an_experts_share_is_that_of_its_group(groups: int):
    """With groups a device has fewer experts, and more of each."""
    source = ModelSource.resolve("tiny-random:mixtral")
    whole = source.config.in_groups(groups)
    own = whole.local(4)
    shapes = load_shapes(source, whole, 4, jnp.float32, WeightStorage())
    inner = source.config.intermediate_size * groups // 4
    found = shapes_served(shapes, own)
    assert {mixture.inner for mixture in found.mixtures} == {inner}
    assert set(found.matrices) == {
        Matrix(64, own.qkv_size),
        Matrix(own.n_heads * own.head_dim, 64),
        Matrix(64, 2 * inner, "plain", True),
        Matrix(inner, 64),
        Matrix(64, own.vocab_share),
    }


def test_one_row_is_no_size_while_any_product_is_xlas(monkeypatch: pytest.MonkeyPatch):
    """XLA:CPU takes many times as long for one row as for four, whichever kernel was taken out."""

    def own(*args: Any, **options: Any) -> Any:
        return reference.matmul(*args, **options)

    choose(monkeypatch, replace(reference_set(), name="own", matmul=own))
    monkeypatch.setattr(StepPrograms, "_compile_all", await_use)  # no step is run
    llm = LLM("tiny-random", **(SMALL | {"max_seats": 8, "seat_buckets": ()}))
    assert min(llm.info.sizes.seat_buckets) == 4
    llm.close()

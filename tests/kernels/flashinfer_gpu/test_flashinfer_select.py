"""Who gets FlashInfer's kernels for prompts: who names them, and cards where they were measured to
be quicker.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jitney.engine.core.executor.proving import proven
from jitney.kernels import select
from jitney.kernels.flashinfer_gpu import modules
from jitney.kernels.flashinfer_gpu.prompts import FlashInferPrompts
from jitney.kernels.interface import AttentionMeta, KernelError, KernelSet
from jitney.kernels.prompt_choices import PromptChoice, PromptChoices
from jitney.kernels.select import ServedHeads

pytest.importorskip("triton")
HEADS = ServedHeads(128, "bfloat16", "bfloat16")
H100 = {
    "platform": "gpu",
    "compute_capability": "9.0",
    "device_kind": "H100",
    "core_count": 132,
}
CHOICE: PromptChoice = {
    "sm": 90,
    "head_dim": 128,
    "by": "flashinfer",
    "seconds": {"triton": 2e-3, "flashinfer": 1e-3, "cuDNN": 1.5e-3},
    "rows": [512, 4096],
    "device": "H100",
    "versions": {"flashinfer-python": "0.7.2"},
}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What importlib.metadata says is installed; each test asks anew what can run."""
    found = {
        "jax": "0.11.2",
        "jax-triton": "0.4.1",
        "triton": "3.9.0",
        "flashinfer-python": "0.7.2.post1",
        "jax-tvm-ffi": "0.1.3",
        "apache-tvm-ffi": "0.1.15",
    }

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    select._flashinfer_for.cache_clear()
    return found


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**H100)])


def table(monkeypatch: pytest.MonkeyPatch, *choices: PromptChoice) -> None:
    """Let the table have these entries."""
    monkeypatch.setattr(PromptChoices, "read", lambda: PromptChoices(choices))


@pytest.mark.usefixtures("h100")
def test_flashinfer_by_name_replaces_only_its_own_kernels():
    kernels = select.select("gpu", "flashinfer", HEADS)
    triton = select.select("gpu", "triton")
    assert kernels.label == "flashinfer (fa3)"
    assert kernels is select.select("gpu", "flashinfer")  # one constant of all jitted steps
    assert kernels.instead is triton
    assert kernels.fp8 == triton.fp8
    assert hash(kernels) != hash(triton)


@pytest.mark.usefixtures("h100")
def test_only_steps_with_prompts_call_it(monkeypatch: pytest.MonkeyPatch):
    """In a step of decode alone, and for what our kernel for prompts would be called, nothing."""
    from triton_recorder import record

    from jitney.kernels.triton_gpu.kernel_set import TritonKernels

    calls: list[str] = []
    monkeypatch.setattr(
        jax.ffi,
        "ffi_call",
        lambda name, out: lambda *a, **k: calls.append(name) or jnp.zeros_like(a[0]),
    )
    prompts = FlashInferPrompts(90, 132, target=lambda variant: variant.target)

    def launched(rows: int) -> list[str]:
        shapes = ((4,), (5,), (4, 8), (rows,), (rows,), (3,))
        arrays: list[Any] = [jnp.zeros(shape, jnp.int32) for shape in shapes]
        meta = AttentionMeta(*arrays)
        q, kv = jnp.zeros((rows, 8, 128), "bfloat16"), jnp.zeros((9, 16, 4, 128), "bfloat16")
        found = record(
            90, lambda launch: TritonKernels(launch, prompts=prompts).attend(q, kv, meta, scale=1.0)
        )
        return [call.kernel.__name__ for call in found]

    assert "prompt_attention" not in launched(16)
    assert calls == ["jitney_flashinfer_fa3_bfloat16_128"]
    assert launched(4)[0] == "decode_attention"
    assert len(calls) == 1


@pytest.mark.usefixtures("h100")
def test_heads_that_it_does_not_take_are_refused_before_anything_is_loaded():
    with pytest.raises(
        KernelError, match=r"^kernels flashinfer: its pools hold .* not int8; choose"
    ):
        select.select("gpu", "flashinfer", ServedHeads(128, "bfloat16", "int8"))


@pytest.mark.usefixtures("h100")
def test_a_missing_package_is_named(versions: dict[str, str]):
    del versions["jax-tvm-ffi"]
    with pytest.raises(KernelError, match=r"kernels flashinfer need jax-tvm-ffi: pip install"):
        select.select("gpu", "flashinfer")


def test_it_needs_a_gpu(versions: dict[str, str]):
    with pytest.raises(
        KernelError, match=r"^kernels flashinfer need an NVIDIA GPU; jax runs on cpu"
    ):
        select.select("cpu", "flashinfer")


def test_the_shipped_table_is_one():
    for choice in PromptChoices.read().entries:
        assert set(choice) == set(CHOICE)
        if choice["by"] == "flashinfer":
            assert choice["seconds"]["flashinfer"] < choice["seconds"]["triton"]


@pytest.mark.usefixtures("h100")
def test_auto_takes_what_was_measured_to_be_quicker(monkeypatch: pytest.MonkeyPatch):
    assert select.select("gpu", "auto", HEADS).name == "triton"  # nobody measured
    table(monkeypatch, CHOICE)
    assert select.select("gpu", "auto", HEADS).name == "flashinfer"
    assert select.select("gpu", "triton", HEADS).name == "triton"
    for other in (
        HEADS._replace(head_dim=64),
        HEADS._replace(kv_dtype="int8"),
        HEADS._replace(dtype="float32", kv_dtype="float32"),
        None,
    ):
        assert select.select("gpu", "auto", other).name == "triton"
    table(monkeypatch, {**CHOICE, "sm": 89})
    assert select.select("gpu", "auto", HEADS).name == "triton"
    table(monkeypatch, {**CHOICE, "by": "triton"})
    assert select.select("gpu", "auto", HEADS).name == "triton"


@pytest.mark.usefixtures("h100")
def test_without_the_packages_auto_serves_with_ours_and_says_so(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], caplog: pytest.LogCaptureFixture
):
    del versions["flashinfer-python"]
    table(monkeypatch, CHOICE)
    with caplog.at_level(logging.WARNING):
        assert select.select("gpu", "auto", HEADS).name == "triton"
    (line,) = caplog.records
    assert line.getMessage() == (
        'kernels flashinfer need flashinfer-python: pip install -e ".[cuda13,flashinfer]"; it '
        "would be quicker for prompts here, kernels triton serve"
    )


def test_the_table_keeps_one_entry_for_a_card_and_head_dim(tmp_path: Path):
    ours: PromptChoice = {**CHOICE, "by": "triton"}
    small: PromptChoice = {**CHOICE, "head_dim": 64}
    choices = PromptChoices([CHOICE]).with_choice(small).with_choice(ours)
    assert choices.entries == [small, ours]
    assert [choices.chosen(90, dim) for dim in (64, 128, 256)] == [
        "flashinfer",
        "triton",
        "triton",
    ]
    file = tmp_path / "t.json"
    file.write_text(json.dumps(choices.entries))
    assert PromptChoices.read(file) == choices
    file.write_text(json.dumps([{**CHOICE, "by": "cuDNN"}]))
    with pytest.raises(ValueError, match="by 'cuDNN' is none of triton, flashinfer"):
        PromptChoices.read(file)
    file.write_text('[{"sm": 90, "head_dim": 128}]')
    with pytest.raises(ValueError, match="an entry has no by"):
        PromptChoices.read(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="no list of entries"):
        PromptChoices.read(file)


def test_if_it_is_wrong_the_set_that_stands_in_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from jitney.engine.core.executor import proving
    from jitney.kernels.proof import Proof

    def prove(kernels: KernelSet, served: Any) -> tuple[Proof, ...]:
        return (Proof("attention", 3.0 if kernels.name == "wrong" else 0.01, 0.1),)

    monkeypatch.setattr(proving, "prove", prove)
    plain = select.reference()
    wrong = replace(plain, name="wrong", instead=plain)
    served: Any = None
    with caplog.at_level(logging.ERROR):
        kernels, proofs = proven(wrong, served, named=False)
    assert kernels is plain
    assert [proof.ok for proof in proofs] == [True]
    assert "of kernels wrong; kernels reference serve." in caplog.text


def test_the_call_is_compiled_once_for_a_variant(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    monkeypatch.setattr(modules, "_compiled", lambda v: SimpleNamespace(paged_run=v.target))
    monkeypatch.setattr(modules, "_register", lambda v, run, platform: made.append(run))
    variant = modules.Variant("fa2", "float16", 256, False, True)
    assert variant.registered() == variant.registered()
    assert made == ["jitney_flashinfer_fa2_float16_256_capped"]
    modules._registered.cache_clear()

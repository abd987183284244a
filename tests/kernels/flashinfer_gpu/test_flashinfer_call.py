"""A call as it leaves the step: what is refused, what XLA is told for CUDA, and, where jax-tvm-ffi
and a C++ compiler are, what arrives at a function that is called as FlashInfer's are.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashinfer_reader import paged_run
from ragged import Batch, Case, attention, make

from jitney.kernels.flashinfer_gpu import modules
from jitney.kernels.flashinfer_gpu.modules import Variant
from jitney.kernels.flashinfer_gpu.prompts import FlashInferPrompts
from jitney.kernels.interface import KernelError

MIXED = Case((4, 2, 64), (5, 90), ((120, 50), (17, 3), (9, 1)), rows=70, seqs=6).served_as(
    "float16"
)


def attend(prompts: FlashInferPrompts, batch: Batch) -> Any:
    return jax.jit(partial(prompts, **batch.options))


@pytest.mark.parametrize(
    "heads,dtype,pool,message",
    [
        (96, "bfloat16", "bfloat16", "it takes heads of 64, 128, 256, not 96"),
        (64, "float32", "float32", "it takes bfloat16 and float16, not float32"),
        (64, "bfloat16", "int8", "its pools hold the activations' bfloat16, not int8"),
    ],
)
def test_what_it_does_not_take_is_one_line(heads: int, dtype: str, pool: str, message: str):
    assert FlashInferPrompts.why_not(heads, dtype, pool) == message
    prompts = FlashInferPrompts(90, 132, target=lambda variant: variant.target)
    q = jnp.zeros((8, 4, heads), dtype)
    kv = jnp.zeros((4, 16, 4, heads), pool)
    batch = make(replace(MIXED, heads=(4, 2, heads)))
    with pytest.raises(
        KernelError, match=rf"^kernels flashinfer: {message}; choose kernels triton"
    ):
        prompts(q, kv, batch.meta, scale=1.0)


@pytest.mark.parametrize("sm,template", [(80, "fa2"), (89, "fa2"), (90, "fa3"), (100, "fa2")])
def test_xla_is_told_of_one_call_for_cuda(sm: int, template: str):
    prompts = FlashInferPrompts(sm, 132, target=lambda variant: variant.target)
    batch = make(replace(MIXED, window=24, softcap=5.0))
    traced = attend(prompts, batch).trace(batch.q, batch.kv, batch.meta)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"stablehlo.custom_call @jitney_\w+\(.*", text)
    assert f"@jitney_flashinfer_{template}_float16_64_windowed_capped(" in call
    shapes = re.findall(r"tensor<([\w]+)>", call.split(" : (")[1])
    workspace = shapes.pop(2)
    assert workspace.endswith("xi32")
    assert shapes == [
        "70x4x64xf16",  # queries
        "22x16x4x64xf16",  # the pool as it lies
        "13xi32",  # where queries begin
        "13xi32",  # and pages
        "192xi32",  # pages
        "12xi32",  # tokens in last pages
        "70x4x64xf16",  # outputs
    ]
    assert "window_left = 23" in call
    assert re.search(r"softcap = 5\.0+e\+00 : f64", call)
    assert re.search(r"scale = 1\.250+e-01 : f64", call)


def test_one_variant_for_each_pair_of_options():
    names = {
        Variant("fa3", "bfloat16", 128, windowed, capped).target
        for windowed in (False, True)
        for capped in (False, True)
    }
    assert len(names) == 4


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modules.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(KernelError, match=r"written for flashinfer-python 0.7.2, here is 0.8.0"):
        modules.check_installed()


def test_what_cannot_be_compiled_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def fail(variant: Variant) -> None:
        raise RuntimeError("ninja exited with status 1\nnvcc: not found\n")

    monkeypatch.setattr(modules, "_compiled", fail)
    variant = Variant("fa2", "bfloat16", 64, False, False)
    with pytest.raises(KernelError, match=r"could not be compiled: RuntimeError: nvcc: not found$"):
        variant.registered()


NUMBERS = {"float16": np.float16, "float32": np.float32, "int32": np.int32}
needs_packages = pytest.mark.skipif(
    importlib.util.find_spec("jax_tvm_ffi") is None or not shutil.which("c++"),
    reason="needs jax-tvm-ffi, ninja and a C++ compiler",
)


def in_place(tensor: Any) -> np.ndarray:
    """A tensor of tvm_ffi as the memory that it is, with its strides."""
    number = np.dtype(NUMBERS[str(tensor.dtype)])
    spans = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)]
    count = 1 + sum(spans)
    memory = (ctypes.c_byte * (count * number.itemsize)).from_address(tensor.data_ptr())
    strides = [stride * number.itemsize for stride in tensor.strides]
    flat = np.frombuffer(memory, number)
    return np.lib.stride_tricks.as_strided(flat, tuple(tensor.shape), strides)


@needs_packages
@pytest.mark.parametrize("sm,window,softcap", [(80, 0, 0.0), (90, 0, 0.0), (90, 24, 5.0)])
def test_a_function_called_as_flashinfers_attends(
    sm: int, window: int, softcap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    tvm_ffi = importlib.import_module("tvm_ffi")
    batch = make(replace(MIXED, window=window, softcap=softcap))
    seen: list[tuple[Any, ...]] = []

    def paged(*args: Any) -> None:
        tensors = [in_place(each) if isinstance(each, tvm_ffi.Tensor) else each for each in args]
        tensors[2] = list(tensors[2])
        seen.append(args)
        paged_run(prompts.template, *tensors, processors=5)

    def target(variant: Variant) -> str:
        modules._register(variant, tvm_ffi.convert(paged), "cpu")
        return variant.target

    prompts = FlashInferPrompts(sm, 5, target=target)
    o = np.asarray(attend(prompts, batch)(batch.q, batch.kv, batch.meta))
    assert len(seen) == 1
    rows = slice(2, batch.n_rows)  # two rows decode
    wanted = attention(batch, batch.kv)[rows]
    np.testing.assert_allclose(o[rows].astype(np.float64), wanted, atol=2e-3)
    assert not o[batch.n_rows :].any()

"""Registers FlashInfer's compiled modules as custom calls of XLA; the only user of flashinfer,
tvm_ffi and jax_tvm_ffi.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from jitney.kernels.interface import KernelError

#: The release of FlashInfer whose plans and calls this code follows.
_RELEASE = "0.7.2"
_PACKAGES = ("flashinfer-python", "jax-tvm-ffi", "apache-tvm-ffi")
_SHIM = Path(__file__).with_name("views.cc")
#: Order of the shim's arguments: see `over_pool` in views.cc.
_ARGUMENTS = [
    "args",
    "rets",
    "attrs.fields",
    "attrs.window_left",
    "attrs.softcap",
    "attrs.scale",
]


class Variant(NamedTuple):
    """A variant of FlashInfer's paged attention, compiled separately."""

    template: str  # "fa3" for Hopper, "fa2" for every other card
    dtype: str  # of queries, pool and outputs
    head_dim: int
    windowed: bool
    capped: bool

    @property
    def target(self) -> str:
        """The name of the custom call."""
        options = f"{'_windowed' * self.windowed}{'_capped' * self.capped}"
        return f"jitney_flashinfer_{self.template}_{self.dtype}_{self.head_dim}{options}"

    def registered(self) -> str:
        """Compile and register the variant; returns the target's name. Raises KernelError.

        The first call takes some minutes, since FlashInfer runs nvcc; later calls use its cache.
        """
        return _registered(self)


def check_installed() -> None:
    """Raise KernelError if a package is missing or of another release."""
    for name in _PACKAGES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            raise KernelError(
                f'kernels flashinfer need {name}: pip install -e ".[cuda13,flashinfer]"'
            ) from None
    installed = metadata.version("flashinfer-python")
    if installed.split(".")[:3] != _RELEASE.split("."):
        raise KernelError(
            f"kernels flashinfer are written for flashinfer-python {_RELEASE}, here is {installed}"
        )


@cache
def _registered(variant: Variant) -> str:
    try:
        _register(variant, _compiled(variant).paged_run, "gpu")
    except Exception as error:  # a compiler, a linker or an import may raise anything
        lines = str(error).strip().splitlines() or [""]
        raise KernelError(
            f"kernels flashinfer: {variant.target} could not be compiled: {type(error).__name__}: "
            f"{lines[-1][:200]}"
        ) from error
    return variant.target


def _compiled(variant: Variant) -> Any:
    """FlashInfer's module of a variant."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("flashinfer.jit.attention")
    number = getattr(torch, variant.dtype)
    spec = attention.gen_batch_prefill_module(
        variant.template,
        number,
        number,
        number,
        torch.int32,
        variant.head_dim,
        variant.head_dim,
        0,  # queries and keys are rotated already
        variant.windowed,
        variant.capped,
        False,  # scores are summed in float32
    )
    with _own_programs_first():
        return spec.build_and_load()


def _register(variant: Variant, run: Any, platform: str) -> None:
    """Register `run`, a tvm_ffi function with the arguments of FlashInfer's paged_run, as the
    variant's target on a platform (gpu, or cpu in tests).
    """
    jax_tvm_ffi = importlib.import_module("jax_tvm_ffi")
    jax_tvm_ffi.register_ffi_target(
        variant.target,
        _shim().over_pool(run, variant.template == "fa3"),
        _ARGUMENTS,
        platform,
        allow_cuda_graph=True,
    )


@cache
def _shim() -> Any:
    """views.cc, compiled by the system's C++ compiler, or from the cache."""
    cpp = importlib.import_module("tvm_ffi.cpp")
    source = _SHIM.read_text(encoding="utf-8")
    with _own_programs_first():
        return cpp.load_inline("jitney_flashinfer", cpp_sources=source, functions=["over_pool"])


@contextmanager
def _own_programs_first() -> Iterator[None]:
    """Put the interpreter's folder first in PATH, so that its ninja is found without an active
    virtual environment.
    """
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before

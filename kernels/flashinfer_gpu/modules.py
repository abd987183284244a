"""FlashInfer's compiled modules as targets of XLA's custom calls: the one place that knows
flashinfer, tvm_ffi and jax_tvm_ffi.
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

#: Releases of FlashInfer whose plans and calls are the ones written down here.
_RELEASE = "0.7.2"
_PACKAGES = ("flashinfer-python", "jax-tvm-ffi", "apache-tvm-ffi")
_SHIM = Path(__file__).with_name("views.cc")
#: How the arguments of a call reach the shim: see `over_pool` in views.cc.
_ARGUMENTS = [
    "args",
    "rets",
    "attrs.fields",
    "attrs.window_left",
    "attrs.softcap",
    "attrs.scale",
]


class Variant(NamedTuple):
    """One of FlashInfer's attentions over pages, compiled by itself."""

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
        """The target's name, after FlashInfer has compiled the variant with nvcc, for some minutes
        the first time, or found it compiled. KernelError in one line if it cannot.
        """
        return _registered(self)


def check_installed() -> None:
    """KernelError in one line if a package is missing or of another release."""
    for name in _PACKAGES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            raise KernelError(
                f'kernels flashinfer need {name}: pip install -e ".[cuda13,flashinfer]"'
            ) from None
    found = metadata.version("flashinfer-python")
    if found.split(".")[:3] != _RELEASE.split("."):
        raise KernelError(
            f"kernels flashinfer are written for flashinfer-python {_RELEASE}, here is {found}"
        )


@cache
def _registered(variant: Variant) -> str:
    try:
        _register(variant, _compiled(variant).paged_run, "gpu")
    except Exception as error:  # whatever a compiler, a linker or an import may raise
        lines = str(error).strip().splitlines() or [""]
        raise KernelError(
            f"kernels flashinfer: {variant.target} could not be compiled: {type(error).__name__}: "
            f"{lines[-1][:200]}"
        ) from error
    return variant.target


def _compiled(variant: Variant) -> Any:
    """FlashInfer's module."""
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
    """Make `run`, a function of tvm_ffi that is called as FlashInfer's paged_run, the variant's
    target on this platform (gpu, or cpu in tests).
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
    """views.cc, compiled by the C++ compiler that is here, or found compiled."""
    cpp = importlib.import_module("tvm_ffi.cpp")
    source = _SHIM.read_text(encoding="utf-8")
    with _own_programs_first():
        return cpp.load_inline("jitney_flashinfer", cpp_sources=source, functions=["over_pool"])


@contextmanager
def _own_programs_first() -> Iterator[None]:
    """ninja lies beside the interpreter, where PATH does not lead without an active environment."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before

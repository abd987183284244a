"""Chooses the kernel set of a platform, once, by name; replaces it only with a message."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import jax

from jitney.kernels.interface import (
    Fp8Products,
    Int8Products,
    KernelError,
    KernelSet,
    PartialProducts,
    RoundingKernels,
)
from jitney.kernels.mamba import mamba

if TYPE_CHECKING:
    from jitney.kernels.triton_gpu.kernel_set import TritonKernels

_log = logging.getLogger(__name__)

#: Least compute capability of NVIDIA GPUs that multiply fp8 numbers without conversion.
_FP8_SINCE = 89


class ServedHeads(NamedTuple):
    """Facts about attention's heads that the choice of kernels depends on."""

    head_dim: int
    dtype: str  # of activations
    kv_dtype: str  # of the pool
    sinks: bool = False  # whether heads have attention sinks

    def refusal(self, name: str) -> str:
        """The reason why the kernel set of that name cannot compute prompt attention for these
        heads; empty if it can.
        """
        from jitney.kernels.flashinfer_gpu.prompts import FlashInferPrompts

        return FlashInferPrompts.why_not(*self) if name == "flashinfer" else ""


def reference() -> KernelSet:
    """The reference set in plain jax.numpy; runs on every platform of XLA."""
    from jitney.kernels import delta_net, int4, routing
    from jitney.kernels import reference as plain

    return KernelSet(
        name="reference",
        paged_attention=plain.paged_attention,
        rotate_and_write=None,
        attend=plain.attend,
        matmul_int4=int4.matmul_int4,
        threshold=None,
        rms_norm=plain.rms_norm,
        norm_sum=plain.norm_sum,
        pack=None,
        matmul=plain.matmul,
        gated=plain.gated,
        project=plain.project,
        route=routing.route,
        delta_net=delta_net.delta_net,
        mamba=partial(mamba, recur=delta_net.recur),
        short_conv=delta_net.short_conv,
    )


def reference_of(kernels: KernelSet) -> KernelSet:
    """The reference set that matches a set's rounding: it rounds rows to int8 or fp8 where the set
    does, but not the rows of experts if the set multiplies all experts at once.
    """
    from jitney.kernels import experts
    from jitney.kernels import reference as plain

    int8 = fp8 = at_once = None
    if kernels.int8 is not None:
        int8 = Int8Products(_as_it_is, plain.matmul_int8, plain.gated_int8)
    if kernels.fp8 is not None:
        fp8 = Fp8Products(_as_it_is, plain.matmul_fp8)
    if kernels.experts is not None:
        at_once = experts.experts
    return replace(
        reference(),
        int8=int8,
        fp8=fp8,
        experts=at_once,
        float32_residual=kernels.float32_residual,
    )


def _as_it_is(w: jax.Array, parts: int = 1) -> jax.Array:
    return w


def _native() -> KernelSet:
    """The CPU set: attention, norms and products compiled from C++, and the reference's other
    kernels.

    Raises KernelError with the reason on another platform, on an unsupported CPU, and if they are
    not compiled and there is no compiler.
    """
    if jax.default_backend() != "cpu":
        raise KernelError(f"kernels native are for CPUs; jax runs on {jax.default_backend()}")
    from jitney.kernels.cpu import attention, build, delta_net, library, norms, products

    try:
        serving = library.load()
    except library.NoLibrary as error:
        raise KernelError(f"kernels native cannot run here: {error}") from error
    kernels = replace(
        reference(),
        name="native",
        instructions=serving.level,
        untried=not build.Level.is_measured(serving.level),
        paged_attention=attention.paged_attention,
        attend=attention.attend,
        rotate_and_write=attention.rotate_and_write,
        rms_norm=norms.rms_norm,
        norm_sum=norms.norm_sum,
        delta_net=delta_net.delta_net,
        mamba=partial(mamba, recur=delta_net.recur),
        pack=products.pack,
        int8=products.INT8,
        mxfp4=products.MXFP4,
        takes_one_of=True,
        leaves_out_padding=True,
        part_seconds=serving.part_seconds,
    )
    return with_product_rows(kernels, products.USUAL_ROWS)


def with_product_rows(kernels: KernelSet, rows: int) -> KernelSet:
    """The set changed so that, if weights are not packed, its own kernels multiply up to `rows`
    rows and XLA multiplies more. Sets without this choice are returned unchanged.
    """
    if kernels.name != "native":
        return kernels
    from jitney.kernels.cpu import products

    chosen = products.up_to(rows)
    return replace(kernels, matmul=chosen.matmul, gated=chosen.gated, project=chosen.project)


def _triton() -> KernelSet:
    """Triton kernels for the NVIDIA GPU that jax sees. Raises KernelError where there is none or
    jax-triton fails.
    """
    return _triton_for(compute_capability())


@cache
def _triton_for(sm: int) -> KernelSet:
    """Triton kernels for compute capability `sm` (90: 9.0), on a machine that may have no GPU.

    Returns the same object for the same `sm`: bound methods of equal objects are not equal, so a
    second object would compile a step's layers again.
    """
    from jitney.kernels.triton_gpu.launch import JaxTriton

    launch = JaxTriton(sm)
    try:
        launch.check()
    except ImportError as error:
        raise KernelError(f"kernels triton cannot run here: {error}") from error
    from jitney.kernels.triton_gpu.kernel_set import TritonKernels

    return _set_of(TritonKernels(launch), sm)


def _set_of(kernels: TritonKernels, sm: int) -> KernelSet:
    """The kernel set of these kernels."""
    from jitney.kernels import w8a8

    products = None
    if sm >= _FP8_SINCE:
        rounding = RoundingKernels(kernels.rounded_norm_sum, kernels.rounded_gated_fp8)
        products = Fp8Products(w8a8.pack_fp8, kernels.matmul_fp8, rounding)
    parts = PartialProducts(
        kernels.multiply_in_parts,
        kernels.norm_parts,
        kernels.rounded_norm_sum,
        kernels.rotate_and_write,
    )
    return replace(
        reference(),
        name="triton",
        paged_attention=kernels.paged_attention,
        attend=kernels.attend,
        rotate_and_write=kernels.rotate_and_write,
        matmul_int4=kernels.matmul_int4,
        gated_int4=kernels.gated_int4,
        threshold=kernels.threshold,
        matmul=kernels.matmul,
        gated=kernels.gated,
        narrow_gates=True,
        fp8=products,
        parts=parts,
        route=kernels.route,
        experts=kernels.experts,
        delta_net=kernels.delta_net,
        mamba=kernels.mamba,
        short_conv=kernels.short_conv,
    )


def _flashinfer() -> KernelSet:
    """Triton kernels, with FlashInfer's for prompt attention. Raises KernelError if FlashInfer's
    cannot run or a package is missing.
    """
    sm = compute_capability("flashinfer")
    processors = getattr(jax.devices()[0], "core_count", 0)
    if not processors:
        raise KernelError("kernels flashinfer: jax does not say how many multiprocessors there are")
    return _flashinfer_for(sm, processors)


@cache
def _flashinfer_for(sm: int, processors: int) -> KernelSet:
    """Like `_triton_for`, for a GPU with that number of multiprocessors."""
    from jitney.kernels.flashinfer_gpu.modules import check_installed
    from jitney.kernels.flashinfer_gpu.prompts import FlashInferPrompts
    from jitney.kernels.triton_gpu.kernel_set import TritonKernels
    from jitney.kernels.triton_gpu.launch import JaxTriton

    check_installed()
    triton = _triton_for(sm)
    prompts = FlashInferPrompts(sm, processors)
    kernels = _set_of(TritonKernels(JaxTriton(sm), prompts=prompts), sm)
    return replace(
        kernels,
        name="flashinfer",
        instructions=prompts.template,
        instead=triton,
        fp8=triton.fp8,  # the same products, so that they are compiled once
        parts=triton.parts,
    )


def compute_capability(kernels: str = "triton") -> int:
    """Compute capability of jax's first device, 90 for 9.0. Raises KernelError, which names
    `kernels`, if the device is not an NVIDIA GPU from sm_80 on.
    """
    device = jax.devices()[0]
    text = str(getattr(device, "compute_capability", ""))
    major, _, minor = text.partition(".")
    if device.platform not in ("gpu", "cuda") or not (major.isdigit() and minor.isdigit()):
        raise KernelError(f"kernels {kernels} need an NVIDIA GPU; jax runs on {device.platform}")
    if int(major) < 8:
        raise KernelError(
            f"kernels {kernels} need compute capability 8.0; this {device.device_kind} has {text}"
        )
    return 10 * int(major) + int(minor)


def _pallas() -> KernelSet:
    """Our own Pallas kernels for the TPU that jax sees, with the reference's products of floats and
    of 8-bit weights, which XLA fuses well there.

    Raises KernelError on another platform.
    """
    from jitney.kernels.pallas_tpu.kernel_set import chip_of

    return _on_tpu(_pallas_set(chip_of(jax.devices()[0].device_kind)))


@cache
def _pallas_set(chip: str) -> KernelSet:
    """The kernel set that `_pallas` chooses on a chip (v5e, v6e, v7x; "": any), also on a machine
    without a TPU; always the same object.
    """
    from jitney.kernels import delta_net as plain_delta_net
    from jitney.kernels import reference as plain
    from jitney.kernels.pallas_tpu import delta_net
    from jitney.kernels.pallas_tpu.experts import experts
    from jitney.kernels.pallas_tpu.kernel_set import PallasKernels
    from jitney.kernels.pallas_tpu.narrow_products import matmul_int4
    from jitney.kernels.pallas_tpu.pool_layout import PoolLayout

    kernels = PallasKernels(chip=chip)
    return replace(
        reference(),
        name="pallas",
        paged_attention=kernels.paged_attention,
        attend=kernels.attend,
        matmul_int4=matmul_int4,
        pool_shape=kernels.pool_shape,
        gated=plain.gated_narrow,
        narrow_gates=True,
        experts=experts,
        delta_net=partial(plain_delta_net.delta_net, recur=delta_net.recur),
        mamba=partial(mamba, recur=delta_net.recur),
        table_columns=PoolLayout.LANES,
        scale_rows=PoolLayout.BYTE_ROWS,
        sums_in_halves=kernels.sums_in_halves,
    )


def _on_tpu(kernels: KernelSet) -> KernelSet:
    """Return the kernels if jax runs on a TPU; else raise KernelError."""
    if jax.default_backend() != "tpu":
        raise KernelError(f"kernels {kernels.name} need a TPU; jax runs on {jax.default_backend()}")
    return kernels


_KERNEL_SETS = {
    "reference": reference,
    "native": _native,
    "triton": _triton,
    "flashinfer": _flashinfer,
    "pallas": _pallas,
}
#: The set that "auto" means, by platform; a platform not named here gets the reference.
_BEST: dict[str, str] = {"cpu": "native", "gpu": "triton", "cuda": "triton", "tpu": "pallas"}


def select(platform: str, name: str = "auto", heads: ServedHeads | None = None) -> KernelSet:
    """The kernel set `name` for `platform` (cpu, gpu, tpu); "auto" is the best one that runs on it.

    heads: the heads that the set will serve, if known; on a GPU "auto" is then the set measured to
    be the fastest for them. Raises KernelError for an unknown name, listing the known ones, and for
    a named set that cannot run here or not with these heads.
    """
    kernels = _selected(platform, name, heads)
    return replace(kernels, float32_residual=True) if platform == "cpu" else kernels


def _selected(platform: str, name: str, heads: ServedHeads | None) -> KernelSet:
    """See `select`."""
    if name == "auto":
        return _measured_best(_best(platform), heads)
    if name not in _KERNEL_SETS:
        raise KernelError(f"unknown kernels {name!r}; known: auto, {', '.join(_KERNEL_SETS)}")
    reason = ""
    if heads is not None:
        reason = heads.refusal(name)
    if reason:
        raise KernelError(f"kernels {name}: {reason}; choose kernels triton")
    return _KERNEL_SETS[name]()


def _measured_best(kernels: KernelSet, heads: ServedHeads | None) -> KernelSet:
    """The set with the fastest prompt attention on this GPU by `jitney.kernels.prompt_choices`;
    `kernels` if nothing was measured, or, with a warning, if the fastest set cannot run.
    """
    from jitney.kernels.prompt_choices import PromptChoices

    if kernels.name != "triton" or heads is None or heads.refusal("flashinfer"):
        return kernels
    if PromptChoices.read().chosen(compute_capability(), heads.head_dim) != "flashinfer":
        return kernels
    try:
        return _flashinfer()
    except KernelError as error:
        _log.warning("%s; it would be quicker for prompts here, kernels triton serve", error)
        return kernels


def _best(platform: str) -> KernelSet:
    """The platform's own set. If it cannot run, a CPU uses the reference with a warning; on a GPU
    or TPU, where the reference is very slow, KernelError says how to choose it explicitly."""
    try:
        return _KERNEL_SETS[_BEST.get(platform, "reference")]()
    except KernelError as error:
        if platform != "cpu":
            raise KernelError(
                f"{error}; or run the slow reference by its name, --kernels reference"
            ) from error
        _log.warning("%s; the slower reference kernels serve", error)
        return reference()

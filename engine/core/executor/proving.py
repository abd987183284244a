"""Proves an engine's kernels on this machine, in the shapes that it serves, and replaces those that
compute wrong numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.engine.common.engine_info import KernelProof
from jitney.engine.common.errors import ConfigError
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.models.layers import Linear
from jitney.engine.core.models.mixture import ExpertLinear
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.weights.checkpoints.layer_configs import (
    DeltaNetConfig,
    MambaConfig,
    ShortConvConfig,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels.interface import KernelSet
from jitney.kernels.proof import Proof, prove, without
from jitney.kernels.proof_shapes import (
    AttentionShapes,
    DeltaShape,
    Matrix,
    MixtureShape,
    NormShapes,
    ServedShapes,
    ShortConvShape,
    StepShapes,
)

_log = logging.getLogger("jitney.core")


def proven(
    kernels: KernelSet, served: ServedShapes, *, named: bool
) -> tuple[KernelSet, list[KernelProof]]:
    """(the kernel set without kernels that are wrong on this machine, the proof of each kernel).

    named: the user chose the set by name, so a wrong kernel raises ConfigError. Otherwise the
    reference or the set's substitute is used, and an error is logged.
    """
    proofs = prove(kernels, served)
    wrong = [proof for proof in proofs if not proof.ok]
    if wrong:
        _report_wrong(kernels, "; ".join(map(str, wrong)), named=named)
        if kernels.instead is not None:
            return proven(kernels.instead, served, named=False)
        kernels = without(kernels, [proof.kernel for proof in wrong])
    return kernels, [_shown(proof) for proof in proofs]


def proofs_of(kernels: KernelSet, served: ServedShapes) -> list[KernelProof]:
    """Prove each kernel, without changing the set."""
    return [_shown(proof) for proof in prove(kernels, served)]


def _report_wrong(kernels: KernelSet, wrong: str, *, named: bool) -> None:
    if named:
        raise ConfigError(
            f"kernels {kernels.label} compute wrong numbers on this machine: {wrong}; use "
            "--kernels auto, which leaves out what is wrong, or --kernels reference"
        )
    place = "the slower reference serves in their place"
    if kernels.instead is not None:
        place = f"kernels {kernels.instead.label} serve"
    _log.error(
        "KERNELS TAKEN OUT: %s of kernels %s; %s. Please report this with the output of `jitney "
        "doctor`.",
        wrong,
        kernels.label,
        place,
    )


def _shown(proof: Proof) -> KernelProof:
    """A proof in the form for the API, the page and `doctor`."""
    return KernelProof(proof.kernel, proof.error, proof.limit, proof.reason)


def served_by(
    model: Model, own: ModelConfig, sizes: StateSizes, buckets: Buckets, dtype: DTypeLike
) -> ServedShapes:
    """The shapes in which an engine calls its kernels. model: over all devices. own: one device's
    configuration.
    """
    table = 0
    if own.tie_embeddings:
        table = own.vocab_share
    activations = jnp.dtype(dtype).name
    attention, *other_attention = _attention_shapes(own, sizes)
    return ServedShapes(
        attention=attention,
        other_attention=tuple(other_attention),
        norms=_norm_shapes(own, activations),
        steps=StepShapes(
            decode=tuple(bucket.seats for bucket in buckets.decode),
            mixed=tuple(bucket.tokens for bucket in buckets.mixed),
            mixed_seats=tuple(bucket.seats for bucket in buckets.mixed),
            blocks=_blocks_of(own, buckets),
        ),
        hidden_size=own.hidden_size,
        vocab_size=own.vocab_size,
        dtype=activations,
        matrices=_matrices_of(model, own),
        table=table,
        mixtures=_mixtures_of(model, own),
        routing=own.experts,
        delta_net=_delta_shape(own),
    )


def _norm_shapes(own: ModelConfig, activations: str) -> NormShapes:
    dtype = activations
    if own.float32_norms:
        dtype = "float32"
    widths: tuple[int, ...] = ()
    if own.wide_qk_norm and own.shards == 1:  # no kernel normalises rows split over devices
        widths = (own.n_heads * own.head_dim, own.n_kv_heads * own.head_dim)
    if isinstance(own.recurrent, MambaConfig):
        widths = (*widths, own.recurrent.values // own.recurrent.groups)
    return NormShapes(own.rms_eps, dtype, widths)


def _attention_shapes(own: ModelConfig, sizes: StateSizes) -> Iterator[AttentionShapes]:
    """The attention shapes of each combination of KV heads and head size."""
    windows: dict[tuple[int, int], set[int]] = {}
    for layer, window in enumerate(own.windows):
        heads = own.of_layer(layer)
        windows.setdefault((heads.n_kv_heads, heads.head_dim), set()).add(window)
    for (n_kv_heads, head_dim), seen in windows.items():
        yield AttentionShapes(
            n_heads=own.n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            windows=tuple(sorted(seen)),
            softcap=own.attention_softcap,
            qk_norm=own.qk_norm,
            sinks=own.attention_sinks,
            value_dim=own.value_dim,
            page_size=sizes.page_size,
            pages=sizes.builder(own).pages,
            context=sizes.context_length,
            kv_dtype=jnp.dtype(sizes.kv_dtype).name,
            read_again=own.n_kv_readers > 0,
        )


def _delta_shape(own: ModelConfig) -> DeltaShape | ShortConvShape | None:
    match own.recurrent:
        case ShortConvConfig(channels=channels, taps=taps):
            return ShortConvShape(channels, taps)
        case MambaConfig() as mamba:
            sizes = mamba.groups, mamba.heads, mamba.state_size, mamba.head_dim, mamba.taps
            return DeltaShape(*sizes, corrects=False)
        case DeltaNetConfig() as net:
            return DeltaShape(net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.taps)
    return None


def _blocks_of(own: ModelConfig, buckets: Buckets) -> tuple[int, ...]:
    """The different numbers of rows per block of an expert; empty without experts."""
    experts = own.experts
    if experts is None:
        return ()
    steps = (*buckets.decode, *buckets.mixed)
    return tuple({experts.block_rows(experts.engines * bucket.tokens) for bucket in steps})


def _mixtures_of(model: Model, own: ModelConfig) -> tuple[MixtureShape, ...]:
    """The shapes of the different expert layers."""
    experts = [one for one in model.linears() if isinstance(one, ExpertLinear)]
    opening_ones = [one for one in experts if one.activation is not None]
    closing_ones = [one for one in experts if one.activation is None]
    pairs = zip(opening_ones, closing_ones, strict=True)
    return tuple(
        dict.fromkeys(
            MixtureShape(
                own.intermediate_size,
                (opening.packed.scheme, closing.packed.scheme),
                own.activation,
                own.mlp_bias,
            )
            for opening, closing in pairs
        )
    )


def _matrices_of(model: Model, own: ModelConfig) -> tuple[Matrix, ...]:
    """The different matrices of all layers, in one device's sizes. own: its configuration."""
    matrices: dict[Matrix, None] = {}
    for linear in model.linears():
        shards = own.shards
        if own.experts is not None and isinstance(linear, ExpertLinear):
            shards *= own.experts.engines
        matrix = _matrix_of(linear, shards)
        matrices[matrix] = None
        matrices |= dict.fromkeys(_adapter_matrices(linear, matrix))
    return tuple(matrices)


def _adapter_matrices(linear: Linear, own: Matrix) -> Iterator[Matrix]:
    """The matrices of a linear layer's adapters on one device."""
    if linear.adapters is None:
        return
    columns = linear.adapters.columns
    yield Matrix(own.size_in, columns)
    yield Matrix(columns, own.size_out)


def _matrix_of(linear: Linear, shards: int) -> Matrix:
    size_in, size_out = linear.sizes
    if linear.summed:
        size_in //= shards
    else:
        size_out //= shards
    packed = linear.packed
    group = 0
    if packed.scheme == "int4":
        group = 2 * packed.kernel.shape[0] // packed.scale.shape[0]
    return Matrix(size_in, size_out, packed.scheme, linear.gated_by_kernel, group)

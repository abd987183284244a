"""The type of KV pools, and the factors of quantised ones: the largest key and value of each head,
from the checkpoint or from a text that the model reads.

Factors travel with the weights (`Attention.kv_scales`); a pool stores a number over its factor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import KV_TYPES
from jitney.engine.core.models.registry import model_class
from jitney.engine.core.models.sharding import TENSOR, Shares
from jitney.engine.core.weights.checkpoint import open_checkpoint
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.kernels.delta_net import DeltaState, StateSlots
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.scales import limit_of
from jitney.kernels.select import select

_log = logging.getLogger("jitney.core")

#: An array of each layer, [2K].
type _Layers = list[Array]

#: Keys and values may exceed what the text gave by this factor before they are cut off. The steps
#: of int8 grow as much (SmolLM2-135M diverges from its plain self by 2.1e-3 nats a token without a
#: margin, 2.4 with 1.1, 4.6 with 1.5); fp8 has as many digits left wherever its factor puts a
#: number.
_MARGINS = {jnp.dtype(jnp.int8): 1.1, jnp.dtype(jnp.float8_e4m3fn): 2.0}
#: Most positions that are read, and positions per page of the pool that they are read into.
_MOST_TOKENS, _PAGE = 512, 16
#: Compute capability from which NVIDIA GPUs convert fp8.
_FP8_CAPABILITY = 8.9
#: Calibration text for the largest keys and values: prose, numbers, code and a list.
_TEXT = """The ferry leaves the old harbour at seven, turns north past the lighthouse and reaches the island in about
forty minutes, if the wind is kind. On board there is coffee, a shelf of borrowed paperbacks and, most days, a dog.
"Do you come here often?" asked the man with the green umbrella. She laughed. "Every Tuesday, for eleven years!"

Prices in 2024: adults 12.50, children 6.25, bicycles 3.00; a family of four pays 34.90 instead of 37.50 (7 % less).

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

To bake the bread:
1. Mix 500 g of flour, 350 ml of water, 10 g of salt and a little yeast.
2. Let it rest overnight at 18 degrees; fold it twice, gently.
3. Bake for 45 minutes at 230 degrees, the first twenty under a lid.

Question: why does ice float? Answer: water expands by about nine percent when it freezes, so a block of ice weighs less
than the water it pushes aside. In short, rho_ice = 917 kg/m^3 < rho_water = 1000 kg/m^3.
{"name": "sensor-7", "values": [0.12, -3.4, 1e-6, 250000], "ok": true, "x": null} <p class="x">Zürich, 東京, naïve</p>
"""  # noqa: E501 - factors of checkpoints rest on these very lines


def choose_kv_dtype(name: str, dtype: np.dtype, device: Any) -> np.dtype:
    """The dtype of the KV pools; ConfigError for fp8 on an NVIDIA GPU that does not know it."""
    if name == "auto":
        return dtype
    if name == "fp8":
        _check_fp8(device)
    return KV_TYPES[name]


def _check_fp8(device: Any) -> None:
    capability = str(getattr(device, "compute_capability", ""))
    is_gpu = device.platform in ("gpu", "cuda") and capability
    if is_gpu and float(capability) < _FP8_CAPABILITY:
        raise ConfigError(
            f"kv_dtype fp8 needs compute capability {_FP8_CAPABILITY}; this {device.device_kind} "
            f"has {capability}: use int8"
        )


def load_kv_scales(
    model: Model, source: ModelSource, kv_dtype: DTypeLike, mesh: Mesh | None = None
) -> None:
    """Give the model factors for quantised pools: the checkpoint's, else those of the text."""
    limits = _stored_limits(source)
    if limits is None:
        _calibrate_on_text(model, source, kv_dtype, mesh)
        return
    scales = [_factors(most, kv_dtype) for most in limits]
    model.set_kv_scales(_placed(scales, source, mesh))
    _log.info("KV factors: as the checkpoint has them")


def _placed(scales: _Layers, source: ModelSource, mesh: Mesh | None) -> _Layers:
    """Copy scales to the devices that hold the layers."""
    if mesh is None:
        return scales
    place = Shares(source.config, mesh).place
    numbered = zip(source.config.pool_layers, scales, strict=True)
    return [place(("layers", layer, "attention", "kv_scales"), own) for layer, own in numbered]


def _calibrate_on_text(
    model: Model, source: ModelSource, kv_dtype: DTypeLike, mesh: Mesh | None
) -> None:
    from jitney.engine.core.text.tokenizer import Tokenizer  # only this reads a text

    ids = Tokenizer.load(source).encode(_TEXT)
    tokens = [token for token in ids if token < source.config.vocab_size]
    _calibrate(model, tokens, kv_dtype, mesh)
    _log.info("KV factors: from %d tokens of the built-in text", len(tokens))


def _stored_limits(source: ModelSource) -> _Layers | None:
    """Largest magnitudes of each layer's KV heads by the checkpoint, [2K] each, or None."""
    if source.kind != "hf" or not source.has_weights:
        return None
    from jitney.engine.core.weights.quantised_folder import QuantisedFolder

    config = source.config
    weights = model_class(config.architecture).weight_map(config, "hf")
    checkpoint = open_checkpoint(source, weights)
    if not isinstance(checkpoint, QuantisedFolder):
        return None
    limits = [checkpoint.kv_limits(layer) for layer in config.pool_layers]
    if None in limits:
        return None
    heads = [config.of_layer(layer).n_kv_heads for layer in config.pool_layers]
    return [jnp.tile(jnp.array(most), count) for most, count in zip(limits, heads, strict=True)]


def _calibrate(
    model: Model, tokens: Sequence[int], kv_dtype: DTypeLike, mesh: Mesh | None = None
) -> None:
    """Give the model factors for int8 or fp8 pools from what its heads compute on `tokens`."""
    seen = _largest(model, tokens, mesh)
    model.set_kv_scales([_factors(_MARGINS[jnp.dtype(kv_dtype)] * most, kv_dtype) for most in seen])


def _factors(most: Array, kv_dtype: DTypeLike) -> Array:
    """Largest magnitudes float32 [2K] of key and value heads -> factors float32 [2K]."""
    return jnp.where(most > 0, most, 1.0) / limit_of(kv_dtype)


def _largest(model: Model, tokens: Sequence[int], mesh: Mesh | None = None) -> list[Array]:
    """Largest magnitude of each layer's keys (rotated) and values by head, float32 [2K], after
    reading `tokens` in one step into a small pool of plain floats, with the reference kernels."""
    graph, state = nnx.split(model)
    config, dtype, kernels = model.config, model.dtype, select("", "reference")
    count = min(len(tokens), _MOST_TOKENS, config.context_length)
    pages = -(-count // _PAGE)

    def read(state: Any, row: Array, meta: AttentionMeta) -> list[Array]:
        slot: Any = None
        if config.recurrent is not None:
            slot = DeltaState.empty(config.recurrent.state_shapes(1))
        empty = [slot] * config.n_layers
        for layer in config.pool_layers:
            own = config.of_layer(layer)
            shape = pages + 1, _PAGE, 2 * own.n_kv_heads, own.head_dim
            empty[layer] = jnp.zeros(shape, dtype)
        _, states = nnx.merge(graph, state)(row, empty, meta, kernels)
        pools = [states[layer] for layer in config.pool_layers]  # [N, page, 2K, D]
        return [jnp.max(jnp.abs(pool), axis=(0, 1, 3)).astype(jnp.float32) for pool in pools]

    if mesh is not None:
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
        read = jax.shard_map(
            read,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(TENSOR.name),
            check_vma=False,
        )
    # In numpy: what all hosts have alike is no array of any device.
    meta = jax.tree.map(np.asarray, _one_prompt(count, pages))
    return jax.jit(read)(state, np.asarray(tokens[:count], np.int32), meta)


def _one_prompt(count: int, pages: int) -> AttentionMeta:
    """A step of one sequence with `count` rows from position 0, in pages 1, 2, ..."""
    rows = jnp.arange(count, dtype=jnp.int32)
    table = jnp.zeros((2, pages), jnp.int32).at[0].set(jnp.arange(1, pages + 1))
    return AttentionMeta(
        kv_lens=jnp.array([count, 0]),
        cu_q=jnp.array([0, count, count]),
        page_table=table,
        write_rows=rows + _PAGE,
        positions=rows,
        counts=jnp.array([0, 1, count]),
        state=StateSlots.in_place(jnp.array([0, 0])),
    )

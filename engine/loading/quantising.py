"""Which scheme and which KV type a configuration means on a device, and the factors of quantised
KV.
"""

from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.errors import ConfigError
from jitney.engine.loading.calibration import calibrate, factors
from jitney.engine.loading.checkpoint import open_checkpoint
from jitney.engine.loading.load import WeightStorage
from jitney.engine.loading.quantised_folder import QuantisedFolder
from jitney.engine.models.protocol import Model
from jitney.engine.models.quantization import KV_TYPES
from jitney.engine.models.registry import model_class
from jitney.engine.models.sharding import Shares
from jitney.engine.text.tokenizer import load_tokenizer
from jitney.kernels.interface import KernelSet

_log = logging.getLogger("jitney.core")

#: An array of each layer, [2K].
type _Layers = list[Array]

#: Compute capability from which NVIDIA GPUs convert fp8.
_FP8_CAPABILITY = 8.9
#: Read once to see how large keys and values become: prose, numbers, code and a list, as prompts
#: have them.
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


def choose_weight_storage(weights: str, platform: str, kernels: KernelSet) -> WeightStorage:
    """How matrices are packed under `weights`, one of the configuration's words.

    auto leaves quantised matrices of a checkpoint as they are where the device's products do: XLA
    widens 8 bits within the product on GPUs and TPUs, 4 bits need a kernel. A CPU would write them
    out as floats in every step, so there they become floats once.
    """
    if weights != "auto":
        return WeightStorage(weights, frozenset({weights} - {"plain"}))
    if platform == "cpu":
        return WeightStorage()
    schemes = {"int8", "fp8"}
    if kernels.multiplies_int4:
        schemes.add("int4")
    return WeightStorage("plain", frozenset(schemes))


def choose_kv_dtype(name: str, dtype: np.dtype, device: Any) -> np.dtype:
    """Of the KV pools; ConfigError for fp8 on an NVIDIA GPU that does not know it."""
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
    """Give the model factors for its quantised pools: the checkpoint's own, else those that TEXT
    leads to.
    """
    limits = _stored_limits(source)
    if limits is None:
        _calibrate_on_text(model, source, kv_dtype, mesh)
        return
    scales = [factors(most, kv_dtype) for most in limits]
    model.set_kv_scales(_placed(scales, source, mesh))
    _log.info("KV factors: as the checkpoint has them")


def _placed(scales: _Layers, source: ModelSource, mesh: Mesh | None) -> _Layers:
    """On the devices that hold the layers."""
    if mesh is None:
        return scales
    place = Shares(source.config, mesh).place
    return [place(("attention", "kv_scales"), layer) for layer in scales]


def _calibrate_on_text(
    model: Model, source: ModelSource, kv_dtype: DTypeLike, mesh: Mesh | None
) -> None:
    ids = load_tokenizer(source).encode(_TEXT)
    tokens = [token for token in ids if token < source.config.vocab_size]
    calibrate(model, tokens, kv_dtype, mesh)
    _log.info("KV factors: from %d tokens of the built-in text", len(tokens))


def _stored_limits(source: ModelSource) -> _Layers | None:
    """Largest magnitudes that a checkpoint states for each layer's KV heads, [2K] each, None if it
    states none.
    """
    if source.kind != "hf":
        return None
    config = source.config
    weights = model_class(config.architecture).weight_map(config, "hf")
    checkpoint = open_checkpoint(source, weights)
    if not isinstance(checkpoint, QuantisedFolder):
        return None
    limits = [checkpoint.kv_limits(layer) for layer in range(config.n_layers)]
    if None in limits:
        return None
    return [jnp.tile(jnp.array(limit), config.n_kv_heads) for limit in limits]

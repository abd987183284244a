"""The registry of model classes by architecture, and models without a checkpoint: with random
weights, or only shapes.

To add a family, add its line to `_MODELS`, and a reader of its files to
`jitney.engine.core.weights.checkpoints.families`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jitney.engine.common.errors import ModelError
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import KV_TYPES, quantise
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import Path
from jitney.kernels.scales import limit_of

#: Class name in `architectures` of config.json -> "module:class", imported on first use.
_MODELS: dict[str, str] = {
    "LlamaForCausalLM": "jitney.engine.core.models.llama:Llama",
    "MistralForCausalLM": "jitney.engine.core.models.llama:Llama",
    "Qwen2ForCausalLM": "jitney.engine.core.models.llama:Llama",
    "Qwen3ForCausalLM": "jitney.engine.core.models.llama:Llama",
    "Qwen3MoeForCausalLM": "jitney.engine.core.models.mixture:Mixture",
    "Qwen3_5ForCausalLM": "jitney.engine.core.models.qwen3_5:Qwen35",
    "Qwen3_5MoeForCausalLM": "jitney.engine.core.models.qwen3_5:Qwen35Mixture",
    "Qwen3NextForCausalLM": "jitney.engine.core.models.qwen3_5:Qwen3Next",
    "MixtralForCausalLM": "jitney.engine.core.models.mixture:Mixture",
    "GptOssForCausalLM": "jitney.engine.core.models.mixture:Mixture",
    "Gemma2ForCausalLM": "jitney.engine.core.models.gemma:Gemma",
    "Gemma3ForCausalLM": "jitney.engine.core.models.gemma:Gemma",
    "Gemma4ForCausalLM": "jitney.engine.core.models.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "jitney.engine.core.models.gemma4:Gemma4",
    "Olmo2ForCausalLM": "jitney.engine.core.models.olmo:Olmo",
    "Olmo3ForCausalLM": "jitney.engine.core.models.olmo:Olmo",
    "Exaone4ForCausalLM": "jitney.engine.core.models.olmo:Exaone",
    "Ministral3ForCausalLM": "jitney.engine.core.models.llama:Llama",
    "SmolLM3ForCausalLM": "jitney.engine.core.models.llama:Llama",
    "SeedOssForCausalLM": "jitney.engine.core.models.llama:Llama",
    "Phi3ForCausalLM": "jitney.engine.core.models.phi:Phi",
    "Glm4ForCausalLM": "jitney.engine.core.models.glm:Glm",
    "GraniteForCausalLM": "jitney.engine.core.models.granite:Granite",
    "GraniteMoeHybridForCausalLM": "jitney.engine.core.models.granite:Granite",
    "Cohere2ForCausalLM": "jitney.engine.core.models.cohere:Cohere",
    "Lfm2ForCausalLM": "jitney.engine.core.models.lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "jitney.engine.core.models.lfm2:Lfm2",
    "MuseGlimmerForCausalLM": "jitney.engine.core.models.muse:Muse",
    "NemotronHForCausalLM": "jitney.engine.core.models.nemotron:NemotronH",
    "DeepseekV2ForCausalLM": "jitney.engine.core.models.latent:Latent",
    "DeepseekV3ForCausalLM": "jitney.engine.core.models.latent:Latent",
    "Glm4MoeLiteForCausalLM": "jitney.engine.core.models.latent:Latent",
    "Mistral4ForCausalLM": "jitney.engine.core.models.latent:Latent",
    "BertModel": "jitney.engine.core.models.bert:Bert",
    "BertForSequenceClassification": "jitney.engine.core.models.bert:Bert",
    "XLMRobertaModel": "jitney.engine.core.models.bert:Bert",
    "XLMRobertaForSequenceClassification": "jitney.engine.core.models.bert:Bert",
}
#: The same map for heads that draft: those in a model's own files (`ModelConfig.prediction_head`),
#: and EAGLE-3's.
_PREDICTION_HEADS: dict[str, str] = {
    "DeepseekV3ForCausalLM:mtp": "jitney.engine.core.models.latent:LatentPredictionHead",
    "LlamaForCausalLM:eagle3": "jitney.engine.core.models.eagle3:Eagle3Head",
    "Glm4MoeLiteForCausalLM:mtp": "jitney.engine.core.models.latent:LatentPredictionHead",
    "Qwen3_5ForCausalLM:mtp": "jitney.engine.core.models.qwen3_5:Qwen35PredictionHead",
    "Qwen3NextForCausalLM:mtp": "jitney.engine.core.models.qwen3_5:Qwen35MixturePredictionHead",
    "Qwen3_5MoeForCausalLM:mtp": "jitney.engine.core.models.qwen3_5:Qwen35MixturePredictionHead",
}
#: Largest magnitude of a random model's keys and values, quantised or not.
_RANDOM_KV = 16.0


def model_class(architecture: str) -> type[Model]:
    """The model class of an architecture; raises ModelError, which lists the known ones."""
    place = (_MODELS | _PREDICTION_HEADS).get(architecture)
    if place is None:
        raise ModelError(
            f"no model serves the architecture {architecture[:100]!r}; known: {', '.join(_MODELS)}"
        )
    module, name = place.split(":")
    return getattr(import_module(module), name)


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
    weights: str = "plain",
    kv: str = "auto",
) -> Model:
    """A model with random weights: the same seed gives the same weights on every platform, rounded
    to dtype.

    weights: one of `Packed.schemes`. kv: auto, or one of `quantization.KV_TYPES` for a model with
    factors of pools of that type.
    """
    model = model_class(config.architecture)(config, dtype=dtype, rngs=nnx.Rngs(seed))
    if weights != "plain":
        for linear in model.linears():
            linear.set_matrix(quantise(linear.packed.kernel, scheme=weights, dtype=dtype))
    if kv in KV_TYPES and config.pool_layers:
        factor = _RANDOM_KV / limit_of(KV_TYPES[kv])
        heads = [config.of_layer(layer).n_kv_heads for layer in config.pool_layers]
        model.set_kv_scales([jnp.full((2 * count,), factor, jnp.float32) for count in heads])
    return model


def fill_at_random(model: Model, sharding: Callable[[Path, int], Sharding] | None = None) -> Model:
    """Fill an abstract model with random numbers of the right shapes, made on the device leaf by
    leaf.

    sharding(path, dimensions): the sharding of a leaf; None: all on the default device.
    """
    graph, state = nnx.split(model)
    leaves = []
    flat: Any = nnx.to_flat_state(state)
    for number, (path, leaf) in enumerate(flat):
        fill = _filler(None if sharding is None else sharding(path, leaf.ndim))
        filled = fill(jax.random.key(number), str(path[-1]), leaf.shape, jnp.dtype(leaf.dtype))
        leaves.append((path, leaf.replace(filled)))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


@cache
def _filler(split: Sharding | None) -> Callable[..., Array]:
    """The compiled filler, cached: layers have equal shapes, so each shape is compiled once."""
    return jax.jit(_fill, static_argnums=(1, 2, 3), out_shardings=split)


def _fill(key: Array, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Random entries for a leaf of this name. Matrices have a spread of 1 / sqrt(inputs), norms are
    1, and scales are small, so that no step overflows."""
    if jnp.issubdtype(dtype, jnp.integer):
        if name == "zeros":
            return jnp.full(shape, 8, dtype)
        width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, width), dtype)
    if name in ("scale", "kv_scales"):
        return jnp.full(shape, 1e-3, dtype)
    if len(shape) < 2:
        return jnp.full(shape, name != "bias", dtype)
    spread = 1.0 if dtype.itemsize == 1 else shape[0] ** -0.5
    return (spread * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def abstract_model(
    config: ModelConfig, *, dtype: DTypeLike = jnp.float32, weights: str = "plain", kv: str = "auto"
) -> Model:
    """A model with shapes and dtypes instead of arrays, without memory. See `random_model`."""
    return nnx.eval_shape(lambda: random_model(config, dtype=dtype, weights=weights, kv=kv))

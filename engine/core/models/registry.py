"""Which class serves an architecture, and models without a checkpoint: random ones, and shapes.

To add a family: its line in MODELS, and how its files are read in
`jitney.engine.core.weights.checkpoints.families`.
"""

from __future__ import annotations

from importlib import import_module

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jitney.engine.common.errors import ModelError
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import KV_TYPES, quantise
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels.scales import limit_of

#: Class name in `architectures` of config.json -> module and class, imported when asked for.
_MODELS: dict[str, str] = {
    "LlamaForCausalLM": "jitney.engine.core.models.llama:Llama",
    "MistralForCausalLM": "jitney.engine.core.models.llama:Llama",
    "Qwen2ForCausalLM": "jitney.engine.core.models.llama:Llama",
    "Qwen3ForCausalLM": "jitney.engine.core.models.llama:Llama",
    "Qwen3MoeForCausalLM": "jitney.engine.core.models.mixture:Mixture",
    "MixtralForCausalLM": "jitney.engine.core.models.mixture:Mixture",
    "GptOssForCausalLM": "jitney.engine.core.models.mixture:Mixture",
    "Gemma2ForCausalLM": "jitney.engine.core.models.gemma:Gemma",
    "Gemma3ForCausalLM": "jitney.engine.core.models.gemma:Gemma",
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
    "BertModel": "jitney.engine.core.models.bert:Bert",
    "BertForSequenceClassification": "jitney.engine.core.models.bert:Bert",
    "XLMRobertaModel": "jitney.engine.core.models.bert:Bert",
    "XLMRobertaForSequenceClassification": "jitney.engine.core.models.bert:Bert",
}
#: Keys and values of random models stay within this, quantised or not.
_RANDOM_KV = 16.0


def model_class(architecture: str) -> type[Model]:
    """The class that serves an architecture; ModelError lists those that are known."""
    if architecture not in _MODELS:
        raise ModelError(
            f"no model serves the architecture {architecture[:100]!r}; known: {', '.join(_MODELS)}"
        )
    module, name = _MODELS[architecture].split(":")
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
    if kv in KV_TYPES and config.n_pools:
        factor = _RANDOM_KV / limit_of(KV_TYPES[kv])
        scales = jnp.full((2 * config.n_kv_heads,), factor, jnp.float32)
        model.set_kv_scales([scales] * config.n_layers)
    return model


def abstract_model(
    config: ModelConfig, *, dtype: DTypeLike = jnp.float32, weights: str = "plain", kv: str = "auto"
) -> Model:
    """The model with shapes and dtypes in place of arrays; costs no memory. See `random_model`."""
    return nnx.eval_shape(lambda: random_model(config, dtype=dtype, weights=weights, kv=kv))

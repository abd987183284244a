"""The bytes and operations of a decoder's steps, from its configuration; jax-free."""

from __future__ import annotations

from collections import Counter

from jitney.engine.common.step_cost import StepCost
from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig


def step_cost(
    config: ModelConfig,
    *,
    weight_bytes: float,
    head_bytes: float,
    kv_bytes: float,
    expert_bytes: float | None = None,
) -> StepCost:
    """The cost of a decoder's steps. weight_bytes: of one number of the layers' matrices, but
    for experts, if these have others; head_bytes: of the output head; kv_bytes: of a position's
    keys and values, as all layers read them.
    """
    experts = config.experts or ExpertsConfig(1, 1, renormalised=True)
    layers = [config.of_layer(layer) for layer in range(config.n_layers)]
    attending = [layers[layer] for layer in config.attending_layers]
    times = config.attention_inputs // config.hidden_size
    outputs = sum(times * own.qkv_size + own.n_heads * own.head_dim for own in attending)
    width = sum(own.n_heads * own.head_dim for own in attending)
    latents = 0
    if config.latent is not None:
        outputs, width = 0, config.n_heads * (config.head_dim + config.value_dim) // 2
        width *= len(attending)
        latents = len(attending) * config.latent.weights(config.hidden_size, config.n_heads)
    outputs += config.n_layers * 3 * config.layer_input_size
    if config.recurrent is not None:
        outputs += len(config.recurrent.layers) * config.recurrent.outputs
    matrices = 2 + config.is_gated
    fed = [own for layer, own in enumerate(layers) if layer not in config.bare_layers]
    dense = [own.intermediate_size for own in fed if own.experts is None]
    inner = dense
    if config.experts is not None:  # the routers, and what all rows go through
        inner = [own.intermediate_size for own in fed if own.experts is not None]
        outputs += len(inner) * (experts.n_experts + matrices * experts.shared_size)
        outputs += matrices * sum(dense)
    return StepCost(
        n_layers=config.n_layers,
        shared_weights=latents + config.hidden_size * outputs,
        expert_weights=config.hidden_size * matrices * sum(inner),
        n_experts=experts.n_experts,
        n_chosen=experts.n_chosen,
        weight_bytes=weight_bytes,
        expert_bytes=expert_bytes,
        head_weights=config.head_columns * config.hidden_size,
        head_bytes=head_bytes,
        attention_width=width,
        kv_bytes=kv_bytes,
        windows=_read_shares(config),
        state_bytes=config.slot_bytes,
    )


def _read_shares(config: ModelConfig) -> dict[int, float]:
    """Shares of the keys and values of a position, as all layers read them: window -> the share
    that layers with this window read.
    """
    read = Counter[int]()
    for layer in config.attending_layers:
        read[config.windows[layer]] += config.kv_width(layer)
    return {window: numbers / read.total() for window, numbers in read.items()}

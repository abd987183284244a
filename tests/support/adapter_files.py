"""Adapters in the files that PEFT writes, and a model with an adapter merged into its matrices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from llamas import mlp_of
from safetensors.numpy import load_file, save_file

from jitney.engine.core.models.llama import Llama
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TENSORS = "adapter_model.safetensors"


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape [O, I] of each projection, by its name in checkpoints."""
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.n_heads * dim, config.n_kv_heads * dim
    return {
        "self_attn.q_proj": (queries, size),
        "self_attn.k_proj": (keys, size),
        "self_attn.v_proj": (keys, size),
        "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }


def write_adapter(
    folder: Path,
    config: ModelConfig,
    seed: int,
    *,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    spread: float = 0.1,
    **settings: Any,
) -> Path:
    """Write an adapter of random numbers for these modules of every layer; returns its folder.
    settings: further entries of its configuration.
    """
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config.n_layers):
        for name, (outputs, inputs) in shapes_of(config).items():
            if name.split(".")[1] in modules:
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = draw.normal(0, spread, (rank, inputs))
                tensors[f"{prefix}.lora_B.weight"] = draw.normal(0, spread, (outputs, rank))
    folder.mkdir()
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, folder / _TENSORS)
    settings_of_peft = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings_of_peft | settings))
    return folder


def merged(model: Llama, folder: Path, scale: float = 2.0) -> Llama:
    """A copy of a model with plain weights, to which the adapter is added."""
    model = nnx.merge(*nnx.split(model))
    tensors = load_file(folder / _TENSORS)
    for layer, block in enumerate(model.layers):
        for linear, names in (
            (block.attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (block.attention.o, ("self_attn.o_proj",)),
            (mlp_of(block).gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (mlp_of(block).down, ("mlp.down_proj",)),
        ):
            shapes = shapes_of(model.config)
            changes = [_change(tensors, layer, name, shapes[name]) for name in names]
            change = scale * np.concatenate(changes).T
            linear.kernel = nnx.Param(linear.kernel[...] + jnp.asarray(change, jnp.float32))
    return model


def _change(
    tensors: dict[str, np.ndarray], layer: int, name: str, shape: tuple[int, int]
) -> np.ndarray:
    prefix = f"base_model.model.model.layers.{layer}.{name}"
    if f"{prefix}.lora_A.weight" not in tensors:
        return np.zeros(shape, np.float32)
    return tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]

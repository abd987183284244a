"""Gemma 4's shapes: heads of two sizes, keys and values that several layers read, and numbers of a
token that each layer has. What it computes is compared with transformers in `test_families`, alone
and in a crowd in `test_features`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jitney.engine.common.errors import ModelError
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost
from jitney.kernels.select import select


def test_layers_have_pools_of_their_own_shapes_and_readers_have_none():
    config = tiny_config("gemma4")
    sizes = StateSizes(
        seats=2,
        n_pages=9,
        page_size=8,
        context_length=64,
        kv_dtype=jnp.dtype("bfloat16"),
        window_pages=(5,),
    )
    kernels = select("cpu", "reference")
    kept = sizes.shapes(config, kernels, None).kv
    assert [pool and pool.shape for pool in kept] == [(5, 8, 4, 32), (9, 8, 2, 64), None, None]
    assert sizes.page_bytes(config, kernels) == (8 * 2 * 64 * 2, 8 * 4 * 32 * 2)
    assert config.kv_sources == (0, 1, 0, 1) and config.layer_groups == (1, 0, 1, 0)


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [
        ("gemma-4-e2b", 4.6, 18),
        ("gemma-4-e4b", 7.5, 56),
        ("gemma-4-12b", 11.9, 336),
        ("gemma-4-26b-a4b", 25.2, 220),
        ("gemma-4-31b", 30.7, 880),
    ],
)
def test_published_sizes(name: str, billions: float, kv_kib: int):
    """Text weights, and bytes of a position as its layers of 256 and of 512 numbers add up."""
    cost = ModelCost(SHAPES[name])
    assert cost.parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert cost.kv_bytes == kv_kib * 1024


PUBLISHED = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}


def test_files_of_transformers_say_the_heads_of_each_layer():
    heads = {"head_dim": 512, "num_key_value_heads": 1}
    settings = PUBLISHED | {"attention_k_eq_v": True}
    written = read_hf_config(settings | {"per_layer_config": {"5": heads}})
    assert written == read_hf_config(settings | {"num_global_key_value_heads": 1})
    with pytest.raises(ModelError, match="per_layer_config: 4 must be left out"):
        read_hf_config(settings | {"per_layer_config": {"4": heads}})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"num_kv_shared_layers": 5, "layer_types": None}, "finds none that sees as many"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"vocab_size_per_layer_input": 511}, "vocab_size_per_layer_input must be vocab_size"),
    ],
)
def test_what_is_not_served_is_refused(more: dict[str, Any], reason: str):
    with pytest.raises(ModelError, match=reason):
        read_hf_config(PUBLISHED | more)

"""A small Llama in the files of every format, and its weights once they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gguf_files import close, open_writer
from jax.typing import DTypeLike
from safetensors.flax import save_file

from jitney.engine.core.models.layers import MLP
from jitney.engine.core.models.llama import Block, Llama
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import WeightStorage, load_model

E, H, K, D, F, V, L = 64, 4, 2, 16, 128, 96, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": E,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "intermediate_size": F,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
#: The matrices of a layer, [O, I].
MATRICES = {
    "self_attn.q_proj": (H * D, E),
    "self_attn.k_proj": (K * D, E),
    "self_attn.v_proj": (K * D, E),
    "self_attn.o_proj": (E, H * D),
    "mlp.gate_proj": (F, E),
    "mlp.up_proj": (F, E),
    "mlp.down_proj": (E, F),
}
#: Storage in which every matrix is converted to floats.
FLOATS = WeightStorage()
NORMS = ("input_layernorm", "post_attention_layernorm")


def as_llama(model: Model) -> Llama:
    assert isinstance(model, Llama)
    return model


def mlp_of(block: Block) -> MLP:
    assert isinstance(block.mlp, MLP)
    return block.mlp


def tensors(biases: bool = False, lm_head: bool = True) -> dict[str, np.ndarray]:
    """A Hugging Face state dict of random floats."""
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, E),
        "model.norm.weight": (E,),
    }
    if lm_head:
        shapes["lm_head.weight"] = (V, E)
    for layer in range(L):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}.weight": (E,) for name in NORMS}
        shapes |= {f"{at}{name}.weight": size for name, size in MATRICES.items()}
        if biases:
            shapes |= {f"{at}{name}.bias": MATRICES[name][:1] for name in [*MATRICES][:3]}
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def write_folder(
    folder: Path, state: dict[str, Any], config: dict[str, Any] = CONFIG, shards: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: jnp.asarray(value) for name, value in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    shard_of = {
        name: f"model-{i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(state)
    }
    for shard in set(shard_of.values()):
        own = {name: value for name, value in state.items() if shard_of[name] == shard}
        save_file(own, folder / shard)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shard_of})
    )
    return folder


def write_gguf(
    path: Path,
    state: dict[str, np.ndarray],
    kinds: dict[str, str] | str = "F32",
    arch: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a .gguf file with names by the gguf library's own table. kinds: a tensor type for all
    matrices, or types by the end of a matrix's Hugging Face name, else F32.
    """
    architectures = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
    names = gguf.get_tensor_name_map(architectures[arch], L)
    writer = open_writer(path, arch, layers=L, size=E, inner=F, heads=H, kv_heads=K)
    for name, value in state.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            value = permuted(value, H if "q_proj" in name else K)
        kind = kinds if isinstance(kinds, str) else "F32"
        if isinstance(kinds, dict):
            kind = next((kinds[end] for end in kinds if f"{end}.weight" in name), "F32")
        quantised = gguf.GGMLQuantizationType["F32" if value.ndim == 1 else kind]
        writer.add_tensor(stored, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    close(writer)
    return path


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows of a Llama model in the order of llama.cpp's converter."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def load(path: Path, dtype: DTypeLike = jnp.float32, storage: WeightStorage = FLOATS) -> Llama:
    source = ModelSource.resolve(str(path))
    return as_llama(load_model(source, source.config, dtype, storage=storage))


def flat(model: Llama) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same(a: Llama, b: Llama, rtol: float = 0, atol: float = 0) -> None:
    """Assert that both models have the same weights, in whatever scheme they are stored."""
    left, right = flat(a), flat(b)
    assert left.keys() == right.keys()
    for path in left:
        np.testing.assert_allclose(left[path], right[path], rtol, atol, err_msg=str(path))

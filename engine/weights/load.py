"""Weights into a model: one tensor at a time from the file, to the device, into its place."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jitney.engine.models.config import ModelConfig
from jitney.engine.models.layers import DType
from jitney.engine.models.llama import Llama, abstract_model, random_model
from jitney.engine.weights import names
from jitney.engine.weights.fetch import Progress, no_progress
from jitney.engine.weights.gguf import GGUFFile, half_split
from jitney.engine.weights.safetensors import SafetensorsFolder
from jitney.engine.weights.sources import ModelSource


class Checkpoint(Protocol):
    """A file or folder of named tensors."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


class LlamaGGUF(GGUFFile):
    """A `llama` GGUF file with query and key rows in the order the models here expect."""

    def __init__(self, path: str, config: ModelConfig):
        super().__init__(path)
        self.heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}

    def read(self, name: str) -> np.ndarray:
        """float32, row-major; see `GGUFFile.read`."""
        rows = super().read(name)
        heads = self.heads.get(name.split(".")[-2])
        return rows if heads is None else half_split(rows, heads)


def load_model(source: ModelSource, config: ModelConfig, dtype: DType = jnp.float32,
               progress: Progress | None = None) -> Llama:
    """The model with its weights in `dtype` on the default device.

    progress("weights", tensors done, tensors in all, "") is called after each tensor. Raises ModelError naming every
    missing, unexpected and misshapen tensor. Host memory: one tensor; device: the weights and one tensor more.
    """
    if source.kind == "tiny":
        return random_model(config, dtype=dtype)
    checkpoint, dialect = open_checkpoint(source, config)
    wanted = list(names.targets(config, dialect))
    names.check(wanted, checkpoint.shapes, config, dialect)
    report = progress or no_progress
    arrays = {}
    for done, target in enumerate(wanted, 1):
        arrays[target.path] = place(checkpoint, target, dtype)
        report("weights", done, len(wanted), "")
    return assemble(config, dtype, arrays)


def open_checkpoint(source: ModelSource, config: ModelConfig) -> tuple[Checkpoint, names.Dialect]:
    """The tensors of a source, and the names they go by."""
    if source.kind == "hf":
        return SafetensorsFolder(source.path), names.HF
    if config.architecture == "llama":
        return LlamaGGUF(source.path, config), names.GGUF
    return GGUFFile(source.path), names.GGUF


def place(checkpoint: Checkpoint, target: names.Target, dtype: DType) -> jax.Array:
    """One of our tensors on the default device."""
    parts = [jnp.asarray(checkpoint.read(piece.name)) for piece in target.pieces]
    return fuse(parts, dtype=jnp.dtype(dtype), transpose=target.transpose)


@partial(jax.jit, static_argnames=("dtype", "transpose"))
def fuse(parts: list[jax.Array], *, dtype: np.dtype, transpose: bool) -> jax.Array:
    """Parts [O_i, I] -> [sum O_i, I], or [I, sum O_i] if transposed, in dtype; on the device, by all its threads."""
    whole = jnp.concatenate(parts).astype(dtype)
    return whole.T if transpose else whole


def assemble(config: ModelConfig, dtype: DType, arrays: dict[tuple[Any, ...], jax.Array]) -> Llama:
    """A model around arrays given by path; every tensor of the model must be there in its shape."""
    graph, state = nnx.split(abstract_model(config, dtype=dtype))
    flat = nnx.to_flat_state(state)
    leaves = [(path, leaf.replace(arrays.pop(path))) for path, leaf in flat]
    assert not arrays, sorted(arrays)
    return nnx.merge(graph, nnx.from_flat_state(leaves))

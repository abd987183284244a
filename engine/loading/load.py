"""Weights into a model: one tensor at a time from the file, to the device, into its place and its
scheme.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path as FilePath
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jitney.engine.checkpoints import names
from jitney.engine.checkpoints.fetch import Progress, no_progress
from jitney.engine.checkpoints.files import read_json
from jitney.engine.checkpoints.gguf import GGUFFile, half_split
from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.checkpoints.quantization_config import read_packing
from jitney.engine.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.loading import repack
from jitney.engine.loading.quantised_folder import QuantisedFolder
from jitney.engine.models.layers import DType, Linear
from jitney.engine.models.llama import Llama, abstract_model, random_model
from jitney.engine.models.quantization import Packed, group_size, quantise
from jitney.engine.models.sharding import BY_INPUTS, Path, Shares

log = logging.getLogger("jitney.core")

#: Block formats of GGUF that stay in 4 bits.
GGUF_FORMATS: dict[str, Callable[[jax.Array], Packed]] = {
    "Q4_0": repack.q4_0,
    "Q4_1": repack.q4_1,
    "Q4_K": repack.q4_k,
}


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """How matrices are stored on the device."""

    #: What floats are rounded to, one of SCHEMES.
    scheme: str = "plain"
    #: Schemes in which a matrix of the checkpoint is taken as it is, number for number.
    as_stored: frozenset[str] = frozenset()


class Checkpoint(Protocol):
    """A file or folder of named tensors."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray:
        """A tensor as floats."""
        ...

    def packed(self, name: str) -> Packed | None:
        """A matrix as it is stored, if that is one of our schemes."""
        ...


class PlainFolder(SafetensorsFolder):
    """A Hugging Face folder of floats."""

    def packed(self, name: str) -> Packed | None:
        return None


class BlockGGUF(GGUFFile):
    """A GGUF file whose 4-bit blocks can be had as they are."""

    def packed(self, name: str) -> Packed | None:
        """The matrix in 4 bits, on the default device; None for other types."""
        from gguf import GGMLQuantizationType

        repack = GGUF_FORMATS.get(GGMLQuantizationType(self.tensors[name].kind).name)
        return None if repack is None else repack(jnp.asarray(self.ordered(name, self.rows(name))))

    def ordered(self, name: str, rows: np.ndarray) -> np.ndarray:
        """A tensor's rows in the order the models here expect."""
        return rows


class LlamaGGUF(BlockGGUF):
    """A `llama` GGUF file, which has query and key rows in another order."""

    def __init__(self, path: str, config: ModelConfig):
        super().__init__(path)
        self.heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}

    def read(self, name: str) -> np.ndarray:
        """float32, row-major; see `GGUFFile.read`."""
        return self.ordered(name, super().read(name))

    def ordered(self, name: str, rows: np.ndarray) -> np.ndarray:
        heads = self.heads.get(name.split(".")[-2])
        return rows if heads is None else half_split(rows, heads)


def load_model(
    source: ModelSource,
    config: ModelConfig,
    dtype: DType = jnp.float32,
    progress: Progress | None = None,
    *,
    storage: WeightStorage = WeightStorage(),
    mesh: Mesh | None = None,
) -> Llama:
    """The model with its weights on the default device, or split over a mesh; what is not quantised
    is in `dtype`.

    progress("weights", tensors done, tensors in all, "") is called after each tensor. Raises
    ModelError naming every missing, unexpected and misshapen tensor, ConfigError where the scheme
    does not fit the model. Host memory: one tensor; device: the weights and one tensor more.
    """
    shares = None if mesh is None else Shares(config, mesh)
    if source.kind == "tiny":
        return random_tiny(config, dtype, storage, shares)
    checkpoint, dialect = open_checkpoint(source, config)
    wanted = list(names.targets(config, dialect))
    names.check(wanted, checkpoint.shapes, config, dialect)
    report = progress or no_progress
    arrays: dict[Path, jax.Array] = {}
    for done, target in enumerate(wanted, 1):
        arrays |= place(checkpoint, target, dtype, storage, shares)
        report("weights", done, len(wanted), "")
    model = assemble(config if shares is None else shares.own, dtype, arrays)
    log.info("weights: %s", describe_weights(model))
    return model


def open_checkpoint(source: ModelSource, config: ModelConfig) -> tuple[Checkpoint, names.Dialect]:
    """The tensors of a source, and the names they go by."""
    if source.kind == "hf":
        packing = read_packing(
            read_json(FilePath(source.path), "config.json").get("quantization_config")
        )
        if packing is None:
            return PlainFolder(source.path), names.HF
        wanted = {
            piece.name for target in names.targets(config, names.HF) for piece in target.pieces
        }
        return QuantisedFolder(source.path, packing, wanted), names.HF
    if config.architecture == "llama":
        return LlamaGGUF(source.path, config), names.GGUF
    return BlockGGUF(source.path), names.GGUF


def place(
    checkpoint: Checkpoint,
    target: names.Target,
    dtype: DType,
    storage: WeightStorage,
    shares: Shares | None,
) -> dict[Path, jax.Array]:
    """The arrays of one of our tensors, on the default device or in shares."""
    packed = as_stored(checkpoint, target, storage) if target.path[-1] == "kernel" else None
    if packed is None and (storage.scheme == "plain" or target.path[-1] != "kernel"):
        return {target.path: fused(checkpoint, target, dtype, shares)}
    if packed is None:
        packed = rounded(
            target.path, fused(checkpoint, target, jnp.float32), dtype, storage, shares
        )
    return shared(named(target.path, packed), shares)


def rounded(
    path: Path, floats: jax.Array, dtype: DType, storage: WeightStorage, shares: Shares | None
) -> Packed:
    """A matrix [I, O] in the scheme; groups of int4 are so small that each device has whole
    ones.
    """
    split = shares.mesh.size if shares is not None and set(BY_INPUTS) & set(path) else 1
    group = group_size(floats.shape[0] // split) if storage.scheme == "int4" else 0
    return quantise(floats, scheme=storage.scheme, dtype=dtype, group=group)


def named(path: Path, packed: Packed) -> dict[Path, jax.Array]:
    """The arrays of a matrix by their own paths; path: of its kernel."""
    return {
        (*path[:-1], name): array for name, array in packed._asdict().items() if array is not None
    }


def shared(arrays: dict[Path, jax.Array], shares: Shares | None) -> dict[Path, jax.Array]:
    """Whole arrays, every device holding its share."""
    return (
        arrays
        if shares is None
        else {path: shares.place(path, array) for path, array in arrays.items()}
    )


def as_stored(
    checkpoint: Checkpoint, target: names.Target, storage: WeightStorage
) -> Packed | None:
    """A fused matrix as its pieces are stored; None unless all are taken so and are alike."""
    parts: list[Packed] = []
    for piece in target.pieces if storage.as_stored else ():
        part = checkpoint.packed(piece.name)
        if part is None or part.scheme not in storage.as_stored:
            return None
        parts.append(part)
    return repack.stack(parts) if parts else None


def fused(
    checkpoint: Checkpoint, target: names.Target, dtype: DType, shares: Shares | None = None
) -> jax.Array:
    """One of our tensors in floats; with shares, each goes straight from the host to its device."""
    parts = [checkpoint.read(piece.name) for piece in target.pieces]
    finish = partial(fuse, dtype=jnp.dtype(dtype), transpose=target.transpose)
    if shares is None:
        return finish([jnp.asarray(part) for part in parts])
    stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return shares.send(
        target.path, stored, lambda part: finish([part]), transposed=target.transpose
    )


@partial(jax.jit, static_argnames=("dtype", "transpose"))
def fuse(parts: list[jax.Array], *, dtype: np.dtype, transpose: bool) -> jax.Array:
    """Parts [O_i, I] -> [sum O_i, I], or [I, sum O_i] if transposed, in dtype; on the device, by
    all its threads.
    """
    whole = jnp.concatenate(parts).astype(dtype)
    return whole.T if transpose else whole


def assemble(config: ModelConfig, dtype: DType, arrays: dict[Path, jax.Array]) -> Llama:
    """A model around arrays given by path; every tensor of the model must be there in its shape."""
    model = abstract_model(config, dtype=dtype)
    for path in [path for path in arrays if path[-1] == "kernel"]:
        linear: Linear = reduce(member, path[:-1], model)
        linear.set_matrix(Packed(*(arrays.get((*path[:-1], name)) for name in Packed._fields)))
    graph, state = nnx.split(model)
    leaves = [(path, leaf.replace(arrays.pop(path))) for path, leaf in flat_leaves(state)]
    assert not arrays, sorted(arrays)
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def flat_leaves(state: Any) -> list[tuple[Path, Any]]:
    """nnx's variables and their paths."""
    found: Any = nnx.to_flat_state(state)
    return list(found)


def member(module: Any, name: str | int) -> Any:
    """What a path's next step leads to."""
    return module[name] if isinstance(name, int) else getattr(module, name)


def random_tiny(
    config: ModelConfig, dtype: DType, storage: WeightStorage, shares: Shares | None
) -> Llama:
    """The random model, packed and shared as a loaded one would be."""
    arrays: dict[Path, jax.Array] = {}
    for path, leaf in flat_leaves(nnx.state(random_model(config, dtype=dtype))):
        whole = leaf[...]
        parts = (
            named(path, rounded(path, whole, dtype, storage, shares))
            if path[-1] == "kernel"
            else {path: whole}
        )
        arrays |= shared(parts, shares)
    return assemble(config if shares is None else shares.own, dtype, arrays)


def describe_weights(model: Llama, source: ModelSource | None = None) -> str:
    """How the matrices are packed: a scheme, or dtype, or several of them with their counts. Where
    floats were made of a GGUF file's blocks it says of which: in float32 they are exact, which is
    another model than the same rounded."""
    kinds = Counter(
        linear.packed.scheme if linear.scale is not None else str(linear.packed.kernel.dtype)
        for linear in model.linears()
    )
    if len(kinds) > 1:
        return ", ".join(f"{kind} x {count}" for kind, count in kinds.most_common())
    kind = next(iter(kinds))
    stored = "" if source is None else stored_blocks(source)
    if not stored or kind not in ("float32", "bfloat16"):
        return kind
    return (
        f"float32, not rounded, from {stored}"
        if kind == "float32"
        else f"bfloat16, rounded from {stored}"
    )


def stored_blocks(source: ModelSource) -> str:
    """The commonest block format of a GGUF file's matrices, such as Q4_1; empty where they are
    floats.
    """
    if source.kind != "gguf":
        return ""
    from gguf import GGMLQuantizationType

    kinds = Counter(
        tensor.kind for tensor in GGUFFile(source.path).tensors.values() if len(tensor.shape) == 2
    )
    name = GGMLQuantizationType(kinds.most_common(1)[0][0]).name if kinds else ""
    return "" if name in ("F32", "F16", "BF16", "F64") else name

"""Weights into a model: one tensor at a time from the file, to the device, into its place and its
scheme.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jitney.engine.checkpoints.fetch import Progress, no_progress
from jitney.engine.checkpoints.gguf import half_split
from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.checkpoints.names import Path, Piece, Target, check
from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.loading import repack
from jitney.engine.loading.checkpoint import Checkpoint, SlicedCheckpoint, open_checkpoint
from jitney.engine.loading.describe import describe_weights
from jitney.engine.loading.slices import Sliceable, Stacked
from jitney.engine.models.layers import DType, Linear
from jitney.engine.models.protocol import Model
from jitney.engine.models.quantization import Packed, group_size, quantise
from jitney.engine.models.registry import abstract_model, model_class, random_model
from jitney.engine.models.sharding import BY_INPUTS, Shares

log = logging.getLogger("jitney.core")

type _Arrays = dict[Path, Array]


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """How matrices are stored on the device."""

    #: What floats are rounded to, one of SCHEMES.
    scheme: str = "plain"
    #: Schemes in which a matrix of the checkpoint is taken as it is, number for number.
    as_stored: frozenset[str] = frozenset()


def load_model(
    source: ModelSource,
    config: ModelConfig,
    dtype: DType = jnp.float32,
    progress: Progress = no_progress,
    *,
    storage: WeightStorage = WeightStorage(),
    mesh: Mesh | None = None,
) -> Model:
    """The model with its weights on the default device, or split over a mesh; what is not quantised
    is in `dtype`.

    progress("weights", tensors done, tensors in all, "") is called after each tensor. Raises
    ModelError naming every missing, unexpected and misshapen tensor, ConfigError where the scheme
    does not fit the model. Host memory: one tensor; device: the weights and one tensor more.
    """
    shares = None if mesh is None else Shares(config, mesh)
    own = config if shares is None else shares.own
    if source.kind == "tiny":
        return _assemble(own, dtype, _random_arrays(config, dtype, storage, shares))
    weights = model_class(config.architecture).weight_map(config, source.kind)
    checkpoint = open_checkpoint(source, weights)
    check(weights, checkpoint.shapes)
    loader = _Loader(checkpoint, storage, shares)
    dtypes = _declared_dtypes(own, dtype)
    arrays: _Arrays = {}
    for done, target in enumerate(weights.targets, 1):
        arrays |= loader.arrays(target, dtypes[target.path])
        progress("weights", done, len(weights.targets), "")
    model = _assemble(own, dtype, arrays)
    log.info("weights: %s", describe_weights(model))
    return model


@dataclass(frozen=True)
class _Loader:
    """Where weights come from, and how and where they are stored."""

    checkpoint: Checkpoint
    storage: WeightStorage
    #: None: all on the default device.
    shares: Shares | None

    def arrays(self, target: Target, dtype: DType) -> _Arrays:
        """The arrays of one weight, on the default device or in shares."""
        if target.path[-1] != "kernel":
            return {target.path: self._floats(target, dtype, self.shares)}
        packed = self._as_stored(target)
        if packed is None and self.storage.scheme == "plain":
            return {target.path: self._floats(target, dtype, self.shares)}
        if packed is None:
            floats = self._floats(target, jnp.float32, None)
            packed = _rounded(target.path, floats, dtype, self.storage, self.shares)
        return _shared(_by_path(target.path, packed), self.shares)

    def _as_stored(self, target: Target) -> Packed | None:
        """A fused matrix as its pieces are stored; None unless all are taken so and are alike."""
        if not self.storage.as_stored:
            return None
        parts: list[Packed] = []
        for piece in target.pieces:
            part = self.checkpoint.packed(piece.name)
            if part is None or part.scheme not in self.storage.as_stored:
                return None
            parts.append(_reordered(part, piece))
        return repack.stack(parts)

    def _floats(self, target: Target, dtype: DType, shares: Shares | None) -> Array:
        """One weight in floats; with shares, each goes straight from the host to its device."""
        finish = partial(
            _fuse, dtype=jnp.dtype(dtype), transpose=target.transpose, offset=target.offset
        )
        if shares is None:
            return finish([jnp.asarray(self._read(piece)) for piece in target.pieces])
        stored = Stacked([self._sliced(piece) for piece in target.pieces])
        return shares.send(
            target.path, stored, lambda part: finish([part]), transposed=target.transpose
        )

    def _sliced(self, piece: Piece) -> Sliceable:
        """A tensor as `_read` has it, left in its file where that can be."""
        if isinstance(self.checkpoint, SlicedCheckpoint) and not piece.paired_heads:
            return self.checkpoint.sliced(piece.name)
        return self._read(piece)

    def _read(self, piece: Piece) -> np.ndarray:
        """A tensor as floats, its rows in our order."""
        rows = self.checkpoint.read(piece.name)
        if not piece.paired_heads:
            return rows
        return rows[half_split(len(rows), piece.paired_heads)]


def _reordered(packed: Packed, piece: Piece) -> Packed:
    """A piece with its outputs in our order."""
    if not piece.paired_heads:
        return packed
    order = half_split(piece.shape[0], piece.paired_heads)
    return jax.tree.map(lambda array: array[..., order], packed)


@partial(jax.jit, static_argnames=("dtype", "transpose", "offset"))
def _fuse(parts: list[Array], *, dtype: np.dtype, transpose: bool, offset: float) -> Array:
    """Parts [O_i, I] -> [sum O_i, I], or [I, sum O_i] if transposed, in dtype; on the device, by
    all its threads.
    """
    whole = jnp.concatenate(parts)
    if offset:
        whole = whole.astype(jnp.float32) + offset
    whole = whole.astype(dtype)
    if transpose:
        whole = whole.T
    return whole


def _rounded(
    path: Path, floats: Array, dtype: DType, storage: WeightStorage, shares: Shares | None
) -> Packed:
    """A matrix [I, O] in the scheme."""
    group = 0
    if storage.scheme == "int4":
        group = group_size(_inputs_of(path, floats, shares))
    return quantise(floats, scheme=storage.scheme, dtype=dtype, group=group)


def _inputs_of(path: Path, floats: Array, shares: Shares | None) -> int:
    """On one device: groups of int4 are so small that each device has whole ones."""
    if shares is not None and set(BY_INPUTS) & set(path):
        return floats.shape[0] // shares.mesh.size
    return floats.shape[0]


def _by_path(path: Path, packed: Packed) -> _Arrays:
    """The arrays of a matrix by their own paths; path: of its kernel."""
    arrays = packed._asdict().items()
    return {(*path[:-1], name): array for name, array in arrays if array is not None}


def _shared(arrays: _Arrays, shares: Shares | None) -> _Arrays:
    """Whole arrays, every device holding its share."""
    if shares is None:
        return arrays
    return {path: shares.place(path, array) for path, array in arrays.items()}


def _declared_dtypes(config: ModelConfig, dtype: DType) -> dict[Path, DType]:
    state = nnx.state(abstract_model(config, dtype=dtype))
    return {path: leaf.dtype for path, leaf in _flat_leaves(state)}


def _assemble(config: ModelConfig, dtype: DType, arrays: _Arrays) -> Model:
    """A model around arrays given by path; every tensor of the model must be there in its shape."""
    model = abstract_model(config, dtype=dtype)
    for path in arrays:
        if path[-1] == "kernel":
            packed = [arrays.get((*path[:-1], name)) for name in Packed._fields]
            _linear_at(model, path).set_matrix(Packed(*packed))
    graph, state = nnx.split(model)
    leaves = [(path, leaf.replace(arrays.pop(path))) for path, leaf in _flat_leaves(state)]
    assert not arrays, sorted(arrays)
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def _linear_at(model: Model, path: Path) -> Linear:
    module: Any = model
    for name in path[:-1]:
        module = module[name] if isinstance(name, int) else getattr(module, name)
    return module


def _flat_leaves(state: Any) -> list[tuple[Path, Any]]:
    leaves: Any = nnx.to_flat_state(state)
    return list(leaves)


def _random_arrays(
    config: ModelConfig, dtype: DType, storage: WeightStorage, shares: Shares | None
) -> _Arrays:
    """Those of the random model, packed and shared as loaded ones would be."""
    arrays: _Arrays = {}
    for path, leaf in _flat_leaves(nnx.state(random_model(config, dtype=dtype))):
        parts = {path: leaf[...]}
        if path[-1] == "kernel":
            parts = _by_path(path, _rounded(path, leaf[...], dtype, storage, shares))
        arrays |= _shared(parts, shares)
    return arrays

"""Loads weights into a model: one tensor at a time from the file to its device and scheme."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.models.layers import Linear
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import Packed, greatest, group_size, quantise
from jitney.engine.core.models.registry import (
    abstract_model,
    fill_at_random,
    model_class,
    random_model,
)
from jitney.engine.core.models.sharding import TENSOR, Shares, whole_shape
from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoint import Checkpoint, may_keep, open_checkpoint
from jitney.engine.core.weights.checkpoints.fetch import Progress, no_progress
from jitney.engine.core.weights.checkpoints.files import Shape
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import Path, Piece, Target, WeightMap
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import describe_weights
from jitney.engine.core.weights.slices import Reordered, Sliceable, Stacked
from jitney.engine.core.weights.stored_matrix import StoredMatrix
from jitney.kernels.interface import KernelSet

_log = logging.getLogger("jitney.core")

type _Arrays = dict[Path, Array]


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """The storage of matrices on the device."""

    #: Scheme that floats are rounded to, one of Packed.schemes.
    scheme: str = "plain"
    #: Schemes in which matrices of a checkpoint are kept exactly.
    as_stored: frozenset[str] = frozenset()

    @classmethod
    def choose(cls, weights: str, platform: str, kernels: KernelSet) -> WeightStorage:
        """The storage of matrices under `weights`, a word of the configuration.

        auto keeps a checkpoint's quantised matrices where the device multiplies them: XLA widens 8
        bits inside products on GPUs and TPUs, int4 needs a kernel. A CPU would widen them anew in
        each step. Experts in MXFP4 are always kept: of a step only those that it chose are read.
        """
        if weights != "auto":
            return cls(weights, frozenset({weights} - {"plain"}))
        if platform == "cpu":
            return cls("plain", frozenset({"mxfp4"}))
        schemes = {"int8", "fp8", "mxfp4"}
        if kernels.multiplies_int4:
            schemes.add("int4")
        return cls("plain", frozenset(schemes))


def load_model(
    source: ModelSource,
    config: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    progress: Progress = no_progress,
    *,
    storage: WeightStorage = WeightStorage(),
    mesh: Mesh | None = None,
) -> Model:
    """Load the model to the default device, or split over a mesh; unquantised weights in `dtype`.

    progress("weights", bytes of the files done, all of them, "") is called before the first and
    after each tensor. Raises ModelError naming every missing, unexpected and misshapen tensor, and
    ConfigError where the scheme does not fit. The host holds one stored weight at a time; a device
    its share of it.
    """
    shares = None if mesh is None else Shares(config, mesh)
    own = config if shares is None else shares.own
    if source.kind == "tiny":
        return _assemble(own, dtype, _random_arrays(config, dtype, storage, shares))
    if not source.has_weights:
        _log.warning("weights are random (load_format dummy): answers mean nothing")
        n_shards = 1 if shares is None else shares.shards
        shapes = load_shapes(source, config, n_shards, dtype, storage)
        return fill_at_random(shapes, None if shares is None else shares.sharding)
    weights = model_class(config.architecture).weight_map(config, source.kind)
    checkpoint = open_checkpoint(source, weights)
    weights.check(checkpoint.shapes)
    loader = _Loader(checkpoint, storage, shares)
    declared = nnx.state(abstract_model(own, dtype=dtype))
    dtypes = {path: leaf.dtype for path, leaf in _flat_leaves(declared)}
    arrays: _Arrays = {}
    # A weight's bytes are estimated by its share of all numbers.
    counts = [_count(target, checkpoint.shapes) for target in weights.targets]
    numbers, total, done = sum(counts), checkpoint.stored_bytes, 0
    progress("weights", 0, total, "")
    for target, count in zip(weights.targets, counts, strict=True):
        placed = loader.arrays(target, dtypes[target.path])
        # Copies and rounding are asynchronous, and would hold one weight while the next is read.
        jax.block_until_ready(placed)
        arrays |= placed
        done += count
        progress("weights", total * done // numbers, total, "")
    model = _assemble(own, dtype, arrays)
    _log.info("weights: %s", describe_weights(model))
    return model


def _count(target: Target, shapes: Mapping[str, Shape]) -> int:
    """Numbers of a weight's tensors."""
    return sum(math.prod(shapes[piece.name]) for piece in target.pieces)


def load_shapes(
    source: ModelSource, whole: ModelConfig, shards: int, dtype: DTypeLike, storage: WeightStorage
) -> Model:
    """The model that `load_model` would make over so many devices, with shapes for arrays.

    shards: devices of one engine. whole: the configuration of all devices. If matrices may stay as
    stored, the first layer's are read, and the others are taken to be stored alike; else no file of
    weights is needed.
    """
    model = abstract_model(whole.local(shards), dtype=dtype, weights=storage.scheme)
    if source.kind != "tiny" and source.has_weights and may_keep(source, storage.as_stored):
        weights = model_class(whole.architecture).weight_map(whole, source.kind)
        loader = _Loader(open_checkpoint(source, weights), storage, None)
        _store_alike(model, weights, loader, dtype)
    groups = engines = 1
    if whole.experts is not None:
        groups, engines = whole.experts.all_groups, whole.experts.engines
    graph, state = nnx.split(model)
    leaves = []
    for path, leaf in _flat_leaves(state):
        shape = whole_shape(path, leaf.shape, shards, groups, engines)
        leaves.append((path, leaf.replace(jax.ShapeDtypeStruct(shape, leaf.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def _store_alike(model: Model, weights: WeightMap, loader: _Loader, dtype: DTypeLike) -> None:
    """Give the matrices of an abstract model the schemes that their checkpoint has."""
    plain = abstract_model(model.config, dtype=dtype)
    schemes: dict[Path, tuple[str, int] | None] = {}
    for target in weights.targets:
        path = target.path
        if path[-1] != "kernel":
            continue
        place = tuple(name for name in path if not isinstance(name, int))
        if place not in schemes:
            schemes[place] = loader.stored_scheme(target)
        stored = schemes[place]
        if stored is not None:
            scheme, group = stored
            pack = partial(quantise, scheme=scheme, dtype=dtype, group=group)
            packed = jax.eval_shape(pack, linear_at(plain, path).packed.kernel)
            linear_at(model, path).set_matrix(packed)


@dataclass(frozen=True)
class _Loader:
    """Loads weights: source, storage scheme and devices."""

    checkpoint: Checkpoint
    storage: WeightStorage
    #: None: all on the default device.
    shares: Shares | None

    def arrays(self, target: Target, dtype: DTypeLike) -> _Arrays:
        """The arrays of one weight, on the default device or in shares."""
        path, shares = target.path, self.shares
        matrices = self._as_stored(target)
        if matrices is not None and shares is None:
            return _by_path(path, repack.join([matrix.packed() for matrix in matrices]))
        if matrices is not None and shares is not None:
            return _in_shares(path, matrices, shares)
        pieces = [_sliced(self.checkpoint, piece) for piece in target.pieces]
        work = self._finish(target, dtype, pieces[0].shape[-1])
        if shares is None:
            return _by_path(path, work([jnp.asarray(piece[...]) for piece in pieces], None))
        return self._split(target, Stacked(pieces), work, shares)

    def _as_stored(self, target: Target) -> list[StoredMatrix] | None:
        """The pieces of a matrix that is kept as stored; None unless all are kept and are alike."""
        if not self.storage.as_stored or target.path[-1] != "kernel":
            return None
        matrices: list[StoredMatrix] = []
        for piece in target.pieces:
            matrix = self.checkpoint.matrix(piece.name)
            if matrix is not None and piece.column_order:
                # A device's share of inputs in another order is no range of them.
                matrix = _regrouped(matrix, piece) if self.shares is None else None
            if matrix is None:
                return None
            matrices.append(_reordered(matrix, piece))
        described = [matrix.described() for matrix in matrices]
        if {one.scheme for one in described} - self.storage.as_stored:
            return None
        return None if jax.eval_shape(repack.alike, described) is None else matrices

    def stored_scheme(self, target: Target) -> tuple[str, int] | None:
        """The scheme and int4 group of a matrix that is kept as stored; None: floats are loaded."""
        stored = self._as_stored(target)
        if stored is None:
            return None
        return stored[0].described().scheme, stored[0].group

    def _split(self, target: Target, stored: Sliceable, work: _Finish, shares: Shares) -> _Arrays:
        """A weight of floats in shares, each read from the file and finished on its device."""
        most = _most_elsewhere(target.path, stored, shares) if work.groups else None
        pieces = shares.send(target.path, stored, transposed=target.transpose)
        finished = [_by_path(target.path, own) for own in shares.on_each(work, pieces, most)]
        return {name: shares.join(name, [own[name] for own in finished]) for name in finished[0]}

    def _finish(self, target: Target, dtype: DTypeLike, inputs: int) -> _Finish:
        """The conversion from floats to this weight; inputs: of the whole matrix."""
        path, scheme, shares = target.path, self.storage.scheme, self.shares
        work = _Finish(jnp.dtype(dtype), target.transpose, target.offset)
        if path[-1] != "kernel" or scheme == "plain":
            return work
        if scheme == "int4":
            return replace(work, scheme=scheme, group=_group(path, inputs, shares))
        groups: tuple[int, ...] = ()
        if shares is not None and shares.splits_inputs(path):
            groups = tuple(shares.group_of(path, number) for number in shares.own_numbers)
        return replace(work, scheme=scheme, groups=groups)


def _sliced(checkpoint: Checkpoint, piece: Piece) -> Sliceable:
    """A tensor as floats with rows and columns in the model's order, read lazily if possible."""
    stored = checkpoint.sliced(piece.name)
    order = piece.order
    if order is not None:
        stored = Reordered(stored, order)
    if piece.column_order:
        stored = Reordered(stored, np.array(piece.column_order), axis=1)
    return stored


def _reordered(matrix: StoredMatrix, piece: Piece) -> StoredMatrix:
    """A piece with its outputs in our order."""
    order = piece.order
    if order is None:
        return matrix
    return replace(matrix, order=tuple(order.tolist()))


def _regrouped(matrix: StoredMatrix, piece: Piece) -> StoredMatrix | None:
    """A piece with its inputs in our order; None where that would tear groups of a scale."""
    size, order = matrix.group, np.array(piece.column_order)
    if not size or len(order) % size:
        return None
    groups = order.reshape(-1, size)
    firsts = groups[:, :1]
    if (firsts % size).any() or (groups != firsts + np.arange(size)).any():
        return None
    numbers = tuple((firsts.ravel() // size).tolist())
    return replace(matrix, lay_out=repack.Regrouped(matrix.lay_out, numbers))


def _in_shares(path: Path, matrices: list[StoredMatrix], shares: Shares) -> _Arrays:
    """Matrices side by side in shares: each device gets its part as stored, and lays it out."""
    _check_groups(path, matrices[0], shares)
    parts = [_parts_of(path, matrices, shares, number) for number in shares.own_numbers]
    laid_out = [_laid_out(alike, shares) for alike in zip(*parts, strict=True)]
    joined = laid_out[0]
    if len(laid_out) > 1:
        joined = shares.on_each(_join, list(zip(*laid_out, strict=True)))
    finished = [_by_path(path, own) for own in joined]
    return {name: shares.join(name, [own[name] for own in finished]) for name in finished[0]}


def _laid_out(parts: tuple[_Part, ...], shares: Shares) -> list[Packed]:
    """Lay out a part of equal size on each of this host's devices."""
    devices = [shares.mesh.devices.flat[number] for number in shares.own_numbers]
    read = [
        jax.device_put(part.matrix.read(part.matrix.span(part.outputs), part.inputs), device)
        for part, device in zip(parts, devices, strict=True)
    ]
    work = parts[0].matrix.part(parts[0].size, parts[0].outputs.start)
    return shares.on_each(work, read)


def _join(parts: tuple[Packed, ...], scale: Array | None) -> Packed:
    """See `Shares.on_each`."""
    return repack.join(list(parts))


class _Part(NamedTuple):
    """Some outputs and inputs of a stored matrix."""

    matrix: StoredMatrix
    outputs: slice
    inputs: slice

    @property
    def size(self) -> tuple[int, int]:
        return (
            self.outputs.stop - self.outputs.start,
            self.inputs.stop - self.inputs.start,
        )


def _parts_of(path: Path, matrices: list[StoredMatrix], shares: Shares, device: int) -> list[_Part]:
    """A device's parts of matrices that lie one behind the other, in its own order."""
    shape = sum([matrix.shape[0] for matrix in matrices]), matrices[0].shape[1]
    _, places = shares.places(path, shape, device, transposed=True)
    pieces = []
    for outputs, inputs in places:
        first = 0
        for matrix in matrices:
            low = max(outputs.start - first, 0)
            high = min(outputs.stop - first, matrix.shape[0])
            if low < high:
                pieces.append(_Part(matrix, slice(low, high), inputs))
            first += matrix.shape[0]
    return pieces


def _check_groups(path: Path, matrix: StoredMatrix, shares: Shares) -> None:
    """ConfigError where a group of inputs that share a scale would be torn."""
    group = matrix.group
    if not group or not shares.splits_inputs(path):
        return
    groups, parts = matrix.shape[1] // group, shares.input_shards(path)
    if groups % parts:
        experts = shares.config.experts is not None and "down" in path
        advice = "; deal out whole experts with expert_parallel" if experts else ""
        raise ConfigError(
            f"tensor_parallel {shares.shards} does not divide the {groups} groups of inputs of "
            f"quantised {'.'.join(map(str, path))}{advice}"
        )


@partial(jax.jit, static_argnames=("dtype", "transpose", "offset"))
def _fuse(parts: list[Array], *, dtype: np.dtype, transpose: bool, offset: float) -> Array:
    """Parts [O_i, I] -> [sum O_i, I], or [I, sum O_i] if transposed, in dtype, on the device."""
    whole = jnp.concatenate(parts)
    if offset:
        whole = whole.astype(jnp.float32) + offset
    whole = whole.astype(dtype)
    if transpose:
        whole = whole.T
    return whole


@dataclass(frozen=True)
class _Finish:
    """Converts a device's share of a stored tensor to the model's form."""

    dtype: np.dtype
    #: [O, I] becomes [I, O].
    transpose: bool
    #: Then added to every number.
    offset: float
    scheme: str = "plain"
    #: R of int4.
    group: int = 0
    #: The scale of an output is that of its inputs on all devices with the same number, one for
    #: each device of this host; empty: that of its own inputs.
    groups: tuple[int, ...] = ()

    def __call__(self, part: Array | list[Array], most: Array | None) -> Packed:
        """See `Shares.on_each`. part: the share, or parts [O_i, I] of one. most: greatest
        magnitudes on other hosts, float32 [groups, O].
        """
        parts = part if isinstance(part, list) else [part]
        dtype = self.dtype if self.scheme == "plain" else jnp.dtype(jnp.float32)
        floats = _fuse(parts, dtype=dtype, transpose=self.transpose, offset=self.offset)
        if self.scheme == "plain":
            return Packed(floats)
        if self.groups:
            own = TENSOR.largest_of_group(greatest(floats), self.groups)
            group = jnp.array(self.groups)[TENSOR.number()]
            most = own if most is None else jnp.maximum(own, most[group])
        return quantise(floats, scheme=self.scheme, dtype=dtype, group=self.group, most=most)


def _group(path: Path, inputs: int, shares: Shares | None) -> int:
    """Inputs of a group of int4; so few that each device has whole ones."""
    if shares is not None and shares.splits_inputs(path):
        inputs //= shares.input_shards(path)
    return group_size(inputs)


def _most_elsewhere(path: Path, stored: Sliceable, shares: Shares) -> np.ndarray | None:
    """The greatest magnitude of each output among inputs of other hosts, float32 [groups, O], or
    None.

    Each host reads them itself, since a collective would make all hosts wait for each other.
    """
    most = None
    n_groups = shares.mesh.size // shares.input_shards(path)
    for number in shares.engines_numbers:
        if number not in shares.own_numbers:
            part = jnp.asarray(shares.cut(path, stored, number, transposed=True))
            maxima = np.asarray(greatest(part.T))
            if most is None:
                most = np.zeros((n_groups, maxima.size), np.float32)
            group = shares.group_of(path, number)
            most[group] = np.maximum(most[group], maxima)
    return most


def _by_path(path: Path, packed: Packed) -> _Arrays:
    """The arrays of a matrix by their own paths; path: of its kernel."""
    arrays = packed._asdict().items()
    if path[-1] != "kernel":
        return {path: packed.kernel}
    return {(*path[:-1], name): array for name, array in arrays if array is not None}


def _assemble(config: ModelConfig, dtype: DTypeLike, arrays: _Arrays) -> Model:
    """A model around arrays given by path; every tensor of the model must be there in its shape."""
    model = abstract_model(config, dtype=dtype)
    for path in arrays:
        if path[-1] == "kernel":
            packed = [arrays.get((*path[:-1], name)) for name in Packed._fields]
            linear_at(model, path).set_matrix(Packed(*packed))
    graph, state = nnx.split(model)
    leaves = [(path, leaf.replace(arrays.pop(path))) for path, leaf in _flat_leaves(state)]
    assert not arrays, sorted(arrays)
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def linear_at(model: Model, path: Path) -> Linear:
    """The linear layer whose matrix has this path."""
    module: Any = model
    for name in path[:-1]:
        module = module[name] if isinstance(name, int) else getattr(module, name)
    return module


def _flat_leaves(state: Any) -> list[tuple[Path, Any]]:
    leaves: Any = nnx.to_flat_state(state)
    return list(leaves)


def _random_arrays(
    config: ModelConfig, dtype: DTypeLike, storage: WeightStorage, shares: Shares | None
) -> _Arrays:
    """The arrays of the random model, packed and shared as loaded ones would be."""
    arrays: _Arrays = {}
    for path, leaf in _flat_leaves(nnx.state(random_model(config, dtype=dtype))):
        parts = {path: leaf[...]}
        if path[-1] == "kernel":
            group = 0
            if storage.scheme == "int4":
                group = _group(path, leaf[...].shape[0], shares)
            packed = quantise(leaf[...], scheme=storage.scheme, dtype=dtype, group=group)
            parts = _by_path(path, packed)
        for name, array in parts.items():
            arrays[name] = array if shares is None else shares.place(name, array)
    return arrays

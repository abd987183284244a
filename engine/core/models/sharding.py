"""Tensor parallelism: one step on several devices, each with its share of heads, feed-forward and
vocabulary.

The whole step runs under `jax.shard_map` over one mesh axis, so every device runs an ordinary
model, the one of `ModelConfig.local`, on its share of the weights and of the KV pools, with the
kernels of one device (the split is that of Megatron-LM, arXiv 1909.08053). `_Axis` joins the shares
again: `total` after the two products that end a layer's halves; `executor.vocabulary` has the
operations for the sampler. Plans and uploads are the same on all devices.

Engines that share the experts of a mixture run one step over a mesh of two axes, in which each
engine has a row of devices: TENSOR splits one engine's devices as before, and along DATA every
engine has its own rows, pools and seats. Experts are distributed over both axes
(`_Axis.rows_of_all` and `own_sums` send rows to them and back); all other weights are the same
along DATA.

Axes as in `jitney.kernels.interface`, with H, K, F and V counted over all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.weights.checkpoints.layer_configs import LatentConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import Path


@dataclass(frozen=True)
class _Axis:
    """An axis of the mesh, with operations that join its devices' arrays, inside a step only."""

    name: str

    def number(self) -> Array:
        """This device's index on the axis, int32."""
        return jax.lax.axis_index(self.name)

    def total(self, x: Array) -> Array:
        """Sum of every device's x, on every device."""
        return jax.lax.psum(x, self.name)

    def largest(self, x: Array) -> Array:
        """Elementwise maximum of every device's x, on every device."""
        return jax.lax.pmax(x, self.name)

    def largest_of_group(self, x: Array, groups: Sequence[int]) -> Array:
        """Elementwise maximum among the devices of this device's group. groups: the group of each
        device of the axis.
        """
        all_x = jax.lax.all_gather(x, self.name)
        numbers = jnp.array(groups)
        mine = numbers == numbers[self.number()]
        return jnp.max(jnp.where(mine[:, None], all_x, -jnp.inf), axis=0)

    def side_by_side(self, x: Array) -> Array:
        """Every device's columns: [R, C / n] -> [R, C]."""
        return jax.lax.all_gather(x, self.name, axis=1, tiled=True)

    def rows_of_all(self, x: Array) -> Array:
        """Every device's rows, concatenated: [T, E] -> [n * T, E]."""
        return jax.lax.all_gather(x, self.name, tiled=True)

    def own_sums(self, x: Array) -> Array:
        """This device's rows of the sum over all devices: [n * T, E] -> [T, E]."""
        return jax.lax.psum_scatter(x, self.name, tiled=True)


#: The mesh axis over which an engine is split, and the axis of engines that share experts.
TENSOR, DATA = _Axis("tensor"), _Axis("data")
WHOLE = PartitionSpec()
#: Weights of recurrent layers per head or channel, beside their matrices.
_OF_RECURRENT = ("rates", "taps", "taps_bias", "log_decay", "rate_bias", "skip", "value_norm")
#: Modules and weights whose outputs (the last axis) are split, and modules whose inputs (the axis
#: before the last, of a matrix) are split.
_BY_OUTPUTS = ("qkv", "q_b", "gate_up", "lm_head", "wide_q_norm", "wide_k_norm", *_OF_RECURRENT)
_BY_INPUTS = ("o", "down")
#: Weights whose first axis runs along heads.
_BY_HEADS = ("kv_scales", "sinks", "to_latent", "from_latent")


def make_mesh(devices: Sequence[Any], engines: int = 1) -> Mesh:
    """The mesh of one engine's devices, or of several engines that share experts, engine by engine.
    The order of devices is the order of the shares.
    """
    if engines == 1:
        return Mesh(np.array(devices), (TENSOR.name,))
    return Mesh(np.array(devices).reshape(engines, -1), (DATA.name, TENSOR.name))


def own_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh of this engine's devices; in a mesh of several engines, those of this process."""
    if mesh is None or engines_of(mesh) == 1:
        return mesh
    return make_mesh([device for device in mesh.devices.flat if _is_here(device)])


def _is_here(device: Any) -> bool:
    return device.process_index == jax.process_index()


def engines_of(mesh: Any) -> int:
    """Number of engines that run their steps together on this mesh."""
    return mesh.shape.get(DATA.name, 1)


def of_each_engine(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """The spec of all engines' arrays, concatenated along the first axis. spec: of one engine's
    array.
    """
    if engines_of(mesh) == 1:
        return spec
    return PartitionSpec(DATA.name, *spec[1:])


def experts_axes(mesh: Mesh) -> Any:
    """The mesh axes over which experts are distributed."""
    return (DATA.name, TENSOR.name) if engines_of(mesh) > 1 else TENSOR.name


def _is_of_experts(path: Path) -> bool:
    """Whether a mixture's weight belongs to one expert, not to all rows."""
    return ("gate_up" in path or "down" in path) and "shared" not in path


def _axis_of(path: Path, ndim: int, groups: int = 1) -> int | None:
    """The axis along which a weight is split; None: every device has all of it. groups: number of
    device groups with different experts, `ExpertsConfig.all_groups`.
    """
    if path[-1] == "embed" or not set(path).isdisjoint(_BY_HEADS):
        return 0
    if path[-2:] == ("adapters", "owners"):
        return None
    names = set(path)
    if names & set(_BY_OUTPUTS) and ndim:
        return None if path[-2:] == ("adapters", "a") else ndim - 1
    if names & set(_BY_INPUTS) and ndim >= 2:
        # The first axis, except for separate experts [X, I, O].
        return None if path[-2:] == ("adapters", "b") else ndim - 2
    if groups > 1 and "down" in names and "shared" not in names:
        return 0  # every group has other experts' scales
    # A bias, or a scale of each output, is applied after the sum over the devices: not split.
    return None


def _sharding_of(path: Path, ndim: int, mesh: Mesh, groups: int = 1) -> NamedSharding:
    """The split of a weight over the devices."""
    axis = _axis_of(path, ndim, groups)
    if axis is None:
        return NamedSharding(mesh, WHOLE)
    split = experts_axes(mesh) if _is_of_experts(path) else TENSOR.name
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, split))


def whole_shape(
    path: Path, own: Sequence[int], shards: int, groups: int = 1, engines: int = 1
) -> tuple[int, ...]:
    """A weight's shape over all devices, given that of one device's share. shards: devices of one
    engine.
    """
    whole = list(own)
    axis = _axis_of(path, len(own), groups)
    if axis is not None:
        whole[axis] *= shards
        if _is_of_experts(path):
            whole[axis] *= engines
    return tuple(whole)


@partial(jax.jit, static_argnames=("work", "mesh"))
def _run_on_each(stacked: Any, known: Any, *, work: Any, mesh: Mesh) -> Any:
    """See `Shares.on_each`; every array is split along its first axis."""
    split = PartitionSpec(TENSOR.name)
    program = jax.shard_map(
        work, mesh=mesh, in_specs=(split, WHOLE), out_specs=split, check_vma=False
    )
    return program(stacked, known)


@partial(jax.jit, static_argnames=("work", "mesh", "before", "after"))
def laid_out_anew(
    array: Array,
    work: Callable[[Array], Array],
    mesh: Mesh,
    *,
    before: PartitionSpec,
    after: PartitionSpec,
) -> Array:
    """Apply `work` to each device's share of an array, without sending data.

    before, after: how the array and the result are split. work: as for `Shares.on_each`.
    """
    return jax.shard_map(work, mesh=mesh, in_specs=before, out_specs=after)(array)


def _single_arrays(array: Array, mesh: Mesh) -> list[Array]:
    """Each device's part of an array, in the order of the mesh's devices."""
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    return [parts[device] for device in mesh.devices.flat]


def _stacked(mesh: Mesh, *parts: Array) -> Array:
    """Concatenate arrays of the same shape, one on each device of the mesh, along the first
    axis.
    """
    rows, *rest = parts[0].shape
    return jax.make_array_from_single_device_arrays(
        (len(parts) * rows, *rest), NamedSharding(mesh, PartitionSpec(TENSOR.name)), list(parts)
    )


def _run(first: int, count: int) -> slice:
    return slice(first, first + count)


@dataclass(frozen=True)
class Shares:
    """The split of a model's weights over the devices."""

    #: The whole model's configuration.
    config: ModelConfig
    mesh: Mesh

    @property
    def shards(self) -> int:
        """Number of devices of one engine."""
        return self.mesh.shape[TENSOR.name]

    @property
    def engines(self) -> int:
        """Number of engines that share the experts."""
        return engines_of(self.mesh)

    @property
    def own(self) -> ModelConfig:
        """The configuration of the model that one device runs."""
        return self.config.local(self.shards)

    @cached_property
    def group_size(self) -> int:
        """Number of devices of a group with its own experts; without experts, of an engine."""
        experts = self.config.experts
        return self.shards // (1 if experts is None else experts.groups)

    @property
    def groups(self) -> int:
        """Number of groups of all engines."""
        return self.mesh.size // self.group_size

    @staticmethod
    def splits_inputs(path: Path) -> bool:
        """Whether the inputs of a matrix are split, not its outputs."""
        return not set(path).isdisjoint(_BY_INPUTS)

    def input_shards(self, path: Path) -> int:
        """Number of devices over which the inputs of a matrix are split."""
        if "down" in path and "shared" not in path:
            return self.group_size
        return self.shards

    def group_of(self, path: Path, device: int) -> int:
        """Index of the group of devices that together hold a matrix whose inputs are split."""
        return device // self.input_shards(path)

    def ranges(self, path: Path, size: int, device: int) -> list[slice]:
        """The indices along the split axis that the device holds, in its own order. size: of that
        axis, in the checkpoint's order. device: its number among those of all engines.

        A fused projection is split piece by piece, so that each device has its own (q, k, v) or
        (gate, up).
        """
        own = self.own
        if path[-1] == "kv_scales":
            heads = self._of_layer(own, path).n_kv_heads
            return [_run(2 * self._first_kv(path, device), 2 * heads)]
        if path[-1] == "sinks":
            return [_run(device % self.shards * own.n_heads, own.n_heads)]
        if self._is_recurrent(path) and ("qkv" in path or path[-1] in _OF_RECURRENT):
            return self._of_recurrent("qkv" if "qkv" in path else str(path[-1]), device)
        if "qkv" in path and self.config.latent is not None:
            return self._beside_latent(self.config.latent, device)
        if "qkv" in path:
            return self._heads(path, device)
        if "wide_q_norm" in path:
            return [self._queries(path, device)]
        if "wide_k_norm" in path:
            return [self._keys(path, device)]
        if "gate_up" in path:
            return self._gates(path, device)
        parts = own.shards
        if self.splits_inputs(path):
            parts = self.input_shards(path)
        number = device % parts
        if size % parts:
            raise ConfigError(
                f"tensor_parallel {own.shards} does not divide the {size} groups of inputs of "
                f"quantised {'.'.join(map(str, path))}"
            )
        return [_run(number * size // parts, size // parts)]

    @staticmethod
    def _of_layer(config: ModelConfig, path: Path) -> ModelConfig:
        """The configuration of a weight's layer."""
        return config.of_layer(int(path[1]))

    def _first_kv(self, path: Path, device: int) -> int:
        """The device's first KV head; devices beyond the KV heads share them."""
        heads = self._of_layer(self.config, path).n_kv_heads
        return device % self.shards * heads // self.shards

    def _is_recurrent(self, path: Path) -> bool:
        """Whether a weight belongs to a recurrent layer's first half."""
        own = self.config.recurrent
        return own is not None and "attention" in path and path[1] in own.layers

    def _of_recurrent(self, name: str, device: int) -> list[slice]:
        """The device's heads in each part of a weight with this name. If a part has fewer heads
        than there are devices, devices share them.
        """
        assert self.config.recurrent is not None
        number, ranges, begin = device % self.shards, [], 0
        for heads, width in self.config.recurrent.parts(name):
            own = number * heads // self.shards
            count = max(1, heads // self.shards)
            ranges.append(_run(begin + own * width, count * width))
            begin += heads * width
        return ranges

    def _heads(self, path: Path, device: int) -> list[slice]:
        """Columns of the fused query, key and value projection."""
        whole, keys = self._of_layer(self.config, path), self._keys(path, device)
        count = keys.stop - keys.start
        gated = 1 + whole.attention_gate
        own, all_queries = self._queries(path, device), whole.n_heads * whole.head_dim
        queries = [slice(gated * own.start, gated * own.stop)]
        if whole.gates_apart:
            queries = [own, slice(all_queries + own.start, all_queries + own.stop)]
        first, size = gated * all_queries, whole.n_kv_heads * whole.head_dim
        starts = (first + number * size + keys.start for number in range(whole.kv_projections))
        return [*queries, *(_run(start, count) for start in starts)]

    def _beside_latent(self, latent: LatentConfig, device: int) -> list[slice]:
        """Columns of the first projection of latent attention: the queries of the device's heads,
        or the row from which all queries are made, and the row for the pool, which every device
        has.
        """
        pool_row = _run(self.config.qkv_size - self.config.head_dim, self.config.head_dim)
        if latent.query_rank:
            return [slice(0, pool_row.stop)]
        count = self.own.n_heads * latent.query_dim
        return [_run(device % self.shards * count, count), pool_row]

    def _queries(self, path: Path, device: int) -> slice:
        """Columns of the device's query heads."""
        count = self.own.n_heads * self._of_layer(self.own, path).head_dim
        return _run(device % self.shards * count, count)

    def _keys(self, path: Path, device: int) -> slice:
        """Columns of the device's key heads, or value heads, among all of them."""
        own = self._of_layer(self.own, path)
        return _run(self._first_kv(path, device) * own.head_dim, own.n_kv_heads * own.head_dim)

    def _gates(self, path: Path, device: int) -> list[slice]:
        """Columns of a feed-forward's first matrix, gates and ups or only ups; in a mixture those
        of all the device's experts, or of the shared expert.
        """
        matrices, whole_layer = 1 + self.config.is_gated, self._of_layer(self.config, path)
        if "shared" in path:
            mixture = whole_layer.experts
            size = whole_layer.intermediate_size if mixture is None else mixture.shared_size
            count = size // self.shards
            first = device % self.shards * count
            return [_run(matrix * size + first, count) for matrix in range(matrices)]
        own, whole = self._of_layer(self.own, path).intermediate_size, whole_layer.intermediate_size
        n_experts = 1
        if self.own.experts is not None:
            n_experts = self.own.experts.own
        group, number = divmod(device, self.group_size)
        indices = range(matrices * group * n_experts, matrices * (group + 1) * n_experts)
        return [_run(matrix * whole + number * own, own) for matrix in indices]

    def _answers(self, size: int, device: int) -> slice:
        """Columns of a feed-forward's last matrix that belong to the group's experts. size: number
        of columns of all experts.
        """
        own = size // self.groups
        return _run(device // self.group_size * own, own)

    def cut(self, path: Path, array: Any, device: int, *, transposed: bool = False) -> Any:
        """One device's share of a weight in the checkpoint's order. array: numpy, jax, or still in
        its file (`weights.slices`), of which only the share is read. transposed: a matrix [O, I].
        """
        if _axis_of(path, array.ndim, self.groups) is None:
            return array[...]
        axis, places = self.places(path, array.shape, device, transposed=transposed)
        parts = [array[place] for place in places]
        if len(parts) == 1:
            return parts[0]
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts, axis=axis)
        return jnp.concatenate(parts, axis=axis)

    def places(
        self, path: Path, shape: Sequence[int], device: int, *, transposed: bool = False
    ) -> tuple[int, list[tuple[slice, ...]]]:
        """The position of a device's share in a split weight of this shape. -> (the axis along
        which there may be several parts, each part's slice of every axis). See `cut` for the rest.
        """
        axis = _axis_of(path, len(shape), self.groups)
        assert axis is not None
        outputs = len(shape) - 1
        if transposed:
            axis, outputs = outputs - axis, 0
        place = [slice(0, size) for size in shape]
        if "down" in path and "shared" not in path and self.groups > 1:
            place[outputs] = self._answers(shape[outputs], device)
            if axis == outputs:
                return axis, [tuple(place)]
        parts = self.ranges(path, shape[axis], device)
        return axis, [(*place[:axis], part, *place[axis + 1 :]) for part in parts]

    def sharding(self, path: Path, ndim: int) -> NamedSharding:
        """The sharding of a weight with `ndim` dimensions."""
        return _sharding_of(path, ndim, self.mesh, self.groups)

    def place(self, path: Path, array: Any) -> Array:
        """Split a whole weight in the checkpoint's order, numpy or jax, over the devices."""
        return self.join(path, self.send(path, array, transposed=False))

    def send(self, path: Path, stored: Any, *, transposed: bool) -> list[Array]:
        """Copy the shares of a whole weight ([O, I] if transposed, see `cut`) to this host's
        devices, in the stored format. -> the shares, each on its device.

        No device ever holds more than its share, and a host only reads the shares of its own
        devices.
        """
        pieces = []
        for number, device in enumerate(self.mesh.devices.flat):
            if number in self.own_numbers:
                own = self.cut(path, stored, number, transposed=transposed)
                pieces.append(jax.device_put(own, device))
        return pieces

    @cached_property
    def own_numbers(self) -> tuple[int, ...]:
        """Numbers of this host's devices in the mesh."""
        devices = enumerate(self.mesh.devices.flat)
        return tuple(number for number, device in devices if _is_here(device))

    @property
    def engines_numbers(self) -> range:
        """Numbers of the devices of this host's engine, some of which may be on other hosts."""
        engine = self.own_numbers[0] // self.shards
        return range(engine * self.shards, (engine + 1) * self.shards)

    def on_each(
        self, work: Callable[[Any, Any], Any], pieces: Sequence[Any], known: Any = None
    ) -> list[Any]:
        """Run work(a device's share, known) on each of this host's devices, as one program. In it,
        TENSOR is the axis of this host's devices.

        work: equal functions must compare equal, or each is compiled; may return a tree of arrays.
        pieces: an array, or a tree of arrays, for each device, with at least one axis. known: an
        argument that is the same for all devices, or None.
        """
        mesh = make_mesh([self.mesh.devices.flat[number] for number in self.own_numbers])
        stacked = jax.tree.map(partial(_stacked, mesh), *pieces)
        leaves, tree = jax.tree.flatten(_run_on_each(stacked, known, work=work, mesh=mesh))
        by_leaf = [_single_arrays(leaf, mesh) for leaf in leaves]
        return [jax.tree.unflatten(tree, own) for own in zip(*by_leaf, strict=True)]

    def join(self, path: Path, pieces: Sequence[Array]) -> Array:
        """Join the devices' shares, each on its device, into one array. With several hosts, pieces
        are only the shares of this host's devices.
        """
        own = pieces[0].shape
        return jax.make_array_from_single_device_arrays(
            whole_shape(path, own, self.shards, self.groups, self.engines),
            self.sharding(path, len(own)),
            list(pieces),
        )

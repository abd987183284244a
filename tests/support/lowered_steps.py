"""Lowers steps for devices that need not exist on this machine."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jitney.engine.core.executor.program import Program, StateSizes
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.sharding import TENSOR, _sharding_of, engines_of, whole_shape
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.weights.checkpoints.names import Path
from jitney.kernels.interface import Kernels


def lower_step(
    model: Model,
    bucket: Bucket,
    plain: bool,
    kernels: Kernels,
    sizes: StateSizes,
    mesh: Mesh | None = None,
) -> jax.stages.Lowered:
    """The lowered step of one bucket, from shapes alone, for devices that need not exist here.

    model: `abstract_model` of the configuration that one device runs (`config.local(n)` for a mesh
    of n, or of several engines with n devices each). plain: the all-greedy step. mesh: of
    `sharding.make_mesh`, one device or more; None: the default device.
    """
    graph, state = nnx.split(model)
    if mesh is not None:
        flat: Any = nnx.to_flat_state(state)
        groups = 1
        if model.config.experts is not None:
            groups = model.config.experts.all_groups
        placed = [(path, leaf.replace(_on_mesh(path, leaf, mesh, groups))) for path, leaf in flat]
        state = nnx.from_flat_state(placed)
    leaves, treedef = jax.tree.flatten(state)
    program = Program(graph, treedef, kernels, mesh, sizes.logprobs)
    layout = sizes.builder(model.config).layout(bucket, plain)
    return program.lower(layout, leaves, sizes.shapes(model.config, kernels, mesh))


def _is_turned(path: Path, own: Any) -> bool:
    """Whether a matrix is packed for fp8 products, [1, O, I]; experts' matrices are not."""
    return path[-1] == "kernel" and len(own.shape) == 3 and own.shape[0] == 1


def _turned(placed: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """[I, O] on a mesh -> [1, O, I]."""
    sharding: Any = placed.sharding
    by_inputs, by_outputs = [*sharding.spec, None][:2]
    spec = PartitionSpec(None, by_outputs, by_inputs)
    return jax.ShapeDtypeStruct(
        (1, *reversed(placed.shape)), placed.dtype, sharding=NamedSharding(sharding.mesh, spec)
    )


def _on_mesh(path: Path, own: Any, mesh: Mesh, groups: int) -> jax.ShapeDtypeStruct:
    """The shape of a weight on the mesh, from an object with the shape and dtype of one device's
    share. groups: of experts.
    """
    if _is_turned(path, own):
        before = jax.ShapeDtypeStruct((own.shape[2], own.shape[1]), own.dtype)
        return _turned(_on_mesh(path, before, mesh, groups))
    return jax.ShapeDtypeStruct(
        whole_shape(path, own.shape, mesh.shape[TENSOR.name], groups, engines_of(mesh)),
        own.dtype,
        sharding=_sharding_of(path, len(own.shape), mesh, groups),
    )

"""Loads models over several CPU devices from tensors made up as they are asked for;
`test_shares` starts it.

python loading_program.py OUT: OUT is an .npz file for the results of JOBS, one array each.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jitney.engine.checkpoints.families import tiny_config
from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.checkpoints.names import Target
from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.loading import load
from jitney.engine.models.llama import Llama
from jitney.engine.models.quantization import SCHEMES, Packed, quantise
from jitney.engine.models.sharding import AXIS, Shares, _run_on_each, make_mesh

#: The sizes of a Llama of 70 billion weights by 16, and as many query heads to a KV head.
SMALL_70B = replace(
    tiny_config(),
    hidden_size=512,
    n_heads=16,
    n_kv_heads=2,
    head_dim=32,
    intermediate_size=1792,
    vocab_size=4008,
    n_layers=1,
    windows=(0,),
)


@dataclass
class Count:
    """What was read, and what it takes while it lies on the host."""

    #: Bytes.
    read: int = 0
    live: int = 0
    most_live: int = 0
    #: Most bytes on each device at a time when something was read, beyond what is `kept` there.
    beside: Counter[int] = field(default_factory=Counter)
    #: Bytes of finished weights on each device.
    kept: Counter[int] = field(default_factory=Counter)

    def note(self, part: np.ndarray) -> None:
        """Of the file."""
        # First, since jax lets go of what it has copied when it is asked for something.
        for device, size in on_devices().items():
            self.beside[device] = max(self.beside[device], size - self.kept[device])
        self.read += part.nbytes
        self.live += part.nbytes
        self.most_live = max(self.most_live, self.live)
        weakref.finalize(part, self._forget, part.nbytes)

    def _forget(self, size: int) -> None:
        self.live -= size


def on_devices() -> Counter[int]:
    """Bytes of all arrays on each device, by its number."""
    sizes: Counter[int] = Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            sizes[shard.device.id] += shard.data.nbytes
    return sizes


class Counted:
    """A tensor that counts what is read of it."""

    def __init__(self, array: np.ndarray, count: Count):
        self._array = array
        self._count = count
        self.shape = array.shape
        self.ndim = array.ndim

    def __getitem__(self, index: Any) -> np.ndarray:
        part = np.array(self._array[index])
        self._count.note(part)
        return part


class MadeUp:
    """A checkpoint of random bfloat16; quantised: whose matrices can be had in int4."""

    def __init__(self, config: ModelConfig, *, quantised: bool = False):
        self.quantised = quantised
        weights = Llama.weight_map(config, "hf")
        self.targets = weights.targets
        self.count = Count()
        self.shapes = {name: piece.shape for name, piece in weights.pieces.items()}
        rng = np.random.default_rng(2)
        self.arrays = {
            name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
            for name, shape in self.shapes.items()
        }

    def sliced(self, name: str) -> Counted:
        return Counted(self.arrays[name], self.count)

    def packed(self, name: str) -> Packed | None:
        """As a quantised checkpoint has it, if it is a matrix and this is one."""
        if not self.quantised or self.arrays[name].ndim < 2:
            return None
        return rounded(self.arrays[name].T, "int4")

    def packed_on_host(self, name: str) -> Packed | None:
        """Of one matrix, and not of the others."""
        found = self.packed(name)
        if found is None or "down_proj" not in name:
            return None
        return jax.tree.map(np.asarray, found)

    def whole(self, target: Target) -> np.ndarray:
        """As the model has it, before it is rounded."""
        array = np.concatenate([self.arrays[piece.name] for piece in target.pieces])
        return array.T if target.transpose else array


def loaded(checkpoint: MadeUp, config: ModelConfig, scheme: str, devices: int) -> Any:
    """Its flat state."""

    def report(*_: object) -> None:
        checkpoint.count.kept = on_devices()

    source = ModelSource("hf", "", "", config)
    mesh = make_mesh(jax.devices()[:devices])
    as_stored = frozenset({"int4"} if checkpoint.quantised else ())
    storage = load.WeightStorage(scheme, as_stored)
    with mock.patch.object(load, "open_checkpoint", return_value=checkpoint):
        model = load.load_model(source, config, jnp.bfloat16, report, storage=storage, mesh=mesh)
    return dict(nnx.to_flat_state(nnx.state(model)))  # pyright: ignore[reportArgumentType]


def rounded(matrix: np.ndarray, scheme: str) -> Packed:
    """A whole matrix [I, O]; in groups that are not torn."""
    group = 0
    if scheme == "int4":
        group = 64 if len(matrix) == SMALL_70B.intermediate_size else 128
    floats = jnp.asarray(matrix, jnp.float32)
    return quantise(floats, scheme=scheme, dtype=jnp.bfloat16, group=group)


def unlike(scheme: str, quantised: bool = False) -> np.ndarray:
    """On four devices: shares of arrays that differ in any bit from those of the whole matrix,
    rounded as one and then cut; and how many were compared. quantised: see `MadeUp`.
    """
    checkpoint = MadeUp(SMALL_70B, quantised=quantised)
    state = loaded(checkpoint, SMALL_70B, "plain" if quantised else scheme, 4)
    shares = Shares(SMALL_70B, make_mesh(jax.devices()[:4]))
    wrong = compared = 0
    for target in checkpoint.targets:
        whole = checkpoint.whole(target)
        wanted = {target.path: whole}
        if target.path[-1] == "kernel":
            wanted = load._by_path(target.path, rounded(whole, scheme))
        for path, array in wanted.items():
            for number, shard in enumerate(state[path][...].addressable_shards):
                own = np.asarray(shares.cut(path, np.asarray(array), number))
                found = np.asarray(shard.data)
                wrong += own.dtype != found.dtype or own.tobytes() != found.tobytes()
                compared += 1
    return np.array([wrong, compared])


def sizes(scheme: str, devices: int) -> np.ndarray:
    """Bytes: read, all tensors once, most on the host, most on a device beside its finished
    weights, the largest weight as it is stored, finished weights of the fullest device.
    """
    checkpoint = MadeUp(SMALL_70B)
    state = loaded(checkpoint, SMALL_70B, scheme, devices)
    count = checkpoint.count
    largest = max(checkpoint.whole(target).nbytes for target in checkpoint.targets)
    stored = sum(array.nbytes for array in checkpoint.arrays.values())
    kept = max(on_devices().values())
    del state
    return np.array(
        [count.read, stored, count.most_live, max(count.beside.values()), largest, kept]
    )


def elsewhere(scheme: str) -> np.ndarray:
    """A host with the first two of four devices: numbers of its shares of a matrix whose inputs are
    split that differ from those of a host with all four, and numbers compared.
    """
    checkpoint = MadeUp(SMALL_70B)
    shares = Shares(SMALL_70B, make_mesh(jax.devices()[:4]))
    storage = load.WeightStorage(scheme)
    target = next(one for one in checkpoint.targets if "down" in one.path)
    loader = load._Loader(checkpoint, storage, shares)
    whole = loader.arrays(target, jnp.bfloat16)
    half = Shares(SMALL_70B, shares.mesh)
    half.__dict__["own_numbers"] = (0, 1)
    with mock.patch.object(Shares, "join", lambda self, path, pieces: list(pieces)):
        halves = load._Loader(checkpoint, storage, half).arrays(target, jnp.bfloat16)
    wrong = compared = 0
    for path, pieces in halves.items():
        for shard, piece in zip(whole[path].addressable_shards[:2], pieces, strict=True):
            wrong += np.sum(np.asarray(shard.data) != np.asarray(piece))
            compared += piece.size
    return np.array([wrong, compared])


def fullest(scheme: str) -> np.ndarray:
    """Bytes that the program of one of four devices takes for the largest matrices of a Llama of 70
    billion weights, its arguments and results included, and bytes of the matrices as they are
    stored.
    """
    mesh, most = make_mesh(jax.devices()[:4]), []
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    for outs, ins, by_inputs in ((57344, 8192, False), (8192, 28672, True), (128256, 8192, False)):
        rows, columns = (4 * outs, ins // 4) if by_inputs else (outs, ins)
        together = (0,) * 4 if by_inputs else ()
        work = load._Finish(jnp.dtype(jnp.bfloat16), True, 0.0, scheme, 128, together)
        part = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16, sharding=split)
        compiled = _run_on_each.lower(part, None, work=work, mesh=mesh).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        most.append((taken + memory.output_size_in_bytes, 2 * outs * ins))
    return np.array(most)


JOBS: dict[str, Any] = {
    "bits stored": (unlike, "int4", True),
    **{f"bits {scheme}": (unlike, scheme) for scheme in SCHEMES},
    **{f"sizes {scheme} {n}": (sizes, scheme, n) for scheme, n in (("int4", 4), ("plain", 8))},
    "elsewhere": (elsewhere, "int8"),
    **{f"fullest {scheme}": (fullest, scheme) for scheme in ("int8", "int4")},
}


if __name__ == "__main__":
    done = {name: function(*arguments) for name, (function, *arguments) in JOBS.items()}
    np.savez(sys.argv[1], **done)

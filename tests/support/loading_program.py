"""Loads models onto several CPU devices from tensors that are made up when they are read;
`test_shares` starts it.

python loading_program.py OUT: OUT is an .npz file for the results of JOBS, one array each.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.quantization import Packed, quantise
from jitney.engine.core.models.sharding import TENSOR, Shares, _run_on_each, make_mesh
from jitney.engine.core.weights import load, repack
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.layer_configs import RopeConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import Target
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.stored_matrix import Along, Field, StoredMatrix

#: The sizes of a Llama with 70 billion weights divided by 16, with as many query heads per KV head.
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
    # A part of each head is rotated, so heads are loaded in another order.
    ropes=(RopeConfig(dims=16),),
)


@dataclass
class Count:
    """Counts bytes that are read, and their memory while they are on the host."""

    #: Bytes that were read.
    read: int = 0
    live: int = 0
    most_live: int = 0
    #: Most bytes on each device during any read, beyond those in `kept`.
    beside: Counter[int] = field(default_factory=Counter)
    #: Bytes of finished weights on each device.
    kept: Counter[int] = field(default_factory=Counter)

    def note(self, part: np.ndarray) -> None:
        """Count a part that was read from the file."""
        # First, since jax frees copied arrays when it is called.
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
    """A checkpoint of random bfloat16 numbers. stored: 4-bit format of its matrices except the
    head: "gptq", "awq" or "q4_k"; else "".
    """

    def __init__(self, config: ModelConfig, stored: str = ""):
        self.kind: Literal["hf", "gguf"] = "gguf" if stored == "q4_k" else "hf"
        self.stored = stored
        weights = Llama.weight_map(config, self.kind)
        self.targets = weights.targets
        self.count = Count()
        self.shapes = {name: piece.shape for name, piece in weights.pieces.items()}
        self.orders = {
            name: piece.order for name, piece in weights.pieces.items() if piece.order is not None
        }
        self.rng = np.random.default_rng(2)
        self.arrays: dict[str, np.ndarray] = {}
        self.matrices: dict[str, StoredMatrix] = {}
        for target in self.targets:
            for piece in target.pieces:
                if stored and target.path[-1] == "kernel" and "lm_head" not in target.path:
                    self.matrices[piece.name] = self._made_up(*piece.shape)
                else:
                    floats = self.rng.standard_normal(piece.shape, np.float32)
                    self.arrays[piece.name] = floats.astype(ml_dtypes.bfloat16)

    def _made_up(self, outs: int, ins: int) -> StoredMatrix:
        """Random words, bytes and scales of a matrix; R is 64."""
        groups, by_group = ins // 64, partial(Along, indices=1, numbers=64)
        by_word = partial(Along, indices=1, numbers=8)
        match self.stored:
            case "gptq":
                fields = (
                    self._words((ins // 8, outs), Along(1), by_word(0)),
                    self._scales((groups, outs), Along(1), by_group(0)),
                    self._words((groups, outs // 8), by_word(1), by_group(0)),
                )
                return StoredMatrix((outs, ins), fields, repack.GPTQ[1], (8, 64))
            case "awq":
                fields = (
                    self._words((ins, outs // 8), by_word(1), Along(0)),
                    self._scales((groups, outs), Along(1), by_group(0)),
                    self._words((groups, outs // 8), by_word(1), by_group(0)),
                )
                return StoredMatrix((outs, ins), fields, repack.awq, (8, 64))
        rows = self.rng.integers(0, 256, (outs, ins // 256, 144), np.uint8)
        factors = self.rng.uniform(0.01, 0.1, (outs, ins // 256, 2)).astype(np.float16)
        rows[..., :4] = factors.view(np.uint8)
        field = self._field(rows.reshape(outs, -1), Along(0), Along(1, 144, 256))
        return StoredMatrix((outs, ins), (field,), repack.q4_k, (1, 256))

    def _words(self, shape: tuple[int, int], *along: Along) -> Field:
        words = self.rng.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)
        return self._field(words, *along)

    def _scales(self, shape: tuple[int, int], *along: Along) -> Field:
        return self._field(self.rng.uniform(0.01, 0.1, shape).astype(np.float16), *along)

    def _field(self, array: np.ndarray, outputs: Along, inputs: Along) -> Field:
        return Field(Counted(array, self.count), array.dtype, outputs, inputs)

    def sliced(self, name: str) -> Counted:
        return Counted(self.arrays[name], self.count)

    def matrix(self, name: str) -> StoredMatrix | None:
        return self.matrices.get(name)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights in the file."""
        return sum(map(self.bytes_of, self.targets))

    def bytes_of(self, target: Target) -> int:
        """Bytes of a weight in the file."""
        total = 0
        for piece in target.pieces:
            if piece.name in self.arrays:
                total += self.arrays[piece.name].nbytes
            else:
                fields = self.matrices[piece.name].fields
                total += sum(np.prod(one.stored.shape) * one.dtype.itemsize for one in fields)
        return int(total)

    def whole(self, target: Target) -> np.ndarray:
        """The whole weight in the model's layout, before rounding."""
        parts = []
        for piece in target.pieces:
            order = self.orders.get(piece.name, slice(None))
            parts.append(self.arrays[piece.name][order])
        array = np.concatenate(parts)
        return array.T if target.transpose else array

    def whole_packed(self, target: Target) -> Packed:
        """The whole 4-bit matrix, packed as one."""
        parts = []
        for piece in target.pieces:
            part = self.matrices[piece.name].packed()
            order = self.orders.get(piece.name, slice(None))
            parts.append(jax.tree.map(partial(_with_columns, order), part))
        return repack.join(parts)


def _with_columns(order: Any, array: jax.Array) -> jax.Array:
    return array[..., order]


def loaded(checkpoint: MadeUp, config: ModelConfig, scheme: str, devices: int) -> Any:
    """The flat state of the loaded model."""

    def report(*_: object) -> None:
        checkpoint.count.kept = on_devices()

    source = ModelSource(checkpoint.kind, "", "", config)
    mesh = make_mesh(jax.devices()[:devices])
    as_stored = frozenset({"int4"} if checkpoint.stored else ())
    storage = load.WeightStorage(scheme, as_stored)
    with mock.patch.object(load, "open_checkpoint", return_value=checkpoint):
        model = load.load_model(source, config, jnp.bfloat16, report, storage=storage, mesh=mesh)
    return dict(nnx.to_flat_state(nnx.state(model)))  # pyright: ignore[reportArgumentType]


def rounded(matrix: np.ndarray, scheme: str) -> Packed:
    """A whole matrix [I, O] in the scheme, with groups that devices do not split."""
    group = 0
    if scheme == "int4":
        group = 64 if len(matrix) == SMALL_70B.intermediate_size else 128
    floats = jnp.asarray(matrix, jnp.float32)
    return quantise(floats, scheme=scheme, dtype=jnp.bfloat16, group=group)


def unlike(scheme: str, stored: str = "") -> np.ndarray:
    """On four devices: number of shares that differ in any bit from the shares of the matrix that
    is first rounded or packed as a whole and then cut; and number of shares compared. stored: see
    `MadeUp`.
    """
    checkpoint = MadeUp(SMALL_70B, stored)
    state = loaded(checkpoint, SMALL_70B, scheme, 4)
    shares = Shares(SMALL_70B, make_mesh(jax.devices()[:4]))
    wrong = compared = 0
    for target in checkpoint.targets:
        for path, array in expected(checkpoint, target, scheme).items():
            for number, shard in enumerate(state[path][...].addressable_shards):
                own = np.asarray(shares.cut(path, np.asarray(array), number))
                share = np.asarray(shard.data)
                wrong += own.dtype != share.dtype or own.tobytes() != share.tobytes()
                compared += 1
    return np.array([wrong, compared])


def expected(checkpoint: MadeUp, target: Target, scheme: str) -> dict[Any, Any]:
    """The whole arrays of a weight, by path."""
    if target.pieces[0].name in checkpoint.matrices:
        return load._by_path(target.path, checkpoint.whole_packed(target))
    whole = checkpoint.whole(target)
    if target.path[-1] == "kernel":
        return load._by_path(target.path, rounded(whole, scheme))
    return {target.path: whole}


def sizes(scheme: str, devices: int, stored: str = "") -> np.ndarray:
    """Bytes: read; of all tensors once; most on the host; most on a device beside its finished
    weights; of the largest stored weight; of the finished weights on the fullest device. stored:
    see `MadeUp`; if set, the largest weight is a matrix.
    """
    config = replace(SMALL_70B, vocab_size=512) if stored else SMALL_70B
    checkpoint = MadeUp(config, stored)
    state = loaded(checkpoint, config, scheme, devices)
    count = checkpoint.count
    weights = [checkpoint.bytes_of(target) for target in checkpoint.targets]
    weight_bytes = max(on_devices().values())
    del state
    return np.array(
        [
            count.read,
            sum(weights),
            count.most_live,
            max(count.beside.values()),
            max(weights),
            weight_bytes,
        ]
    )


def half_a_host(stored: str) -> np.ndarray:
    """A host with the first two of four devices, and a checkpoint whose matrices keep their stored
    format: number of shares that differ from those of a host with all four, number of shares
    compared, bytes that the host read, and bytes of all these matrices.
    """
    checkpoint = MadeUp(SMALL_70B, stored)
    shares = Shares(SMALL_70B, make_mesh(jax.devices()[:4]))
    half = Shares(SMALL_70B, shares.mesh)
    half.__dict__["own_numbers"] = (0, 1)
    wrong = compared = total = read = 0
    for target in checkpoint.targets:
        if target.pieces[0].name not in checkpoint.matrices:
            continue
        matrices = [
            load._reordered(checkpoint.matrices[piece.name], piece) for piece in target.pieces
        ]
        whole = load._in_shares(target.path, matrices, shares)
        before = checkpoint.count.read
        with mock.patch.object(Shares, "join", lambda self, path, pieces: list(pieces)):
            halves = load._in_shares(target.path, matrices, half)
        read += checkpoint.count.read - before
        total += checkpoint.bytes_of(target)
        for path, pieces in halves.items():
            for shard, piece in zip(whole[path].addressable_shards[:2], pieces, strict=True):
                wrong += np.asarray(shard.data).tobytes() != np.asarray(piece).tobytes()
                compared += 1
    return np.array([wrong, compared, read, total])


def elsewhere(scheme: str) -> np.ndarray:
    """A host with the first two of four devices, and a matrix whose inputs are split: how many
    numbers of its shares differ from those of a host with all four, and how many are compared.
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
    """Bytes that the program of one of four devices uses for the largest matrices of a Llama with
    70 billion weights, including its arguments and results, and bytes of the stored matrices.
    """
    mesh, most = make_mesh(jax.devices()[:4]), []
    split = NamedSharding(mesh, PartitionSpec(TENSOR.name))
    for outs, ins, by_inputs in ((57344, 8192, False), (8192, 28672, True), (128256, 8192, False)):
        rows, columns = (4 * outs, ins // 4) if by_inputs else (outs, ins)
        together = (0,) * 4 if by_inputs else ()
        work = load._Finish(jnp.dtype(jnp.bfloat16), True, 0.0, scheme, 128, together)
        part = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16, sharding=split)
        compiled = _run_on_each.lower(part, None, work=work, mesh=mesh).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        input_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        most.append((input_bytes + memory.output_size_in_bytes, 2 * outs * ins))
    return np.array(most)


def fullest_stored(stored: str) -> np.ndarray:
    """Like `fullest`, for stored gate and down matrices; a device packs its own share. The bytes of
    the matrices are those in bfloat16.
    """
    mesh, most = make_mesh(jax.devices()[:4]), []
    split = NamedSharding(mesh, PartitionSpec(TENSOR.name))

    def shape(array: Any) -> jax.ShapeDtypeStruct:
        rows, *rest = array.shape
        return jax.ShapeDtypeStruct((4 * rows, *rest), array.dtype, sharding=split)

    for outs, ins, by_inputs in ((28672, 8192, False), (8192, 28672, True)):
        matrix = MadeUp(SMALL_70B, stored)._made_up(outs, ins)
        size = (outs, ins // 4) if by_inputs else (outs // 4, ins)
        read = matrix.read(*(slice(0, count) for count in size))
        work = matrix.part(size)
        compiled = _run_on_each.lower(jax.tree.map(shape, read), None, work=work, mesh=mesh)
        memory = compiled.compile().memory_analysis()
        assert memory is not None
        input_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        most.append((input_bytes + memory.output_size_in_bytes, 2 * outs * ins))
    return np.array(most)


#: Formats of `MadeUp`.
STORED = ("gptq", "awq", "q4_k")


def random_weights(scheme: str) -> np.ndarray:
    """For random weights on four devices: number of leaves that differ from loaded ones in shape,
    type or sharding, and number of all leaves.
    """
    source = ModelSource("hf", "", "made-up", SMALL_70B, has_weights=False)
    mesh, storage = make_mesh(jax.devices()[:4]), load.WeightStorage(scheme)
    random = load.load_model(source, SMALL_70B, jnp.bfloat16, storage=storage, mesh=mesh)
    pairs = list(
        zip(
            jax.tree.leaves(nnx.state(random)),
            jax.tree.leaves(nnx.state(loaded(MadeUp(SMALL_70B), SMALL_70B, scheme, 4))),
            strict=True,
        )
    )
    unlike = [
        one
        for one, other in pairs
        if (one.shape, one.dtype) != (other.shape, other.dtype)
        or not one.sharding.is_equivalent_to(other.sharding, one.ndim)
    ]
    return np.array([len(unlike), len(pairs)])


#: Stored formats for which the bytes read from files are compared.
READ = ("gptq", "q4_k")
JOBS: dict[str, Any] = {
    **{f"bits {stored}": (unlike, "plain", stored) for stored in STORED},
    **{f"bits {scheme}": (unlike, scheme) for scheme in Packed.schemes},
    **{f"sizes {scheme} {n}": (sizes, scheme, n) for scheme, n in (("int4", 4), ("plain", 8))},
    **{f"sizes {stored} 4": (sizes, "plain", 4, stored) for stored in READ},
    **{f"half {stored}": (half_a_host, stored) for stored in READ},
    "elsewhere": (elsewhere, "int8"),
    "random": (random_weights, "int4"),
    "fullest": (fullest, "int4"),
    **{f"fullest {stored}": (fullest_stored, stored) for stored in READ},
}


if __name__ == "__main__":
    done = {name: function(*arguments) for name, (function, *arguments) in JOBS.items()}
    np.savez(sys.argv[1], **done)

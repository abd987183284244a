"""Parts of tensors, read without the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import save_file

from jitney.engine.core.models.sharding import TENSOR, Shares
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.names import Piece
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder
from jitney.engine.core.weights.slices import DecodedTensor, Reordered, Stacked


class Counted:
    """A tensor that counts what is read of it."""

    def __init__(self, array: np.ndarray):
        self._array = array
        self.shape = array.shape
        self.ndim = array.ndim
        self.read = 0

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self._array[index]
        self.read += part.size
        return part


def matrices(*rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((count, 6)) for count in rows]


@pytest.mark.parametrize("rows", [(0, 9), (0, 4), (4, 6), (5, 9), (3, 8), (0, 1), (4, 5)])
@pytest.mark.parametrize("columns", [(), (slice(2, 5),)])
def test_a_part_of_a_stack_is_that_of_the_whole(rows: tuple[int, int], columns: tuple[Any, ...]):
    parts = matrices(4, 1, 4)
    index = (slice(*rows), *columns)
    np.testing.assert_array_equal(Stacked(parts)[index], np.concatenate(parts)[index])


def test_a_whole_stack():
    parts = matrices(2, 3)
    stack = Stacked(parts)
    assert (stack.shape, stack.ndim) == ((5, 6), 2)
    np.testing.assert_array_equal(stack[...], np.concatenate(parts))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_tensor_in_its_file(tmp_path: Path, dtype: Any):
    array = np.arange(24).reshape(4, 6).astype(dtype)
    save_file({"a": array, "b": array[0].copy()}, tmp_path / "x.safetensors")
    tensors = SafetensorsFolder(tmp_path, shards=("x.safetensors",)).tensors
    stored = tensors["a"]
    for index in (..., (slice(1, 3),), (slice(None), slice(2, 5))):
        np.testing.assert_array_equal(stored[index], array[index])
        assert stored[index].dtype == dtype
    np.testing.assert_array_equal(tensors["b"][slice(2, 4),], array[0, 2:4])


@pytest.mark.parametrize("columns", [(0, 6), (1, 3), (4, 5)])
def test_a_part_of_columns_in_another_order(columns: tuple[int, int]):
    """No more is read than lies around them."""
    array, order = matrices(4)[0], np.array([0, 3, 1, 4, 2, 5])
    stored = Counted(array)
    reordered = Reordered(stored, order, axis=1)
    assert (reordered.shape, reordered.ndim) == ((4, 6), 2)
    index = (slice(1, 3), slice(*columns))
    np.testing.assert_array_equal(reordered[index], array[:, order][index])
    around = np.ptp(order[slice(*columns)]) + 1
    assert stored.read == 2 * around
    for index in (..., (slice(2, 4),)):
        np.testing.assert_array_equal(reordered[index], array[:, order][index])


def test_a_part_of_what_is_decoded():
    whole = matrices(7)[0]
    asked: list[tuple[slice, slice]] = []

    def decode(rows: slice, columns: slice) -> np.ndarray:
        asked.append((rows, columns))
        return whole[rows, columns]

    tensor = DecodedTensor(decode, (7, 6))
    for index in (..., (slice(2, 5),), (slice(None), slice(1, 3))):
        np.testing.assert_array_equal(tensor[index], whole[index])
    assert asked[1:] == [(slice(2, 5), slice(0, 6)), (slice(0, 7), slice(1, 3))]
    np.testing.assert_array_equal(DecodedTensor(decode, (6,))[slice(2, 4),], whole[0, 2:4])


def test_a_part_of_rows_in_another_order():
    """Of the rows behind those asked for, and what lies between them, no more is read."""
    order = Piece("q", (12,), 3, (0, 2, 1, 3)).order
    assert order is not None
    part = Counted(matrices(12)[0])
    tensor = Reordered(part, order)
    np.testing.assert_array_equal(tensor[slice(4, 8), slice(1, 3)], part[...][order][4:8, 1:3])
    assert part.read == 4 * 2 + 12 * 6
    np.testing.assert_array_equal(tensor[...], part[...][order])


@pytest.mark.parametrize(
    ("path", "rows", "width", "share"),
    [
        (("layers", 0, "attention", "qkv", "kernel"), (64, 32, 32), 64, 64 * 64),
        (("layers", 0, "attention", "o", "kernel"), (64,), 64, 32 * 64),
        (("layers", 0, "mlp", "gate_up", "kernel"), (128, 128), 64, 128 * 64),
        (("layers", 0, "mlp", "down", "kernel"), (64,), 128, 64 * 64),
        (("layers", 0, "attention_norm", "weight"), (64,), 0, 64),
    ],
)
def test_a_device_reads_its_share_alone(
    path: tuple[str | int, ...], rows: tuple[int, ...], width: int, share: int
):
    """All in the checkpoint's order, [outputs, inputs]."""
    config = tiny_config()
    assert (config.n_heads * config.head_dim, config.hidden_size) == (64, 64)
    assert (config.n_kv_heads * config.head_dim, config.intermediate_size) == (32, 128)
    shares = Shares(config, AbstractMesh((2,), (TENSOR.name,)))  # pyright: ignore[reportArgumentType]
    arrays = [
        np.random.default_rng(i).random((n, width) if width else n) for i, n in enumerate(rows)
    ]
    parts = [Counted(array) for array in arrays]
    whole = np.concatenate(arrays)
    for device in range(2):
        before = sum(part.read for part in parts)
        found = shares.cut(path, Stacked(parts), device, transposed=width > 0)
        np.testing.assert_array_equal(found, shares.cut(path, whole, device, transposed=width > 0))
        assert sum(part.read for part in parts) - before == found.size == share

"""An independent packer of int4 weights, to check the engine's."""

from __future__ import annotations

import numpy as np

from jitney.kernels.int4 import Int4


def pack_int4(nibbles: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> Int4:
    """nibbles [I, O] in 0..15, scales [I // R, O], zeros [I // R, O] in 0..16 or None -> Int4
    (numpy arrays).

    Raises ValueError for shapes that do not divide into groups of 32, 64 or 128.
    """
    size_in, size_out = nibbles.shape
    groups, columns = scales.shape
    sizes = [groups * size for size in Int4.group_sizes]
    if size_in not in sizes or not groups or columns != size_out:
        raise ValueError(
            f"weights {nibbles.shape} with scales {scales.shape}: groups must have 32, 64 or 128 "
            "inputs"
        )
    if zeros is not None:
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros {zeros.shape} must have the shape of scales {scales.shape}")
        zeros = zeros.astype(np.uint8)
    halves = nibbles.astype(np.uint8).reshape(groups, 2, -1, size_out)
    packed = (halves[:, 0] | halves[:, 1] << 4).reshape(size_in // 2, size_out)
    return Int4(packed, scales, zeros)  # pyright: ignore[reportArgumentType]


def quantise_int4(weights: np.ndarray, group_size: int, *, symmetric: bool = True) -> Int4:
    """Round weights [I, O] to the nearest of 16 levels per group and output (float32 scales, numpy
    arrays).

    symmetric: zero point `Int4.middle`, scale from the greatest magnitude; else levels span each
    group's least to greatest.
    """
    groups = weights.astype(np.float32).reshape(-1, group_size, weights.shape[1])
    zeros = None
    if symmetric:
        scales = np.abs(groups).max(1) / 7
    else:
        low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
        scales = (high - low) / 15
        zeros = np.rint(-low / np.where(scales > 0, scales, 1))
    steps = np.where(scales > 0, scales, 1)[:, None]
    middles = Int4.middle if zeros is None else zeros[:, None]
    nibbles = np.clip(np.rint(groups / steps) + middles, 0, 15).reshape(weights.shape)
    return pack_int4(nibbles, scales.astype(np.float32), zeros)

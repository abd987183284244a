"""The layout of KV pools on TPUs, and conversions to and from the interface's layout.

XLA and Pallas use a pool in place, without copying it, if its last two axes are whole tiles of
vector registers: 128 numbers wide, with as many rows as a tile of their dtype. A token has R rows
of W numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

#: Rows of 32-bit numbers in a vector register.
_SUBLANES = 8


@dataclass(frozen=True)
class PoolLayout:
    """The rows of one token in a pool."""

    #: Numbers in a row of a vector register.
    LANES: ClassVar[int] = 128
    #: Rows of bytes in a vector register, four per lane.
    BYTE_ROWS: ClassVar[int] = 4 * _SUBLANES
    heads: int  # K
    dim: int  # D
    rows: int  # R
    width: int  # numbers of a key, padded
    value_dim: int = 0  # first numbers of a key that are its value; 0: values are stored separately
    parts: int = 1  # neighbouring rows that a key is cut into

    @classmethod
    def of(cls, heads: int, dim: int, itemsize: int, value_dim: int = 0) -> PoolLayout:
        """The layout for K key heads of dimension D in numbers of `itemsize` bytes."""
        packed = value_dim > 0 or 2 * dim <= cls.LANES
        rows = _whole_tiles(heads if packed else 2 * heads, 4 // itemsize)
        width = cls._whole_vectors(dim)
        # If a tile has more rows than key heads (two in 16 bits), each row holds a part of a key.
        parts = rows // heads if value_dim else 1
        layout = cls(heads, dim, rows, width, value_dim, parts)
        return layout if layout.row_width < width else replace(layout, parts=1)

    @classmethod
    def _whole_vectors(cls, numbers: int) -> int:
        """`numbers` rounded up to whole rows of vector registers."""
        return -(-numbers // cls.LANES) * cls.LANES

    @property
    def row_width(self) -> int:
        """W."""
        return self._whole_vectors(-(-self.dim // self.parts))

    @property
    def packed(self) -> bool:
        """Whether key and value of a head share a row, [k | v | zeros], or a few rows, [k | zeros],
        where the value is part of the key. Otherwise row 2h is key head h and row 2h + 1 its value,
        each padded with zeros.
        """
        return self.value_dim > 0 or 2 * self.dim <= self.width

    @property
    def planes(self) -> int:
        """Rows per key head in the interface's layout."""
        return 1 if self.value_dim else 2

    def new_rows(self, new: jax.Array) -> jax.Array:
        """new [T, 2K, D], or of keys alone [T, K, D] -> [T, R, W]."""
        return self.pool(new[None])[0]

    def pool(self, kv: jax.Array) -> jax.Array:
        """kv [N, page, 2K, D] -> [N, page, R, W]."""
        if self.packed:
            size = self.planes * self.dim
            kv = kv.reshape(*kv.shape[:2], self.heads, size)
            kv = jnp.pad(kv, [(0, 0)] * 3 + [(0, self.parts * self.row_width - size)])
            kv = kv.reshape(*kv.shape[:2], self.heads * self.parts, self.row_width)
        return self.fill(kv)

    def plain(self, pool: jax.Array) -> jax.Array:
        """pool [N, page, R, W] -> [N, page, 2K, D]."""
        if self.packed:
            keys = pool[:, :, : self.heads * self.parts]
            keys = keys.reshape(*pool.shape[:2], self.heads, self.parts * self.row_width)
            pairs = keys[..., : self.planes * self.dim]
            return pairs.reshape(*pool.shape[:2], self.planes * self.heads, self.dim)
        return pool[:, :, : 2 * self.heads, : self.dim]

    def queries(self, q: jax.Array) -> jax.Array:
        """q [T, H, D] -> [T, H, width], with zeros where the pool's row does not hold the key."""
        return jnp.pad(q, ((0, 0), (0, 0), (0, self.width - self.dim)))

    def values(self, o: jax.Array) -> jax.Array:
        """The columns of values in weighted sums of rows: [T, H, width] -> [T, H, D]."""
        if self.value_dim:
            return o[:, :, : self.value_dim]
        first = self.dim if self.packed else 0
        return o[:, :, first : first + self.dim]

    def fill(self, rows: jax.Array) -> jax.Array:
        """Pad with zeros to [..., R, W]."""
        missing = (0, self.rows - rows.shape[-2]), (0, self.row_width - rows.shape[-1])
        return jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [*missing])


def _whole_tiles(rows: int, packing: int) -> int:
    """`rows` rounded up to whole tiles; packing: numbers per 32 bits."""
    words = -(-rows // packing)
    if words > _SUBLANES:
        return -(-words // _SUBLANES) * _SUBLANES * packing
    return packing << (words - 1).bit_length()

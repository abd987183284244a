"""The shapes in which an engine's kernels are proved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from jitney.kernels.routing import Mixture

#: All row counts of products up to this are compared; of larger counts, which only repeat the same
#: tiles, only the largest is.
_MOST_ROWS = 256
#: Most rows of a product on CPUs (`jitney.engine.lab.bench.sizes`).
_LARGEST = 2048


@dataclass(frozen=True)
class Matrix:
    """One weight matrix that a model multiplies with."""

    size_in: int  # I
    size_out: int  # O
    scheme: str = "plain"  # how it is stored: plain, int8, fp8, int4 or mxfp4
    gated: bool = (
        False  # whether its product is gated, if the set has a gated product for the scheme
    )
    group: int = 0  # inputs per group of int4


@dataclass(frozen=True)
class MixtureShape:
    """The experts of a layer, on one device."""

    inner: int  # F, feed-forward size of an expert
    schemes: tuple[str, str]  # schemes of the opening and of the closing matrices
    activation: str  # activation of the gates
    biased: bool = False  # their products have biases


@dataclass(frozen=True)
class DeltaShape:
    """A recurrent layer's first half on one device, axes as in `jitney.kernels.delta_net`."""

    key_heads: int  # G
    heads: int  # H
    dim: int  # D
    width: int  # V
    taps: int  # W
    corrects: bool = True  # True: gated delta net; False: Mamba-2

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.dim + self.heads * self.width

    @property
    def columns(self) -> int:
        """Size of an input row: inputs of the convolution, then gates, or Mamba-2's time steps."""
        return self.channels + self.heads * (self.width if self.corrects else 1)

    def state_shapes(self, slots: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays in which a layer keeps the state of `slots` slots."""
        return (
            (slots, self.taps, self.channels),
            (slots, self.heads, self.dim, self.width),
            (slots,),
        )


@dataclass(frozen=True)
class ShortConvShape:
    """A layer of short convolutions on one device, axes as in `jitney.kernels.delta_net`."""

    channels: int  # C
    taps: int  # W
    heads: int = 0  # there are no decay rates

    @property
    def columns(self) -> int:
        """Size of an input row: gates of inputs, gates of outputs, and values."""
        return 3 * self.channels

    def state_shapes(self, slots: int) -> tuple[tuple[int, ...] | None, ...]:
        """See `DeltaShape.state_shapes`."""
        return (slots, self.taps, self.channels), None, (slots,)


@dataclass(frozen=True)
class AttentionShapes:
    """Shapes of the layers' attention and of its KV pool."""

    n_heads: int  # H
    n_kv_heads: int  # K
    head_dim: int  # D
    windows: tuple[int, ...]  # distinct windows of the layers, 0 for no window
    softcap: float  # of the scores, 0 for none
    qk_norm: bool  # heads are normed before they are rotated
    page_size: int  # tokens
    pages: int  # P, entries of a seat's page table
    context: int  # tokens a sequence may have
    kv_dtype: str  # of the pool
    sinks: bool = False  # whether heads have sinks
    value_dim: int = 0  # first numbers of a key that are its value; 0: values are stored separately
    read_again: bool = False  # whether other layers read the same pool without writing

    @property
    def pool_rows(self) -> int:
        """Rows of the pool per position."""
        return self.n_kv_heads * (1 if self.value_dim else 2)


@dataclass(frozen=True)
class NormShapes:
    """The norms of a model."""

    eps: float  # added to the mean square
    dtype: str  # of their weights
    widths: tuple[int, ...] = ()  # widths of normed rows other than the hidden size and heads


@dataclass(frozen=True)
class StepShapes:
    """The rows of the steps that programs are compiled for."""

    decode: tuple[int, ...]  # seats of the decode buckets, ascending
    mixed: tuple[int, ...]  # rows of the mixed buckets, ascending
    mixed_seats: tuple[int, ...] = ()  # seats of the mixed buckets, ascending; empty: max(decode)
    blocks: tuple[int, ...] = ()  # block sizes of experts, in rows

    @property
    def prompts(self) -> tuple[tuple[int, int], ...]:
        """(rows, seats) of the smallest mixed bucket, and of the smallest one with all seats."""
        seats = self.mixed_seats or (self.decode[-1],) * len(self.mixed)
        smallest = self.mixed[0], seats[0]
        of_all = next(pair for pair in zip(self.mixed, seats, strict=True) if pair[1] == seats[-1])
        return tuple(dict.fromkeys((smallest, of_all)))

    @property
    def product_rows(self) -> tuple[int, ...]:
        """Row counts at which products are compared, ascending."""
        served = (*self.decode, *self.mixed, *self.blocks)
        counts = {min(rows, _MOST_ROWS) for rows in served}
        return tuple(sorted({*counts, min(max(served), _LARGEST)}))


@dataclass(frozen=True)
class ServedShapes:
    """The shapes that an engine's kernels compute on one device."""

    attention: AttentionShapes
    norms: NormShapes
    steps: StepShapes
    hidden_size: int  # E
    vocab_size: int  # V
    dtype: str  # of activations
    matrices: tuple[Matrix, ...]  # distinct matrices of the layers
    table: int  # rows of the embedding table if it is also the output head, else 0
    mixtures: tuple[MixtureShape, ...] = ()  # distinct mixtures of the layers
    routing: Mixture | None = None  # how the mixtures choose experts
    delta_net: DeltaShape | ShortConvShape | None = None  # of recurrent layers
    other_attention: tuple[AttentionShapes, ...] = ()  # of layers with other heads

    @property
    def by_heads(self) -> tuple[ServedShapes, ...]:
        """The shapes of each kind of heads."""
        kinds = self.attention, *self.other_attention
        return tuple(replace(self, attention=kind, other_attention=()) for kind in kinds)


def distance(got: jax.Array | np.ndarray, want: np.ndarray) -> float:
    """The largest distance between arrays [..., n], in units of the root mean square of each row of
    `want`; infinite if it is NaN.
    """
    wide = np.asarray(got).astype(np.float32)
    spread = np.sqrt(np.mean(want * want, axis=-1, keepdims=True))
    apart = np.abs(wide - want) / np.maximum(spread, 1e-6)
    if not np.isfinite(apart).all():
        return float("inf")
    return float(np.max(apart, initial=0.0))


def rounded_distance(got: jax.Array | np.ndarray, want: np.ndarray) -> float:
    """`distance` of rows that were rounded to e4m3 by their greatest magnitude, without what the
    rounding explains: half of each number's last bit.
    """
    apart = np.asarray(got) - want
    least = np.abs(want).max(axis=-1, keepdims=True) / (448 * 1024)
    explained = np.maximum(np.abs(want) / 16, least)
    return distance(want + np.sign(apart) * np.maximum(np.abs(apart) - explained, 0), want)

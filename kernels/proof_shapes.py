"""The shapes in which an engine's kernels are proved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from jitney.kernels.routing import Mixture

#: Row counts of products up to this are all compared; of larger ones, which only repeat the same
#: tiles, only the largest.
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

    inner: int  # F of one of them
    schemes: tuple[str, str]  # how what opens them and what closes them is stored
    activation: str  # what gates them
    biased: bool = False  # their products have biases


@dataclass(frozen=True)
class DeltaShape:
    """A recurrent layer's first half on one device, axes as in `jitney.kernels.delta_net`."""

    key_heads: int  # G
    heads: int  # H
    dim: int  # D
    width: int  # V
    taps: int  # W
    corrects: bool = True  # it is a gated delta net; else of Mamba-2

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.dim + self.heads * self.width

    @property
    def columns(self) -> int:
        """Numbers of the rows that come in: inputs of the convolution, then gates, or steps."""
        return self.channels + self.heads * (self.width if self.corrects else 1)

    def state_shapes(self, slots: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that a layer keeps in so many slots."""
        return (
            (slots, self.taps, self.channels),
            (slots, self.heads, self.dim, self.width),
            (slots,),
        )


@dataclass(frozen=True)
class AttentionShapes:
    """Shapes of the layers' attention, and of the pool that they attend to."""

    n_heads: int  # H
    n_kv_heads: int  # K
    head_dim: int  # D
    windows: tuple[int, ...]  # the different ones of the layers, 0 for none
    softcap: float  # of the scores, 0 for none
    qk_norm: bool  # heads are normed before they are rotated
    page_size: int  # tokens
    pages: int  # of a seat's table, P
    context: int  # tokens a sequence may have
    kv_dtype: str  # of the pool
    sinks: bool = False  # whether heads have sinks
    value_dim: int = 0  # numbers of a key that are its value; 0: it is one of its own
    read_again: bool = False  # whether other layers read the same pool without writing

    @property
    def pool_rows(self) -> int:
        """Rows of a position of the pool."""
        return self.n_kv_heads * (1 if self.value_dim else 2)


@dataclass(frozen=True)
class NormShapes:
    """The norms of a model."""

    eps: float  # added to the mean square
    dtype: str  # of their weights
    widths: tuple[int, ...] = ()  # of other rows than those of the hidden size, and than heads


@dataclass(frozen=True)
class StepShapes:
    """The rows of the steps that programs are compiled for."""

    decode: tuple[int, ...]  # seats of the decode buckets, ascending
    mixed: tuple[int, ...]  # rows of the mixed buckets, ascending
    mixed_seats: tuple[int, ...] = ()  # theirs, ascending; empty: the most of `decode`
    blocks: tuple[int, ...] = ()  # rows that experts are multiplied with at a time

    @property
    def prompts(self) -> tuple[tuple[int, int], ...]:
        """(rows, seats) of the smallest mixed bucket, and of the smallest that has all seats."""
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
    """Shapes that an engine's kernels compute on one device."""

    attention: AttentionShapes
    norms: NormShapes
    steps: StepShapes
    hidden_size: int  # E
    vocab_size: int  # V
    dtype: str  # of activations
    matrices: tuple[Matrix, ...]  # the different ones of the layers
    table: int  # rows of the embedding where it is the head too, else 0
    mixtures: tuple[MixtureShape, ...] = ()  # the different ones of the layers
    routing: Mixture | None = None  # how their experts are chosen
    delta_net: DeltaShape | None = None  # of recurrent layers
    other_attention: tuple[AttentionShapes, ...] = ()  # of layers with other heads

    @property
    def by_heads(self) -> tuple[ServedShapes, ...]:
        """The shapes of each kind of heads."""
        kinds = self.attention, *self.other_attention
        return tuple(replace(self, attention=kind, other_attention=()) for kind in kinds)


def distance(got: jax.Array | np.ndarray, want: np.ndarray) -> float:
    """The largest distance of arrays [..., n], in root mean squares of want's rows; NaN:
    infinite.
    """
    wide = np.asarray(got).astype(np.float32)
    spread = np.sqrt(np.mean(want * want, axis=-1, keepdims=True))
    apart = np.abs(wide - want) / np.maximum(spread, 1e-6)
    if not np.isfinite(apart).all():
        return float("inf")
    return float(np.max(apart, initial=0.0))

"""Gated delta nets by their definition, in numpy, and made-up steps of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jitney.kernels.delta_net import DeltaState, DeltaWeights
from jitney.kernels.interface import AttentionMeta


class Sizes(NamedTuple):
    """G, H, D, V, W and M of `jitney.kernels.delta_net`."""

    key_heads: int = 2
    heads: int = 4
    dim: int = 16
    width: int = 32
    taps: int = 4
    seats: int = 5

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dim + self.heads * self.width


def draw_weights(sizes: Sizes, rng: np.random.Generator, dtype: Any = "float32") -> DeltaWeights:
    heads = sizes.heads
    return DeltaWeights(
        jnp.asarray(0.7 * rng.standard_normal((sizes.taps, sizes.channels)), dtype),
        jnp.asarray(rng.standard_normal(heads) - 2, jnp.float32),
        jnp.asarray(rng.standard_normal(heads), jnp.float32),
        jnp.asarray(1 + 0.2 * rng.standard_normal(sizes.width), jnp.float32),
    )


@dataclass
class Text:
    """The rows of one sequence: x [L, C + H V], rates [L, 2 H]."""

    seat: int
    x: np.ndarray
    rates: np.ndarray
    done: int = 0

    @classmethod
    def draw(cls, sizes: Sizes, rng: np.random.Generator, seat: int, length: int) -> Text:
        columns = sizes.channels + sizes.heads * sizes.width
        x = rng.standard_normal((length, columns), np.float32)
        return cls(seat, x, rng.standard_normal((length, 2 * sizes.heads), np.float32))


@dataclass
class Step:
    """The next rows of some texts: (text, how many), and rows and sequences of the bucket."""

    parts: list[tuple[Text, int]]
    rows: int
    seqs: int
    #: The last row of each text that was computed is computed again.
    again: bool = False
    x: Any = field(init=False)
    rates: Any = field(init=False)
    meta: AttentionMeta = field(init=False)

    def __post_init__(self) -> None:
        first = self.parts[0][0]
        x = np.full((self.rows, first.x.shape[1]), 1e3, np.float32)
        rates = np.zeros((self.rows, first.rates.shape[1]), np.float32)
        positions = np.zeros(self.rows, np.int32)
        ends = [0]
        for text, count in self.parts:
            start = text.done - self.again
            rows = slice(ends[-1], ends[-1] + count)
            x[rows], rates[rows] = (
                text.x[start : start + count],
                text.rates[start : start + count],
            )
            positions[rows] = np.arange(start, start + count)
            text.done = start + count
            ends.append(ends[-1] + count)
        padded = [*ends, *[ends[-1]] * (self.seqs + 1 - len(ends))]
        seats = [text.seat for text, _ in self.parts]
        none = jnp.zeros(0, jnp.int32)
        self.x, self.rates = x, rates
        self.meta = AttentionMeta(
            none,
            jnp.array(padded, jnp.int32),
            none,
            none,
            jnp.array(positions),
            jnp.array([0, len(seats), ends[-1]], jnp.int32),
            seats=jnp.array([*seats, *[1 << 30] * (self.seqs - len(seats))], jnp.int32),
        )


def dirty_state(sizes: Sizes) -> DeltaState:
    """What others left in the seats: nothing that the next may read."""
    values = sizes.heads * sizes.width
    memory = jnp.full((sizes.seats, sizes.heads, sizes.dim, sizes.width), jnp.nan)
    taps = jnp.full((sizes.seats, sizes.taps, sizes.channels), jnp.nan)
    return DeltaState(taps, memory, jnp.full(sizes.seats, values, jnp.int32))


def definition(sizes: Sizes, weights: DeltaWeights, text: Text, eps: float) -> np.ndarray:
    """One sequence, token by token and head by head, in float64: [L, H V]."""
    taps, log_decay, bias, norm = (np.asarray(one, np.float64) for one in weights)
    shared, keys = sizes.heads // sizes.key_heads, sizes.key_heads * sizes.dim
    memory = np.zeros((sizes.heads, sizes.dim, sizes.width))
    out = np.zeros((len(text.x), sizes.heads * sizes.width))
    mixed = text.x[:, : sizes.channels].astype(np.float64)
    for t in range(len(mixed)):
        total = np.zeros(sizes.channels)
        for lag in range(min(sizes.taps, t + 1)):
            total += mixed[t - lag] * taps[-1 - lag]
        total = total / (1 + np.exp(-total))
        for head in range(sizes.heads):
            at = head // shared * sizes.dim
            q, k = total[at : at + sizes.dim], total[keys + at : keys + at + sizes.dim]
            q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(sizes.dim)
            k = k / np.sqrt(k @ k + 1e-6)
            own = slice(head * sizes.width, (head + 1) * sizes.width)
            v = total[2 * keys :][own]
            rate = text.rates[t].astype(np.float64)
            beta = 1 / (1 + np.exp(-rate[head]))
            speed = np.exp(log_decay[head])
            decay = np.exp(-speed * np.log1p(np.exp(rate[sizes.heads + head] + bias[head])))
            kept = decay * memory[head]
            memory[head] = kept + np.outer(k, beta * (v - k @ kept))
            read = q @ memory[head]
            gate = text.x[t, sizes.channels :].astype(np.float64)[own]
            normed = read / np.sqrt(np.mean(read * read) + eps) * norm
            out[t, own] = normed * gate / (1 + np.exp(-gate))
    return out

"""Gated delta nets and layers of Mamba-2 by their definition in numpy, and made-up steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.delta_net import DeltaState, DeltaWeights
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.mamba import MambaWeights, mamba

#: Of the norm of what a head reads.
EPS = 1e-5
#: Of the steps of Mamba-2: some are clamped.
LIMITS = (0.1, 2.0)


class Sizes(NamedTuple):
    """G, H, D, V, W and M of `jitney.kernels.delta_net`; whether it is one, or else of Mamba-2."""

    key_heads: int = 2
    heads: int = 4
    dim: int = 16
    width: int = 32
    taps: int = 4
    seats: int = 5
    corrects: bool = True

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dim + self.heads * self.width


def of_mamba(recur: Any) -> Any:
    """A layer of Mamba-2, called as a delta net is."""

    def layer(x: Any, rates: Any, *others: Any, eps: float) -> Any:
        read, state = mamba(x, *others, limits=LIMITS, recur=recur)
        return read.reshape(len(x), -1), state

    return layer


def draw_weights(sizes: Sizes, rng: np.random.Generator, dtype: Any = "float32") -> Any:
    heads = sizes.heads
    weights = _draw(sizes, rng, dtype)
    if sizes.corrects:
        return weights
    return MambaWeights(
        weights.taps,
        jnp.asarray(0.2 * rng.standard_normal(sizes.channels), dtype),
        weights.log_decay,
        weights.rate_bias,
        jnp.asarray(rng.standard_normal(heads), jnp.float32),
    )


def _draw(sizes: Sizes, rng: np.random.Generator, dtype: Any) -> DeltaWeights:
    heads = sizes.heads
    return DeltaWeights(
        jnp.asarray(0.7 * rng.standard_normal((sizes.taps, sizes.channels)), dtype),
        jnp.asarray(rng.standard_normal(heads) - 2, jnp.float32),
        jnp.asarray(rng.standard_normal(heads), jnp.float32),
        jnp.asarray(1 + 0.2 * rng.standard_normal(sizes.width), jnp.float32),
    )


@dataclass
class Text:
    """The rows of one sequence: x [L, C + H V], or of Mamba-2 [L, C + H], rates [L, 2 H]."""

    seat: int
    x: np.ndarray
    rates: np.ndarray
    done: int = 0

    @classmethod
    def draw(cls, sizes: Sizes, rng: np.random.Generator, seat: int, length: int) -> Text:
        columns = sizes.channels + sizes.heads * (sizes.width if sizes.corrects else 1)
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


def definition(sizes: Sizes, weights: Any, text: Text) -> np.ndarray:
    """[L, H V] of one sequence."""
    if not sizes.corrects:
        read = definitions.mamba(text.x, weights, sizes.key_heads, sizes.dim, LIMITS)
        return read.reshape(len(read), -1)
    return definitions.delta_net(text.x, text.rates, weights, sizes.key_heads, sizes.dim, EPS)


def run(
    kernel: Any, steps: list[Step], sizes: Sizes, weights: Any, dtype: Any = "float32"
) -> tuple[list[np.ndarray], DeltaState]:
    """The rows of each step, and the state behind them."""
    compiled = jax.jit(kernel, static_argnames="eps", donate_argnums=3)
    state, outputs = dirty_state(sizes), []
    for step in steps:
        x = jnp.asarray(step.x, dtype)
        rows, state = compiled(x, jnp.asarray(step.rates), weights, state, step.meta, eps=EPS)
        outputs.append(np.asarray(rows.astype(jnp.float32)))
    return outputs, state


def in_pieces(kernel: Any, sizes: Sizes) -> dict[str, Any]:
    """Prompts in odd pieces beside sequences that decode, in seats that hold others' numbers: the
    greatest distance from the definition, and whether the other seats hold what they held.
    """
    rng = np.random.default_rng(3)
    weights = draw_weights(sizes, rng)
    one, two, three = (Text.draw(sizes, rng, seat, n) for seat, n in ((3, 45), (0, 6), (1, 3)))
    steps = [
        Step([(one, 1), (two, 2)], 8, 4),
        Step([(two, 1), (one, 2)], 8, 4),
        Step([(three, 1), (two, 1), (one, 37)], 64, 4),
        Step([(one, 1), (two, 1), (three, 1)], 4, 4),
        Step([(three, 1), (one, 4), (two, 1)], 8, 4),
    ]
    outputs, state = run(kernel, steps, sizes, weights)
    error = 0.0
    for text in (one, two, three):
        found = []
        for step, rows in zip(steps, outputs, strict=True):
            first = 0
            for other, count in step.parts:
                if other is text:
                    found += list(rows[first : first + count])
                first += count
        error = max(error, float(np.abs(found - definition(sizes, weights, text)).max()))
    lengths = np.asarray(state.lengths)[[3, 0, 1]].tolist()
    memory = np.asarray(state.memory)
    same = lengths == [45, 6, 3] and bool(np.isnan(memory[[2, 4]]).all())
    return {"error": error, "untouched": same}

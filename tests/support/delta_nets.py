"""Gated delta nets, Mamba-2 layers and short convolutions by their definition in numpy, and random
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.delta_net import DeltaState, DeltaWeights, StateSlots
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.mamba import MambaWeights
from jitney.kernels.proof_shapes import distance

#: Epsilon of the norm of a head's output.
EPS = 1e-5
#: Least and greatest time step of Mamba-2, chosen so that some steps are clamped.
LIMITS = (0.1, 2.0)


class Sizes(NamedTuple):
    """G, H, D, V, W and M of `jitney.kernels.delta_net`; True for a delta net, False for Mamba-2.
    `CONVOLUTION` has no key heads.
    """

    key_heads: int = 2
    heads: int = 4
    dim: int = 16
    width: int = 32
    taps: int = 4
    slots: int = 5
    corrects: bool = True

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dim + self.heads * self.width


#: Of a short convolution with 40 channels; its memory is not used.
CONVOLUTION = Sizes(0, 1, 1, 40, 3)


def of_short_conv(layer_of: Any) -> Any:
    """A kernel set's short convolution with the call signature of a delta net."""

    def layer(x: Any, rates: Any, weights: Any, state: Any, meta: Any, *, eps: float) -> Any:
        o, after = layer_of(_gated(x), weights.taps, state._replace(memory=None), meta)
        return o, after._replace(memory=state.memory)

    return layer


def _gated(x: Any) -> Any:
    """Rows of a short convolution [T, 3 C] with the inputs x[:, :C], which are products of a gate
    and a value, and with the output's gates x[:, C:].
    """
    inputs, behind = jnp.split(jnp.asarray(x), 2, axis=1)
    return jnp.concatenate([jnp.full_like(inputs, 2), behind, inputs / 2], axis=1)


def of_mamba(layer_of: Any) -> Any:
    """A kernel set's Mamba-2 layer with the call signature of a delta net."""

    def layer(x: Any, rates: Any, *others: Any, eps: float) -> Any:
        read, state = layer_of(x, *others, limits=LIMITS)
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


@dataclass(eq=False)
class Text:
    """The rows of one sequence, whose state is in a slot: x [L, C + H V], or [L, C + H] for
    Mamba-2; rates [L, 2 H].
    """

    slot: int
    x: np.ndarray
    rates: np.ndarray
    done: int = 0

    @classmethod
    def draw(cls, sizes: Sizes, rng: np.random.Generator, slot: int, length: int) -> Text:
        columns = sizes.channels + sizes.heads * (sizes.width if sizes.corrects else 1)
        x = rng.standard_normal((length, columns), np.float32)
        return cls(slot, x, rng.standard_normal((length, 2 * sizes.heads), np.float32))


@dataclass
class Step:
    """The next rows of some texts: (text, number of rows), and rows and sequences of the bucket.

    saves: for some texts, (number of these rows, slot to which the state after them is written), at
    two positions at most. to: the slot in which a text continues.
    """

    parts: list[tuple[Text, int]]
    rows: int
    seqs: int
    #: Whether the last computed row of each text is computed again.
    again: bool = False
    saves: list[tuple[Text, int, int]] = field(default_factory=list[tuple[Text, int, int]])
    to: list[tuple[Text, int]] = field(default_factory=list[tuple[Text, int]])
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
        none = jnp.zeros(0, jnp.int32)
        self.x, self.rates = x, rates
        self.meta = AttentionMeta(
            none,
            jnp.array(padded, jnp.int32),
            none,
            none,
            jnp.array(positions),
            jnp.array([0, len(self.parts), ends[-1]], jnp.int32),
            state=self._state(),
        )

    def _state(self) -> StateSlots:
        most = 0 if self.rows == self.seqs else 2
        reads, cuts, writes = (np.zeros((self.seqs, n), np.int32) for n in (1, most, most + 1))
        for number, (text, _) in enumerate(self.parts):
            reads[number] = text.slot
            saves = [(rows, slot) for other, rows, slot in self.saves if other is text]
            for place, (rows, slot) in enumerate(saves, most - len(saves)):
                cuts[number, place], writes[number, place] = rows, slot
            text.slot = dict(self.to).get(text, text.slot)
            writes[number, most] = text.slot
        return StateSlots(jnp.array(reads[:, 0]), jnp.array(cuts), jnp.array(writes))


def dirty_state(sizes: Sizes) -> DeltaState:
    """Slots filled with the numbers of other sequences, which new ones must not read."""
    values = sizes.heads * sizes.width
    memory = jnp.full((sizes.slots, sizes.heads, sizes.dim, sizes.width), jnp.nan)
    taps = jnp.full((sizes.slots, sizes.taps, sizes.channels), jnp.nan)
    return DeltaState(taps, memory, jnp.full(sizes.slots, values, jnp.int32))


def definition(sizes: Sizes, weights: Any, text: Text) -> np.ndarray:
    """The output of one sequence by definition, [L, H V]."""
    if not sizes.key_heads:
        return definitions.short_conv(np.asarray(_gated(text.x)), weights.taps)
    if not sizes.corrects:
        read = definitions.mamba(text.x, weights, sizes.key_heads, sizes.dim, LIMITS)
        return read.reshape(len(read), -1)
    return definitions.delta_net(text.x, text.rates, weights, sizes.key_heads, sizes.dim, EPS)


def run(
    kernel: Any,
    steps: Sequence[Step | _DraftedStep],
    sizes: Sizes,
    weights: Any,
    dtype: Any = "float32",
) -> tuple[list[np.ndarray], DeltaState]:
    """The output rows of each step, and the final state."""
    compiled = jax.jit(kernel, static_argnames="eps", donate_argnums=3)
    state, outputs = dirty_state(sizes), []
    for step in steps:
        x = jnp.asarray(step.x, dtype)
        rows, state = compiled(x, jnp.asarray(step.rates), weights, state, step.meta, eps=EPS)
        outputs.append(np.asarray(rows.astype(jnp.float32)))
    return outputs, state


def in_pieces(kernel: Any, sizes: Sizes) -> dict[str, Any]:
    """Prompts in odd pieces together with sequences that decode, in slots with other numbers.
    Returns the greatest distance from the definition, and whether other slots are unchanged.
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
        own_rows = []
        for step, rows in zip(steps, outputs, strict=True):
            first = 0
            for other, count in step.parts:
                if other is text:
                    own_rows += list(rows[first : first + count])
                first += count
        distance = np.abs(own_rows - definition(sizes, weights, text)).max()
        error = float(np.maximum(error, distance))  # Python's max loses a NaN
    lengths = np.asarray(state.lengths)[[3, 0, 1]].tolist()
    memory = np.asarray(state.memory)
    same = lengths == [45, 6, 3] and bool(np.isnan(memory[[2, 4]]).all())
    return {"error": error, "untouched": same}


def row_by_row(kernel: Any, sizes: Sizes) -> dict[str, Any]:
    """Sequences that begin, continue in their slot and in others, and compute a row again, in
    decode-only steps with free seats. Returns the greatest distance of any row from the definition,
    and whether each slot has the taps and the length that were last written to it.
    """
    sizes = sizes._replace(slots=6)
    rng = np.random.default_rng(7)
    weights = draw_weights(sizes, rng)
    one, two = (Text.draw(sizes, rng, slot, 12) for slot in (3, 0))
    steps: list[Step] = []
    rows: list[list[tuple[Text, int]]] = []

    def add(*texts: Text, **changed: Any) -> None:
        steps.append(Step([(text, 1) for text in texts], 4, 4, **changed))
        rows.append([(text, text.done - 1) for text in texts])

    add(one)
    add(two, one)
    add(two, one, again=True)  # the first row of all, and a second one
    fork = one.done  # of fewer tokens than there are taps
    add(one, two, to=[(one, 1)])
    for _ in range(4):
        add(one, two)
    add(two, one, again=True)
    moved = one.done
    add(one, two, again=True, to=[(one, 4)])
    add(one, two)
    third = Text(3, one.x, one.rates, done=fork)
    add(third, two, to=[(third, 5)])
    add(third)
    outputs, state = run(kernel, steps, sizes, weights)
    errors = [
        np.abs(output[row] - definition(sizes, weights, text)[position]).max()
        for output, step_rows in zip(outputs, rows, strict=True)
        for row, (text, position) in enumerate(step_rows)
    ]
    ends = [(0, two, two.done), (1, one, moved), (3, one, fork), (4, one, one.done)]
    states_right = [
        _holds(state, sizes, slot, text.x[:end])
        for slot, text, end in [*ends, (5, third, third.done)]
    ]
    free = all(bool(jnp.isnan(array[2]).all()) for array in (state.taps, state.memory))
    return {"error": float(np.max(errors)), "untouched": all(states_right) and free}


def _holds(state: DeltaState, sizes: Sizes, slot: int, x: np.ndarray) -> bool:
    """Whether the taps of a slot are the last of these rows, and its length is their number."""
    inputs = np.pad(x[:, : sizes.channels], ((sizes.taps, 0), (0, 0)))[-sizes.taps :]
    same = np.array_equal(state.taps[slot], inputs)
    return same and int(state.lengths[slot]) == len(x)


def from_checkpoints(kernel: Any, sizes: Sizes) -> dict[str, Any]:
    """A prompt whose state is saved twice in a step, and sequences that continue from there.
    Returns the greatest distance of any row from the definition.
    """
    sizes = sizes._replace(slots=9)
    rng = np.random.default_rng(4)
    weights = draw_weights(sizes, rng)
    first = Text.draw(sizes, rng, 3, 60)
    other, second, third = (Text.draw(sizes, rng, slot, 60) for slot in (8, 5, 0))
    for text, shared in ((second, 2), (third, 37)):
        text.x[:shared], text.rates[:shared] = first.x[:shared], first.rates[:shared]
    steps = [
        Step([(other, 1), (first, 40)], 64, 4, saves=[(first, 2, 5), (first, 37, 0)]),
        Step([(first, 1), (other, 1)], 4, 4, to=[(first, 1)]),
    ]
    second.done, third.done = 2, 37
    # Both read slots that are read again later, and do not change them.
    steps.append(Step([(second, 9), (third, 1)], 16, 4, to=[(second, 2), (third, 4)]))
    second.slot, third.slot, second.done, third.done = 5, 0, 2, 37
    again = [(second, 6), (third, 7), (first, 2)]
    saves = [(third, 5, 6), (first, 1, 3)]
    steps.append(Step(again, 16, 4, saves=saves, to=[(second, 5), (third, 7)]))
    steps.append(Step([(text, 1) for text, _ in again], 4, 4))
    outputs, state = run(kernel, steps, sizes, weights)
    spans = [
        (0, [(other, 0, 1), (first, 0, 40)]),
        (1, [(first, 40, 1), (other, 1, 1)]),
        (2, [(second, 2, 9), (third, 37, 1)]),
        (3, [(second, 2, 6), (third, 37, 7), (first, 41, 2)]),
        (4, [(second, 8, 1), (third, 44, 1), (first, 43, 1)]),
    ]
    error = 0.0
    for step, parts in spans:
        row = 0
        for text, start, count in parts:
            expected = definition(sizes, weights, text)[start : start + count]
            distance = np.abs(outputs[step][row : row + count] - expected).max()
            error = float(np.maximum(error, distance))
            row += count
    return {
        "error": error,
        "untouched": np.asarray(state.lengths)[[0, 6, 3]].tolist() == [37, 42, 42],
    }


def of_every_length(kernel: Any, sizes: Sizes) -> dict[str, Any]:
    """Prompts of many lengths and an empty one in a step, then further rows of each. Returns the
    greatest distance of any row from the definition, in its root mean square; whether other slots
    are unchanged; and whether the longest prompt has the same bits alone, and cut at a chunk's end.
    One head forgets at once, another hardly ever; one prompt repeats a single row.
    """
    lengths, later = (15, 1, 16, 0, 63, 64, 65, 200), (200, 3, 65, 0, 8, 31, 33, 40)
    sizes = sizes._replace(slots=10)
    rng = np.random.default_rng(8)
    weights = draw_weights(sizes, rng)
    speeds = weights.log_decay.at[:2].set(jnp.array([4.0, -12.0]))
    weights = weights._replace(log_decay=speeds)
    texts = [
        Text.draw(sizes, rng, slot, sum(counts))
        for slot, counts in enumerate(zip(lengths, later, strict=True))
    ]
    texts[5].x[:], texts[5].rates[:, : sizes.heads] = texts[5].x[0], 8.0
    steps = [Step(list(zip(texts, counts, strict=True)), 448, 9) for counts in (lengths, later)]
    outputs, state = run(kernel, steps, sizes, weights)
    longest = Text(8, texts[-1].x, texts[-1].rates)
    cut = Text(9, texts[-1].x, texts[-1].rates)
    alone, *pieces = run(
        kernel,
        [Step([(longest, 200)], 448, 9)] + [Step([(cut, n)], 448, 9) for n in (96, 104)],
        sizes,
        weights,
    )[0]
    own = outputs[0][sum(lengths) - 200 : sum(lengths)]
    ends = np.cumsum([lengths, later], axis=1)
    errors = []
    for text, *counts, end, later_end in zip(texts, lengths, later, *ends, strict=True):
        if counts[0]:
            rows = outputs[0][end - counts[0] : end], outputs[1][later_end - counts[1] : later_end]
            errors.append(distance(np.concatenate(rows), definition(sizes, weights, text)))
    return {
        "error": float(np.max(errors)),
        "untouched": bool(np.isnan(np.asarray(state.memory)[[3, 8, 9]]).all()),
        "same": np.array_equal(alone[:200], own)
        and np.array_equal(np.concatenate([pieces[0][:96], pieces[1][:104]]), own),
    }


#: For each step, the number of right rows of two texts, and of wrong drafts after them. The first
#: step has prompts; the third one writes the slot that it reads, and then others.
_DRAFTED = (
    ((6, 0), (2, 0)),
    ((2, 1), (1, 3)),
    ((3, 0), (1, 0)),
    ((1, 3), (2, 2)),
    ((4, 0), (2, 1)),
    ((1, 0), (4, 0)),
    ((1, 1), (1, 0)),
)


def after_drafts(kernel: Any, sizes: Sizes) -> dict[str, Any]:
    """Sequences with up to three drafts in a step. Returns the greatest distance of their right
    rows from the definition, and whether another slot is unchanged. The inputs of a step do not say
    which drafts of the previous step were right.
    """
    sizes = sizes._replace(slots=9)
    rng = np.random.default_rng(6)
    weights = draw_weights(sizes, rng)
    texts = [Text.draw(sizes, rng, slot, 20) for slot in (0, 1)]
    steps, rights = [], []
    for number, counts in enumerate(_DRAFTED):
        parts, right, row = [], [], 0
        for text, (n_right, n_wrong) in zip(texts, counts, strict=True):
            wrong = Text.draw(sizes, rng, text.slot, n_wrong)
            rows = slice(text.done, text.done + n_right)
            x = np.concatenate([text.x[rows], wrong.x])
            rates = np.concatenate([text.rates[rows], wrong.rates])
            parts.append((Text(text.slot, x, rates), text.done))
            right.append((text, text.done, slice(row, row + n_right)))
            text.done += n_right
            row += n_right + n_wrong
        steps.append(_DraftedStep.of(parts, decodes=number > 0))
        rights.append(right)
    outputs, state = run(kernel, steps, sizes, weights)
    errors = [
        np.abs(rows[span] - definition(sizes, weights, text)[start:][: len(rows[span])]).max()
        for rows, right in zip(outputs, rights, strict=True)
        for text, start, span in right
    ]
    return {
        "error": float(np.max(errors)),
        "untouched": bool(np.isnan(np.asarray(state.memory)[8]).all()),
    }


class _DraftedStep(NamedTuple):
    """A step whose decoding sequences each have drafts; see `Step`."""

    x: np.ndarray
    rates: np.ndarray
    meta: AttentionMeta

    @classmethod
    def of(cls, parts: list[tuple[Text, int]], *, decodes: bool) -> _DraftedStep:
        """A step of parts (rows of a text in its slot, position of the first row), with at most
        three drafts each, which are separate sequences outside recurrent layers. decodes: False for
        prompts.
        """
        counts = [len(text.x) for text, _ in parts]
        ends = np.cumsum([0, *counts])
        cuts, writes = np.zeros((8, 3), np.int32), np.zeros((8, 4), np.int32)
        for number, (text, _) in enumerate(parts):
            drafts = counts[number] - 1 if decodes else 0
            first = 2 + 3 * text.slot
            cuts[number, 3 - drafts :] = range(1, drafts + 1)
            writes[number, 3 - drafts :] = [text.slot, *range(first, first + drafts)]
        at = [
            np.arange(start, start + count) for (_, start), count in zip(parts, counts, strict=True)
        ]
        rows = 8 if decodes else 16
        room = (0, rows - ends[-1])
        none = jnp.zeros(0, jnp.int32)
        elsewhere = np.arange(ends[-1] + 1) if decodes else ends
        state = StateSlots(
            jnp.arange(8) % 2,
            jnp.array(cuts),
            jnp.array(writes),
            jnp.array(np.pad(ends, (0, 6), mode="edge"), jnp.int32),
            jnp.arange(8) % 2 * 3 + 2,
        )
        meta = AttentionMeta(
            none,
            jnp.array(np.pad(elsewhere, (0, 9 - len(elsewhere)), mode="edge"), jnp.int32),
            none,
            none,
            jnp.array(np.pad(np.concatenate(at), room), jnp.int32),
            jnp.array([0, len(elsewhere) - 1, ends[-1]], jnp.int32),
            state=state,
        )
        x = np.pad(np.concatenate([text.x for text, _ in parts]), (room, (0, 0)))
        return cls(
            x, np.pad(np.concatenate([text.rates for text, _ in parts]), (room, (0, 0))), meta
        )

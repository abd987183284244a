"""Recurrent layers of every kernel set against their recurrence in numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import delta_nets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_nets import CONVOLUTION, Sizes, Step, Text, of_mamba, of_short_conv

from jitney.kernels import delta_net as plain
from jitney.kernels.cpu import delta_net as native
from jitney.kernels.mamba import mamba
from jitney.kernels.pallas_tpu import delta_net as pallas

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

KERNELS: dict[str, Callable[..., Any]] = {
    "reference": plain.delta_net,
    "reference, one by one": partial(plain.delta_net, recur=plain.recur_by_rows),
    "native": native.delta_net,
    "pallas": partial(plain.delta_net, recur=partial(pallas.recur, interpret=True)),
    "reference of Mamba": of_mamba(partial(mamba, recur=plain.recur)),
    "native of Mamba": of_mamba(partial(mamba, recur=native.recur)),
    "pallas of Mamba": of_mamba(partial(mamba, recur=partial(pallas.recur, interpret=True))),
}


def sizes_of(name: str, *sizes: Any) -> Sizes:
    """Of a TPU's kernel the values of a head, or of some heads that share keys, fill a vector."""
    own = Sizes(*sizes)._replace(corrects="Mamba" not in name)
    if sizes or "pallas" not in name:
        return own
    return own._replace(dim=8, width=128) if own.corrects else own._replace(dim=128, width=64)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("reference", (2, 2, 16, 80, 3)),
        ("native", (2, 2, 16, 80, 3)),
        ("native", (1, 2, 128, 128)),
        ("pallas", (1, 8, 16, 128, 3)),
        ("reference of Mamba", (1, 4, 32, 16, 2)),
        ("native of Mamba", (2, 2, 16, 80, 3)),
        ("native of Mamba", (1, 2, 128, 128)),
        ("pallas of Mamba", (2, 8, 128, 32)),
    ],
    ids=str,
)
def test_rows_in_chunks_are_the_recurrence(name: str, sizes: tuple[int, ...]):
    found = delta_nets.in_pieces(KERNELS[name], sizes_of(name, *sizes))
    assert found["error"] < 1e-3 and found["untouched"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("reference", ()),
        ("native", (2, 2, 16, 80, 3)),
        ("pallas", ()),
        ("reference of Mamba", (2, 2, 16, 80, 3)),
        ("native of Mamba", ()),
        ("pallas of Mamba", ()),
    ],
    ids=str,
)
def test_rows_behind_a_checkpoint_are_the_recurrence(name: str, sizes: tuple[int, ...]):
    """Slots that only some sequences read, and a prompt of three pieces."""
    found = delta_nets.from_checkpoints(KERNELS[name], sizes_of(name, *sizes))
    assert found["error"] < 1e-3 and found["untouched"]


@pytest.mark.parametrize(
    "name", ["reference", "reference, one by one", "native", "pallas", "pallas of Mamba"]
)
def test_steps_of_one_row_each_are_the_recurrence(name: str):
    found = delta_nets.row_by_row(KERNELS[name], sizes_of(name))
    assert found["error"] < 1e-3 and found["untouched"]


def test_steps_of_one_row_each_are_the_convolution():
    found = delta_nets.row_by_row(of_short_conv(plain.short_conv), CONVOLUTION)
    assert found["error"] < 1e-5 and found["untouched"]


@pytest.mark.parametrize("name", [name for name in KERNELS if "one by one" not in name])
def test_wrong_drafts_leave_nothing_behind(name: str):
    found = delta_nets.after_drafts(KERNELS[name], sizes_of(name))
    assert found["error"] < 1e-3 and found["untouched"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["native", "native of Mamba", "pallas", "pallas of Mamba"])
def test_numbers_do_not_depend_on_the_cut_nor_on_the_others(name: str, dtype: str):
    sizes = sizes_of(name) if "pallas" in name else sizes_of(name, 2, 4, 32, 32)
    rng = np.random.default_rng(5)
    weights = delta_nets.draw_weights(sizes, rng, dtype)
    text = Text.draw(sizes, rng, 2, 70)
    other = Text.draw(sizes, rng, 4, 70)

    def rows(*counts: int, beside: bool = False) -> tuple[np.ndarray, np.ndarray]:
        text.done = other.done = 0
        text.slot = 2
        steps, spans = [], []
        for count in counts:
            parts = [(other, 1), (text, count)] if beside else [(text, count)]
            # A longer chunk is also cut inside the step, and goes on in another slot.
            saves, to = [(text, 13, 0)], [(text, 5 - text.slot)]
            changed: Any = {"saves": saves, "to": to} if beside and count > 20 else {}
            steps.append(Step(parts, 80, 3, **changed))
            spans.append(slice(len(parts) - 1, len(parts) - 1 + count))
        outputs, state = delta_nets.run(KERNELS[name], steps, sizes, weights, dtype)
        own = [rows[span] for rows, span in zip(outputs, spans, strict=True)]
        return np.concatenate(own), np.asarray(state.memory)[text.slot]

    whole, memory = rows(70)
    for counts in ((1, 69), (33, 5, 32), (2, 1, 1, 1, 65)):
        for beside in (False, True):
            cut, after = rows(*counts, beside=beside)
            np.testing.assert_array_equal(cut, whole)
            np.testing.assert_array_equal(after, memory)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("reference", 3),
        ("reference, one by one", 3),
        ("native", 8),
        ("pallas", 3),
        ("reference of Mamba", 3),
        ("native of Mamba", 8),
        ("pallas of Mamba", 3),
    ],
)
def test_a_row_that_is_computed_again_changes_nothing(name: str, rows: int):
    """As where a mask came late (`Scheduler.sit_out`): the token before is in the state already."""
    sizes = sizes_of(name)
    rng = np.random.default_rng(9)
    weights = delta_nets.draw_weights(sizes, rng)
    texts = [Text.draw(sizes, rng, seat, 12) for seat in (1, 4)]
    steps = [Step([(text, 6) for text in texts], 16, 3)]
    steps.append(Step([(text, 1) for text in texts], rows, 3))
    steps += [Step([(text, 1) for text in texts], rows, 3, again=True) for _ in range(2)]
    steps.append(Step([(text, 1) for text in texts], rows, 3))
    outputs, _ = delta_nets.run(KERNELS[name], steps, sizes, weights)
    _, once, twice, thrice, after = outputs
    np.testing.assert_allclose(twice[:2], once[:2], atol=1e-6)
    np.testing.assert_allclose(thrice[:2], once[:2], atol=1e-6)
    for number, text in enumerate(texts):
        wanted = delta_nets.definition(sizes, weights, text)
        np.testing.assert_allclose(after[number], wanted[7], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("lengths", "dim", "width"),
    [((200, 1, 0, 65), 128, 64), ((63, 64, 15, 1), 8, 128), ((0, 0, 0, 0), 8, 128)],
    ids=str,
)
def test_a_tpu_passes_sequences_of_any_length(lengths: tuple[int, ...], dim: int, width: int):
    """Decays near 0 and 1, sequences that begin, slots that are read and not written, padding."""
    rng = np.random.default_rng(2)
    n_rows, shape = 320, (10, 4, dim, width)
    floats, counts = partial(jnp.asarray, dtype=jnp.float32), partial(jnp.asarray, dtype=jnp.int32)
    queries, keys = rng.standard_normal((2, n_rows, 2, dim))
    rows = plain.DeltaRows(
        queries=floats(queries),
        keys=floats(keys / np.linalg.norm(keys, axis=-1, keepdims=True)),
        values=floats(rng.standard_normal((n_rows, 4, width))),
        decay=floats(rng.choice([0.0, 1e-30, 0.5, 1 - 1e-6, 1.0], (n_rows, 4))),
        beta=floats(rng.uniform(size=(n_rows, 4))),
    )
    stops = np.array(lengths)[:, None]
    sequences = plain.DeltaSequences(
        ends=counts(np.cumsum([0, *lengths])),
        stops=counts(stops),
        reads=counts([[0], [6], [2], [3]]),
        writes=counts(np.where(stops > 0, [[5], [6], [7], [8]], 1 << 30)),
        starts=counts([7, 3, 0, 0]),
        again=counts([0] * len(lengths)),
    )
    memory = floats(rng.standard_normal(shape))
    given = rows, memory, sequences, jnp.int32(sum(lengths))
    wanted = jax.jit(plain.recur_by_rows)(*given)
    found = jax.jit(partial(pallas.recur, interpret=True))(*given)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)

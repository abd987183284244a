"""The Pallas products with a mixture's experts, interpreted on the CPU, against numpy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jitney.kernels import definitions
from jitney.kernels import experts as plain
from jitney.kernels.expert_cases import CASES, ExpertCase, _make_inputs
from jitney.kernels.pallas_tpu.experts import experts

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

INTERPRETED = partial(experts, interpret=True)
#: Gates of whole vectors; gates that are half of one, side by side; columns that are no whole
#: vectors, which lie the other way round; outputs of several blocks.
SHAPES = {
    "whole vectors": ExpertCase(size=128, inner=256),
    "gates and ups in one vector": ExpertCase(size=128, inner=64),
    "no whole vectors": ExpertCase(size=128, inner=96),
    "several blocks of outputs": ExpertCase(size=8320, inner=384, rows=2, n_experts=3),
}


#: Cases that other cases contain.
CONTAINED = {"gelu", "fp8", "biases, clamped"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in CONTAINED])
def test_answers_are_those_of_numpy(name: str):
    assert max(CASES[name].errors(INTERPRETED)) < 1e-4


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("whole vectors", "plain"),
        ("whole vectors", "mxfp4"),
        ("gates and ups in one vector", "int8"),
        ("gates and ups in one vector", "mxfp4"),
        ("no whole vectors", "plain"),
        ("several blocks of outputs", "int8"),
    ],
)
def test_matrices_lie_in_four_ways(name: str, scheme: str):
    case = replace(SHAPES[name], schemes=(scheme, scheme))
    assert max(case.errors(INTERPRETED)) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "silu"},
        {"activation": "gelu_tanh"},
        {"activation": "clamped_silu", "biased": True, "schemes": ("mxfp4", "mxfp4")},
    ],
)
def test_bfloat16_is_as_close_as_its_rounding(options: dict[str, Any]):
    case = ExpertCase(size=128, inner=128, dtype="bfloat16", **options)
    assert max(case.errors(INTERPRETED)) < 0.05


@pytest.mark.parametrize("name", ["plain", "gelu", "fp8", "mxfp4", "biases, clamped", "no rows"])
def test_the_plain_one_is_the_definition_too(name: str):
    assert max(CASES[name].errors(plain.experts)) < 1e-4


def test_unused_rows_and_blocks_change_nothing():
    """Numbers that are none, and experts beyond the last, stand where nobody should look."""
    case = ExpertCase(n_experts=4)
    given = _make_inputs(case)
    count = int(given.blocks.count)
    rows = np.array(given.blocks.rows)
    rows[count * case.block :] = 5  # as if they were somebody's
    wrong = given.blocks._replace(rows=rows)
    find = jax.jit(INTERPRETED, static_argnums=4)
    args = given.x, given.opening, given.closing
    found = find(*args, wrong, "silu")
    wanted = definitions.experts(*args, given.blocks, "silu")
    np.testing.assert_allclose(np.asarray(found)[given.real], wanted[given.real], atol=1e-4)


def test_a_row_has_the_same_answers_in_any_block_of_its_expert():
    case = ExpertCase(size=128, inner=64, dtype="bfloat16", rows=40)
    given = _make_inputs(case)
    find = jax.jit(INTERPRETED, static_argnums=4)
    args = given.opening, given.closing
    together = np.asarray(find(given.x, *args, given.blocks, "silu"))
    for place in given.real[::7]:
        rows = np.full(case.block, 1, np.int32)
        rows[3] = 0
        owner = given.blocks.experts[place // case.block]
        blocks = given.blocks._replace(
            rows=jnp.asarray(rows), experts=jnp.array([owner]), count=jnp.array(1)
        )
        x = given.x[given.blocks.rows[place]][None]
        np.testing.assert_array_equal(
            np.asarray(find(x, *args, blocks, "silu"))[3], together[place]
        )

"""Tokens chosen by devices that share the vocabulary's columns are those of one device.

Devices are parts of this CPU, which a process of its own has to ask for:
`vocabulary_program` does all the running.
"""

from __future__ import annotations

import numpy as np
import pytest
from many_devices import run_on_devices
from vocabulary_program import CASES, ROWS, VOCAB

from jitney.engine.core.executor.vocabulary import _lane_places


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What `vocabulary_program` found, by case."""
    return run_on_devices("vocabulary_program.py", tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_counts_are_those_of_one_device(results: dict[str, np.ndarray], case: str):
    np.testing.assert_array_equal(*results[f"{case} tokens"])
    np.testing.assert_array_equal(*results[f"{case} counted"])


@pytest.mark.parametrize("case", ["logprobs", "all"])
def test_logprobs_and_alternatives_are_those_of_one_device(
    results: dict[str, np.ndarray], case: str
):
    np.testing.assert_array_equal(*results[f"{case} ids"])
    np.testing.assert_allclose(*results[f"{case} own"], atol=1e-5)
    np.testing.assert_allclose(*results[f"{case} best"], atol=1e-5)
    assert np.all(results[f"{case} own"] < 0)


def test_rows_draw_different_tokens(results: dict[str, np.ndarray]):
    """Else equal ones would say nothing."""
    assert len(set(results["top_p tokens"][0].tolist())) > ROWS // 2


def test_broken_rows_have_no_token(results: dict[str, np.ndarray]):
    tokens = results["broken tokens"][1]
    assert np.all(tokens[::3] == -1) and np.all(tokens[1::3] == -1) and np.all(tokens[2::3] >= 0)
    assert np.all(np.isnan(results["broken own"][1][::3]))


def test_logits_stay_where_they_are(results: dict[str, np.ndarray]):
    """The widest all-gather brings sums of lanes, or each device's cuts: never a row's logits."""
    assert 0 < results["gather"] <= ROWS * VOCAB // 50


def test_every_lane_has_one_owner():
    owners, places = _lane_places(1000, 3)
    np.testing.assert_array_equal(owners, [0] * 8 + [1] * 8 + [2] * 8)
    np.testing.assert_array_equal(places, [*range(8)] * 3)
    owners, places = _lane_places(300, 2)  # of 600: lanes begin at 0, 128, 256 | 384, 512
    np.testing.assert_array_equal(owners, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(places, [0, 1, 2, 0, 1])

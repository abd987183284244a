"""Tokens chosen by devices that share the vocabulary's columns are those of one device.

Devices are parts of this CPU, which a process of its own has to ask for:
`vocabulary_program` does all the running.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from places import SUPPORT
from vocabulary_program import CASES, ROWS, VOCAB

from jitney.engine.core.executor.vocabulary import _lane_places

DEVICES = (2, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What `vocabulary_program` found, by number of devices and case."""
    out = tmp_path_factory.mktemp("split") / "out.npz"
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environ = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SUPPORT / "vocabulary_program.py"), str(out)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(np.load(out))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_counts_are_those_of_one_device(
    results: dict[str, np.ndarray], case: str, devices: int
):
    np.testing.assert_array_equal(*results[f"{devices} {case} tokens"])
    np.testing.assert_array_equal(*results[f"{devices} {case} counted"])


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("case", ["logprobs", "all"])
def test_logprobs_and_alternatives_are_those_of_one_device(
    results: dict[str, np.ndarray], case: str, devices: int
):
    np.testing.assert_array_equal(*results[f"{devices} {case} ids"])
    np.testing.assert_allclose(*results[f"{devices} {case} own"], atol=1e-5)
    np.testing.assert_allclose(*results[f"{devices} {case} best"], atol=1e-5)
    assert np.all(results[f"{devices} {case} own"] < 0)


def test_rows_draw_different_tokens(results: dict[str, np.ndarray]):
    """Else equal ones would say nothing."""
    assert len(set(results["4 top_p tokens"][0].tolist())) > ROWS // 2


@pytest.mark.parametrize("devices", DEVICES)
def test_broken_rows_have_no_token(results: dict[str, np.ndarray], devices: int):
    tokens = results[f"{devices} broken tokens"][1]
    assert np.all(tokens[::3] == -1) and np.all(tokens[1::3] == -1) and np.all(tokens[2::3] >= 0)
    assert np.all(np.isnan(results[f"{devices} broken own"][1][::3]))


@pytest.mark.parametrize("devices", DEVICES)
def test_logits_stay_where_they_are(results: dict[str, np.ndarray], devices: int):
    """The widest all-gather brings sums of lanes, or each device's cuts: never a row's logits."""
    assert 0 < results[f"{devices} gather"] <= ROWS * VOCAB // 50


def test_every_lane_has_one_owner():
    owners, places = _lane_places(1000, 3)
    np.testing.assert_array_equal(owners, [0] * 8 + [1] * 8 + [2] * 8)
    np.testing.assert_array_equal(places, [*range(8)] * 3)
    owners, places = _lane_places(300, 2)  # of 600: lanes begin at 0, 128, 256 | 384, 512
    np.testing.assert_array_equal(owners, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(places, [0, 1, 2, 0, 1])

"""Every class of models over several devices: two sums a layer, and through the command line the
tokens of one device.

`docs/benchmarks/tensor_parallel.py` does the second for all families and counts; here it is the
family with the most of its own: windows, caps of scores and of logits, norms behind layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import SUPPORT

from jitney.engine.core.models.registry import model_class
from jitney.engine.core.weights.checkpoints.families import FAMILIES, tiny_config

# The programs compile for minutes where processors are busy.
pytestmark = pytest.mark.timeout(600)

#: A decoder of each class of models; an encoder is served on one device.
NAMES = [
    *{
        model_class(tiny_config(family.name).architecture): family.name
        for family in FAMILIES.values()
        if tiny_config(family.name).encoder is None
    }.values()
]
#: Families whose rows are rounded to fp8, over so many devices.
IN_FP8 = (("qwen3", 4), ("mixtral", 2))


def run(folder: Path, jobs: list[tuple[str, str, list[Any]]]) -> dict[str, np.ndarray]:
    """What `sharding_program` makes of the jobs, in a process with eight devices,
    compiled in a hurry."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [
            sys.executable,
            str(SUPPORT / "sharding_program.py"),
            str(folder / "jobs.json"),
            str(folder / "out.npz"),
        ],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(np.load(folder / "out.npz"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What a greedy step of each model is on two devices, by the family's name; and what engines
    answer on one device and on four, which share KV heads two by two.
    """
    jobs: list[tuple[str, str, list[Any]]] = [
        (name, "program", [2, True, [4, 4], name]) for name in NAMES
    ]
    jobs += [(str(n), "served", ["gemma2", n, n > 1]) for n in (1, 4)]
    jobs += [(f"adapted {n}", "adapted", [n]) for n in (1, 4)]
    jobs += [(f"drafted {n}", "drafted", [n, kind]) for n, kind in ((1, "off"), (2, "draft"))]
    return run(tmp_path_factory.mktemp("families"), jobs)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What engines answer whose products are multiplied in other ways, on several devices and on
    one. All in one process, which takes seconds to start.
    """
    jobs: list[tuple[str, str, list[Any]]] = [
        ("loop", "served", ["qwen3_moe", 1]),
        ("at once", "served_at_once", ["qwen3_moe", 4]),
    ]
    for family, devices in IN_FP8:
        jobs.append((f"{family} over", "in_fp8", [family, devices, 1]))
        jobs.append((f"{family} on one", "in_fp8", [family, 1, devices]))
    return run(tmp_path_factory.mktemp("products"), jobs)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_any_model_sends_two_sums(results: dict[str, np.ndarray], name: str):
    """And a third one of two numbers a row, where queries and keys are normed over all heads, or
    of one, where a group of recurrent heads is split; one, where both halves are added at once, or
    there is only one.
    """
    reduces, gathers, widest, pools, aliased, scatters = results[name]
    config = tiny_config(name)
    sums = 3 if config.wide_qk_norm else 2
    if name == "cohere2":
        sums = 1
    wanted = sums * config.n_layers + 1 - len(config.bare_layers)  # one for the embedding
    if config.mamba is not None and config.mamba.groups == 1:
        wanted += len(config.mamba.layers)
    assert reduces == wanted
    assert gathers == 1 and widest == 2 * 2 * 4  # two numbers a row of each device
    assert scatters == 0
    assert aliased >= pools


def test_the_command_line_prints_the_same_on_four_devices(results: dict[str, np.ndarray]):
    np.testing.assert_array_equal(results["4 text"], results["1 text"])
    assert len(results["1 text"]) > 24


def test_an_engine_on_four_devices_answers_like_one(results: dict[str, np.ndarray]):
    answers = results["4 tokens"]
    np.testing.assert_array_equal(answers, results["1 tokens"])
    assert answers.shape == (18, 12) and len(np.unique(answers, axis=0)) > 12
    assert not results["4 compiles"]


def test_adapters_on_four_devices_answer_like_those_on_one(results: dict[str, np.ndarray]):
    answers = results["adapted 4"]
    np.testing.assert_array_equal(answers, results["adapted 1"])
    assert answers.shape == (6, 12) and len(np.unique(answers, axis=0)) == 6


def test_drafts_of_a_model_on_two_devices_change_no_answer(results: dict[str, np.ndarray]):
    """The model drafts for itself, so nearly all are right; sums over devices round anew."""
    np.testing.assert_array_equal(results["drafted 2 tokens"], results["drafted 1 tokens"])
    right, wrong = results["drafted 2 drafts"]
    assert right > 20 and wrong < 0.1 * right


def test_experts_all_at_once_on_four_devices_choose_the_tokens_of_one_after_the_other_on_one(
    products: dict[str, np.ndarray],
):
    """Each device has a share of every expert."""
    assert products["at once calls"] > 0
    for kind in ("text", "tokens"):
        np.testing.assert_array_equal(products[f"at once {kind}"], products[f"loop {kind}"])


@pytest.mark.parametrize(("family", "devices"), IN_FP8)
def test_rows_in_fp8_over_devices_choose_the_tokens_of_shares_rounded_on_one(
    products: dict[str, np.ndarray], family: str, devices: int
):
    """One device multiplies each share of a row with its own part of the matrix, turned back to
    [I, O], and adds them up. The experts of a mixture go one after the other here.
    """
    over, on_one = f"{family} over", f"{family} on one"
    assert products[f"{over} calls"] > 0 and products[f"{on_one} calls"] > 0
    assert products[f"{over} proved"].tolist() == [True]
    np.testing.assert_array_equal(products[f"{over} tokens"], products[f"{on_one} tokens"])

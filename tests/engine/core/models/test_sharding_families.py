"""Every class of models over several devices: two sums a layer, and through the command line the
tokens of one device.

`docs/benchmarks/tensor_parallel.py` does the second for all families and counts; here it is the
family with the most of its own: windows, caps of scores and of logits, norms behind layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from many_devices import run_on_devices

from jitney.engine.core.models.registry import model_class
from jitney.engine.core.weights.checkpoints.families import FAMILIES, tiny_config
from jitney.engine.core.weights.checkpoints.layer_configs import MambaConfig

# The programs compile for minutes where processors are busy.
pytestmark = pytest.mark.timeout(1200)

#: A decoder of each class of models; an encoder is served on one device.
NAMES = [
    *{
        model_class(tiny_config(family.name).architecture): family.name
        for family in FAMILIES.values()
        if tiny_config(family.name).encoder is None
    }.values()
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What a greedy step of each model is on two devices, by the family's name; and what engines
    answer on one device and on several: four share KV heads two by two.

    All in one process, which takes seconds to start.
    """
    jobs: list[tuple[str, str, list[Any]]] = [
        (name, "program", [2, True, [4, 4], name]) for name in NAMES
    ]
    jobs += [(str(n), "served", ["gemma2", n, n > 1]) for n in (1, 4)]
    jobs += [(f"adapted {n}", "adapted", [n]) for n in (1, 4)]
    jobs += [("drafted 1", "drafted", [1, "off"])]
    jobs += [("drafted 2", "drafted", [2, "draft", "tiny-random"])]
    jobs.append(("loop", "served", ["qwen3_moe", 1]))
    jobs.append(("at once", "served_at_once", ["qwen3_moe", 4]))
    jobs.append(("fp8 over two", "in_fp8", ["mixtral", 2, 1]))
    jobs.append(("fp8 on one", "in_fp8", ["mixtral", 1, 2]))
    return run_on_devices("sharding_program.py", tmp_path_factory.mktemp("families"), jobs)


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
    if isinstance(config.recurrent, MambaConfig) and config.recurrent.groups == 1:
        wanted += len(config.recurrent.layers)
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
    results: dict[str, np.ndarray],
):
    """Each device has a share of every expert."""
    assert results["at once calls"] > 0
    for kind in ("text", "tokens"):
        np.testing.assert_array_equal(results[f"at once {kind}"], results[f"loop {kind}"])


def test_rows_in_fp8_over_devices_choose_the_tokens_of_shares_rounded_on_one(
    results: dict[str, np.ndarray],
):
    """One device multiplies each share of a row with its own part of the matrix, turned back to
    [I, O], and adds them up. The experts of a mixture go one after the other here.
    """
    assert results["fp8 over two calls"] > 0 and results["fp8 on one calls"] > 0
    assert results["fp8 over two proved"].tolist() == [True]
    np.testing.assert_array_equal(results["fp8 over two tokens"], results["fp8 on one tokens"])

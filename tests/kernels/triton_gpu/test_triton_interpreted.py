"""Every Triton kernel and option, interpreted on the CPU, against numpy on random ragged batches.

All in one other process: kernels are made for the interpreter or for a GPU when they are decorated.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")
#: float32 sums in another order; float16 rounds results of about 1 to 2**-11.
ERROR, HALF_ERROR = 1e-5, 2e-3

#: The fixture interprets all cases in one process: 200 seconds of CPU.
pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Case -> figures, of all cases of `triton_cases`."""
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
        # What surrounds the kernels is compiled in a hurry; they themselves are interpreted.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "triton_cases"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def of_kind(results: dict[str, dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    found = {name: figures for name, figures in results.items() if name.startswith(kind + ":")}
    assert found
    return found


def bound(name: str) -> float:
    return HALF_ERROR if "float16" in name else ERROR


def test_attention_matches_numpy(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "attention")
    assert not {
        name: case["error"] for name, case in cases.items() if not case["error"] < bound(name)
    }


def test_bfloat16_queries_of_any_size_meet_keys_of_one_byte(results: dict[str, dict[str, Any]]):
    """bfloat16 rounds results of about 1 to 2**-8."""
    assert results["queries: bfloat16 over int8"]["error"] < 2**-8


def test_the_pool_holds_what_was_written_and_nothing_else_changed(
    results: dict[str, dict[str, Any]],
):
    assert not [name for name, case in of_kind(results, "attention").items() if not case["pool"]]


def test_rows_of_padding_are_zero(results: dict[str, dict[str, Any]]):
    assert not [name for name, case in of_kind(results, "attention").items() if not case["padding"]]


def test_a_sequence_gets_the_same_bits_alone_and_in_a_crowd(results: dict[str, dict[str, Any]]):
    assert results["invariance: alone and in a crowd"]["same"] == [True] * 6


def test_chunks_of_a_prompt_give_what_the_whole_gives(results: dict[str, dict[str, Any]]):
    assert results["invariance: in chunks"]["error"] < 2e-6


def test_rotation_and_write_match_the_reference(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "rotation")
    assert not {
        name: case
        for name, case in cases.items()
        if not (
            case["error"] < bound(name) and case["pool_error"] < bound(name) and case["moved"] > 0
        )
    }


def test_int4_products_match_numpy(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "int4")
    limit = {name: 5e-4 if "results in float16" in name else 1e-6 for name in cases}
    assert not {
        name: case["error"] for name, case in cases.items() if not case["error"] < limit[name]
    }


def test_fp8_products_match_numpy(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "fp8")
    assert not {name: case["error"] for name, case in cases.items() if not case["error"] < 1e-6}


def test_rows_are_rounded_to_fp8_as_numpy_rounds_them(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "rounding")
    assert not {name: case["wrong"] for name, case in cases.items() if case["wrong"]}


def test_rounded_norms_and_gates_match_numpy(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "rounded")
    assert not {
        name: case for name, case in cases.items() if not (case["error"] < 1e-4 and case["same"])
    }


def test_norms_of_products_in_parts_match_numpy(results: dict[str, dict[str, Any]]):
    for name, case in of_kind(results, "parts").items():
        assert case["sum_error"] < bound(name), name
        assert case["error"] < bound(name), name  # in units of a row's standard deviation
        assert case["rounded_error"] < 1e-4, name
        assert case["same"], name


def test_products_in_parts_match_their_definitions(results: dict[str, dict[str, Any]]):
    for name, case in of_kind(results, "product in parts").items():
        assert case["error"] < 2e-5, name
        assert case["parts"] > 1, name


def test_products_with_experts_match_numpy(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "experts")
    limit = {name: 5e-3 if "float16" in name else 1e-5 for name in cases}
    assert not {
        name: case["error"] for name, case in cases.items() if not case["error"] < limit[name]
    }


def test_unused_places_are_not_written(results: dict[str, dict[str, Any]]):
    """They are rubbish then, as uninitialised memory is: nobody may read them."""
    assert not [name for name, case in of_kind(results, "experts").items() if case["written"]]


def test_a_row_meets_an_expert_alone_with_the_same_bits(results: dict[str, dict[str, Any]]):
    same = results["alone: experts"]["same"]
    assert len(same) > 10 and all(same)


def test_rows_go_through_the_experts_that_numpy_chooses(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "routing")
    assert not {name: case["error"] for name, case in cases.items() if not case["error"] < 1e-5}


def test_a_router_without_numbers_is_not_hidden(results: dict[str, dict[str, Any]]):
    rows = results["no numbers: routing"]["none"]
    assert (
        [all(row) for row in rows] == [any(row) for row in rows] == 2 * [False, True, True, False]
    )


def test_recurrent_layers_are_their_recurrence(results: dict[str, dict[str, Any]]):
    cases = of_kind(results, "delta net")
    assert all(case["error"] < 1e-3 and case["untouched"] for case in cases.values()), cases


def test_a_prompt_has_the_same_bits_alone_and_cut_between_chunks(
    results: dict[str, dict[str, Any]],
):
    cases = of_kind(results, "delta net")
    same = {name: case["same"] for name, case in cases.items() if "every length" in name}
    assert len(same) == 2 and all(same.values())


def test_cuts_are_those_that_sorting_finds(results: dict[str, dict[str, Any]]):
    assert not {
        name: case["wrong"] for name, case in of_kind(results, "threshold").items() if case["wrong"]
    }


def test_a_cut_takes_three_passes_and_with_many_ties_or_short_lists_four(
    results: dict[str, dict[str, Any]],
):
    cases = of_kind(results, "threshold")
    assert cases["threshold: several splits"]["one_limit"] == 3
    assert not {name: case for name, case in cases.items() if case["one_limit"] > 4}
    usual = [case for name, case in cases.items() if name != "threshold: short lists"]
    assert max(case["both"] for case in usual) <= 3


def test_the_sampler_draws_the_same_tokens_by_either_search(results: dict[str, dict[str, Any]]):
    case = results["sampling: tokens"]
    assert case["other"] == 0
    assert case["distinct"] > 12  # draws, not maxima


def test_a_model_computes_the_same_logits_with_either_kernels(results: dict[str, dict[str, Any]]):
    assert not {
        name: case for name, case in of_kind(results, "model").items() if not case["error"] < 5e-5
    }

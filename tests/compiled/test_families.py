"""Steps of the families that people run, of layers of every kind that they have, compiled for a GPU
and a TPU that need not be there: `make test-compile`.
"""

from __future__ import annotations

import pytest
from compiled_specs import GPUS, MXFP4, Spec, facts, families

#: MiB of temporaries at most: activations. A copied pool, or matrix of experts, is more.
DECODE_MIB, MIXED_MIB = 48, 192
#: Bytes touched over the least, of a decode step but for its output head, which would outweigh so
#: few layers.
MOST = 1.15
#: Kernels of a decode step of so many rows at most. Each takes some microseconds, whatever it does.
COUNTED = 8
KERNELS = {
    MXFP4: 56,
    "qwen3.5-27b": 63,
    "qwen3.5-35b-a3b": 89,
    "glm-4.7-flash": 55,
    "gemma-4-26b-a4b": 157,
    "nemotron-3-nano-30b-a3b": 86,
    "lfm2-8b-a1b": 61,
}
SPECS = [spec for spec in families() if spec.plugin]
if not SPECS:
    pytest.skip("needs the targets' plugins: make test-compile", allow_module_level=True)


def name_of(spec: Spec) -> str:
    """As a test is named."""
    return str(spec).replace(" ", "_")


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_the_state_is_updated_in_place_by_one_program(spec: Spec):
    step = facts(spec)
    assert step["aliased"] >= step["state"]
    assert step["temporaries"] < (DECODE_MIB if spec.decodes else MIXED_MIB) << 20
    if spec.target in GPUS:
        assert (step["command_buffers"], step["outside"], step["slices"]) == (1, 0, 0)
        assert spec.rows != COUNTED or step["nodes"] <= KERNELS[spec.model]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.decodes], ids=name_of)
def test_a_step_touches_little_more_than_it_must(spec: Spec):
    step = facts(spec)
    for load in step["loads"]:
        # The least, which is counted from the weights, is that of plans, which is not.
        assert load["floor"] == pytest.approx(load["roofline_bytes"], rel=0.005)
        assert 0.99 < (load["bytes"] - step["head"]) / (load["floor"] - step["head"]) < MOST

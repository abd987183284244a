"""The engine's own steps at 8B shapes, compiled for GPUs and TPUs that need not be there: what they
move and keep.

Needs the compilers' plugins: `make test-compile` fetches them and sets JITNEY_CUDA_PLUGIN and
JITNEY_TPU_PLUGIN.
"""

from __future__ import annotations

import pytest
from compiled_specs import GPUS, Spec, every_spec, facts

#: Bytes touched over the least that a step must touch (in a mixed one activations count), and MiB
#: of temporaries.
MOST, DECODE_MIB, OTHER_MIB = {"decode": 1.2, "mixed": 2.0}, 64, 256

SPECS = list(every_spec())
pytestmark = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            spec,
            id=str(spec).replace(" ", "_"),
            marks=pytest.mark.skipif(
                not spec.plugin, reason="needs the target's plugin: make test-compile"
            ),
        )
        for spec in SPECS
    ],
)


def test_the_pools_are_updated_in_place_and_nothing_large_is_made(spec: Spec):
    step = facts(spec)
    assert step["aliased"] >= step["pools"]
    assert not step["copied"]
    bound = DECODE_MIB if spec.decodes and spec.plain else OTHER_MIB
    assert step["temporaries"] < bound << 20


def test_a_step_touches_little_more_than_it_must(spec: Spec):
    step = facts(spec)
    over = {load["context"]: load["bytes"] / load["floor"] for load in step["loads"]}
    most = MOST["decode" if spec.decodes else "mixed"]
    assert not {context: ratio for context, ratio in over.items() if ratio > most}
    assert min(over.values()) > 0.99  # else something went uncounted


def test_the_roofline_knows_the_program(spec: Spec):
    for load in facts(spec)["loads"]:
        assert load["floor"] * spec.devices == pytest.approx(load["roofline_bytes"], rel=0.02)
        if spec.weights != "int4" and spec.rows > 1:  # one row's product is written as a sum
            assert load["operations"] * spec.devices == pytest.approx(
                load["roofline_operations"], rel=0.01
            )


def test_a_step_on_gpus_is_one_graph(spec: Spec):
    if spec.target not in GPUS:
        pytest.skip("TPUs have no command buffers")
    step = facts(spec)
    assert (step["command_buffers"], step["outside"]) == (1, 0)


def test_no_kernel_takes_a_slice_of_the_upload(spec: Spec):
    if spec.target not in GPUS:
        pytest.skip("TPUs have no command buffers")
    assert facts(spec)["slices"] == 0  # each is recorded anew in every step


def test_gates_are_written_in_the_activations_dtype(spec: Spec):
    assert not facts(spec)["wide_gates"]

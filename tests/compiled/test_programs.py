"""The engine's own steps at 8B shapes, compiled for GPUs and TPUs that need not be there: what they
move and keep.

Needs the compilers' plugins: `make test-compile` fetches them and sets JITNEY_CUDA_PLUGIN and
JITNEY_TPU_PLUGIN.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from compiled_specs import GPUS, MANY, MIXTURE, MODELS, SEATS, Spec, every_spec, facts

from jitney.engine.core.executor.memory import likely_temp_bytes
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.lab.simulation.roofline import SHAPES
from jitney.kernels.pallas_tpu.kernel_set import PallasKernels

#: Bytes touched over the least that a step must touch (in a mixed one activations count), and MiB
#: of temporaries.
MOST, DECODE_MIB, OTHER_MIB = {"decode": 1.2, "many": 1.25, "mixed": 2.0}, 64, 256
#: Of many rows with fp8 weights and pools: the activations of bf16, beside half the bytes.
MOST_FP8 = 1.3
#: Of 64 and more with int4 weights: activations beside a quarter of the bytes.
MOST_INT4 = 1.15
#: Of a mixture's mixed steps: each row is brought to each of its experts and back, on every device.
MOST_MIXTURE = 2.3

SPECS = [spec for spec in every_spec() if spec.plugin]
if not SPECS:
    pytest.skip("needs the targets' plugins: make test-compile", allow_module_level=True)


def steps_that(fit: Callable[[Spec], bool]) -> pytest.MarkDecorator:
    """Run a test for each of these steps."""
    steps = [pytest.param(spec, id=str(spec).replace(" ", "_")) for spec in SPECS if fit(spec)]
    return pytest.mark.parametrize("spec", steps)


every_step = steps_that(lambda spec: True)
#: TPUs have no command buffers.
gpu_steps = steps_that(lambda spec: spec.target in GPUS)


@every_step
def test_the_pools_are_updated_in_place_and_nothing_large_is_made(spec: Spec):
    step = facts(spec)
    assert step["aliased"] >= step["pools"]
    assert not step["copied"]
    few = spec.decodes and spec.plain and spec.rows < MANY
    bound = DECODE_MIB if few else OTHER_MIB
    assert step["temporaries"] < bound << 20


@every_step
def test_a_step_touches_little_more_than_it_must(spec: Spec):
    step = facts(spec)
    over = {load["context"]: load["bytes"] / load["floor"] for load in step["loads"]}
    many = "many" if spec.rows == MANY else "decode"
    most = MOST[many if spec.decodes else "mixed"]
    if spec.weights == "fp8" and spec.rows == MANY:
        most = MOST_FP8
    if spec.weights == "int4" and spec.rows >= SEATS:
        most = MOST_INT4
    if spec.model == MIXTURE and not spec.decodes:
        most = MOST_MIXTURE
    assert not {context: ratio for context, ratio in over.items() if ratio > most}
    assert min(over.values()) > 0.99  # else something went uncounted


@steps_that(lambda spec: spec.devices <= SHAPES[spec.model].n_kv_heads)
def test_the_roofline_knows_the_program(spec: Spec):
    """More devices share KV heads, each with a copy, which the roofline does not count."""
    for load in facts(spec)["loads"]:
        assert load["floor"] * spec.devices == pytest.approx(load["roofline_bytes"], rel=0.02)
        counted = spec.rows > 1  # one row's product is written as a sum
        padded = spec.weights == "fp8" and spec.rows < 16  # by cuBLASLt
        # Who goes where is every device's own work.
        apart = 0.02 if spec.model == MIXTURE else 0.01
        if spec.weights != "int4" and counted and not padded:
            assert load["operations"] * spec.devices == pytest.approx(
                load["roofline_operations"], rel=apart
            )


@gpu_steps
def test_a_step_on_gpus_is_one_graph(spec: Spec):
    step = facts(spec)
    assert (step["command_buffers"], step["outside"]) == (1, 0)


@gpu_steps
def test_no_kernel_takes_a_slice_of_the_upload(spec: Spec):
    assert facts(spec)["slices"] == 0  # each is recorded anew in every step


@steps_that(lambda spec: spec.weights == "fp8" and spec.target in GPUS)
def test_fp8_weights_are_multiplied_as_fp8(spec: Spec):
    layers = spec.layers or SHAPES[spec.model].n_layers
    # qkv, o, gate and up, down; the head. Experts are widened within their kernels.
    each = 2 if spec.model == MIXTURE else 4
    assert facts(spec)["fp8_products"] == each * layers + 1


@steps_that(lambda spec: spec.weights == "fp8" and spec.target in GPUS)
def test_norms_and_gates_round_their_rows_to_fp8(spec: Spec):
    kernels, layers = facts(spec)["kernels"], spec.layers or SHAPES[spec.model].n_layers
    if spec.model == MIXTURE:  # its router reads the second norm
        assert (kernels["norm_rows"], kernels.get("gate_rows", 0)) == (layers, 0)
    else:
        # The last layer's second norm is of the rows with logits alone.
        assert (kernels["norm_rows"], kernels["gate_rows"]) == (2 * layers - 1, layers)
        # Attention's output; that norm, and the head's.
        assert kernels["round_rows"] == layers + 2


#: Kernels of a layer of a decode step, by the weights' format.
LAYER_KERNELS = {"plain": 10, "fp8": 11}


@steps_that(
    lambda spec: (
        spec.target == "h100"
        and spec.model in MODELS
        and spec.weights in LAYER_KERNELS
        and (spec.decodes, spec.plain, spec.devices) == (True, True, 1)
    )
)
def test_products_are_added_by_the_kernels_that_read_them(spec: Spec):
    """Beside the layers there are at most 21 kernels: indices, embedding, head, and the choice of
    tokens.
    """
    step, layers = facts(spec), spec.layers or SHAPES[spec.model].n_layers
    assert step["nodes"] <= LAYER_KERNELS[spec.weights] * layers + 21


@steps_that(lambda spec: spec.model == MIXTURE)
def test_all_blocks_of_a_mixture_are_two_kernels_a_layer(spec: Spec):
    kernels = facts(spec)["kernels"]
    assert (kernels["open_experts"], kernels["close_experts"]) == (spec.layers, spec.layers)


@steps_that(lambda spec: spec.model == MIXTURE and not spec.decodes)
def test_a_mixtures_temporaries_are_those_expected(spec: Spec):
    buckets = Buckets((Bucket(spec.seqs, spec.seqs),), (Bucket(spec.rows, spec.seqs),))
    likely = likely_temp_bytes(SHAPES[spec.model].local(spec.devices), buckets)
    assert 0.3 * likely < facts(spec)["temporaries"] < likely


@every_step
def test_gates_are_written_in_the_activations_dtype(spec: Spec):
    assert not facts(spec)["wide_gates"]


def sums_beside_products(spec: Spec) -> bool:
    """Many rows, and as many devices as a host of the chip has."""
    many = spec.devices >= 8 and not spec.decodes
    return many and PallasKernels(chip=spec.target).sums_in_halves


@steps_that(sums_beside_products)
def test_sums_of_many_rows_run_beside_products_where_that_pays(spec: Spec):
    sums = facts(spec)["sums"]
    # The embedding's, two halves of attention's a layer, and two of the feed-forward's; that of
    # experts is one sum, and the last feed-forward, of the few rows that somebody wants, has one
    # that nothing runs beside.
    halves = 1 if spec.model == MIXTURE else 2
    counted = 1 + 2 * spec.layers + halves * (spec.layers - 1) + 1
    assert (sums["all"], sums["asynchronous"]) == (counted, counted - 1)
    assert sums["beside"] >= spec.layers + (halves - 1) * (spec.layers - 1)

"""What was found wrong in the programs for GPUs when they were first counted, and what they are
now: a table of `compiled_programs.md`, which `compiled_programs.py` writes.

What a program says of itself is taken from the counted programs, what a function says is asked of
it, and the rest stands in the test that is named and in its decision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from compiled_specs import GPUS, MANY, SEATS, Spec

from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.lab.simulation.roofline import SHAPES

type Found = dict[Spec, dict[str, Any]]

_HEADING = """## What was wrong, before and now

Found by reading kernels and counting programs for GPUs, in November 2026, 8B shapes. What is said
of programs now is counted in those below; the rest is held by the test.

| defect | before | now | held by |
|---|---|---|---|
"""
_PROVES = """
It does not prove that a step became faster: fewer bytes, passes, thunks and registers are what a
compiler and an interpreter can see. XLA's products are not tuned without a device: a card may split
their sums otherwise, and write other bytes than those counted. And which attention of prompts is
best is a device's to say (`jitney bench device --only prefill,cudnn,flashinfer`).
"""


@dataclass(frozen=True)
class _Defect:
    """A row of the table."""

    what: str
    before: str
    #: What the programs say of it.
    now: Callable[[Found], str]
    #: The test that would fail if it came back, in tests/, or where else it is told of.
    held_by: str


def defects(found: Found) -> str:
    """The table as Markdown."""
    gpus = {spec: step for spec, step in found.items() if spec.target in GPUS}
    lines = [f"| {one.what} | {one.before} | {one.now(gpus)} | {one.held_by} |" for one in _DEFECTS]
    return _HEADING + "\n".join(lines) + "\n" + _PROVES


def _overs(found: Found, rows: int) -> Iterator[str]:
    """Of each card's step with int4 weights: bytes touched over the least."""
    for spec, step in found.items():
        if (spec.weights, spec.rows) == ("int4", rows):
            most = max(load["bytes"] / load["floor"] for load in step["loads"])
            yield f"{spec.target.upper()} {most:.2f}"


def _int4(found: Found) -> str:
    (step,) = [
        step
        for spec, step in found.items()
        if (spec.target, spec.weights, spec.rows) == ("h100", "int4", MANY)
    ]
    (load,) = step["loads"]
    return (
        f"{load['bytes'] / 2**30:.1f} GiB, {step['temporaries'] / 2**20:.0f} MiB of temporaries; "
        f"times the least, {MANY} rows: {', '.join(_overs(found, MANY))}; {SEATS} rows: "
        f"{', '.join(_overs(found, SEATS))}"
    )


def _gates(found: Found) -> str:
    wide = [spec for spec, step in found.items() if step.get("wide_gates")]
    return f"bfloat16: float32 in {len(wide)} of {len(found)} programs"


def _slices(found: Found) -> str:
    most = max(step["slices"] for step in found.values())
    return f"{most} in the worst of {len(found)} programs"


def _fp8(found: Found) -> str:
    told = []
    for spec, step in found.items():
        if spec.weights == "fp8" and not spec.layers:
            products = 4 * SHAPES[spec.model].n_layers + 1
            told.append((spec.target.upper(), spec.devices, step["fp8_products"], products))
    fewest = min(taken for *_, taken, _ in told)
    (products,) = {products for *_, products in told}
    where = {(target, devices) for target, devices, *_ in told}
    names = ", ".join(f"{devices} x {target}" for target, devices in sorted(where))
    return f"{fewest} of {products} products take both operands in fp8 on {names}"


def _graphs(found: Found) -> str:
    several = [step for spec, step in found.items() if spec.devices > 1]
    graphs = max(step["command_buffers"] for step in several)
    outside = max(step["outside"] for step in several)
    return f"{graphs} graph and {outside} thunks outside in the worst of {len(several)} programs"


def _smallest(found: Found) -> str:
    buckets = Buckets.of(max_seats=256, token_budget=2048, on_device=True)
    bucket = buckets.choose(tokens=20, sequences=1, decode_only=False, logit_rows=1)
    return f"{bucket.tokens} rows, {bucket.seats} logit rows"


def _always(text: str) -> Callable[[Found], str]:
    return lambda found: text


_COMPILED = "`compiled/test_programs.py`"
_TRITON = "`kernels/triton_gpu/test_triton_compiled.py`"
_DEFECTS = (
    _Defect(
        "int4 above 64 rows wrote every weight out as bfloat16",
        "H100, 128 rows: 51.7 GiB, 2.63 times the least, 1 GiB of temporaries",
        _int4,
        f"{_COMPILED}: `test_a_step_touches_little_more_than_it_must`; {_TRITON}: "
        "`test_int4_products_of_many_rows_stay_narrow_up_to_the_tile` (wgmma from 64 rows on)",
    ),
    _Defect(
        "gate and up of a prompt step went through memory as float32 [T, 28,672]",
        "in each layer; some 5 ms of a step of 2,048 rows",
        _gates,
        f"{_COMPILED}: `test_gates_are_written_in_the_activations_dtype`",
    ),
    _Defect(
        "kernels took slices of the upload, recorded anew in each step (`DynamicSliceFusion`)",
        "1 a layer in decode steps, 4 in mixed ones",
        _slices,
        f"{_COMPILED}: `test_no_kernel_takes_a_slice_of_the_upload`",
    ),
    _Defect(
        "tiles of decode attention did not know pools of int8 and fp8",
        "242 to 254 registers, 2 programs resident where 3 were launched; values 8 bytes at a time",
        _always(
            "128 and 120 registers (H100, head dim 128), as many resident as launched; 16 bytes"
        ),
        f"{_TRITON}: `test_as_many_programs_are_resident_for_every_pool`, "
        "`test_keys_and_values_of_single_bytes_are_copied_16_bytes_at_a_time`; decision 100",
    ),
    _Defect(
        "the cut of top-k and top-p read a row again and again, one program a row",
        "33 passes; 4.3 GB at 256 rows of 128k; all logits copied first",
        _always("3 passes, 4 with many ties; 0.42 GB; logits are not copied first"),
        "`kernels/triton_gpu/test_triton_interpreted.py`: "
        "`test_a_cut_takes_three_passes_and_with_many_ties_or_short_lists_four`; decision 82",
    ),
    _Defect(
        "attention of prompts runs 8 warps in lock step, without TMA",
        "ours alone",
        _always("ours, and FlashInfer's by name; beside cuDNN's on a device: open until one says"),
        "`jitney bench device`: parts `prefill`, `cudnn`, `flashinfer`; decision 113",
    ),
    _Defect(
        "PTX 8.7 for every card",
        "sm_103 and sm_121 ended the process",
        _always("as the card's compiler has it; an unknown card ends with one line"),
        f"{_TRITON}: `test_the_ptx_version_is_one_that_the_card_can_have`",
    ),
    _Defect(
        "fp8 weights were widened: memory saved, arithmetic not",
        "0 fp8 products; until 2026-11-26 also over several GPUs",
        _fp8,
        f"{_COMPILED}: `test_fp8_weights_are_multiplied_as_fp8`",
    ),
    _Defect(
        "a step over several GPUs was many graphs",
        "17 graphs, 24 thunks outside (2 devices, 8 layers)",
        _graphs,
        f"{_COMPILED}: `test_a_step_on_gpus_is_one_graph`",
    ),
    _Defect(
        "the smallest step with a prompt had twice as many rows as there are seats",
        "one prompt of 20 tokens, 256 seats: 512 rows, 256 logit rows",
        _smallest,
        "`engine/core/scheduler/test_buckets.py`: "
        "`test_few_sequences_with_a_short_prompt_are_a_small_step`",
    ),
    _Defect(
        "places counted in 32 bits, sizes that were never launched",
        "int4 and fp8 products wrong beyond 37,450 rows of 70B",
        _always("64 bits; pools and results beyond 2**31 elements are interpreted"),
        "`kernels/test_sizes.py`; decision 84",
    ),
)

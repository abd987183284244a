"""Proofs of a kernel set by the tables of cases: attention, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jitney.kernels.attention_cases import CASES, AttentionCase
from jitney.kernels.expert_cases import CASES as EXPERTS
from jitney.kernels.expert_cases import ExpertCase
from jitney.kernels.interface import KernelSet
from jitney.kernels.proof import Proof
from jitney.kernels.select import ServedHeads

#: Published mixtures of experts, reduced to four experts per layer: in blocks of a decode step and
#: of a prompt, on one device and on one of several.
_PUBLISHED = {
    f"{name}, blocks of {block}, {scheme}": ExpertCase(
        size, inner, block + 3, block, 4, (scheme, scheme)
    )
    for name, size, inner in (
        ("Qwen3-30B-A3B", 2048, 768),
        ("an eighth of Qwen3-30B-A3B", 2048, 96),
        ("a fourth of Mixtral-8x7B", 4096, 3584),
    )
    for block in (16, 64)
    for scheme in ("plain", "int8", "fp8")
}


class CaseProof(NamedTuple):
    """The comparison of one case with its definition."""

    kernel: str  # attention or experts
    name: str
    as_served: bool  # attention in the dtype that serves
    refusal: str  # why the set does not compute it; empty if it does
    prove: Callable[[], Proof]  # on this device; never raises


def case_proofs(kernels: KernelSet, dtype: str) -> Iterator[CaseProof]:
    """Attention in this dtype, attention in the other dtypes of the table, experts in this dtype;
    without experts for a set that multiplies a mixture's blocks one after another.
    """
    served = {f"{name}, {dtype}": case.served_as(dtype) for name, case in CASES.items()}
    for name, case in served.items():
        yield _of_attention(kernels, name, case, as_served=True)
    for name, case in CASES.items():
        if case not in served.values():
            yield _of_attention(kernels, f"{name}, {case.dtype}", case, as_served=False)
    if kernels.experts is None:
        return
    for name, case in (EXPERTS | _PUBLISHED).items():
        prove = partial(Proof.of_experts, kernels, replace(case, dtype=dtype))
        yield CaseProof("experts", name, False, "", prove)


def _of_attention(
    kernels: KernelSet, name: str, case: AttentionCase, *, as_served: bool
) -> CaseProof:
    refusal = ""
    if case.prompts:
        refusal = ServedHeads(case.heads[2], case.dtype, case.pool).refusal(kernels.name)
    prove = partial(Proof.of_attention, kernels, case)
    return CaseProof("attention", name, as_served, refusal, prove)

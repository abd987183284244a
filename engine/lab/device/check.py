"""Checks that answers are right before anything is timed: tokens of the engine, every case of
attention, and every kernel in the shapes of the measured model.

Attention and the other kernels are compared with their definitions in numpy. The engine's tokens
are compared with the reference kernels on the same device: each must be the reference's token, or
as likely up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.core import (
    KV_TYPES,
    Bucket,
    Buckets,
    ModelConfig,
    Packed,
    RandomModel,
    ReferenceModel,
)
from jitney.engine.lab.bench.offline import outputs_of
from jitney.engine.lab.device.loop import make_traffic, random_requests
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.kernels.case_proofs import CaseProof, case_proofs
from jitney.kernels.interface import KernelSet
from jitney.kernels.proof import Proof, prove
from jitney.kernels.proof_shapes import ServedShapes
from jitney.kernels.select import ServedHeads

#: Layers of the model whose tokens are compared; enough for each kernel to feed the next.
_LAYERS = 2
#: Number of requests; most tokens of a prompt and of an answer.
_REQUESTS, _PROMPT, _OUTPUT = 8, 150, 16
#: Bytes per activation -> most distance of a token's logit from the reference's best one, in
#: standard deviations of the row. In random models the best is 4 of them above the mean.
_TOKEN_LIMIT = {2: 0.25, 4: 0.02}
#: The same limit if rows are rounded to int8 or fp8, where the last bit of a number may move it by
#: a whole quantisation step.
_ROUNDED_LIMIT = 0.25
#: Most positions of a sequence in the checks of kernels.
_CONTEXT = 4096


def checks(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """Checks of the first kernel set: tokens, attention in the dtype that serves, kernels in the
    measured model's shapes, attention in other dtypes, experts; a short call may not reach the end.
    """
    kernels = sets[0]
    cases = list(case_proofs(kernels, jnp.dtype(dtype).name))
    yield from _token_tasks(job, kernels, dtype)
    yield from _case_tasks(job, kernels, [case for case in cases if case.as_served])
    yield from _proof_tasks(job, kernels, dtype)
    yield from _case_tasks(job, kernels, [case for case in cases if not case.as_served])


def _token_tasks(job: PartJob, kernels: KernelSet, dtype: DTypeLike) -> Tasks:
    config = _shallow(job.config, _LAYERS)
    for weights in Packed.schemes:
        case = f"{weights} weights, {jnp.dtype(dtype)}"
        row = job.row("tokens of the engine", case, kernels.label)
        model = RandomModel(config, kernels, dtype, weights)
        yield Task(row, partial(_token_row, job, model))


def _proof_tasks(job: PartJob, kernels: KernelSet, dtype: DTypeLike) -> Tasks:
    for weights in Packed.schemes:
        for kv in ("auto", *KV_TYPES):
            row = job.row("kernels", f"{weights} weights, {kv} KV", kernels.label)
            yield Task(row, partial(_proof_rows, job, kernels, dtype, weights, kv))


def _case_tasks(job: PartJob, kernels: KernelSet, cases: Sequence[CaseProof]) -> Tasks:
    for case in cases:
        row = job.row(case.kernel, case.name, kernels.label)
        yield Task(row, partial(_case_row, case))


def _case_row(case: CaseProof, row: Row) -> Iterator[Row]:
    if case.refusal:
        yield row.noted(f"not for these kernels: {case.refusal}")
    else:
        yield _judged(row, case.prove())


def _judged(row: Row, proof: Proof) -> Row:
    if proof.reason:
        return row.as_wrong(proof.reason)
    return _compared(row, proof.error, proof.limit)


def _compared(row: Row, error: float, limit: float) -> Row:
    row = replace(row, error=error, note=f"right (at most {limit:g})")
    if not error <= limit:
        return row.as_wrong(f"{error:.3g}, at most {limit:g} are right")
    return row


def _proof_rows(
    job: PartJob, kernels: KernelSet, dtype: DTypeLike, weights: str, kv: str, row: Row
) -> Iterator[Row]:
    """A row for each kernel that the model calls with weights and pools of these kinds. The first
    row decides whether an earlier call has measured all of them.
    """
    served, pool = jnp.dtype(dtype), jnp.dtype(KV_TYPES.get(kv, dtype))
    reason = ServedHeads(job.config.head_dim, served.name, pool.name).refusal(kernels.name)
    if reason:
        yield row.noted(f"not for these kernels: {reason}")
        return
    proofs = prove(kernels, _shapes_for(job, kernels, dtype, weights, kv))
    whole = replace(row, note="right", figures=_count(proofs))
    right = all(proof.ok for proof in proofs)
    yield whole if right else whole.as_wrong("see below")
    for proof in proofs:
        yield _judged(replace(row, name=proof.kernel), proof)


def _count(proofs: Sequence[Proof]) -> dict[str, float]:
    return {"kernels compared": float(len(proofs))}


def _shapes_for(
    job: PartJob, kernels: KernelSet, dtype: DTypeLike, weights: str, kv: str
) -> ServedShapes:
    model = RandomModel(_shallow(job.config, 1), kernels, dtype, weights)
    decode_rows, mixed_rows = job.sizes.proved
    seats = decode_rows[-1]
    decode = tuple(Bucket(rows, rows) for rows in decode_rows)
    buckets = Buckets(decode, tuple(Bucket(rows, seats) for rows in mixed_rows))
    context = min(_CONTEXT, model.config.context_length)
    return model.served(buckets, page_size=job.page_size, context=context, kv=kv)


def _token_row(job: PartJob, model: RandomModel, row: Row) -> Iterator[Row]:
    """Compare greedy requests of many lengths through scheduler, core and runner."""
    prompt = min(_PROMPT, model.config.context_length - _OUTPUT)
    traffic, _ = make_traffic(job, model, context=prompt + _OUTPUT)
    requests = random_requests(job, _REQUESTS, (1, prompt), (_OUTPUT, _OUTPUT))
    outputs = outputs_of(traffic.run(requests, concurrency=job.sizes.streams))
    reference = ReferenceModel(model, job.page_size, prompt + _OUTPUT)
    errors = [0.0]
    same = 0
    for request, output in zip(requests, outputs, strict=True):
        if len(output) != _OUTPUT:
            raise RuntimeError(f"{len(output)} of {_OUTPUT} tokens came out")
        behind = _behind_best(reference, request.prompt, output)
        errors.extend(behind)
        same += sum(distance == 0 for distance in behind)
    error = float(max(errors))
    figures = {"tokens": float(_REQUESTS * _OUTPUT), "of them the reference's own": float(same)}
    yield replace(_compared(row, error, _limit_of(model)), figures=figures)


def _limit_of(model: RandomModel) -> float:
    if getattr(model.kernels, model.weights, None) is not None:  # int8, fp8: rows are rounded, too
        return _ROUNDED_LIMIT
    return _TOKEN_LIMIT[model.itemsize]


def _shallow(config: ModelConfig, most: int) -> ModelConfig:
    """A copy of the shape with at most `most` layers."""
    layers = min(most, config.n_layers)
    return replaced(config, n_layers=layers, windows=config.windows[:layers])


def _behind_best(
    reference: ReferenceModel, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Distance of each token's logit from the best one, in standard deviations of its row."""
    rows = reference.logits([*prompt, *output])[len(prompt) - 1 : -1]
    chosen = rows[np.arange(len(output)), output]
    return ((rows.max(-1) - chosen) / rows.std(-1)).tolist()

"""Attention of one prompt by other people's kernels, where the device has them: FlashInfer's, as
the kernel set `flashinfer` calls them, and cuDNN's over pages, which jax carries.

They are measured beside ours (`engine.lab.device.kernels`), at the same sizes, so that a device
says whose are the quickest for its heads (`DeviceReport.prompt_choice`). cuDNN's cannot serve: it
has keys and values in pools of their own, and takes every prompt from its first token on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jitney.engine.lab.device.kernels import Contexts, attend_row, measured
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.timing import distance, timed
from jitney.kernels.interface import KernelError, KernelSet
from jitney.kernels.select import ServedHeads, select

_BY = "cuDNN"


class _Prompt(NamedTuple):
    """One prompt of T tokens, whole pages, whose keys and values lie in pools of their own."""

    q: jax.Array  #: [1, T, H, D]
    keys: jax.Array  #: [N, page, K, D]
    values: jax.Array  #: the same
    table: jax.Array  #: int32 [1, 1, N, 1], the pages in the prompt's order


def _prompts(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """A row for each size of prompt; none of the sets is called."""
    for rows in job.sizes.prompts:
        row = job.row("prompt attention", f"{rows:,} rows", _BY)
        yield Task(row, partial(_cudnn_row, job, dtype, rows))


def _flashinfer_prompts(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """A row for each size of prompt, by the kernel set `flashinfer`; none of the sets is called."""
    for rows in job.sizes.prompts:
        row = job.row("prompt attention", f"{rows:,} rows", "flashinfer")
        yield Task(row, partial(_flashinfer_row, job, dtype, rows))


def _flashinfer_row(job: PartJob, dtype: Any, rows: int, row: Row) -> Iterator[Row]:
    name = jnp.dtype(dtype).name
    try:
        kernels = select("gpu", "flashinfer", ServedHeads(job.config.head_dim, name, name))
    except KernelError as error:
        yield row.noted(f"not run: {error}")
        return
    yield from attend_row(job, kernels, dtype, Contexts((), ((rows, rows),)), "auto", row)


def _cudnn_row(job: PartJob, dtype: Any, rows: int, row: Row) -> Iterator[Row]:
    if jax.default_backend() != "gpu":
        yield row.noted("cuDNN runs on NVIDIA's GPUs")
        return
    load = Contexts((), ((rows, rows),))
    size = jnp.dtype(dtype).itemsize
    moved = load.moved(job.config, size, size)
    given = _make_prompt(job, rows, dtype, 0)

    def time(floor_s: float) -> list[float]:
        seeds = range(1, job.copies_of(moved))
        copies = [given, *(_make_prompt(job, rows, dtype, seed) for seed in seeds)]
        return timed(
            lambda q, other: _over_pages(other._replace(q=q)),
            jnp.copy(given.q),
            copies,
            floor_s=floor_s,
            sample_s=job.sizes.sample_s,
        )

    yield measured(
        job,
        row,
        moved=moved,
        operations=load.operations(job.config),
        error=float(distance(jax.jit(_over_pages)(given), jax.jit(_in_a_row)(given))),
        itemsize=size,
        time=time,
    )


def _make_prompt(job: PartJob, rows: int, dtype: Any, seed: int) -> _Prompt:
    """Random queries, keys and values; the pages are shuffled."""
    config, page = job.config, job.page_size
    n_pages = rows // page
    for_queries, for_keys, for_values = jax.random.split(jax.random.key(seed), 3)
    pool = (n_pages, page, config.n_kv_heads, config.head_dim)
    order = np.random.default_rng(seed).permutation(n_pages).astype(np.int32)
    return _Prompt(
        jax.random.normal(for_queries, (1, rows, config.n_heads, config.head_dim), dtype),
        jax.random.normal(for_keys, pool, dtype),
        jax.random.normal(for_values, pool, dtype),
        jnp.asarray(order.reshape(1, 1, n_pages, 1)),
    )


def _over_pages(given: _Prompt) -> jax.Array:
    """cuDNN's attention. -> [1, T, H, D]"""
    # jax has no public name for it.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    length = jnp.full((1,), given.q.shape[1], jnp.int32)
    return cudnn.paged_attention(
        given.q,
        given.keys,
        given.values,
        length,
        length,
        given.table,
        given.table,
        scale=given.q.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )


def _in_a_row(given: _Prompt) -> jax.Array:
    """The same by XLA, the pages put in order first."""
    order = given.table.reshape(-1)
    shape = (1, -1, *given.keys.shape[2:])
    keys, values = given.keys[order].reshape(shape), given.values[order].reshape(shape)
    return jax.nn.dot_product_attention(given.q, keys, values, is_causal=True, implementation="xla")


#: Part -> what yields its tasks.
TASKS = {
    "flashinfer": _flashinfer_prompts,
    "cudnn": _prompts,
}

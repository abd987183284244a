"""Measures FlashInfer's attention of one prompt, as the kernel set `flashinfer` calls it, if the
device has it, so that the fastest kernels for its heads can be chosen
(`DeviceReport.prompt_choice`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from jitney.engine.lab.device.kernels import Contexts, attend_row
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.kernels.interface import KernelError, KernelSet
from jitney.kernels.select import ServedHeads, select


def flashinfer_prompts(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """A row for each size of prompt, by the kernel set `flashinfer`; `sets` are not called."""
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

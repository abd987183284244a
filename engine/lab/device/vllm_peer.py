"""Measures vLLM, if installed, on the batches of requests of our engine: the same shape, random
weights, greedy, answers of fixed length. This module does not import jax.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from jitney.engine.lab.device.peers import hf_config, second_batch, where_installed
from jitney.engine.lab.device.rows import PartJob, Row, Tasks

_BY = "vLLM"


def batching(job: PartJob) -> Tasks:
    """`LLM.generate` with as many simultaneous requests as streams."""
    get = cache(partial(_make_engine, job))
    yield from where_installed(job.batch_tasks(_BY, "", partial(_batch_row, job, get)), "vllm")


def _batch_row(job: PartJob, get: Callable[[], Any], streams: int, row: Row) -> Iterator[Row]:
    engine, n_output = get(), job.sizes.batch[1]
    params = importlib.import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=n_output, ignore_eos=True, detokenize=False
    )

    def answer(prompts: list[list[int]]) -> int:
        token_prompts = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = engine.generate(token_prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    yield second_batch(job, streams, answer, row)


def _make_engine(job: PartJob) -> Any:
    """A vLLM engine with its defaults, except for seats for every stream and no prefix cache."""
    sizes = job.sizes
    folder = tempfile.mkdtemp(prefix="jitney-vllm-")
    Path(folder, "config.json").write_text(json.dumps(hf_config(job.config, job.dtype)))
    return importlib.import_module("vllm").LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=job.dtype,
        max_model_len=sum(sizes.batch) + job.page_size,
        max_num_seqs=max(sizes.streams, *sizes.crowds),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

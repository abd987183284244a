"""Measures transformers' continuous batching, if installed, on the batch of requests of `loop`,
with its own defaults. This module does not import jax.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from msgspec.structs import replace

from jitney.engine.common.requests import JsonDict
from jitney.engine.core import ModelConfig
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks

_CONTINUOUS = "transformers, continuous batching"
#: Rows of a step on a CPU; transformers needs at least this number.
_CPU_ROWS = 256


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _missing(*packages: str) -> str:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return ""


def _tasks(tasks: Tasks) -> Tasks:
    return where_installed(tasks, "torch", "transformers")


def where_installed(tasks: Tasks, *packages: str) -> Tasks:
    """The same tasks, or rows with the reason why the peer cannot run."""
    why = _missing(*packages)
    for task in tasks:
        if why:
            task = Task(task.row, lambda row: [row.noted(why)])
        yield task


def batching(job: PartJob) -> Tasks:
    """transformers' `generate_batch` with as many simultaneous requests as streams: the batch that
    counts for the goal, then those of `crowds`.
    """
    get = cache(partial(_make_model, job))
    yield from _tasks(job.batch_tasks(_CONTINUOUS, "peer's", partial(_batching_row, job, get)))


def _place(job: PartJob) -> str:
    """PyTorch's device: a GPU, unless the job is for a CPU."""
    on_gpu = job.platform != "cpu" and _module("torch").cuda.is_available()
    return "cuda" if on_gpu else "cpu"


def _wait(place: str) -> None:
    """Wait until the device is done."""
    if place == "cuda":
        _module("torch").cuda.synchronize()


def config_fields(shape: ModelConfig) -> JsonDict:
    """The shape as fields of a Hugging Face configuration."""
    family = "Qwen3" if shape.qk_norm else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "tie_word_embeddings": shape.tie_embeddings,
    }


def hf_config(shape: ModelConfig, dtype: str) -> JsonDict:
    """The content of a model's config.json."""
    fields = config_fields(shape)
    return fields | {
        "model_type": fields["architectures"][0].removesuffix("ForCausalLM").lower(),
        "rms_norm_eps": shape.rms_eps,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _make_model(job: PartJob) -> Any:
    torch, fields = _module("torch"), config_fields(job.config)
    make = getattr(_module("transformers"), fields["architectures"][0])
    config = make.config_class(**fields, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, job.dtype))
    try:
        with torch.device(_place(job)):
            return make(config).eval()
    finally:
        torch.set_default_dtype(previous)


def _batching_row(job: PartJob, get: Callable[[], Any], streams: int, row: Row) -> Iterator[Row]:
    place = _place(job)
    if place == "cpu" and _missing("psutil"):
        yield row.noted("psutil is not installed, by which transformers finds a CPU's memory")
        return
    model = get()
    options = _batching_options(model, job.sizes.batch[1])
    if place == "cpu":
        options["continuous_batching_config"] = _small_pool(streams)

    def answer(prompts: list[list[int]]) -> int:
        outputs = model.generate_batch(inputs=prompts, **options)
        _wait(place)
        return sum(len(output.generated_tokens) for output in outputs.values())

    try:
        yield second_batch(job, streams, answer, row)
    finally:
        # The manager is made for this number of streams, and holds most of the memory.
        getattr(model, "destroy_cached_continuous_batching_manager", int)()


def second_batch(
    job: PartJob, streams: int, answer: Callable[[list[list[int]]], int], row: Row
) -> Row:
    """Output tokens a second of the second of two batches; the first one captures and compiles.

    answer: computes the prompts' answers and returns how many tokens they have.
    """
    n_prompt, n_output = job.sizes.batch
    seconds = 0.0
    for turn in range(2):
        # Different prompts each time, since a prefix cache would speed up the second run.
        prompts = _random_prompts(job, streams, n_prompt, turn)
        started = time.perf_counter()
        tokens = answer(prompts)
        seconds = time.perf_counter() - started
        if tokens != streams * n_output:
            raise RuntimeError(
                f"{tokens} tokens came out of {streams} requests for {n_output} each"
            )
    figures = {"tokens_s": streams * n_output / seconds}
    return replace(row.timed([seconds]), figures=figures)


def _batching_options(model: Any, n_output: int) -> JsonDict:
    """Options for exactly `n_output` greedy tokens."""
    generation = _module("transformers").GenerationConfig(
        max_new_tokens=n_output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = {"generation_config": generation}
    if "persistent_manager" in inspect.signature(model.generate_batch).parameters:
        options["persistent_manager"] = True
    return options


def _small_pool(streams: int) -> Any:
    """A KV pool of a few blocks: by default it takes nine tenths of a CPU's memory."""
    make = _module("transformers").ContinuousBatchingConfig
    return make(num_blocks=2 * streams, max_batch_tokens=_CPU_ROWS)


def _random_prompts(job: PartJob, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    ids = range(1, job.config.vocab_size)
    return [rng.choices(ids, k=length) for _ in range(count)]

"""The same shapes in PyTorch, where it is installed: attention, a decode step over a static cache,
and transformers' continuous batching on the batch of requests that `loop` gives to our
engine. Knows no jax.

Only figures that can be had from the public interfaces are taken, each at the peer's own defaults.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import median
from typing import Any

from msgspec.structs import replace

from jitney.engine.common.requests import JsonDict
from jitney.engine.core import ModelConfig, StepWork
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.simulation.roofline import ModelCost

_REPEATS = 7
#: Steps that a static cache has room for beyond the context that is measured.
_SLACK = 64
_CONTINUOUS = "transformers, continuous batching"
_SDPA = "torch SDPA"
_FLASHINFER = "FlashInfer"
#: Bytes that FlashInfer is given to work in, as its documentation says.
_FLASHINFER_BYTES = 128 << 20
_COMPILED = "torch.compile, static cache"


def _module(name: str) -> Any:
    """A package that need not be installed."""
    return importlib.import_module(name)


def _missing(*packages: str) -> str:
    """Why the peer cannot run; empty if it can."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return ""


def _tasks(tasks: Tasks) -> Tasks:
    return where_installed(tasks, "torch", "transformers")


def where_installed(tasks: Tasks, *packages: str) -> Tasks:
    """The same, or rows that say why the peer cannot run."""
    why = _missing(*packages)
    for task in tasks:
        if why:
            task = Task(task.row, lambda row: [row.noted(why)])
        yield task


def _batching(job: PartJob) -> Tasks:
    """transformers' `generate_batch`, as many requests as streams, all at once: the batch that the
    goal is about, then those of `crowds`.
    """
    get = cache(partial(_make_model, job))
    yield from _tasks(job.batch_tasks(_CONTINUOUS, "peer's", partial(_batching_row, job, get)))


def _torch_tasks(job: PartJob) -> Tasks:
    """Attention by SDPA over whole, contiguous caches, prompts by FlashInfer over pages, and
    compiled decode steps.
    """
    yield from _tasks(_sdpa_tasks(job))
    yield from where_installed(_flashinfer_tasks(job), "torch", "flashinfer")
    yield from _tasks(_compiled_tasks(job))


def _sdpa_tasks(job: PartJob) -> Tasks:
    sizes = job.sizes
    for seqs, context in (*sizes.attention[:2], (1, sizes.long)):
        row = job.row("decode attention", f"{seqs} x {context:,}", _SDPA)
        yield Task(row, partial(_sdpa_row, job, seqs, 1, context))
    for rows in sizes.prompts[:2]:
        row = job.row("prompt attention", f"{rows:,} rows", _SDPA)
        yield Task(row, partial(_sdpa_row, job, 1, rows, rows))


def _flashinfer_tasks(job: PartJob) -> Tasks:
    for rows in job.sizes.prompts:
        row = job.row("prompt attention", f"{rows:,} rows", _FLASHINFER)
        yield Task(row, partial(_flashinfer_row, job, rows))


def _compiled_tasks(job: PartJob) -> Tasks:
    sizes = job.sizes
    get = cache(partial(_make_model, job))
    context = sizes.contexts[0][-1]
    for seqs in (*sizes.steps[0], sizes.streams):
        row = job.row("decode step", f"{seqs} x {context:,}, {job.dtype}", _COMPILED)
        yield Task(row, partial(_compiled_row, job, get, seqs, context))


def _place() -> Any:
    """The device that PyTorch finds: a GPU, else the CPU."""
    torch = _module("torch")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _wait() -> None:
    """Until the device is done."""
    torch = _module("torch")
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def config_fields(shape: ModelConfig) -> JsonDict:
    """The shape, as Hugging Face names it."""
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


def _make_model(job: PartJob) -> Any:
    torch, fields = _module("torch"), config_fields(job.config)
    make = getattr(_module("transformers"), fields["architectures"][0])
    config = make.config_class(**fields, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, job.dtype))
    try:
        with torch.device(_place()):
            return make(config).eval()
    finally:
        torch.set_default_dtype(previous)


def _batching_row(job: PartJob, get: Callable[[], Any], streams: int, row: Row) -> Iterator[Row]:
    model = get()
    options = _batching_options(model, job.sizes.batch[1])

    def answer(prompts: list[list[int]]) -> int:
        outputs = model.generate_batch(inputs=prompts, **options)
        _wait()
        return sum(len(output.generated_tokens) for output in outputs.values())

    try:
        yield second_batch(job, streams, answer, row)
    finally:
        # It was made for so many streams, and holds most of the memory.
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
        # Other prompts each time, or a prefix cache would answer for the second run.
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
    """For exactly so many tokens, greedily."""
    wanted = _module("transformers").GenerationConfig(
        max_new_tokens=n_output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = {"generation_config": wanted}
    if "persistent_manager" in inspect.signature(model.generate_batch).parameters:
        options["persistent_manager"] = True
    return options


def _random_prompts(job: PartJob, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    ids = range(1, job.config.vocab_size)
    return [rng.choices(ids, k=length) for _ in range(count)]


def _sdpa_row(job: PartJob, seqs: int, rows: int, context: int, row: Row) -> Iterator[Row]:
    """Attention of `rows` new rows of each sequence, keys and values contiguous."""
    torch = _module("torch")
    attend = torch.nn.functional.scaled_dot_product_attention

    def run(given: tuple[Any, Any, Any]) -> None:
        q, k, v = given
        attend(q, k, v, is_causal=rows > 1, enable_gqa=True)

    make = partial(_random_heads, job, seqs, rows, context)
    yield _attention_row(job, (seqs, rows, context), make, run, row)


def _attention_row(
    job: PartJob,
    shape: tuple[int, int, int],
    make: Callable[[], Any],
    run: Callable[[Any], None],
    row: Row,
) -> Row:
    """The row with its times, over as many inputs as the caches do not hold. shape: sequences, new
    rows of each, and their contexts. make: random inputs. run: attention of them.
    """
    seqs, rows, context = shape
    config, size = job.config, getattr(_module("torch"), job.dtype).itemsize
    numbers = 2 * context * config.n_kv_heads + 2 * rows * config.n_heads
    moved = size * seqs * numbers * config.head_dim
    pairs = seqs * rows * (2 * context - rows + 1) / 2
    operations = 4.0 * config.n_heads * config.head_dim * pairs
    floor_s, bound = job.measured.of(moved, operations)
    copies = job.copies_of(moved)
    given = [make() for _ in range(copies)]

    def run_all() -> None:
        for each in given:
            run(each)

    spent = [sample / copies for sample in _samples(run_all, job.sizes.sample_s)]
    return replace(row.timed(spent), floor_s=floor_s, bound=bound)


def _flashinfer_row(job: PartJob, rows: int, row: Row) -> Iterator[Row]:
    """Attention of a prompt over pages that lie as ours do, planned once for all runs."""
    torch, device = _module("torch"), _place()
    if device.type != "cuda":
        yield row.noted("FlashInfer runs on NVIDIA's GPUs")
        return
    config, page, dtype = job.config, job.page_size, getattr(torch, job.dtype)
    n_pages = rows // page
    whole = partial(torch.tensor, dtype=torch.int32, device=device)
    workspace = torch.zeros(_FLASHINFER_BYTES, dtype=torch.uint8, device=device)
    attention = _module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    attention.plan(
        whole([0, rows]),
        whole([0, n_pages]),
        torch.randperm(n_pages, device=device).int(),
        whole([page]),
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        page,
        causal=True,
        q_data_type=dtype,
    )
    random_of = partial(torch.randn, dtype=dtype, device=device)

    def make() -> tuple[Any, Any]:
        pool = random_of(n_pages, page, 2 * config.n_kv_heads, config.head_dim)
        return random_of(rows, config.n_heads, config.head_dim), (pool[:, :, ::2], pool[:, :, 1::2])

    def run(given: tuple[Any, Any]) -> None:
        attention.run(*given)

    yield _attention_row(job, (1, rows, rows), make, run, row)


def _random_heads(job: PartJob, seqs: int, rows: int, context: int) -> tuple[Any, Any, Any]:
    """(queries, keys, values) [seqs, heads, positions, head_dim]."""
    torch, config = _module("torch"), job.config
    random_of = partial(torch.randn, dtype=getattr(torch, job.dtype), device=_place())
    of_keys = seqs, config.n_kv_heads, context, config.head_dim
    q = random_of(seqs, config.n_heads, rows, config.head_dim)
    return q, random_of(*of_keys), random_of(*of_keys)


def _compiled_row(
    job: PartJob, get: Callable[[], Any], seqs: int, context: int, row: Row
) -> Iterator[Row]:
    """One decode step of a compiled model whose cache holds `context` positions of each sequence,
    and a few more.
    """
    skipped = _graphs_skipped()
    spent = _samples(_compiled_step(get(), seqs, context), job.sizes.sample_s)
    number = "f32" if job.dtype == "float32" else "bf16"
    cost = ModelCost(job.config, number, number)
    work = StepWork(decode=seqs, keys=seqs * context, longest=context)
    moved = sum(cost.read_bytes(seqs, work))
    floor_s, bound = job.measured.of(moved, sum(cost.operations(seqs, seqs, work)))
    figures = {"tokens_s": seqs / median(spent)}
    if _place().type == "cuda":
        figures["CUDA graphs skipped"] = float(_graphs_skipped() - skipped)
    yield replace(row.timed(spent), floor_s=floor_s, bound=bound, figures=figures)


def _graphs_skipped() -> int:
    """How many graphs PyTorch has left out so far, where "reduce-overhead" asked for them."""
    counters = _module("torch._dynamo.utils").counters
    return counters["inductor"]["cudagraph_skips"]


def _compiled_step(model: Any, seqs: int, context: int) -> Callable[[], None]:
    """Runs one step on a cache that holds the context, and starts over there when it is full.

    The cache's arrays are made before anything is compiled: arrays that a compiled step makes are
    not where the CUDA graph of the next one looks for them, and PyTorch leaves the graphs out.
    """
    torch, device, turns = _module("torch"), _place(), itertools.count(1)
    keys = _make_cache(model, seqs, context)
    token = torch.ones((seqs, 1), dtype=torch.long, device=device)
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    forward = torch.compile(model.forward, dynamic=False, mode=mode)

    def run() -> None:
        if next(turns) % _SLACK == 0:
            _forget(keys, context)
        with torch.no_grad():
            forward(token, past_key_values=keys, use_cache=True).logits.argmax(-1)

    return run


def _make_cache(model: Any, seqs: int, context: int) -> Any:
    """A static cache of so many positions, and room for some more."""
    config = model.config
    keys = _module("transformers").StaticCache(config=config, max_cache_len=context + _SLACK)
    keys.early_initialization(
        batch_size=seqs,
        num_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=_place(),
    )
    _forget(keys, context)
    return keys


def _forget(keys: Any, context: int) -> None:
    """All positions but the first ones."""
    for layer in keys.layers:
        layer.cumulative_length.fill_(context)


def _samples(run: Callable[[], None], sample_s: float) -> list[float]:
    """Seconds of one run, REPEATS times: as many in a row as make up `sample_s`, then one wait."""
    for _ in range(3):
        run()
    _wait()
    count = max(2, math.ceil(sample_s / max(_seconds_of(run, 1), 1e-7)))
    return [_seconds_of(run, count) / count for _ in range(_REPEATS)]


def _seconds_of(run: Callable[[], None], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        run()
    _wait()
    return time.perf_counter() - started


#: Part -> what yields its tasks.
TASKS = {
    "transformers": _batching,
    "torch": _torch_tasks,
}

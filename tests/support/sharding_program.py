"""Runs models on several CPU devices, which a process must ask for before jax starts;
`test_sharding` starts it.

python sharding_program.py JOB OUT: JOB is a JSON file, a list of [name, function, arguments]; OUT
an .npz file for the results, one array each.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from adapter_files import write_adapter
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from joint_processes import drawn_prompts
from lowered_steps import lower_step
from programs import await_use, decoding_beside_prompts
from served_shapes import shapes_served

from jitney.engine import LLM, SamplingParams
from jitney.engine.cli import generate, main
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.requests import Grammar
from jitney.engine.config.schema import Config
from jitney.engine.core import build, setup
from jitney.engine.core.executor.program import Program, StateSizes
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.llm import load_llm
from jitney.engine.core.models.layers import Linear
from jitney.engine.core.models.quantization import quantise
from jitney.engine.core.models.registry import abstract_model
from jitney.engine.core.models.sharding import (
    TENSOR,
    WHOLE,
    _sharding_of,
    make_mesh,
    of_each_engine,
)
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.weights.checkpoints import families
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import WeightStorage, load_model, load_shapes
from jitney.engine.core.weights.quantising import _calibrate
from jitney.kernels import experts, w8a8
from jitney.kernels.interface import Fp8Products
from jitney.kernels.reference import matmul_fp8
from jitney.kernels.select import select

ROWS = 64
#: The engine's kernels, which also compile faster.
KERNELS = select("cpu", "auto")
#: Settings of an engine with few sizes, since every process compiles them.
_FEW_SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 4,
    "token_budget": 32,
    "context": 128,
    "seat_buckets": [4],
    "token_buckets": [32],
    "compilation_cache": "off",
}
#: The fp8 products of GPUs: XLA's, which a CPU runs too.
FP8 = Fp8Products(w8a8.pack_fp8, w8a8.matmul_fp8)


def logits(
    folder: str,
    devices: int,
    tokens: list[int],
    dtype: str = "float32",
    scheme: str = "plain",
    kv_dtype: str = "",
    groups: int = 1,
    columns: int = 0,
) -> np.ndarray:
    """Logits of every row of one prompt, float32 [len(tokens), V], by the engine's own step on
    `devices` devices.

    kv_dtype: of quantised pools, whose scales come from the same prompt. groups: of experts.
    scheme auto: the stored format, if the engine keeps it. columns: of the embedding table.
    """
    source = ModelSource.resolve(folder)
    config = source.config.in_groups(groups)
    mesh = make_mesh(jax.devices()[:devices]) if devices > 1 else None
    storage = WeightStorage(scheme)
    if scheme == "auto":
        storage = WeightStorage.choose(scheme, "cpu", KERNELS)
    model = load_model(source, config, jnp.dtype(dtype), storage=storage, mesh=mesh)
    if kv_dtype:
        _calibrate(model, tokens, jnp.dtype(kv_dtype), mesh)
    kernels = KERNELS
    if scheme == "int8":
        kernels = select("cpu", "reference")  # other kernels round each device's share separately
    if columns:
        assert mesh is not None
        model.pack_shares(replace(kernels, table_columns=columns), mesh)
        table = dict(nnx.to_flat_state(nnx.state(model)))["embed",]
        assert table.shape[1] == columns and table.sharding.spec[0] == TENSOR.name
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    program = Program(graph, treedef, kernels, mesh)
    sizes = StateSizes(
        seats=len(tokens),
        n_pages=8,
        page_size=16,
        context_length=ROWS,
        kv_dtype=jnp.dtype(kv_dtype or dtype),
    )
    layout = sizes.builder(model.config).layout(Bucket(ROWS, len(tokens)), True)
    kv = sizes.shapes(model.config, kernels, mesh).allocate(model.config)

    def step(leaves: Any, kv: Any, seat_tokens: Any, packed: Any) -> jax.Array:
        inputs, _ = seat_tokens.fill(layout.split(packed))
        logits_of, _, _ = program.forward(leaves, kv, inputs)
        row_logits = logits_of(inputs.logit_rows)
        return TENSOR.side_by_side(row_logits) if mesh is not None else row_logits

    args = leaves, kv.kv, kv.seat_tokens, one_prompt(layout, tokens)
    if mesh is not None:
        of_arrays = jax.tree.map(lambda leaf: leaf.sharding.spec, (leaves, kv.kv))
        specs = *of_arrays, WHOLE, WHOLE
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=WHOLE, check_vma=False)
    return np.asarray(jax.jit(step)(*args))


def joined_logits(
    folder: str,
    engines: int,
    devices: int,
    counts: list[int],
    tokens: list[int],
    scheme: str = "plain",
    kv_dtype: str = "",
    groups: int = 1,
) -> np.ndarray:
    """Logits of engines that share a mixture's experts, with `devices` devices each, float32
    [engines, len(tokens), V]. Each engine has its own prompt in the step, the first `counts` of the
    tokens; 0: it takes part without a row.

    scheme, kv_dtype, groups: as in `logits`.
    """
    source = ModelSource.resolve(folder)
    mesh = make_mesh(jax.devices()[: engines * devices], engines)
    model = load_model(
        source,
        source.config.in_groups(groups, engines),
        jnp.float32,
        storage=WeightStorage(scheme),
        mesh=mesh,
    )
    if kv_dtype:
        _calibrate(model, tokens, jnp.dtype(kv_dtype), mesh)
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    program = Program(graph, treedef, select("cpu", "reference"), mesh)
    sizes = StateSizes(
        seats=len(tokens),
        n_pages=8,
        page_size=16,
        context_length=ROWS,
        kv_dtype=jnp.dtype(kv_dtype or "float32"),
    )
    bucket = Bucket(ROWS, len(tokens))
    layout = sizes.builder(model.config).layout(bucket, True)
    uploads = [one_prompt(layout, tokens[:count]) for count in counts]
    kv = sizes.shapes(model.config, program.kernels, mesh).allocate(model.config)

    def step(leaves: Any, kv: Any, seat_tokens: Any, packed: Any) -> jax.Array:
        inputs, _ = seat_tokens.fill(layout.split(packed))
        logits_of, _, _ = program.forward(leaves, kv, inputs)
        return TENSOR.side_by_side(logits_of(inputs.logit_rows))

    args = leaves, kv.kv, kv.seat_tokens, np.concatenate(uploads)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, (leaves, kv.kv, kv.seat_tokens))
    of_each = of_each_engine(mesh, WHOLE)
    step = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, of_each), out_specs=of_each, check_vma=False
    )
    return np.asarray(jax.jit(step)(*args)).reshape(engines, len(tokens), -1)


def proved_shapes(family: str, devices: int, groups: int, engines: int = 1) -> np.ndarray:
    """Representations of the served shapes of a sharded model's engine: derived from its arrays,
    and derived without them. devices: of each engine.
    """
    source = ModelSource.resolve(f"tiny-random:{family}")
    whole = source.config.in_groups(groups, engines)
    mesh = make_mesh(jax.devices()[: engines * devices], engines)
    models = (
        load_model(source, whole, mesh=mesh),
        load_shapes(source, whole, devices, jnp.float32, WeightStorage()),
    )
    return np.array([str(shapes_served(model, whole.local(devices))) for model in models])


def one_prompt(layout: Any, tokens: list[int]) -> np.ndarray:
    """The upload of a step with one prompt in pages 1, 2, ..., and logits of all its rows; without
    tokens, of a step without rows.
    """
    n, packed = len(tokens), np.zeros(layout.size, np.int32)
    out = layout.split(packed)
    out.tokens[:n], out.positions[:n], out.write_rows[:] = tokens, np.arange(n), 8 * 16
    out.write_rows[:n] = 16 + np.arange(n)
    out.kv_lens[0], out.cu_q[1:], out.counts[:3] = n, n, (0, min(n, 1), n)
    out.page_table[0, :4] = 1, 2, 3, 4
    out.logit_rows[:n] = np.arange(n)
    return packed


def served(family: str, devices: int, ahead: bool = False) -> dict[str, np.ndarray]:
    """Answers of one engine with a family's tiny random model with 8 query heads.

    ahead: compile all programs before the first request; else one program serves all steps. Results
    are text: see `generated`; tokens: of six prompts, greedy, sampled, and under a grammar, int
    [18, 12]; compiles: number of compilations since the engine started.
    """
    engines: list[LLM] = []

    def load(config: Config) -> LLM:
        engines.append(load_llm(config))
        return engines[0]

    with (
        mock.patch.object(generate, "load_llm", load),
        mock.patch.object(LLM, "close"),
        contextlib.nullcontext() if ahead else few_programs(),
        many_heads(),
    ):
        text = generated(family, devices)
        (llm,) = engines
        rows = tokens(llm)
    count = f"{devices} x " if devices > 1 else ""
    assert (llm.info.device.tensor_parallel, llm.info.device.name) == (
        devices,
        f"{count}{cpu_name()}",
    )
    # The layers of Gemma 2 that have a window keep pages of their own.
    assert bool(llm.info.sizes.window_pages) == (family == "gemma2")
    llm.core.check()
    compiles = np.array(llm.core.runner.compiles)
    llm.close()
    return {"text": text, "tokens": rows, "compiles": compiles}


def served_at_once(family: str, devices: int) -> dict[str, np.ndarray]:
    """Like `served`, with kernels that multiply all blocks of a mixture at once."""
    calls = []

    def counted(*args: Any) -> jax.Array:
        calls.append(args)
        return experts.experts(*args)

    kernels = replace(KERNELS, experts=counted)
    with mock.patch.object(setup, "select", lambda platform, name, heads: kernels):
        results = served(family, devices)
    return results | {"calls": np.array(len(calls))}


def tokens(llm: LLM) -> np.ndarray:
    """See `served`."""
    prompts = drawn_prompts(6, 11)
    ways = (
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(
            seed=3, top_p=0.9, top_k=40, max_tokens=12, ignore_eos=True, frequency_penalty=0.5
        ),
        SamplingParams(
            seed=3, max_tokens=12, presence_penalty=0.5, grammar=Grammar("regex", "[a-z]{99}")
        ),
    )
    outputs = [output for params in ways for output in llm.generate(prompts, params)]
    return np.array([output.outputs[0].token_ids for output in outputs])


def adapted(devices: int) -> np.ndarray:
    """Greedy tokens of prompts, each with one of two adapters or none; int32 [6, 12]."""
    with many_heads(), tempfile.TemporaryDirectory() as folder, few_programs():
        config = ModelSource.resolve("tiny-random").config
        fr = write_adapter(Path(folder) / "fr", config, 1)
        de = write_adapter(Path(folder) / "de", config, 2, rank=8, modules=("o_proj", "up_proj"))
        llm = LLM(
            "tiny-random",
            adapters=(f"fr={fr}", f"de={de}"),
            tensor_parallel=devices,
            **_FEW_SIZES,
        )
        prompts = drawn_prompts(6, 11)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts, params, adapter=["", "fr", "de"] * 2)
    return np.array([output.outputs[0].token_ids for output in outputs])


def drafted(
    devices: int,
    speculative: str,
    draft_model: str = "",
    model: str = "tiny-random",
    prompts: list[list[int]] | None = None,
) -> dict[str, np.ndarray]:
    """Greedy tokens of two prompts, and the numbers of right and wrong drafts."""
    drafting: dict[str, Any] = {"speculative": speculative, "draft_model": draft_model}
    # Drafts are in decode steps, which therefore need their own program.
    with many_heads(), mock.patch.object(StepPrograms, "_compile_all", await_use):
        llm = LLM(model, tensor_parallel=devices, **_FEW_SIZES, **drafting)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(prompts or drawn_prompts(2, 11), params)
    llm.core.check()
    totals = llm.core.ledger.totals
    return {
        "tokens": np.array([output.outputs[0].token_ids for output in outputs]),
        "drafts": np.array([totals["accepted"], totals["rejected"]]),
    }


def in_fp8(family: str, devices: int, shares: int) -> dict[str, np.ndarray]:
    """Greedy answers to six prompts of an engine that rounds rows to fp8 for fp8 weights.

    shares: number of parts in which one device rounds the rows of products that several devices
    would sum, each part separately; 1 for several devices. Results are tokens: int32 [6, 12];
    calls: number of traced products of fp8 with fp8.
    """
    calls = []

    def counted(x: Any, w: w8a8.Fp8, dtype: Any = jnp.float32) -> jax.Array:
        calls.append(w)
        if shares == 1:
            return w8a8.matmul_fp8(x, w, dtype)
        parts = shares if x.shape[1] != families.tiny.SMALLEST.hidden_size else 1
        rows = jnp.split(x, parts, axis=1)
        weights = jnp.split(w.kernel[0].T, parts, axis=0)
        products = [
            matmul_fp8(x, w8a8.Fp8(kernel, w.scale))
            for x, kernel in zip(rows, weights, strict=True)
        ]
        return sum(products[1:], start=products[0]).astype(dtype)

    products = Fp8Products(w8a8.pack_fp8, counted)
    kernels = replace(select("cpu", "reference"), fp8=products)
    with contextlib.ExitStack() as stack:
        stack.enter_context(many_heads())
        stack.enter_context(mock.patch.object(setup, "select", lambda *_: kernels))
        stack.enter_context(few_programs())
        if shares > 1:  # the proof does not support this product
            stack.enter_context(
                mock.patch.object(build, "proven", lambda kernels, *_, **__: (kernels, []))
            )
        llm = LLM(
            f"tiny-random:{family}",
            tensor_parallel=devices,
            weights="fp8",
            **_FEW_SIZES,
        )
        prompts = drawn_prompts(6, 11)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        proved = [proof.ok for proof in llm.info.kernels.proofs if proof.kernel == "fp8 product"]
        llm.close()
    token_ids = np.array([output.outputs[0].token_ids for output in outputs])
    return {"tokens": token_ids, "calls": np.array(len(calls)), "proved": np.array(proved)}


def fp8_product(devices: int, by_inputs: bool) -> dict[str, np.ndarray]:
    """A layer's matrix on `devices` devices: x and w, and the product y with rows in fp8, float32.

    The inputs of one device are a thousand times as large as those of the next. by_inputs: devices
    split the inputs, else the outputs.
    """
    mesh = make_mesh(jax.devices()[:devices])
    rng = np.random.default_rng(devices)
    sizes = np.repeat(1000.0 ** -np.arange(devices), 32)
    x = (rng.standard_normal((5, 32 * devices)) * sizes).astype(np.float32)
    w = rng.standard_normal((32 * devices, 24 * devices)).astype(np.float32)
    path = ("o", "kernel") if by_inputs else ("qkv", "kernel")
    layer = Linear(
        *w.shape, bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0), summed=by_inputs and devices > 1
    )
    packed = quantise(jnp.asarray(w), scheme="fp8", dtype=jnp.float32)
    scale_place = WHOLE if by_inputs else PartitionSpec(TENSOR.name)
    placed = packed._replace(
        kernel=jax.device_put(packed.kernel, _sharding_of(path, 2, mesh)),
        scale=jax.device_put(packed.scale, NamedSharding(mesh, scale_place)),
    )
    layer.set_matrix(placed)
    kernels = replace(select("cpu", "reference"), fp8=FP8)
    layer.pack_shares(kernels, mesh)
    graph, state = nnx.split(layer)
    x_place, y_place = WHOLE, PartitionSpec(None, TENSOR.name)
    if by_inputs:
        x_place, y_place = PartitionSpec(None, TENSOR.name), WHOLE
    step = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x, kernels),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda leaf: leaf.sharding.spec, state), x_place),
        out_specs=y_place,
        check_vma=False,
    )
    return {
        "x": x,
        "w": np.asarray(packed.kernel).astype(np.float32),
        "scale": np.asarray(packed.scale),
        "y": np.asarray(jax.jit(step)(state, x)),
    }


def generated(family: str, devices: int, groups: int = 1) -> np.ndarray:
    """The characters that `jitney generate` prints for three prompts, sampled, as int32, with a
    family's tiny random model with 8 query heads. groups: of experts.
    """
    flags = (
        f"--model tiny-random:{family} --tensor-parallel {devices} --expert-parallel {groups} "
        "--dtype float32 --max-seats 4 "
        "--token-budget 32 --context 128 --seat-buckets 4 --token-buckets 32 "
        "--no-compilation-cache --temperature 1 --seed 5 --max-tokens 24 --json"
    )
    prompts = ["--prompt", "a", "--prompt", "a longer one that takes two chunks", "--prompt", "b c"]
    with many_heads(), contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["generate", *flags.split(), *prompts]) == 0
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == 3
    return np.array([ord(character) for line in lines for character in line["text"]], np.int32)


@contextlib.contextmanager
def few_programs() -> Iterator[None]:
    """Make engines compile one program for all steps, and samplers when a row first needs them."""
    with (
        mock.patch.object(StepPrograms, "_compile_all", await_use),
        decoding_beside_prompts(),
    ):
        yield


@contextlib.contextmanager
def many_heads() -> Iterator[None]:
    """Make tiny models with enough query heads for eight devices."""
    before = families.tiny.SMALLEST
    families.tiny.SMALLEST = replace(before, n_heads=8)
    try:
        yield
    finally:
        families.tiny.SMALLEST = before


def program(
    devices: int,
    plain: bool,
    bucket: list[int],
    family: str = "llama",
    groups: int = 1,
    engines: int = 1,
) -> np.ndarray:
    """Facts of a step compiled from shapes alone: all-reduces, all-gathers, widest all-gather
    (elements), bytes of a device's pools and of aliased arrays, reduce-scatters. groups: of
    experts. devices: of each engine.
    """
    config = tiny_config(family).in_groups(groups, engines)
    mesh = make_mesh(jax.devices()[: engines * devices], engines)
    sizes = StateSizes(seats=4, n_pages=16, page_size=16, context_length=256, kv_dtype=jnp.float32)
    model = abstract_model(config.local(devices), dtype=jnp.float32)
    compiled = lower_step(model, Bucket(*bucket), plain, KERNELS, sizes, mesh).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    gathers = [
        np.prod([int(n) for n in re.findall(r"\d+", shape)])
        for shape in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    ]
    pools = sum(config.kv_numbers) * 16 * 16 * 4 // devices
    pools += sizes.seats * config.local(devices).slot_bytes
    return np.array(
        [
            len(re.findall(r" all-reduce(?:-start)?\(", text)),
            len(gathers),
            max(gathers, default=0),
            pools,
            memory.alias_size_in_bytes,
            len(re.findall(r" reduce-scatter(?:-start)?\(", text)),
        ]
    )


FUNCTIONS = {
    "logits": logits,
    "joined_logits": joined_logits,
    "program": program,
    "generated": generated,
    "served": served,
    "served_at_once": served_at_once,
    "adapted": adapted,
    "drafted": drafted,
    "in_fp8": in_fp8,
    "fp8_product": fp8_product,
    "proved_shapes": proved_shapes,
}


def named(name: str, found: Any) -> dict[str, np.ndarray]:
    """The results of a job by name: one array, or several with the job's name as a prefix."""
    if isinstance(found, dict):
        return {f"{name} {part}": array for part, array in found.items()}
    return {name: found}


if __name__ == "__main__":
    done: dict[str, Any] = {}
    for name, function, arguments in json.loads(Path(sys.argv[1]).read_text()):
        done |= named(name, FUNCTIONS[function](*arguments))
    np.savez(sys.argv[2], **done)

"""Measures what quantised weights and KV cost in accuracy: a model's perplexity on
tests/data/accuracy.txt.

    python docs/benchmarks/perplexity.py [--model smollm2-135m] [--dtype float32] [--only int8,KV]

The forward pass is the engine's own: its model loaded in the scheme, its kernels, and pools of the
KV type, with the whole text as one prompt. Beside perplexity: the mean Kullback-Leibler divergence
of the next-token distribution from that of the first row, and how often both have the same most
likely token.

The default model's file stores most matrices in 4 bits already (Q4_1, groups of 32): "plain" uses
these numbers as floats, "as stored" the same numbers in 4 bits. The rows of int4 round them once
more, to other levels, as int4 made from a checkpoint of floats would; a 4-bit file served with
`--weights int4` stays as stored.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jitney.engine.core.models import quantization
from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import describe_weights
from jitney.engine.core.weights.load import WeightStorage, load_model
from jitney.engine.core.weights.quantising import _PAGE, _one_prompt, load_kv_scales
from jitney.kernels.interface import Fp8Products, KernelSet
from jitney.kernels.reference import matmul_fp8
from jitney.kernels.select import select

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "data" / "accuracy.txt"
#: Rows of logits in memory at once: 256 rows of 49,152 tokens are 50 MB in float32.
ROWS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. weights: a scheme, or "stored" for the checkpoint's own; group: int4
    group size, 0: chosen by size. rows: the rows of every product are rounded too: to int8, as the
    CPU's own kernels do; to fp8, as GPUs with fp8 units do.
    """

    name: str
    weights: str = "plain"
    kv: str = "auto"
    group: int = 0
    dtype: str = ""
    rows: bool = False


CASES = (
    Case("plain"),
    Case("plain, bfloat16", dtype="bfloat16"),
    Case("as stored", "stored"),
    Case("int8", "int8"),
    Case("int8, rows too", "int8", rows=True),
    Case("int8, rows too, bfloat16", "int8", dtype="bfloat16", rows=True),
    Case("fp8", "fp8"),
    Case("fp8, rows too", "fp8", rows=True),
    Case("fp8, rows too, bfloat16", "fp8", dtype="bfloat16", rows=True),
    Case("int4, groups of 32", "int4", group=32),
    Case("int4, groups of 64", "int4", group=64),
    Case("plain, KV int8", kv="int8"),
    Case("plain, KV fp8", kv="fp8"),
    Case("int8, KV int8", "int8", "int8"),
    Case("as stored, KV int8", "stored", "int8"),
)


@dataclass(frozen=True, slots=True)
class Result:
    """weight_bytes: of the matrices in the layers and an untied head. kl: nats per token."""

    name: str
    weights: str
    kv: str
    weight_bytes: int
    perplexity: float
    kl: float
    same_top: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--only",
        help="words that a row's name must contain one of, separated by commas; beside the first",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "benchmarks" / "perplexity.json"
    )
    options = parser.parse_args()
    source = ModelSource.resolve(options.model)
    tokens = Tokenizer.load(source).encode(TEXT.read_text())[: source.config.context_length]
    kernels = select(jax.default_backend())
    results: list[Result] = []
    first: list[np.ndarray] = []
    for case in CASES:
        if not chosen(case, options.only):
            continue
        started = time.perf_counter()
        model = load(source, case, jnp.dtype(case.dtype or options.dtype))
        own = kernels_for(case, model, kernels)
        result, first = measure(case, model, tokens, own, first)
        results.append(result)
        print(f"{row(result)}  {time.perf_counter() - started:5.0f} s", flush=True)
    options.out.write_text(
        json.dumps(
            {
                "model": options.model,
                "dtype": options.dtype,
                "tokens": len(tokens),
                "text": str(TEXT.relative_to(ROOT)),
                "kernels": kernels.label,
                "device": jax.devices()[0].device_kind,
                "machine": platform.machine(),
                "jax": jax.__version__,
                "rows": [asdict(result) for result in results],
            },
            indent=1,
        )
        + "\n"
    )


def chosen(case: Case, only: str | None) -> bool:
    """Whether to measure the row; the first row always, since the others are compared with it."""
    if only is None or case is CASES[0]:
        return True
    return any(word in case.name for word in only.split(","))


def kernels_for(case: Case, model: Model, kernels: KernelSet) -> KernelSet:
    """Kernels for the row's products: rows are not rounded unless the case says so. Packs a
    model whose rows are rounded, so that the kernels are those that serve.
    """
    if not case.rows:
        return replace(kernels, int8=None)
    if case.weights == "fp8":
        return replace(kernels, fp8=Fp8Products(_as_it_is, matmul_fp8))
    model.pack(kernels)
    return kernels


def _as_it_is(w: jax.Array, parts: int = 1) -> jax.Array:
    return w


def load(source: ModelSource, case: Case, dtype: Any) -> Model:
    """Load the model as the case requires."""
    if case.group:
        return grouped(source, case, dtype)
    storage = {"stored": WeightStorage("plain", frozenset({"int4", "int8", "fp8"}))}.get(
        case.weights, WeightStorage(case.weights)
    )
    model = load_model(source, source.config, dtype, storage=storage)
    if case.kv != "auto":
        load_kv_scales(model, source, quantization.KV_TYPES[case.kv])
    return model


def grouped(source: ModelSource, case: Case, dtype: Any) -> Model:
    """Load int4 in groups of the case's size; normal loading would choose the largest that fits."""
    model = load_model(source, source.config, jnp.float32)
    for linear in model.linears():
        linear.set_matrix(
            quantization.quantise(
                linear.packed.kernel, scheme="int4", dtype=dtype, group=case.group
            )
        )
    return model


def measure(
    case: Case, model: Model, tokens: list[int], kernels: KernelSet, first: list[np.ndarray]
) -> tuple[Result, list[np.ndarray]]:
    """The row's figures. first: log-probabilities [T - 1, V] of the first row in chunks; empty for
    the first row itself.
    """
    hidden = read(model, tokens, quantization.KV_TYPES.get(case.kv, model.dtype), kernels)
    targets, parts = np.asarray(tokens[1:]), []
    loss = divergence = same = 0.0
    for index, start in enumerate(range(0, len(targets), ROWS)):
        part = log_probabilities(model, hidden[start : min(start + ROWS, len(targets))], kernels)
        base = first[index] if first else part
        loss -= part[np.arange(len(part)), targets[start : start + ROWS]].sum(dtype=np.float64)
        divergence += (np.exp(base) * (base - part)).sum(dtype=np.float64)
        same += (base.argmax(1) == part.argmax(1)).sum()
        parts.append(part)
    count = len(targets)
    size = sum(
        array.nbytes for linear in model.linears() for array in jax.tree.leaves(linear.packed)
    )
    return Result(
        case.name,
        describe_weights(model),
        case.kv,
        size,
        math.exp(loss / count),
        divergence / count,
        same / count,
    ), first or parts


def read(model: Model, tokens: list[int], kv_dtype: Any, kernels: KernelSet) -> Hidden:
    """Hidden states of the text as one prompt, through pools of kv_dtype."""
    config, pages = model.config, -(-len(tokens) // _PAGE)
    graph, state = nnx.split(model)
    shape = (pages + 1, _PAGE, 2 * config.n_kv_heads, config.head_dim)

    @jax.jit
    def forward(state: Any, row: jax.Array, meta: Any) -> Hidden:
        pools = [jnp.zeros(shape, kv_dtype) for _ in range(config.n_layers)]
        return nnx.merge(graph, state)(row, pools, meta, kernels)[0]

    return forward(state, np.asarray(tokens, np.int32), _one_prompt(len(tokens), pages))


def log_probabilities(model: Model, hidden: Hidden, kernels: KernelSet) -> np.ndarray:
    """Log-probabilities, float32 [R, V], of R rows of hidden states."""
    return np.asarray(jax.nn.log_softmax(model.logits(hidden, kernels)))


def row(result: Result) -> str:
    return (
        f"| {result.name:24} | {result.weight_bytes / 1e6:8.1f} MB | {result.perplexity:8.4f} | "
        f"{result.kl:9.6f} | "
        f"{100 * result.same_top:6.2f} % |"
    )


if __name__ == "__main__":
    main()

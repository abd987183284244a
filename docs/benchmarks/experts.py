"""How long a layer of experts takes beside a feed-forward as wide as what a row goes through.

`python docs/benchmarks/experts.py [--scheme int8]`. The layer is one of Qwen3-30B-A3B's (128
experts of 2048 x 768, 8 for each row), the other one has 8 x 768 for all rows. Random rows choose
by chance, the worst case for few rows: nearly every choice reads an expert of its own. Medians of
several runs, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jitney.engine.common.machine import cpu_name
from jitney.engine.core.models.layers import MLP, RowFacts
from jitney.engine.core.models.mixture import Experts
from jitney.engine.core.models.quantization import Packed, quantise
from jitney.engine.lab.simulation.roofline import SHAPES
from jitney.kernels.select import select

ROWS = (1, 8, 32, 128, 512)
REPEATS = 7


def make(layer: type[MLP], scheme: str, kernels: str) -> Callable[[jax.Array], jax.Array]:
    """The layer with weights in the scheme, compiled for each number of rows it is asked for."""
    config = SHAPES["qwen3-30b-a3b"]
    assert config.experts is not None
    if layer is MLP:
        inner = config.experts.n_chosen * config.intermediate_size
        config = replace(config, experts=None, intermediate_size=inner)
    chosen = select(jax.default_backend(), kernels)
    made = layer(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for linear in (made.gate_up, made.down):
        linear.set_matrix(quantise(linear.kernel[...], scheme=scheme, dtype=jnp.bfloat16))
    made.pack(chosen)
    graph, state = nnx.split(made)

    @partial(jax.jit, static_argnames="graph")
    def run(graph: nnx.GraphDef[MLP], state: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x, chosen, RowFacts())

    return lambda x: run(graph, state, x)


def seconds(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(x))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", choices=Packed.schemes, default="plain")
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    runs = [make(layer, args.scheme, args.kernels) for layer in (Experts, MLP)]
    print(f"{jax.devices()[0].device_kind}, {cpu_name()}, {args.scheme}, {args.kernels} kernels")
    print("| rows | experts, ms | the wide one, ms | ratio |")
    print("|---|---|---|---|")
    for rows in ROWS:
        x = jax.random.normal(jax.random.key(rows), (rows, 2048), jnp.bfloat16)
        for run in runs:
            seconds(run, x)
        times = [[seconds(run, x) for run in runs] for _ in range(REPEATS)]
        own, wide = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"| {rows} | {own:.1f} | {wide:.1f} | {own / wide:.2f} |", flush=True)


if __name__ == "__main__":
    main()

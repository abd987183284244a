"""What the host pays to launch a step, by the number of its arguments: processor time of a call, in
pairs that take turns.

python docs/benchmarks/dispatch_cost.py [--model llama-3.1-8b] [--weights plain] [--devices 1]

The program has as many weights and pools as the engine's greedy decode step of that model, in small
arrays, and does next to nothing: what is left is the launch. Devices are parts of this CPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

#: Calls of one timing, and timings of each way.
CALLS, ROUNDS = 100, 40


def layouts(model: str, weights: str) -> dict[str, tuple[int, int]]:
    """Way -> (arrays of weights, arrays of pools)."""
    import jax
    from flax import nnx

    from jitney.engine.core.models.registry import abstract_model
    from jitney.engine.lab.simulation.roofline import SHAPES

    shape = SHAPES[model]
    state: Any = nnx.split(abstract_model(shape, weights=weights))[1]
    paths = [path for path, _ in nnx.to_flat_state(state)]
    leaves = jax.tree.leaves(state)
    layers = shape.n_layers
    kinds = {path[2:] for path in paths if path[0] == "layers"}
    norms = {path[2:] for path in paths if path[0] == "layers" and "weight" in path[-1:]}
    total = len(leaves)
    by_norm = total - len(norms) * (layers - 1)
    by_kind = total - len(kinds) * (layers - 1)
    return {
        "as it is": (total, layers),
        "norms by kind": (by_norm, layers),
        "one pool": (total, 1),
        "weights by kind": (by_kind, layers),
        "weights by kind, one pool": (by_kind, 1),
    }


def launcher(weights: int, pools: int, devices: int) -> Callable[[], float]:
    """A function that times calls: microseconds of processor time of one."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jitney.engine.core.models.sharding import TENSOR, WHOLE, make_mesh

    mesh = make_mesh(jax.devices()[:devices])
    split = NamedSharding(mesh, PartitionSpec(None, TENSOR.name))
    whole = NamedSharding(mesh, WHOLE)
    held = [jax.device_put(jnp.ones((8, 128)), split) for _ in range(weights)]
    state = {
        "kv": [jax.device_put(jnp.zeros((4, 128)), split) for _ in range(pools)],
        "last": jax.device_put(jnp.zeros(32, jnp.int32), whole),
    }
    upload = np.zeros(2000, np.int32)

    def step(held: Any, kv: Any, last: Any, packed: Any) -> Any:
        return kv, last + packed[:32], last + 1

    packed = jax.ShapeDtypeStruct(upload.shape, jnp.int32, sharding=whole)
    jitted = jax.jit(step, donate_argnums=(1, 2), keep_unused=True)
    executable = jitted.lower(held, state["kv"], state["last"], packed).compile()

    def timed() -> float:
        begun, tokens = time.process_time(), None
        for _ in range(CALLS):
            state["kv"], state["last"], tokens = executable(
                held, state["kv"], state["last"], upload
            )
        jax.block_until_ready(tokens)
        return (time.process_time() - begun) / CALLS * 1e6

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--weights", default="plain", choices=["plain", "int8", "fp8", "int4"])
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    counts = layouts(args.model, args.weights)
    ways = {name: launcher(*count, args.devices) for name, count in counts.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for timed in ways.values():
        timed()
    for turn in range(ROUNDS):
        names = list(ways) if turn % 2 else list(ways)[::-1]
        for name in names:
            found[name].append(ways[name]())
    print("| way | arguments | us, median | of the first, quartiles |")
    print("|---|---|---|---|")
    for name, (weights, pools) in counts.items():
        ratios = np.array(found[name]) / np.array(found["as it is"])
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        print(
            f"| {name} | {weights + pools + 2} | {np.median(found[name]):.0f} "
            f"| {middle:.2f} ({low:.2f} to {high:.2f}) |"
        )


if __name__ == "__main__":
    main()

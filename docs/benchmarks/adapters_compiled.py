"""What low-rank adapters add to a step that is compiled for a TPU which need not be there: bytes,
arithmetic and all-reduces of four layers of an 8B model, on one chip and on four.

    make build/tpu
    PYTHONPATH=build/tpu TPU_SKIP_MDS_QUERY=1 python docs/benchmarks/adapters_compiled.py

The counts are XLA's own (`cost_analysis`), output head included. Weights are shapes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from lowered_steps import lower_step

from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.models.adapters import Adapters
from jitney.engine.core.models.layers import Linear
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.registry import abstract_model
from jitney.engine.core.models.sharding import make_mesh
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.lab.simulation.roofline import SHAPES
from jitney.kernels.select import _pallas_set

MODEL, LAYERS, TARGET, TOPOLOGY = "llama-3.1-8b", 4, "v5e", "v5e:2x2"
RANK, ADAPTERS, SEATS = 16, 8, 64
DTYPE = jnp.dtype(jnp.bfloat16)


def adapt(linear: Linear, pieces: int) -> None:
    """Adapters of every projection that the matrix is made of, as shapes."""
    inputs, outputs = linear.kernel.shape
    own = pieces * RANK
    columns = ADAPTERS * own
    a: Any = jax.ShapeDtypeStruct((inputs, columns), DTYPE)
    b: Any = jax.ShapeDtypeStruct((columns, outputs), DTYPE)
    owners: Any = jax.ShapeDtypeStruct((columns,), jnp.int32)
    linear.adapt(Adapters(a, b, owners))


def model_of(config: ModelConfig, *, adapted: bool) -> Model:
    model: Any = abstract_model(config, dtype=DTYPE)
    if adapted:
        for block in model.layers:
            adapt(block.attention.qkv, 3)
            adapt(block.attention.o, 1)
            adapt(block.mlp.gate_up, 2)
            adapt(block.mlp.down, 1)
    return model


def counts(config: ModelConfig, chips: int, bucket: Bucket, *, adapted: bool) -> list[float]:
    """GB that the step touches, TFLOP, and all-reduces; of one chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = make_mesh(list(devices)[:chips])
    sizes = StateSizes(SEATS, 2048, 16, 8192, DTYPE, has_adapters=adapted)
    model = model_of(config.local(chips), adapted=adapted)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = lower_step(model, bucket, True, _pallas_set(TARGET), sizes, mesh)
    compiled = lowered.compile()
    cost: Any = compiled.cost_analysis()
    text = compiled.as_text() or ""
    sums = text.count(" all-reduce(") + text.count(" all-reduce-start(")
    return [cost["bytes accessed"] / 1e9, cost["flops"] / 1e12, sums]


def main() -> None:
    config = replace(SHAPES[MODEL], n_layers=LAYERS, windows=(0,) * LAYERS)
    print(f"{LAYERS} layers of {MODEL}, bfloat16, compiled for {TARGET}")
    print(f"without adapters -> with {ADAPTERS} of rank {RANK}\n")
    print("| chips | step | GB | TFLOP | all-reduces |")
    print("|---|---|---|---|---|")
    for chips in (1, 4):
        for bucket in (Bucket(SEATS, SEATS), Bucket(1024, SEATS)):
            none = counts(config, chips, bucket, adapted=False)
            some = counts(config, chips, bucket, adapted=True)
            cells = [f"{one:.3g} -> {other:.3g}" for one, other in zip(none, some, strict=True)]
            print(f"| {chips} | {bucket} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

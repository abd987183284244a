"""Compiles the engine's own step for an H100 that is not there, and prints what came out as JSON; run as a program.

`test_triton_program` starts it with jax's CUDA plugin on PYTHONPATH, and tells XLA by XLA_FLAGS to write what it made
into FOLDER: python cuda_program.py ROWS SEQUENCES FOLDER. Llama-3.1-8B shapes, two layers, greedy.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jitney.engine.batch import BatchBuilder
from jitney.engine.buckets import Bucket
from jitney.engine.models.config import ModelConfig
from jitney.engine.models.llama import abstract_model
from jitney.engine.runner import Program
from jitney.kernels.select import triton_for

TARGET = Path(__file__).parents[1] / "data" / "h100.txtpb"
LAYERS, PAGES, PAGE, SEATS = 2, 4096, 16, 64
CONFIG = ModelConfig(architecture="llama", vocab_size=128256, hidden_size=4096, n_layers=LAYERS, n_heads=32,
                     n_kv_heads=8, head_dim=128, intermediate_size=14336, windows=(0,) * LAYERS, context_length=8192)


def compile_step(bucket: Bucket) -> jax.stages.Compiled:
    """The all-greedy step of one bucket, with its state donated."""
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET.read_text())
    place = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
    graph, weights = nnx.split(abstract_model(CONFIG, dtype=jnp.bfloat16))
    leaves, treedef = jax.tree.flatten(weights)
    builder = BatchBuilder(seats=SEATS, pages_per_seat=512, page_size=PAGE, pool_rows=PAGES * PAGE)
    layout = builder.layout(bucket, True)
    pool = jax.ShapeDtypeStruct((PAGES, PAGE, 16, 128), jnp.bfloat16)
    args = ([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves], [pool] * LAYERS,
            jax.ShapeDtypeStruct((SEATS,), jnp.int32), jax.ShapeDtypeStruct((layout.size,), jnp.int32))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    step = partial(Program(graph, treedef, triton_for(90)).plain, layout)
    return jax.jit(step, donate_argnums=(1, 2)).lower(*placed).compile()


def main(rows: int, seqs: int, folder: Path) -> None:
    compiled = compile_step(Bucket(rows, seqs))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    thunks = next(folder.glob("*thunk_sequence_after_thunk_passes.txt")).read_text().splitlines()
    print(json.dumps({
        "aliased": memory.alias_size_in_bytes, "pools": LAYERS * PAGES * PAGE * 16 * 128 * 2,
        "temporaries": memory.temp_size_in_bytes,
        "copied": [shape for shape in re.findall(r"= (\S+) copy\(", text) if elements(shape) > 1 << 20],
        "kernels": text.count('custom_call_target="triton_kernel_call_ffi"'),
        "command_buffers": sum("kCommandBuffer" in line for line in thunks),
        "outside": sum(not line.startswith(" ") and "kCommandBuffer" not in line for line in thunks)}))


def elements(shape: str) -> int:
    """bf16[4096,16]{1,0} -> 65536."""
    dims = re.findall(r"\d+", shape.partition("[")[2].partition("]")[0])
    return int(np.prod([int(dim) for dim in dims] or [1]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

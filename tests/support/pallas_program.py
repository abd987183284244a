"""Compiles the Pallas kernel for a TPU that this machine does not have, and prints facts of the
program as JSON; run as a program.

`test_pallas_compiled` starts it with libtpu on PYTHONPATH: python pallas_program.py TOPOLOGY [PART
OF A CASE'S NAME].
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jitney.kernels.interface import AttentionMeta
from jitney.kernels.pallas_tpu.kernel_set import PallasKernels, chip_of
from jitney.kernels.select import _pallas_set

PAGES = 4096


@dataclass(frozen=True)
class Shape:
    """One step's attention. heads: query heads, key heads, head dim; by default those of
    Llama-3.1-8B and Qwen3-8B.
    """

    rows: int = 512
    seqs: int = 64
    heads: tuple[int, int, int] = (32, 8, 128)
    page: int = 16
    context: int = 8192
    dtype: str = "bfloat16"
    pool: str = "bfloat16"
    window: int = 0
    softcap: float = 0.0


MIXED, DECODE = Shape(), Shape(32, 32)
CASES = {
    "decode": DECODE,
    "one seat": Shape(1, 1),
    "decode, 256 seats, pages of 64": Shape(256, 256, page=64, context=32768),
    "mixed": MIXED,
    "mixed, 2048 rows, pages of 128": replace(MIXED, rows=2048, page=128),
    "window, softcap": replace(MIXED, window=1024, softcap=30.0),
    "int8 pool": replace(MIXED, pool="int8"),
    "fp8 pool": replace(MIXED, pool="float8_e4m3fn"),
    "fp8 e5m2 pool": replace(DECODE, pool="float8_e5m2"),
    "float32": replace(MIXED, dtype="float32", pool="float32"),
    "half of the heads": replace(MIXED, heads=(16, 4, 128)),
    "one key head": replace(MIXED, heads=(4, 1, 128)),
    "one key head, int8 pool": replace(DECODE, heads=(4, 1, 128), pool="int8"),
    "no groups": replace(MIXED, heads=(32, 32, 128)),
    "head dim 64": replace(MIXED, heads=(32, 8, 64)),
    "head dim 64, groups of three": replace(MIXED, heads=(9, 3, 64)),
    "head dim 80": replace(MIXED, heads=(32, 32, 80)),
    "head dim 96, window": replace(MIXED, heads=(32, 8, 96), window=512),
    "head dim 256": replace(MIXED, heads=(16, 8, 256)),
}


def arguments(shape: Shape) -> tuple[Any, ...]:
    """(q, k, v, pool, meta, kv_scales) as shapes."""
    n_heads, n_kv, dim = shape.heads
    array: Any = jax.ShapeDtypeStruct
    meta = AttentionMeta(
        *(
            array(size, jnp.int32)
            for size in (
                (shape.seqs,),
                (shape.seqs + 1,),
                (shape.seqs, shape.context // shape.page),
                (shape.rows,),
                (shape.rows,),
                (3,),
            )
        )
    )
    q, k = (array((shape.rows, n, dim), shape.dtype) for n in (n_heads, n_kv))
    pool_shape = PallasKernels().pool_shape
    pool = array(pool_shape(PAGES, shape.page, n_kv, dim, jnp.dtype(shape.pool)), shape.pool)
    return (
        q,
        k,
        k,
        pool,
        meta,
        array((2 * n_kv,), jnp.float32) if pool.dtype.itemsize == 1 else None,
    )


def compile_case(shape: Shape, device: Any) -> dict[str, Any]:
    """Bytes of the pool, of aliased arrays and of temporaries; instructions that make another
    array of the pool's size.
    """
    kernels = _pallas_set(chip_of(device.device_kind))
    mesh = Mesh(np.array([device]), ("x",))
    args = arguments(shape)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
        args,
    )

    def step(q, k, v, kv, meta, kv_scales):
        return partial(
            kernels.paged_attention, scale=0.1, window=shape.window, softcap=shape.softcap
        )(q, k, v, kv, meta, kv_scales=kv_scales)

    with use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(step, donate_argnums=3).lower(*placed).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    dims = ",".join(map(str, args[3].shape))
    return {
        "pool": math.prod(args[3].shape) * args[3].dtype.itemsize,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "copied": [
            line.strip() for line in text.splitlines() if f"[{dims}]" in line and " copy" in line
        ],
    }


def main(topology: str, part: str = "") -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    print(
        json.dumps(
            {name: compile_case(shape, device) for name, shape in CASES.items() if part in name}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

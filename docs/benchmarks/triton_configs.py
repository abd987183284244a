"""Measures tile sizes of attention on this machine's NVIDIA GPU, and prints rows for
`kernels/triton_gpu/tiles.py`.

python docs/benchmarks/triton_configs.py [--dims 64 128 256] [--groups 4 32] [--pages 16 128]
[--quick]

Decode is measured at 32 sequences of 4096 keys and at one of 32768, prompts at 4096 rows; all in
bfloat16 with 8 key heads. Candidates that do not compile are left out. Each winner is printed with
its share of the rate of a plain copy, or of a bfloat16 product, in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels.interface import AttentionMeta
from jitney.kernels.select import compute_capability
from jitney.kernels.triton_gpu.kernel_set import TritonKernels
from jitney.kernels.triton_gpu.launch import JaxTriton
from jitney.kernels.triton_gpu.tiles import (
    _PROCESSORS,
    DecodeTiles,
    PromptTiles,
    _generation,
    attention_tiles,
)

KEY_HEADS, REPEATS, ROUNDS = 8, 20, 5


def seconds(work: Callable[..., jax.Array], x: jax.Array, *rest: Any) -> float:
    """Device seconds of x = work(x, *rest), REPEATS times in one program; the median of ROUNDS."""
    loop = jax.jit(lambda x, *rest: jax.lax.fori_loop(0, REPEATS, lambda _, x: work(x, *rest), x))
    jax.block_until_ready(loop(x, *rest))
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        jax.block_until_ready(loop(x, *rest))
        times.append((time.perf_counter() - started) / REPEATS)
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Bytes per second read and written by adding one to 1 GiB."""
    x = jnp.zeros((1 << 28,), jnp.float32)
    return 2 * x.nbytes / seconds(lambda x: x + 1, x)


def product_rate() -> float:
    """bfloat16 operations per second of an 8192-cubed product."""
    x = jnp.zeros((8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / seconds(lambda x, w: x @ w, x, x)


def batch(
    lengths: list[int], rows: int, heads: int, dim: int, page: int
) -> tuple[jax.Array, jax.Array, AttentionMeta]:
    """(q, kv, meta): `rows` new rows of each sequence, pages of all sequences shuffled."""
    pages = -(-max(lengths) // page)
    seqs = len(lengths)
    order = np.random.default_rng(0).permutation(seqs * pages).astype(np.int32) + 1
    counts = np.array([seqs if rows == 1 else 0, seqs, seqs * rows], np.int32)
    total = seqs * rows + (rows > 1)  # with rows == seqs it would be a decode bucket
    meta = AttentionMeta(
        jnp.array(lengths, jnp.int32),
        jnp.arange(seqs + 1, dtype=jnp.int32) * rows,
        jnp.asarray(order.reshape(seqs, pages)),
        jnp.zeros((total,), jnp.int32),
        jnp.zeros((total,), jnp.int32),
        jnp.asarray(counts),
    )
    q = jax.random.normal(jax.random.key(0), (total, heads, dim), jnp.bfloat16)
    kv = jax.random.normal(
        jax.random.key(1), (seqs * pages + 1, page, 2 * KEY_HEADS, dim), jnp.bfloat16
    )
    return q, kv, meta


def time_tiles(
    tiles: tuple[DecodeTiles, PromptTiles],
    sm: int,
    given: tuple[jax.Array, jax.Array, AttentionMeta],
) -> float:
    """Seconds of one attention with these tiles; infinite if they do not compile or fit."""
    q, kv, meta = given
    kernels = TritonKernels(JaxTriton(sm), lambda *_: tiles)
    try:
        return seconds(partial(attend, kernels), q, kv, meta)
    except Exception as error:  # after any compiler or driver error try the next candidate
        print(f"  {tiles} left out: {str(error).splitlines()[0][:100]}")
        return float("inf")


def attend(kernels: TritonKernels, q: jax.Array, kv: jax.Array, meta: AttentionMeta) -> jax.Array:
    return kernels.attend(q, kv, meta, scale=q.shape[-1] ** -0.5)


def decode_candidates(current: DecodeTiles, sm: int, quick: bool) -> Iterator[DecodeTiles]:
    processors = _PROCESSORS[_generation(sm)]
    for block, warps, stages, resident in itertools.product(
        (32, 64, 128), (4, 8), (2, 3, 4), (2, 3, 4, 6)
    ):
        if not quick or (warps, stages) == (current.warps, current.stages):
            yield replace(
                current, block_n=block, warps=warps, stages=stages, programs=processors * resident
            )


def prompt_candidates(current: PromptTiles, quick: bool) -> Iterator[PromptTiles]:
    for rows, block, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        if not quick or (warps, stages) == (current.warps, current.stages):
            yield PromptTiles(rows, block, warps, stages)


def best_decode(
    dim: int, group: int, page: int, sm: int, quick: bool, bandwidth: float
) -> DecodeTiles:
    """The fastest over many sequences and one long one, each counted by its share of the best."""
    current, prompt = attention_tiles(sm, dim, 2, group, 2)
    heads = group * KEY_HEADS
    cases = {
        lengths: batch(list(lengths), 1, heads, dim, page) for lengths in ((4096,) * 32, (32768,))
    }
    candidates = list(decode_candidates(current, sm, quick))
    times = np.array(
        [[time_tiles((tiles, prompt), sm, case) for case in cases.values()] for tiles in candidates]
    )
    chosen = int(np.argmin((times / times.min(0)).sum(1)))
    for lengths, spent in zip(cases, times[chosen], strict=True):
        moved = sum(lengths) * 2 * KEY_HEADS * dim * 2
        share = moved / spent / bandwidth
        print(
            f"  decode {len(lengths)} x {lengths[0]}: {spent * 1e6:.0f} us, {share:.0%} of a copy"
        )
    return candidates[chosen]


def best_prompt(dim: int, group: int, page: int, sm: int, quick: bool, rate: float) -> PromptTiles:
    """The fastest over one prompt of 4096 rows."""
    decode, current = attention_tiles(sm, dim, 2, group, 2)
    case = batch([4096], 4096, group * KEY_HEADS, dim, page)
    candidates = list(prompt_candidates(current, quick))
    times = [time_tiles((decode, tiles), sm, case) for tiles in candidates]
    chosen = int(np.argmin(times))
    work = (
        4 * group * KEY_HEADS * dim * 4096 * 4096 / 2
    )  # two products, half of them behind the causal mask
    print(
        f"  prompt of 4096: {times[chosen] * 1e3:.2f} ms, {work / times[chosen] / rate:.0%} of a "
        "product's rate"
    )
    return candidates[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dims", type=int, nargs="+", default=[64, 128, 256], help="padded head dims"
    )
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[4, 32], help="query heads per key head"
    )
    parser.add_argument("--pages", type=int, nargs="+", default=[16], help="positions per page")
    parser.add_argument("--quick", action="store_true", help="keep today's warps and stages")
    options = parser.parse_args()
    sm = compute_capability()
    bandwidth, rate = copy_bandwidth(), product_rate()
    name = jax.devices()[0].device_kind
    print(f"{name}: copy {bandwidth / 1e9:.0f} GB/s, bfloat16 product {rate / 1e12:.0f} TFLOP/s")
    for dim, group, page in itertools.product(options.dims, options.groups, options.pages):
        print(f"head dim {dim}, {group} query heads to a key head, pages of {page}")
        decode = best_decode(dim, group, page, sm, options.quick, bandwidth)
        prompt = best_prompt(dim, group, page, sm, options.quick, rate)
        print(f"    ({_generation(sm)}, {dim}, 2): ({decode}, {prompt}),")


if __name__ == "__main__":
    main()

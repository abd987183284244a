"""What the compiler makes of every Triton kernel for A100, L4 and H100, without one: nothing
spills, all fits.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
from triton_recorder import Call, compile_call, longest_loop, record

from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.kernels.delta_net import DeltaState, DeltaWeights, StateSlots
from jitney.kernels.experts import ExpertBlocks, Stack
from jitney.kernels.int4 import Int4
from jitney.kernels.interface import AttentionMeta, KernelError
from jitney.kernels.mamba import MambaWeights
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.triton_gpu.kernel_set import TritonKernels
from jitney.kernels.triton_gpu.tiles import _ATTENTION, _PROCESSORS, ProductTiles, parts_of
from jitney.kernels.triton_gpu.top_k_top_p import _SHIFTS
from jitney.kernels.w8a8 import Fp8

#: Shared memory a program may have, bytes: CUDA C++ programming guide, technical specifications per
#: capability.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
DTYPES = {2: "bfloat16", 4: "float32"}
#: The whole table with every pool and option takes minutes: `make test-compile` sets this.
whole_table = pytest.mark.skipif(
    os.environ.get("JITNEY_TEST_COMPILE") != "1", reason="minutes of compiling: make test-compile"
)


def launches(
    sm: int,
    dim: int,
    dtype: str,
    pool: str,
    *,
    group: int = 4,
    page: int = 16,
    rows: int = 512,
    seqs: int = 64,
    **options: Any,
) -> list[Call]:
    """All launches of a step's write and attention with 8 key heads and 8192 positions a
    sequence.
    """

    def use(launch):
        pages = 8192 // page
        shapes = ((seqs,), (seqs + 1,), (seqs, pages), (rows,), (rows,), (3,))
        arrays: list[Any] = [jnp.zeros(shape, jnp.int32) for shape in shapes]
        meta = AttentionMeta(*arrays)
        q, k = (jnp.zeros((rows, n, dim), dtype) for n in (8 * group, 8))
        kv = jnp.zeros((32, page, 16, dim), pool)
        scales = jnp.ones((16,)) if pool in ("int8", "float8_e4m3fn") else None
        heads = jnp.concatenate([q, k, k], axis=1)
        angles = jnp.zeros((rows, 1, dim // 2))
        kernels = TritonKernels(launch)
        norm = jnp.ones((dim,), dtype)
        kernels.rotate_and_write(
            heads, (angles, angles), kv, meta, norms=(norm, norm), kv_scales=scales
        )
        kernels.paged_attention(q, k, k, kv, meta, scale=dim**-0.5, kv_scales=scales, **options)

    return record(sm, use)


def check(calls: list[Call], sm: int) -> None:
    """No call takes more shared memory than there is; unless it computes in float32, it does not
    spill, and prompt blocks use wgmma on Hopper, but for heads above 256: with its 64 rows they
    would spill.
    """
    for call in calls:
        made = compile_call(call, sm)
        assert made.shared <= SHARED[sm], (
            f"{made.name} on sm_{sm} takes {made.shared} bytes of shared memory"
        )
        if call.types[0] == "*fp32" and made.name.endswith("attention"):
            continue
        assert made.spilled == 0, f"{made.name} on sm_{sm} spills {made.spilled} bytes"
        small = dict(call.constants).get("D", 0) <= 256
        assert made.has_wgmma or (made.name, sm, small) != ("prompt_attention", 90, True)


SAMPLE = [
    (90, 128, "bfloat16", "bfloat16"),
    (80, 128, "bfloat16", "int8"),
    (89, 64, "float32", "float32"),
]


@pytest.mark.parametrize("sm,dim,dtype,pool", SAMPLE)
def test_the_usual_shapes(sm: int, dim: int, dtype: str, pool: str):
    check(launches(sm, dim, dtype, pool), sm)


@pytest.mark.parametrize("sm,heads,dtype", [(90, 16, "bfloat16"), (80, 20, "bfloat16")])
def test_latents_of_deepseek_and_glm(sm: int, heads: int, dtype: str):
    """Decode spills nothing; prompts on Hopper little, for products of warp groups."""

    def use(launch):
        shapes = ((64,), (65,), (64, 512), (512,), (512,), (3,))
        arrays: list[Any] = [jnp.zeros(shape, jnp.int32) for shape in shapes]
        q, k = (jnp.zeros((512, n, 576), dtype) for n in (heads, 1))
        kv = jnp.zeros((32, 16, 1, 576), dtype)
        meta = AttentionMeta(*arrays)
        TritonKernels(launch).paged_attention(q, k, None, kv, meta, scale=0.1, value_dim=512)

    for call in record(sm, use):
        made = compile_call(call, sm)
        assert made.shared <= SHARED[sm]
        on_hopper = (made.name, sm) == ("prompt_attention", 90)
        assert made.spilled <= (32 if on_hopper else 0) and made.has_wgmma == on_hopper


@whole_table
@pytest.mark.parametrize("sm,dim,itemsize", _ATTENTION)
def test_the_whole_table(sm: int, dim: int, itemsize: int):
    dtype = DTYPES[itemsize]
    options: tuple[dict[str, Any], ...] = ({}, {"window": 1024}, {"softcap": 30.0})
    for pool in pools(sm, dtype):
        for more in options:
            check(launches(sm, dim, dtype, pool, **more), sm)


def pools(sm: int, dtype: str) -> list[str]:
    """What a card keeps keys and values of this dtype as: an A100 has no fp8."""
    return [dtype, "int8"] if sm == 80 else [dtype, "int8", "float8_e4m3fn"]


@whole_table
@pytest.mark.parametrize("sm", SHARED)
def test_odd_groups_and_pages(sm: int):
    for group, dim, page in ((1, 128, 16), (7, 128, 32), (3, 64, 128), (16, 96, 64), (32, 80, 16)):
        check(launches(sm, dim, "bfloat16", "bfloat16", group=group, page=page), sm)


@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("rows,experts,clusters", [(128, 256, 1), (256, 32, 1), (128, 256, 8)])
def test_the_most_choices_of_experts(sm: int, rows: int, experts: int, clusters: int):
    """Of Qwen3.6-35B-A3B, gpt-oss-20b and DeepSeek-V3."""
    chosen_of = -(-clusters // 2)
    mixture = ExpertsConfig(
        experts, 1024 // rows, renormalised=True, clusters=clusters, chosen_clusters=chosen_of
    )

    def use(launch):
        numbers = jnp.zeros((rows, experts), jnp.float32)
        TritonKernels(launch).route(numbers, mixture, jnp.int32(rows))

    calls = record(sm, use)
    assert [call.kernel.__name__ for call in calls] == ["choose_experts", "deal_out"]
    made = [compile_call(call, sm) for call in calls]
    assert not any(kernel.spilled for kernel in made)


@pytest.mark.parametrize(
    "rows,names",
    [
        (512, ["weigh_chunks", "pass_rows"]),
        (16, ["pass_rows"]),
        (8, ["pass_row", "close_row"]),
    ],
)
@pytest.mark.parametrize("sm", SHARED)
def test_a_recurrent_layer_keeps_its_memory_in_registers(sm: int, rows: int, names: list[str]):
    """Qwen3.5's heads: a program has 128 x 32 numbers, 32 registers of each of its 128 threads, and
    of chunks of rows 16 of 256. Eight sequences, with checkpoints among more rows.
    """

    def use(launch):
        state = DeltaState.empty(((8, 4, 8192), (8, 32, 128, 128), (8,)))
        weights = DeltaWeights(
            jnp.zeros((4, 8192), "bfloat16"), jnp.zeros(32), jnp.zeros(32), jnp.ones(128)
        )
        x = jnp.zeros((rows, 8192 + 4096), "bfloat16")
        net = TritonKernels(launch).delta_net
        net(x, jnp.zeros((rows, 64)), weights, state, meta_of_eight(rows), eps=1e-6)

    made = [compile_call(call, sm) for call in record(sm, use)]
    assert [one.name for one in made] == names
    assert all(one.spilled == 0 and one.shared <= SHARED[sm] for one in made)


@pytest.mark.parametrize(
    "rows,names",
    [(512, ["weigh_chunks", "pass_rows"]), (8, ["pass_mamba_row", "keep_row"])],
)
@pytest.mark.parametrize("sm", SHARED)
def test_a_layer_of_mamba_keeps_its_memory_in_registers(sm: int, rows: int, names: list[str]):
    """Nemotron 3 Nano's heads: 128 x 64 numbers, of which a program has half."""

    def use(launch):
        state = DeltaState.empty(((8, 4, 6144), (8, 64, 128, 64), (8,)))
        taps = jnp.zeros((4, 6144), "bfloat16")
        weights = MambaWeights(taps, taps[0], jnp.zeros(64), jnp.zeros(64), jnp.ones(64))
        x = jnp.zeros((rows, 6144 + 64), "bfloat16")
        limits = 0.0, math.inf
        TritonKernels(launch).mamba(x, weights, state, meta_of_eight(rows), limits=limits)

    made = [compile_call(call, sm) for call in record(sm, use)]
    assert [one.name for one in made] == names
    assert all(one.spilled == 0 and one.shared <= SHARED[sm] for one in made)


@pytest.mark.parametrize("sm", SHARED)
def test_a_short_convolution_keeps_all_channels_in_registers(sm: int):
    """LFM2-8B-A1B's."""

    def use(launch):
        state = DeltaState.empty(((8, 3, 2048), None, (8,)))
        x = jnp.zeros((8, 3 * 2048), "bfloat16")
        taps = jnp.zeros((3, 2048), "bfloat16")
        TritonKernels(launch).short_conv(x, taps, state, meta_of_eight(8))

    (made,) = [compile_call(call, sm) for call in record(sm, use)]
    assert made.name == "pass_conv_row" and made.spilled == 0


def meta_of_eight(rows: int) -> AttentionMeta:
    """Indices of a step of eight sequences, with checkpoints among more rows."""
    none = jnp.zeros(0, jnp.int32)
    state_slots = StateSlots.in_place(jnp.arange(8))
    if rows > 8:
        slots = jnp.zeros((8, 3), jnp.int32)
        state_slots = StateSlots(jnp.arange(8), slots[:, :2], slots)
    positions = jnp.zeros(rows, jnp.int32)
    counts = jnp.array([8, 8, 8])
    return AttentionMeta(none, jnp.arange(9), none, none, positions, counts, state=state_slots)


#: What the programs on one multiprocessor share: registers, and bytes of shared memory, of which
#: each takes 1024 more.
REGISTERS, SHARED_IN_ALL = 65536, {80: 164 << 10, 89: 100 << 10, 90: 228 << 10}


def decode_call(sm: int, dim: int, pool: str, group: int = 4) -> Call:
    """The launch of decode attention over a pool of these numbers."""
    return next(
        call
        for call in launches(sm, dim, "bfloat16", pool, group=group)
        if call.kernel.__name__ == "decode_attention"
    )


def check_residency(sm: int, dim: int, group: int, pool: str) -> None:
    """Decode launches no more programs than a multiprocessor holds at once: one wave."""
    call = decode_call(sm, dim, pool, group)
    made, resident = compile_call(call, sm), call.grid[0] // _PROCESSORS[sm]
    assert made.spilled == 0
    assert resident * -(-made.registers // 8) * 8 * 32 * call.warps <= REGISTERS
    assert resident * (made.shared + 1024) <= SHARED_IN_ALL[sm]


@pytest.mark.parametrize(
    "sm,dim,group,pool",
    [
        (90, 128, 8, "bfloat16"),
        (80, 256, 32, "bfloat16"),
        (89, 128, 4, "float8_e4m3fn"),
        (90, 128, 8, "int8"),
    ],
)
def test_as_many_programs_are_resident_as_the_table_says(sm: int, dim: int, group: int, pool: str):
    check_residency(sm, dim, group, pool)


@whole_table
@pytest.mark.parametrize("sm,dim", [key[:2] for key in _ATTENTION if key[2] == 2])
def test_as_many_programs_are_resident_for_every_pool(sm: int, dim: int):
    for pool in pools(sm, "bfloat16"):
        for group in (1, 4, 32):
            check_residency(sm, dim, group, pool)


@pytest.mark.parametrize("sm,dim,pool", [(90, 128, "float8_e4m3fn"), (80, 64, "int8")])
def test_keys_and_values_of_single_bytes_are_copied_16_bytes_at_a_time(
    sm: int, dim: int, pool: str
):
    made = compile_call(decode_call(sm, dim, pool), sm)
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+)", made.ptx)
    assert set(copied) == {"0x10"}


@pytest.mark.parametrize("pool,most,conversions", [("int8", 500, 160), ("float8_e4m3fn", 440, 100)])
def test_numbers_of_single_bytes_are_widened_by_few_instructions(
    tmp_path: Path, pool: str, most: int, conversions: int
):
    """A warp's tile has 128 numbers a thread, and half as many cycles' worth of bytes as in
    bfloat16: 754 instructions took it to 47 % of the bandwidth of an H200. While a tile is
    multiplied, both loads of the next two are under way.
    """
    made = compile_call(decode_call(90, 128, pool), 90)
    loop = longest_loop(made.ptx, 90, tmp_path)
    widening = ("PRMT", "HADD2", "HFMA2", "F2FP", "I2F", "F2F")
    assert 300 < len(loop) <= most
    assert sum(name.startswith(widening) for name in loop) <= conversions
    assert "cp.async.wait_group \t4;" in made.ptx


#: In a process of its own: with a PTX version that is too old for a card, LLVM ends the process.
WRITE_PAGES = """
import sys
from test_triton_compiled import compile_call, launches

for sm in map(int, sys.argv[1:]):
    calls = launches(sm, 128, "bfloat16", "bfloat16")
    writing = next(call for call in calls if call.kernel.__name__ == "write_pages")
    print(sm, compile_call(writing, sm).ptx)
"""


def test_the_ptx_version_is_one_that_the_card_can_have():
    versions = {80: "8.7", 90: "8.7", 103: "8.8", 110: "9.0", 121: "8.8"}
    folders = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", WRITE_PAGES, *map(str, versions)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"\.version (\S+)\n", done.stdout)
    assert dict(zip(versions, found, strict=True)) == versions


@whole_table
@pytest.mark.parametrize("rows,seqs", [(1, 1), (64, 1), (2, 2), (2048, 1024)])
def test_few_and_many_seats(rows: int, seqs: int):
    check(launches(90, 128, "bfloat16", "bfloat16", rows=rows, seqs=seqs), 90)


def others(sm: int, dtype: str, group: int, rows: int) -> list[Call]:
    """The int4 and fp8 products of a Llama-3.1-8B projection; Hopper leaves fp8 to XLA."""

    def use(launch):
        kernels = TritonKernels(launch)
        scales, zeros = (
            jnp.zeros((4096 // group, 14336), dtype),
            jnp.zeros((4096 // group, 14336), jnp.uint8),
        )
        weights = Int4(jnp.zeros((2048, 14336), jnp.uint8), scales, zeros)
        kernels.matmul_int4(jnp.zeros((rows, 4096), dtype), weights)
        kernels.gated_int4(jnp.zeros((rows, 4096), dtype), weights)
        kernels.matmul(jnp.zeros((rows, 4096), dtype), jnp.zeros((4096, 14336), jnp.float8_e4m3fn))

    return record(sm, use)


def cuts(sm: int, rows: int) -> list[Call]:
    """The search for the cut of so many rows of 128k logits."""

    def use(launch):
        limits = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,))
        TritonKernels(launch).threshold(jnp.zeros((rows, 128256)), *limits)

    return record(sm, use)


@pytest.mark.parametrize(
    "sm,dtype,group,rows", [(90, "bfloat16", 128, 64), (80, "float32", 128, 16)]
)
def test_narrow_products(sm: int, dtype: str, group: int, rows: int):
    calls = others(sm, dtype, group, rows)
    assert len(calls) == (2 if sm == 90 else 3)
    check(calls, sm)


@pytest.mark.parametrize("sm,size,dtype", [(90, 14336, "bfloat16"), (89, 4096, "float32")])
def test_a_row_that_is_rounded_to_fp8_stays_in_registers(sm: int, size: int, dtype: str):
    def use(launch):
        kernels, x = TritonKernels(launch), jnp.zeros((8, size), dtype)
        kernels.round_to_fp8(x)
        kernels.rounded_norm_sum(x, x, x[0], 1e-5)
        weights = jnp.zeros((1, 2 * size, 64), jnp.float8_e4m3fn)
        kernels.rounded_gated_fp8(x[:, :64], Fp8(weights, jnp.zeros(2 * size)))
        few = x[:, :8192]
        factors = jnp.zeros((8, 1)), jnp.zeros(few.shape[1])
        product = PartialSums(jnp.zeros((8, 16, few.shape[1])), *factors, 8, few.dtype)
        kernels.rounded_norm_sum(few, product, few[0], 1e-5)
        kernels.norm_parts(few, product, few[0], 1e-5)

    calls = record(sm, use)
    check(calls, sm)
    names = {"round_rows", "norm_rows", "norm_parts", "gate_rows"}
    assert {call.kernel.__name__ for call in calls} == names
    for call in calls:
        assert compile_call(call, sm).registers <= 64  # of which two programs of 32 warps fit


@pytest.mark.parametrize("sm,rows", [(90, 256), (89, 1)])
def test_the_cut_of_a_vocabulary(sm: int, rows: int):
    counting, choosing, *_, gathering, finishing = calls = cuts(sm, rows)
    assert len(calls) == 2 * len(_SHIFTS) + 2
    check([counting, choosing, gathering, finishing], sm)
    assert counting.grid == (63 if rows == 1 else 16, rows)
    made = compile_call(counting, sm)
    assert made.ptx.count("mma.sync") >= 64  # four products of 16 x 128 x 16
    assert made.ptx.count("st.shared.b16") == 0  # a store for each entry would be most of the work
    resident = min(REGISTERS // (made.registers * 32), SHARED_IN_ALL[sm] // (made.shared + 1024))
    assert resident >= 10  # of one warp each


@pytest.mark.parametrize(
    "sm,rows,group",
    [
        (80, 128, 128),
        (90, 65, 128),
        *(
            pytest.param(*call, marks=whole_table)
            for call in ((89, 128, 128), (90, 64, 32), (90, 64, 64), (90, 64, 128), (90, 2048, 128))
        ),
    ],
)
def test_int4_products_of_many_rows_stay_narrow_up_to_the_tile(sm: int, rows: int, group: int):
    """On Hopper they are wgmma from 64 rows on, for every group."""
    calls = others(sm, "bfloat16", group, rows)[:2]
    assert [call.kernel.__name__ for call in calls] == ["matmul_int4", "gated_int4"]
    for made in (compile_call(call, sm) for call in calls):
        assert made.spilled == 0
        assert made.shared <= SHARED[sm]
        assert made.has_wgmma or sm != 90


@whole_table
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("sm", SHARED)
def test_every_narrow_product(sm: int, group: int):
    for rows in (1, 17, 64):
        check(others(sm, "bfloat16", group, rows), sm)
    check(others(sm, "float16", group, 64), sm)
    check(others(sm, "float32", group, 16), sm)


def with_experts(sm: int, block: int, weights: str, dtype: str = "bfloat16") -> list[Call]:
    """The products of a layer of Qwen3-30B-A3B with blocks of so many rows."""
    size, inner, n_experts, n_blocks = 2048, 768, 128, 192

    def stack(size_in: int, size_out: int) -> Stack:
        scale = None if weights == dtype else jnp.zeros((n_experts, size_out))
        return Stack(jnp.zeros((n_experts, size_in, size_out), weights), scale)

    def use(launch):
        rows, owners = jnp.zeros(n_blocks * block, jnp.int32), jnp.zeros(n_blocks, jnp.int32)
        blocks = ExpertBlocks(rows, owners, jnp.zeros((), jnp.int32))
        x = jnp.zeros((512, size), dtype)
        stacks = stack(size, 2 * inner), stack(inner, size)
        TritonKernels(launch).experts(x, *stacks, blocks, "silu")

    return record(sm, use)


@pytest.mark.parametrize(
    "sm,block,weights",
    [
        (90, 16, "bfloat16"),
        (90, 64, "bfloat16"),
        (89, 32, "float8_e4m3fn"),
        (80, 128, "int8"),
    ],
)
def test_products_with_experts(sm: int, block: int, weights: str):
    calls = with_experts(sm, block, weights)
    assert [call.kernel.__name__ for call in calls] == ["open_experts", "close_experts"]
    check(calls, sm)
    if (sm, block) == (90, 64):
        assert all(compile_call(call, sm).has_wgmma for call in calls)


def with_mxfp4(sm: int, block: int) -> list[Call]:
    """The products of a layer of gpt-oss-20b with blocks of so many rows."""
    size, n_experts, n_blocks = 2880, 32, 96

    def stack(size_out: int) -> Stack:
        codes = jnp.zeros((n_experts, size // 2, size_out), jnp.uint8)
        scales = jnp.zeros((n_experts, size // 32, size_out), jnp.uint8)
        return Stack(codes, scales, jnp.zeros((n_experts, size_out), jnp.bfloat16))

    def use(launch):
        rows, owners = jnp.zeros(n_blocks * block, jnp.int32), jnp.zeros(n_blocks, jnp.int32)
        blocks = ExpertBlocks(rows, owners, jnp.zeros((), jnp.int32))
        x = jnp.zeros((512, size), jnp.bfloat16)
        stacks = stack(2 * size), stack(size)
        TritonKernels(launch).experts(x, *stacks, blocks, "clamped_silu")

    return record(sm, use)


@pytest.mark.parametrize(
    "sm,block",
    [
        *((90, 16), (90, 64), (89, 128), (80, 16)),
        *(
            pytest.param(*call, marks=whole_table)
            for call in ((90, 32), (90, 128), (89, 16), (80, 64))
        ),
    ],
)
def test_products_with_experts_in_mxfp4(sm: int, block: int):
    check(with_mxfp4(sm, block), sm)


@pytest.mark.parametrize("sm", SHARED)
def test_weights_of_few_rows_are_on_their_way_in_what_a_multiprocessor_holds(sm: int):
    """At a bandwidth of 3.35, 2.04 and 0.3 TB/s a microsecond's bytes are 25, 19 and 5 KB."""
    wanted = {80: 19 << 10, 89: 5 << 10, 90: 25 << 10}[sm]
    for call in with_experts(sm, 16, "bfloat16"):
        made = compile_call(call, sm)
        by_registers = REGISTERS // (-(-made.registers // 8) * 8 * 32 * call.warps)
        resident = min(by_registers, SHARED_IN_ALL[sm] // (made.shared + 1024))
        constants = dict(call.constants)
        # A stage is multiplied while the others are brought; most of it is weights.
        brought = made.shared * (call.stages - 2) // (call.stages - 1)
        assert constants["BLOCK_M"] == 16 and resident * brought >= wanted


@whole_table
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("sm", SHARED)
def test_every_product_with_experts(sm: int, block: int):
    for weights in ("bfloat16", "int8", "float8_e4m3fn"):
        check(with_experts(sm, block, weights), sm)
    check(with_experts(sm, block, "float32", "float32"), sm)


def test_few_blocks_are_cut_into_as_many_programs_as_there_are_processors():
    """One row of Qwen3-30B-A3B goes through 8 experts, whose 1536 columns are 12 tiles of 128."""
    assert ProductTiles(90).experts(16, 2, 8, 1536).block_n == 64
    assert ProductTiles(90).experts(16, 2, 144, 1536).block_n == 128
    assert ProductTiles(89).experts(16, 2, 8, 1536).block_n == 128


def test_products_of_few_rows_and_many_inputs_have_as_many_parts_as_xla_would_make():
    """Of Llama-3.1-8B, Qwen3.5-27B and Gemma 3 12B; and parts of many rows are large."""
    for size_in, size_out in ((14336, 4096), (17408, 5120), (15360, 3840)):
        assert {parts_of(rows, size_in, size_out) for rows in (1, 8, 64)} == {8}
    assert parts_of(128, 17408, 5120) == 2


def test_fp8_pools_need_a_gpu_that_has_fp8():
    with pytest.raises(
        KernelError, match=r"fp8 pools need compute capability 8\.9, this GPU has 8\.0; use int8"
    ):
        launches(80, 128, "bfloat16", "float8_e4m3fn")


def test_a_head_dim_beyond_the_table_is_refused():
    with pytest.raises(KernelError, match="head dim up to 512, not 1024; choose kernels reference"):
        launches(90, 1024, "bfloat16", "bfloat16")

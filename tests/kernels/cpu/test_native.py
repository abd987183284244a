"""The kernels for CPUs against numpy: attention on ragged batches, small products, and the threads
they share.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import native_checks
import numpy as np
import pytest
from cpu_library import packs_here
from ragged import Case, attention, make, written

from jitney.kernels import definitions, reference
from jitney.kernels.cpu import library, norms, products
from jitney.kernels.cpu.attention import paged_attention, rotate_and_write
from jitney.kernels.interface import KernelError, OneOf
from jitney.kernels.mxfp4 import Mxfp4
from jitney.kernels.select import select
from jitney.kernels.w8a8 import Int8

#: As they are where no machine was asked.
OURS = products.up_to(products.USUAL_ROWS)
NO_PAIRS = library._PanelLayout(bfloat16=0, int8=4, columns=96)

#: No test here asks how fast XLA's part is.
pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASES = {
    "decode, three query heads a key head": Case((9, 3, 64), (5, 100, 200, 333)),
    "decode, absent sequences": Case((4, 4, 32), (1, 250), rows=8, seqs=8, page=8, pages=64),
    "prefill alone": Case((8, 2, 32), (), ((70, 70), (17, 17), (1, 1)), rows=256, seqs=8),
    "mixed, chunks in the middle of prompts": Case(
        (8, 2, 32), (5, 300), ((300, 140), (17, 3), (9, 1)), rows=256, seqs=8
    ),
    "a head of 80, a group of seven": Case(
        (14, 2, 80), (77,), ((170, 40),), rows=64, seqs=4, pages=30
    ),
    "a head of 128, one key head a query head, large pages": Case(
        (3, 3, 128), (65,), ((70, 64),), page=64, pages=4
    ),
    "a group of sixteen, a head of 96": Case((16, 1, 96), (150,), ((40, 30),), rows=32, seqs=4),
    "keys of 112 whose first 80 are values": Case(
        (6, 1, 112), (5, 300), ((170, 40),), rows=64, seqs=4, value_dim=80
    ),
}


WINDOWED = ("decode, three query heads a key head", "mixed, chunks in the middle of prompts")


@pytest.mark.parametrize(
    "case,options",
    [(case, {}) for case in CASES]
    + [(case, {"window": 24, "softcap": 5.0, "sinks": True}) for case in WINDOWED]
    + [("keys of 112 whose first 80 are values", {"sinks": True})],
)
def test_attention_matches_numpy(case: str, options: dict[str, Any]):
    batch = make(replace(CASES[case], **options))
    o, after = jax.jit(lambda *args: paged_attention(*args, **batch.options))(
        batch.q, batch.k, batch.v, batch.kv, batch.meta
    )
    expected = written(batch)
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_allclose(np.asarray(o)[: batch.n_rows], attention(batch, expected), atol=4e-6)
    assert (np.asarray(o)[batch.n_rows :] == 0).all()  # padding is computed by nobody


DECODING, PROMPTS = "attention of decoding rows", "attention of prompts"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("decode, absent sequences", {DECODING}),
        ("prefill alone", {PROMPTS}),
        ("mixed, chunks in the middle of prompts", {DECODING, PROMPTS}),
    ],
)
def test_attention_gives_its_time_to_the_rows_that_it_is_for(case: str, parts: set[str]):
    batch = make(CASES[case])
    attend = jax.jit(lambda *args: paged_attention(*args, **batch.options))
    assert parts_of(attend, batch.q, batch.k, batch.v, batch.kv, batch.meta) == parts


def test_each_kernel_gives_its_time_to_its_part():
    x, w = jnp.ones((8, 64)), jnp.ones((64, 96))
    assert parts_of(jax.jit(OURS.matmul), x, w) == {"products"}
    assert parts_of(jax.jit(OURS.project), x, w.T) == {"head"}
    assert parts_of(jax.jit(norms.rms_norm, static_argnums=2), x, jnp.ones(64), 1e-5) == {"norms"}
    batch = make(Case((4, 2, 32), (5, 100)))
    angles = jnp.ones((len(batch.q), 1, 16))
    heads = jnp.concatenate([batch.q, batch.k, batch.v], axis=1)
    rotate = jax.jit(rotate_and_write)
    assert parts_of(rotate, heads, (angles, angles), batch.kv, batch.meta) == {
        "rotation and writes"
    }


def parts_of(call: Callable[..., Any], *arguments: Any) -> set[str]:
    """The parts whose times a call adds to, which add up to no more than it takes."""
    jax.block_until_ready(call(*arguments))  # compiled
    before, started = library.load().part_seconds(), time.perf_counter()
    jax.block_until_ready(call(*arguments))
    taken, after = time.perf_counter() - started, library.load().part_seconds()
    grown = {name: after[name] - before[name] for name in after}
    assert sum(grown.values()) <= taken
    return {name for name, seconds in grown.items() if seconds > 0}


def test_bfloat16_attention_rounds_its_weights_and_its_result():
    """Weights of a prompt's rows are rounded to 8 bits where the CPU multiplies pairs, a decoding
    row's never are.
    """
    batch = make(CASES["mixed, chunks in the middle of prompts"])
    narrow = [jnp.asarray(array, jnp.bfloat16) for array in (batch.q, batch.k, batch.v, batch.kv)]
    o, _ = jax.jit(lambda *args: paged_attention(*args, **batch.options))(*narrow, batch.meta)
    wide = replace(
        batch,
        **dict(
            zip(("q", "k", "v", "kv"), (np.asarray(x, np.float32) for x in narrow), strict=True)
        ),
    )
    expected = attention(wide, written(wide))
    assert o.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(o, np.float32)[: batch.n_rows], expected, rtol=2**-8, atol=3e-3
    )
    np.testing.assert_allclose(
        np.asarray(o, np.float32)[:2], expected[:2], rtol=2**-8, atol=1e-6
    )  # those that decode


@pytest.mark.parametrize("options", [{"pool": "int8"}, {"heads": (4, 4, 40)}])
def test_what_it_does_not_serve_is_the_references(options: dict):
    batch = make(replace(CASES["decode, absent sequences"], **options))
    arguments = (batch.q, batch.k, batch.v, batch.kv, batch.meta)
    mine, other = (
        jax.jit(lambda *args, f=f: f(*args, **batch.options))(*arguments)
        for f in (paged_attention, reference.paged_attention)
    )
    np.testing.assert_array_equal(mine[0], other[0])
    np.testing.assert_array_equal(mine[1], other[1])


def test_a_row_does_not_depend_on_its_batch():
    """Bit-equal alone and among others, for a decoding row and for a chunk of a prompt."""
    crowd = make(
        Case(
            (9, 3, 64),
            (40, 200, 90),
            ((150, 100), (300, 33)),
            rows=256,
            seqs=8,
            dtype="bfloat16",
            pool="bfloat16",
        )
    )
    call = jax.jit(lambda *args: paged_attention(*args, **crowd.options))
    o, _ = call(crowd.q, crowd.k, crowd.v, crowd.kv, crowd.meta)
    meta = crowd.meta
    for s, (first, last) in {1: (1, 2), 4: (103, 136)}.items():
        alone = meta._replace(
            kv_lens=meta.kv_lens[s : s + 1],
            cu_q=jnp.array([0, last - first]),
            page_table=meta.page_table[s : s + 1],
            write_rows=meta.write_rows[first:last],
            positions=meta.positions[first:last],
            counts=jnp.array([int(last - first == 1), 1, last - first], jnp.int32),
        )
        single, _ = call(
            crowd.q[first:last], crowd.k[first:last], crowd.v[first:last], crowd.kv, alone
        )
        np.testing.assert_array_equal(
            np.asarray(single, np.float32), np.asarray(o, np.float32)[first:last]
        )


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_computed_again_has_the_bits_of_its_decode_rows(dtype: str, window: int):
    """A sequence of 33 rows between one that decodes and a prompt, which are as without it."""
    case = Case((9, 3, 64), (40,), ((150, 33), (300, 20)), rows=64, seqs=4, window=window)
    batch = make(replace(case, dtype=dtype, pool=dtype))
    call = jax.jit(lambda *args: paged_attention(*args, **batch.options))
    arrays, meta, own = (batch.q, batch.k, batch.v), batch.meta, slice(1, 34)
    again = meta._replace(counts=jnp.array([1, 3, 54, 1], jnp.int32))
    got, kv = call(*arrays, batch.kv, again)
    usual, _ = call(*arrays, batch.kv, meta)
    decoding = meta._replace(
        kv_lens=meta.positions[own] + 1,
        cu_q=jnp.arange(34, dtype=jnp.int32),
        page_table=jnp.repeat(meta.page_table[1:2], 33, axis=0),
        write_rows=meta.write_rows[own],
        positions=meta.positions[own],
        counts=jnp.array([33, 33, 33], jnp.int32),
    )
    rows, _ = call(*[array[own] for array in arrays], kv, decoding)
    expected = np.asarray(usual.at[own].set(rows), np.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 64)], ids=str)
def test_a_prompts_rows_are_the_same_bits_however_it_is_cut(
    heads: tuple[int, int, int], dtype: str
):
    """Also where rows share a block with later ones, whose keys they pass without seeing any."""
    length = 209
    whole = make(Case(heads, (), ((length, length),), dtype=dtype, pool=dtype))
    call = jax.jit(lambda *args: paged_attention(*args, **whole.options))

    def in_chunks(*ends: int) -> np.ndarray:
        kv, done, rows = whole.kv, 0, []
        for end in ends:
            meta = whole.meta._replace(
                kv_lens=jnp.array([end], jnp.int32),
                cu_q=jnp.array([0, end - done], jnp.int32),
                write_rows=whole.meta.write_rows[done:end],
                positions=whole.meta.positions[done:end],
                counts=jnp.array([0, 1, end - done], jnp.int32),
            )
            here = slice(done, end)
            o, kv = call(whole.q[here], whole.k[here], whole.v[here], kv, meta)
            rows.append(np.asarray(o, np.float32))
            done = end
        return np.concatenate(rows)

    expected = in_chunks(length)
    np.testing.assert_array_equal(in_chunks(64, 128, 192, length), expected)
    np.testing.assert_array_equal(in_chunks(50, 97, 160, length), expected)


@pytest.mark.parametrize(
    "dtype,rows,shape",
    [
        ("bfloat16", 4, (576, 960)),
        ("bfloat16", 8, (576, 960)),
        ("bfloat16", 1, (100, 48)),
        ("float32", 3, (64, 16)),
    ],
)
def test_small_products_match_numpy(rows: int, shape: tuple[int, int], dtype: str):
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(size), dtype) for size in ((rows, shape[0]), shape))
    wide_x, wide_w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y = jax.jit(OURS.matmul)(x, w)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, wide_x @ wide_w, rtol=2e-6, atol=1e-4)
    table, narrow = w.T, x  # [O, I] with O rows of I columns
    if shape[0] % 16 == 0:
        np.testing.assert_allclose(
            jax.jit(OURS.project)(narrow, jnp.asarray(np.asarray(table))),
            wide_x @ wide_w,
            rtol=2e-6,
            atol=1e-4,
        )


@pytest.mark.parametrize(("rows", "dtype"), [(9, "float32"), (37, "bfloat16")])
def test_products_of_more_rows_are_the_bits_of_few(rows: int, dtype: str):
    """Where a machine's steps said that they are quicker than XLA's."""
    rng = np.random.default_rng(3)
    x, w = jnp.asarray(rng.standard_normal((rows, 96))), jnp.asarray(rng.standard_normal((96, 80)))
    x, w = x.astype(dtype), w.astype(dtype)
    many = jax.jit(products.up_to(rows).matmul)
    assert "jitney_product" in many.lower(x, w).as_text()
    whole = np.asarray(many(x, w))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(whole, exact, rtol=2e-6, atol=1e-4)
    for row in range(0, rows, 5):
        alone = jax.jit(OURS.matmul)(x[row : row + 1], w)
        np.testing.assert_array_equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("x,w", [((9, 64), (64, 32)), ((4, 64), (64, 30)), ((2, 3, 64), (64, 32))])
def test_other_products_are_xlas(x: tuple[int, ...], w: tuple[int, int]):
    a, b = jnp.ones(x), jnp.ones(w)
    assert "jitney_product" not in jax.jit(OURS.matmul).lower(a, b).as_text()
    np.testing.assert_array_equal(OURS.matmul(a, b), np.full((*x[:-1], w[1]), 64))


try:
    library.load()
except library.NoLibrary as absent:
    pytest.skip(str(absent), allow_module_level=True)

PAIRS = pytest.mark.skipif(not packs_here(), reason="this CPU's weights are not packed in pairs")


def random_bf16(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@PAIRS
@pytest.mark.parametrize("parts", [1, 2])
def test_panels_hold_every_weight_once(parts: int):
    """Panel p, pair i, column c: inputs 2i and 2i + 1 of output p * width + c, in each part."""
    w = random_bf16(3, 6, 192)
    panels = np.asarray(products.pack(w, parts), np.float32)
    width = panels.shape[2] // parts
    split = np.asarray(w, np.float32).reshape(
        3, 2, parts, -1, width
    )  # pair, which of it, part, panel, column
    for part in range(parts):
        np.testing.assert_array_equal(
            panels[:, :, part * width : (part + 1) * width], split[:, :, part].transpose(2, 0, 3, 1)
        )


@PAIRS
@pytest.mark.parametrize("size_in,size_out", [(576, 960), (2100, 64), (100, 112)])
def test_products_with_panels_match_numpy_and_do_not_depend_on_the_number_of_rows(
    size_in: int, size_out: int
):
    w, x = random_bf16(1, size_in, size_out), random_bf16(2, 600, size_in)
    panels = products.pack(w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    whole = np.asarray(jax.jit(OURS.matmul)(x, panels))
    np.testing.assert_allclose(whole, exact, rtol=0, atol=4e-6 * np.abs(exact).max())
    # AMX takes 32 rows, or 17 to 31, or up to 16, each in its own way, and from 512 on some of them
    # in each task.
    for rows in (1, 2, 3, 4, 7, 8, 16, 17, 33, 50, 64, 270, 513):
        some = jax.jit(OURS.matmul)(x[:rows], panels)
        np.testing.assert_array_equal(some, whole[:rows])
        narrow = jax.jit(lambda x, w: OURS.matmul(x, w, jnp.bfloat16))(x[:rows], panels)
        np.testing.assert_array_equal(narrow, some.astype(jnp.bfloat16))


@PAIRS
def test_gated_products_match_numpy_and_do_not_depend_on_the_number_of_rows():
    w, x = random_bf16(1, 576, 384), random_bf16(2, 150, 576)
    panels = products.pack(w, 2)
    gates, ups = np.split(np.asarray(x, np.float64) @ np.asarray(w, np.float64), 2, axis=1)
    whole = np.asarray(jax.jit(OURS.gated)(x, panels), np.float64)
    np.testing.assert_allclose(whole, gates / (1 + np.exp(-gates)) * ups, rtol=2**-8, atol=1e-5)
    for rows in (1, 4, 5, 16):
        np.testing.assert_array_equal(jax.jit(OURS.gated)(x[:rows], panels), whole[:rows])


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("gated", [False, True])
def test_one_of_many_matrices_is_multiplied_where_it_lies(kind: str, gated: bool):
    """Bit for bit as if it were alone; one that is not there is an error."""
    if kind == "bfloat16" and not packs_here():
        pytest.skip("this CPU's weights are not packed in pairs")
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((5, 64)), jnp.bfloat16)
    parts = 1 + gated
    if kind == "int8":
        codes = rng.integers(-127, 128, (3, 64, 192)).astype(np.int8)
        matrices = jnp.stack([products.INT8.pack(jnp.asarray(one), parts) for one in codes])
        scale = jnp.asarray(rng.random(192), jnp.float32)

        def multiply(w: Any) -> jax.Array:
            return (products.INT8.gated if gated else products.INT8.matmul)(x, Int8(w, scale))
    else:
        floats = jnp.asarray(rng.standard_normal((3, 64, 192)), jnp.bfloat16)
        matrices = jnp.stack([products.pack(one, parts) for one in floats])

        def multiply(w: Any) -> jax.Array:
            return (OURS.gated if gated else OURS.matmul)(x, w)

    pick = jax.jit(lambda number: multiply(OneOf(matrices, number)))
    for number in range(3):
        np.testing.assert_array_equal(pick(number), jax.jit(multiply)(matrices[number]))
    for number in (-1, 3):
        with pytest.raises(Exception, match="panels"):
            jax.block_until_ready(pick(number))


def test_panels_of_int8_hold_every_weight_once():
    """Panel p, quad i, column c: inputs 4i to 4i + 3 of output p * width + c, 128 greater."""
    w = np.random.default_rng(3).integers(-128, 128, (32, 192), np.int8)
    panels = np.asarray(products.INT8.pack(jnp.asarray(w))).view(np.uint8).astype(int) - 128
    assert panels.shape == (2, 8, 96, 4)
    back = panels.transpose(1, 3, 0, 2).reshape(32, 192)
    np.testing.assert_array_equal(back, w)


@pytest.mark.parametrize("size_in,size_out", [(40, 64), (64, 40)])
def test_int8_that_is_no_whole_vectors_is_the_references(size_in: int, size_out: int):
    codes, scale = native_checks.int8_weights(1, size_in, size_out)
    x = native_checks.numbers(2, "float32", 5, size_in)
    weights = Int8(products.INT8.pack(jnp.asarray(codes)), jnp.asarray(scale))
    assert weights.kernel.shape == codes.shape
    wanted = definitions.matmul_int8(np.asarray(x), codes, scale)
    np.testing.assert_allclose(products.INT8.matmul(x, weights), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        products.INT8.gated(x, weights),
        definitions.gated(definitions.matmul_int8(np.asarray(x), codes, scale)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("strange", "dtype"), [(np.nan, "float32"), (np.inf, "bfloat16"), (-np.inf, "float32")]
)
def test_a_number_that_is_not_finite_ends_its_own_row_only(strange: float, dtype: str):
    codes, scale = native_checks.int8_weights(1, 64, 96)
    x = native_checks.numbers(2, dtype, 9, 64)
    broken = x.at[4, 63].set(strange)
    others = np.arange(9) != 4
    for product, parts in ((products.INT8.matmul, 1), (products.INT8.gated, 2)):
        weights = Int8(products.INT8.pack(jnp.asarray(codes), parts), jnp.asarray(scale))
        got = np.asarray(jax.jit(product)(broken, weights), np.float32)
        whole = np.asarray(jax.jit(product)(x, weights), np.float32)
        assert np.isnan(got[4]).all()
        np.testing.assert_array_equal(got[others], whole[others])
    plain = Int8(jnp.asarray(codes), jnp.asarray(scale))
    assert np.isnan(np.asarray(reference.matmul_int8(broken, plain))[4]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_of_int8_is_its_definition(dtype: str):
    codes, scale = native_checks.int8_weights(1, 256, 96)
    x = native_checks.numbers(2, dtype, 21, 256)
    plain = Int8(jnp.asarray(codes), jnp.asarray(scale))
    wanted = definitions.matmul_int8(np.asarray(x), codes, scale)
    np.testing.assert_allclose(reference.matmul_int8(x, plain), wanted, rtol=1e-5, atol=1e-6)


def random_mxfp4(size_in: int, size_out: int, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """So many matrices in MXFP4: codes and scales."""
    rng = np.random.default_rng(size_in + size_out)
    codes = rng.integers(0, 256, (count, size_in // 2, size_out), np.uint8)
    return codes, rng.integers(118, 124, (count, size_in // 32, size_out)).astype(np.uint8)


@pytest.mark.parametrize(
    ("size_in", "size_out", "dtype"),
    [(64, 48, "float32"), (352, 5 * 96, "bfloat16"), (96, 80, "bfloat16")],
)
def test_products_with_mxfp4_are_those_with_the_weights_it_stands_for(
    size_in: int, size_out: int, dtype: str
):
    """Of one matrix among many, at every number of rows, without rows of padding; in bfloat16 the
    same bits as with the weights in bfloat16.
    """
    codes, scales = random_mxfp4(size_in, size_out, count=3)
    pack = jax.jit(lambda both: jax.lax.map(products.MXFP4.pack, both))
    laid_out = pack(Mxfp4(jnp.asarray(codes), jnp.asarray(scales)))
    one = Mxfp4(*(OneOf(part, jnp.int32(2)) for part in laid_out))
    wide = definitions.mxfp4(codes[2], scales[2])
    x = native_checks.numbers(2, dtype, 150, size_in)
    wanted = definitions.matmul(np.asarray(x), wide)
    product = jax.jit(products.MXFP4.matmul)
    for rows in (1, 5, 16, 33, 150):
        got = np.asarray(product(x[:rows], one))
        np.testing.assert_allclose(got, wanted[:rows], rtol=0, atol=1e-5 * np.abs(wanted).max())
        if dtype == "bfloat16" and library.load().packs:
            panels = products.pack(jnp.asarray(wide, jnp.bfloat16))
            np.testing.assert_array_equal(got, jax.jit(OURS.matmul)(x[:rows], panels))
    counted = np.asarray(product(x, one, count=jnp.int32(40)))
    np.testing.assert_array_equal(counted[:40], np.asarray(product(x, one))[:40])
    assert not counted[40:].any()


def test_mxfp4_of_outputs_that_are_no_whole_vectors_is_widened():
    codes, scales = random_mxfp4(64, 24)
    plain = Mxfp4(jnp.asarray(codes[0]), jnp.asarray(scales[0]))
    packed = products.MXFP4.pack(plain)
    x = native_checks.numbers(2, "float32", 5, 64)
    wanted = definitions.matmul(np.asarray(x), definitions.mxfp4(codes[0], scales[0]))
    np.testing.assert_allclose(products.MXFP4.matmul(x, packed), wanted, rtol=1e-5, atol=1e-6)


@PAIRS
def test_the_output_head_does_not_depend_on_the_number_of_rows():
    table, x = random_bf16(1, 1040, 64), random_bf16(2, 37, 64)
    whole = np.asarray(jax.jit(OURS.project)(x, table))
    exact = np.asarray(x, np.float64) @ np.asarray(table, np.float64).T
    np.testing.assert_allclose(whole, exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    for rows in (1, 2, 3, 4, 7, 8):
        np.testing.assert_array_equal(jax.jit(OURS.project)(x[:rows], table), whole[:rows])


@pytest.mark.parametrize("dtype,scale", [("float32", 2e-6), ("bfloat16", 2**-8)])
def test_norms_match_numpy_and_do_not_depend_on_the_number_of_rows(dtype: str, scale: float):
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((40, 3, 64)) * rng.lognormal(0, 2, (1, 1, 64)), dtype)
    weight = jnp.asarray(rng.standard_normal(64), dtype)
    norm = jax.jit(norms.rms_norm, static_argnums=2)
    wide = np.asarray(x, np.float64)
    exact = (
        wide
        / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
        * np.asarray(weight, np.float64)
    )
    whole = np.asarray(norm(x, weight, 1e-5), np.float64)
    np.testing.assert_allclose(whole, exact, rtol=scale, atol=1e-6)
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(norm(x[:rows], weight, 1e-5), whole[:rows])
    odd, plain = (
        jax.jit(f, static_argnums=2)(x[..., :50], weight[:50], 1e-5)
        for f in (norm, reference.rms_norm)
    )
    np.testing.assert_array_equal(odd, plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_finite_is_written_as_zero(dtype: str):
    batch = make(CASES["mixed, chunks in the middle of prompts"])
    n_heads, n_kv, dim = batch.q.shape[1], batch.k.shape[1], batch.q.shape[2]
    heads = np.concatenate([batch.q, batch.k, batch.v], axis=1)
    heads[2, n_heads, 1], heads[5, n_heads + n_kv, 7] = np.nan, np.inf
    rope = np.ones((len(heads), 1, dim // 2)), np.zeros((len(heads), 1, dim // 2))
    pool = jnp.asarray(batch.kv, dtype)
    _, after = jax.jit(rotate_and_write)(
        jnp.asarray(heads, dtype), jax.tree.map(jnp.float32, rope), pool, batch.meta
    )
    slots = np.asarray(after, np.float32).reshape(-1, 2 * n_kv, dim)
    rows = np.asarray(batch.meta.write_rows)
    expected = np.array(jnp.asarray(heads[:, n_heads:], dtype), np.float32)
    expected[2, 0, [1, 1 + dim // 2]] = 0  # a key's element is turned with another
    expected[5, n_kv, 7] = 0
    np.testing.assert_array_equal(slots[rows[2], 0], expected[2, 0])
    np.testing.assert_array_equal(slots[rows[5], 1], expected[5, n_kv])


def test_the_pool_is_rotated_into_where_it_lies():
    batch = make(replace(CASES["mixed, chunks in the middle of prompts"], spare=400))
    heads = np.concatenate([batch.q, batch.k, batch.v], axis=1)
    angles = np.zeros((len(heads), 1, heads.shape[2] // 2), np.float32)
    step = jax.jit(
        lambda kv, heads, rope, meta: rotate_and_write(heads, rope, kv, meta), donate_argnums=0
    )
    lowered = step.lower(batch.kv, heads, (angles, angles), batch.meta)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == batch.kv.nbytes
    assert memory.temp_size_in_bytes < batch.kv.nbytes // 2  # no second pool


def test_weights_stay_as_they_are_where_pairs_do_not_serve(monkeypatch):
    assert products.pack(jnp.ones((8, 32))).shape == (8, 32)
    assert products.pack(random_bf16(0, 8, 40)).shape == (
        8,
        40,
    )  # outputs that are no whole vectors
    monkeypatch.setattr(library, "load", lambda: library._Library("avx512", NO_PAIRS))
    assert products.pack(random_bf16(0, 8, 32)).shape == (8, 32)


def test_calls_from_many_threads_share_the_blocks():
    """More calls at once than blocks: some work alone, none waits for another, and every block
    comes back.

    Two kinds of call take turns, so that a helper that comes late meets work of the other kind.
    """
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 256)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((256, 960)), jnp.float32)
    call = jax.jit(OURS.matmul)
    table = jnp.asarray(np.random.default_rng(2).standard_normal((4096, 256)), jnp.float32)
    other = jax.jit(OURS.project)
    expected, projected = np.asarray(call(x, w)), np.asarray(other(x, table))
    with ThreadPoolExecutor(72) as pool:
        results = list(
            pool.map(lambda i: np.asarray((call, other)[i % 2](x, (w, table)[i % 2])), range(600))
        )
    assert all((result == (expected, projected)[i % 2]).all() for i, result in enumerate(results))


@PAIRS
def test_products_of_xlas_and_ours_take_turns_on_the_same_threads():
    """AMX's registers have shapes, which each thread sets for itself, and XLA has its own."""
    w, x = random_bf16(1, 576, 576), random_bf16(2, 64, 576)
    panels = products.pack(w)

    @jax.jit
    def alternate(x: jax.Array) -> list[jax.Array]:
        return [
            product(x[:rows], weights)
            for rows in (5, 16, 31, 48, 64)
            for product, weights in ((OURS.matmul, panels), (reference.matmul, w))
        ]

    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: alternate(x), range(6)):
            for some in found:
                close = 4e-6 * np.abs(exact).max()
                np.testing.assert_allclose(some, exact[: len(some)], rtol=0, atol=close)


def test_selection(monkeypatch):
    kernels = select("cpu")
    assert kernels.name == "native"
    assert kernels.label == f"native ({library.load().level})"
    assert select("cpu", "reference").matmul is reference.matmul
    assert select("cpu", "reference").label == "reference"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(KernelError, match="kernels native are for CPUs; jax runs on gpu"):
        select("gpu", "native")

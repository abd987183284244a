"""The Pallas kernel for TPUs, interpreted on the CPU, against numpy on random ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from ragged import Batch, Case, attention, make, written

from jitney.kernels.interface import KernelError
from jitney.kernels.pallas_tpu import pool_layout
from jitney.kernels.pallas_tpu.kernel_set import PallasKernels, _BlockSizes, chip_of
from jitney.kernels.select import _pallas_set, select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

#: Blocks of 32 keys, so that short contexts have several.
KERNELS = PallasKernels(interpret=True, blocks=_BlockSizes(32, 3, 2048))
Step = Callable[..., tuple[jax.Array, jax.Array]]
DECODE = Case((8, 2, 64), (1, 160, 33, 64), rows=6, seqs=6, pages=12)
MIXED = Case((8, 2, 64), (5, 90), ((120, 50), (17, 3), (9, 1)), rows=70, seqs=6, pages=12)

CASES = {
    "decode": DECODE,
    "int8 pool, one factor": replace(DECODE, pool="int8", scales="pool"),
    "sinks, window, softcap in decode": replace(DECODE, window=50, softcap=20.0, sinks=True),
    "mixed": MIXED,
    "sinks": replace(MIXED, sinks=True),
    "window, softcap": replace(MIXED, heads=(4, 2, 128), window=40, softcap=5.0),
    "group of three, rows of padding in the pool": Case(
        (9, 3, 16), (40, 90), ((130, 60),), rows=64, seqs=4
    ),
    "head dim 256, pages of 128": Case(
        (4, 2, 256), (200,), ((100, 40),), rows=48, seqs=2, page=128, pages=2
    ),
    "fp8 e4m3 pool": replace(MIXED, heads=(8, 2, 128), pool="float8_e4m3fn"),
    "values in keys": replace(MIXED, heads=(8, 1, 144), value_dim=112),
}


def attend(batch: Batch, kernels: PallasKernels = KERNELS) -> tuple[np.ndarray, np.ndarray]:
    """(o, pool after)."""
    return run(compiled(batch, kernels), batch)


@cache
def attended(case: Case) -> tuple[Batch, Step, np.ndarray, np.ndarray]:
    """The case's batch, the operation, its output and the pool after it; compiled and interpreted
    once for all who ask.
    """
    batch = make(case)
    step = compiled(batch)
    return batch, step, *run(step, batch)


def compiled(batch: Batch, kernels: PallasKernels = KERNELS) -> Step:
    """The operation with the batch's options, compiled once for each set of shapes."""
    return jax.jit(lambda *args: kernels.paged_attention(*args, **batch.options))


def run(step: Step, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(o, pool after)."""
    o, kv = step(batch.q, batch.k, batch.v, batch.kv, batch.meta)
    return np.asarray(o), np.asarray(kv)


def error(batch: Batch, o: np.ndarray) -> float:
    """Greatest over the real rows."""
    return float(np.abs(o[: batch.n_rows] - attention(batch, written(batch))).max())


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_numpy_and_writes_its_pages_only(name: str):
    batch, _, o, kv = attended(CASES[name])
    assert error(batch, o) < 1e-5
    assert (kv == written(batch)).all()
    assert np.isfinite(o).all()  # padding too


@pytest.mark.parametrize("heads", ["each with a value", "keys with values, cut in two rows"])
def test_bfloat16_is_as_close_as_its_rounding(heads: str):
    case = replace(DECODE, pool="bfloat16")
    if heads != "each with a value":
        case = replace(case, heads=(8, 1, 144), value_dim=112)
        assert KERNELS.pool_shape(3, 16, 1, 144, jnp.bfloat16, 112) == (3, 16, 2, 128)
    batch = make(case)
    names = [name for name in "qkv" if getattr(batch, name) is not None]
    rounded = replace(
        batch, **{name: np.asarray(getattr(batch, name), "bfloat16") for name in names}
    )
    o, kv = attend(rounded)
    exact = replace(rounded, **{name: getattr(rounded, name).astype(np.float32) for name in names})
    assert (kv == written(rounded)).all()
    assert error(exact, o.astype(np.float32)) < 2e-2


def test_every_copy_is_awaited_and_none_races():
    kernels = PallasKernels(
        pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait"),
        blocks=_BlockSizes(16, 2, 2048),
    )
    batch = make(
        Case((2, 1, 64), (20, 3, 9, 33), ((30, 18), (5, 3), (9, 4)), rows=32, seqs=8, pages=4)
    )
    o, kv = attend(batch, kernels)
    assert error(batch, o) < 1e-5
    assert (kv == written(batch)).all()
    assert not races_found()


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found


def test_a_sequence_gets_the_same_bits_alone_and_in_a_crowd():
    crowd = make(replace(MIXED, decode=(100, 5, 61)))
    together, kv = attend(crowd)
    step = compiled(crowd)
    for seq in range(3):
        meta = crowd.meta._replace(
            kv_lens=crowd.meta.kv_lens[seq : seq + 1],
            cu_q=jnp.array([0, 1], jnp.int32),
            page_table=crowd.meta.page_table[seq : seq + 1],
            write_rows=crowd.meta.write_rows[seq : seq + 1],
            counts=jnp.array([1, 1, 1], jnp.int32),
        )
        rows = slice(seq, seq + 1)
        alone, _ = run(
            step,
            replace(crowd, q=crowd.q[rows], k=crowd.k[rows], v=crowd.v[rows], kv=kv, meta=meta),
        )
        assert (alone[0] == together[seq]).all()


def test_a_prompt_in_chunks_gives_what_the_whole_gives():
    whole = make(Case((4, 2, 64), (), ((40, 40),), seqs=2, pages=4))
    expected, _ = attend(whole)
    step, kv, done = compiled(whole), whole.kv, 0
    for count in (20, 3, 17):
        rows = slice(done, done + count)
        done += count
        dropped = kv.shape[0] * kv.shape[1]
        meta = whole.meta._replace(
            kv_lens=jnp.array([done, 0], jnp.int32),
            cu_q=jnp.array([0, count, count], jnp.int32),
            write_rows=jnp.pad(
                whole.meta.write_rows[rows], (0, 20 - count), constant_values=dropped
            ),
            counts=jnp.array([0, 1, count], jnp.int32),
        )
        q, k, v = (
            np.pad(x[rows], ((0, 20 - count), (0, 0), (0, 0))) for x in (whole.q, whole.k, whole.v)
        )
        o, kv = run(step, replace(whole, q=q, k=k, v=v, kv=kv, meta=meta))
        assert np.abs(o[:count] - expected[rows]).max() < 2e-6


def test_a_pool_of_the_tpus_own_shape_holds_the_same():
    batch = make(replace(DECODE, heads=(6, 3, 64)))
    rows = pool_layout.PoolLayout.of(3, 64, 4)
    own = replace(batch, kv=np.asarray(rows.pool(jnp.asarray(batch.kv))))
    assert own.kv.shape == KERNELS.pool_shape(len(batch.kv), 16, 3, 64, jnp.float32)
    assert own.kv.shape[2:] == (4, 128)
    o, kv = attend(own)
    assert (np.asarray(rows.plain(jnp.asarray(kv))) == written(batch)).all()
    assert error(batch, o) < 1e-5


def test_attend_reads_pages_that_are_written():
    batch = make(replace(DECODE, heads=(4, 2, 128)))
    expected, kv = attend(batch)
    o = jax.jit(lambda q, kv, meta: KERNELS.attend(q, kv, meta, **batch.options))(
        batch.q, kv, batch.meta
    )
    assert (np.asarray(o)[: batch.n_rows] == expected[: batch.n_rows]).all()


def test_an_empty_step_changes_nothing():
    batch, step, *_ = attended(MIXED)
    meta = jax.tree.map(jnp.zeros_like, batch.meta)
    nowhere = jnp.full_like(batch.meta.write_rows, 1 << 20)
    _, kv = run(step, replace(batch, meta=meta._replace(write_rows=nowhere)))
    assert (kv == batch.kv).all()


def test_a_deeper_ring_and_longer_items_give_the_same_bits():
    batch, _, *shallow = attended(MIXED)
    deep = PallasKernels(interpret=True, blocks=_BlockSizes(32, 7, 4096))
    for expected, got in zip(shallow, attend(batch, deep), strict=True):
        assert (expected == got).all()


def test_chips_are_known_by_what_jax_calls_them():
    kinds = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "v7x", "TPU v4": "", "cpu": ""}
    assert {kind: chip_of(kind) for kind in kinds} == kinds


@pytest.mark.parametrize(
    "chip,key_bytes,page,expected",
    [
        ("v5e", 4096, 16, (256, 3, 2048)),
        ("v7x", 4096, 16, (256, 9, 4096)),
        ("v6e", 1024, 64, (512, 9, 4096)),
        ("v5e", 16384, 16, (256, 3, 2048)),
        ("", 4096, 16, (256, 9, 2048)),
    ],
)
def test_blocks_keep_a_chips_memory_busy(
    chip: str, key_bytes: int, page: int, expected: tuple[int, int, int]
):
    assert _BlockSizes.on(chip, key_bytes, page) == expected


def test_rows_fill_whole_tiles():
    """By the rows that a word of 32 bits holds, and so many rows."""
    expected = {
        1: {3: 4, 12: 16, 24: 24},
        2: {2: 2, 6: 8, 8: 8, 10: 16, 16: 16, 24: 32},
        4: {2: 4, 4: 4, 6: 8, 12: 16, 20: 32, 40: 64},
    }
    for packing, tiles in expected.items():
        assert {rows: pool_layout._whole_tiles(rows, packing) for rows in tiles} == tiles


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dtype": "float16"}, r"compute in bfloat16 or float32, not float16; choose one of these"),
        ({"page": 24}, r"page_size of 16, 32, 64, 128, 256, not 24"),
        (
            {"seqs": 256, "pages": 2048},
            r"256 x 2048 takes 2048 KiB .* choose a larger page_size or fewer seats",
        ),
        ({"pool": "int8"}, r"a pool of int8 needs kv_scales"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_line(change: dict[str, Any], message: str):
    batch = make(replace(DECODE, rows=0, **change))
    batch.options.pop("kv_scales", None)
    with pytest.raises(ValueError, match=message):
        attend(batch)


def test_only_a_tpu_gets_the_pallas_kernels(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KernelError, match="kernels pallas need a TPU; jax runs on cpu"):
        select("cpu", "pallas")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert select("tpu", "pallas").name == "pallas"
    assert select("tpu") is _pallas_set("")

"""Proof at start: right kernels pass, and each kernel that is broken on purpose is found and taken
out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import Case, attention, make
from rounding_kernels import PARTS, PRODUCTS, ROUNDING

from jitney.kernels import definitions, delta_net, proof, reference, w8a8
from jitney.kernels import experts as plain_experts
from jitney.kernels.delta_net import StateSlots
from jitney.kernels.experts import gate
from jitney.kernels.interface import (
    Fp8Products,
    Int8Products,
    KernelSet,
    Mxfp4Products,
    OneOf,
)
from jitney.kernels.mxfp4 import Mxfp4, matmul_mxfp4
from jitney.kernels.pallas_tpu.kernel_set import PallasKernels
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.proof_attention import _long_steps
from jitney.kernels.proof_products import _narrowed
from jitney.kernels.proof_shapes import (
    AttentionShapes,
    DeltaShape,
    Matrix,
    MixtureShape,
    NormShapes,
    ServedShapes,
    ShortConvShape,
    StepShapes,
)
from jitney.kernels.select import _triton_for, select
from jitney.kernels.select import reference as reference_set
from jitney.kernels.w8a8 import Fp8, Int8, RoundedRows

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

#: The default model's heads and page, fewer numbers elsewhere.
SERVED = ServedShapes(
    attention=AttentionShapes(
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        windows=(0,),
        softcap=0.0,
        qk_norm=False,
        page_size=16,
        pages=64,
        context=1024,
        kv_dtype="float32",
    ),
    norms=NormShapes(1e-5, "float32"),
    steps=StepShapes(decode=(1, 4, 16), mixed=(64, 128)),
    hidden_size=192,
    vocab_size=1000,
    dtype="float32",
    matrices=(Matrix(192, 288), Matrix(192, 512, gated=True)),
    table=992,
)


def serving(shapes: ServedShapes = SERVED, **fields: Any) -> ServedShapes:
    """The same but for these fields, of whichever group. The norms have the activations' dtype,
    unless norm_dtype says another.
    """
    norm_dtype = fields.pop("norm_dtype", fields.get("dtype", shapes.norms.dtype))
    attention = {name: fields.pop(name) for name in _ATTENTION & fields.keys()}
    steps = {name: fields.pop(name) for name in _STEPS & fields.keys()}
    return replace(
        shapes,
        attention=replace(shapes.attention, **attention),
        norms=replace(shapes.norms, dtype=norm_dtype),
        steps=replace(shapes.steps, **steps),
        **fields,
    )


_ATTENTION = {field.name for field in dataclasses.fields(AttentionShapes)}
_STEPS = {field.name for field in dataclasses.fields(StepShapes)}


def changed(**kernels: Any) -> KernelSet:
    """The reference with other kernels in some places: these alone are proved."""
    return replace(reference_set(), name="changed", **kernels)


def defined(q: Any, k: Any, v: Any, kv: Any, meta: Any, **options: Any) -> Any:
    """Attention by its definition, called back from the step: right, and quick to compile."""
    kv = reference.write_kv(kv, k, v, meta.write_rows)
    return defined_attend(q, kv, meta, **options), kv


def defined_attend(q: Any, kv: Any, meta: Any, **options: Any) -> Any:
    def call(q: np.ndarray, kv: np.ndarray, meta: Any) -> np.ndarray:
        q, kv, lens, cu_q, table = map(
            np.asarray, (q, kv, meta.kv_lens, meta.cu_q, meta.page_table)
        )
        o = definitions.attention(q, kv, lens, cu_q, table, **options)
        return o.astype(q.dtype)

    return jax.pure_callback(call, jax.ShapeDtypeStruct(q.shape, q.dtype), q, kv, meta)


def errors(kernels: KernelSet, served: ServedShapes = SERVED) -> dict[str, float]:
    """Kernel -> error, of those that fail."""
    return {found.kernel: found.error for found in proof.prove(kernels, served) if not found.ok}


def same(kernel: Any) -> Any:
    """The kernel under another identity, so that it is proved."""

    def call(*args: Any, **options: Any) -> Any:
        return kernel(*args, **options)

    return call


def test_right_kernels_pass():
    names = ("paged_attention", "rms_norm", "matmul", "gated", "project")
    kernels = changed(**{name: same(getattr(reference, name)) for name in names})
    own = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "windows": (0, 40), "qk_norm": True}
    served = serving(SERVED, **own)
    proofs = proof.prove(kernels, served)
    assert [found.kernel for found in proofs] == ["attention", "norm", "products", "head"]
    assert all(found.ok for found in proofs), list(map(str, proofs))


def test_attention_without_its_sinks_is_found():
    def attend(*args: Any, sinks: Any = None, **options: Any) -> Any:
        return reference.paged_attention(*args, **options)

    served = serving(SERVED, windows=(0, 40), sinks=True)
    assert not errors(changed(paged_attention=same(reference.paged_attention)), served)
    assert list(errors(changed(paged_attention=attend), served)) == ["attention"]


def test_products_with_mxfp4_that_take_a_block_s_halves_the_other_way_round_are_found():
    def turned(x: Any, w: Mxfp4, dtype: Any = jnp.float32) -> Any:
        parts = [part.apart() if isinstance(part, OneOf) else part for part in w]
        codes = parts[0] << 4 | parts[0] >> 4 if wrong else parts[0]
        return matmul_mxfp4(x, Mxfp4(codes, parts[1]), dtype)

    served = serving(
        SERVED, mixtures=(MixtureShape(96, ("mxfp4", "mxfp4"), "clamped_silu", True),), blocks=(16,)
    )
    for wrong in (False, True):
        own = Mxfp4Products(lambda w, parts=1: w, turned)
        assert list(errors(changed(mxfp4=own), served)) == ["mxfp4 product"] * wrong


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_pools_of_eight_bits_pass(kv_dtype: str):
    kernels = changed(paged_attention=same(reference.paged_attention))
    assert not errors(kernels, serving(SERVED, kv_dtype=kv_dtype, decode=(4,)))


def test_the_reference_needs_no_proof():
    assert proof.prove(reference_set(), SERVED) == ()


def test_the_native_kernels_pass_here():
    kernels = select("cpu", "auto")
    if kernels.name != "native":
        pytest.skip("native kernels do not run on this CPU")
    served = serving(SERVED, dtype="bfloat16", kv_dtype="bfloat16")
    assert not errors(kernels, served)
    assert not errors(kernels, serving(served, head_dim=256, windows=(0, 40), softcap=5.0))
    gemma = serving(served, n_heads=4, n_kv_heads=1, head_dim=256, hidden_size=640, qk_norm=True)
    assert not errors(kernels, serving(gemma, windows=(0, 40), norm_dtype="float32"))
    assert not errors(kernels, SERVED)


def test_a_tpu_kernel_passes_in_the_interpreter():
    kernels = changed(paged_attention=PallasKernels(interpret=True).paged_attention)
    assert not errors(kernels, serving(SERVED, decode=(4,), mixed=(16,), context=40))


def one_wrong_head(head: int):
    def paged_attention(*args: Any, **options: Any) -> Any:
        o, kv = defined(*args, **options)
        return o.at[:, head].set(o[:, (head + 1) % o.shape[1]]), kv

    return paged_attention


def test_one_wrong_head_is_found():
    assert list(errors(changed(paged_attention=one_wrong_head(8)))) == ["attention"]


@pytest.mark.parametrize(("place", "dtype"), [(0, "float32"), (39, "bfloat16")])
def test_one_wrong_page_is_found(place: int, dtype: str):
    """Reading another sequence's page at one place of the table, the first and a late one among
    them.
    """

    def paged_attention(q: Any, k: Any, v: Any, kv: Any, meta: Any, **options: Any) -> Any:
        written = reference.write_kv(kv, k, v, meta.write_rows)
        pages = meta.page_table
        other = meta._replace(page_table=pages.at[:, place].set(pages[:, 0] + (place == 0)))
        return defined_attend(q, written, other, **options), written

    served = serving(SERVED, dtype=dtype, kv_dtype=dtype)
    assert list(errors(changed(paged_attention=paged_attention), served)) == ["attention"]


@pytest.mark.parametrize("longest", [700, 8191])
def test_a_part_that_is_left_out_of_long_contexts_is_found(longest: int):
    """As by a kernel that cuts contexts up to `longest` rightly: of longer ones the last of 32
    parts is lost.
    """

    def paged_attention(q: Any, k: Any, v: Any, kv: Any, meta: Any, **options: Any) -> Any:
        written = reference.write_kv(kv, k, v, meta.write_rows)
        lens = meta.kv_lens
        cut = meta._replace(kv_lens=jnp.where(lens > longest, lens - lens // 32, lens))
        return defined_attend(q, written, cut, **options), written

    served = serving(SERVED, dtype="bfloat16", kv_dtype="bfloat16", pages=512, context=8192)
    assert list(errors(changed(paged_attention=paged_attention), served)) == ["attention"]
    assert not errors(changed(paged_attention=defined), served)


@pytest.mark.parametrize("seats", [1, 16])
def test_contexts_of_every_power_of_two_are_proved(seats: int):
    """From the 647 tokens of the other steps to the longest that is served, whatever the seats; a
    prompt ends the longest, too.
    """
    served = serving(SERVED, pages=4096, context=40000, decode=(1, seats))
    steps = _long_steps(served)
    lens = [np.asarray(step.arrays.meta.kv_lens) for step in steps]
    lengths = {int(length) for own in lens for length in own if length}
    assert {(length - 1).bit_length() for length in lengths} == {16, 15, 14, 13, 12, 11}
    assert max(lengths) == 40000 and steps[-1].rows == 5
    longest = [len(own) for own in lens if own.max() == 40000]
    assert {1, seats} <= set(longest)


def test_a_key_written_to_the_wrong_place_is_found():
    def paged_attention(q: Any, k: Any, v: Any, kv: Any, meta: Any, **options: Any) -> Any:
        return defined(q, k.at[-2].set(0), v, kv, meta, **options)

    assert "attention" in errors(changed(paged_attention=paged_attention))


def test_a_page_that_should_not_change_is_watched():
    def paged_attention(q: Any, k: Any, v: Any, kv: Any, meta: Any, **options: Any) -> Any:
        o, kv = defined(q, k, v, kv, meta, **options)
        return o, kv.at[-1, 3, 2].add(1)

    assert "attention" in errors(changed(paged_attention=paged_attention))


def test_an_ignored_window_is_found():
    def paged_attention(*args: Any, **options: Any) -> Any:
        return defined(*args, **(options | {"window": 0}))

    served = serving(SERVED, windows=(24,))
    assert "attention" in errors(changed(paged_attention=paged_attention), served)


def test_an_ignored_soft_cap_is_found():
    def paged_attention(*args: Any, **options: Any) -> Any:
        return defined(*args, **(options | {"softcap": 0.0}))

    served = serving(SERVED, softcap=1.0, head_dim=256)
    assert "attention" in errors(changed(paged_attention=paged_attention), served)
    assert not errors(changed(paged_attention=defined), served)


@pytest.mark.parametrize("break_it", ["rotation", "norm", "write"])
def test_a_wrong_rotation_is_found(break_it: str):
    def rotate_and_write(heads: Any, rope: Any, kv: Any, meta: Any, **options: Any) -> Any:
        if break_it == "rotation":
            rope = rope[0], -rope[1]
        if break_it == "norm":
            options = options | {"norms": options["norms"][::-1]}
        q, kv = reference.rotate_and_write(heads, rope, kv, meta, **options)
        return q, kv.at[:, :, 1].multiply(1.5) if break_it == "write" else kv

    served = serving(SERVED, qk_norm=True)
    right = same(reference.rotate_and_write)
    assert not errors(changed(rotate_and_write=right, attend=defined_attend), served)
    broken = changed(rotate_and_write=rotate_and_write, attend=defined_attend)
    assert list(errors(broken, served)) == ["attention"]
    assert proof.without(broken, ["attention"]).rotate_and_write is None


def test_an_attention_that_is_wrong_after_a_right_rotation_is_found():
    def attend(*args: Any, **options: Any) -> Any:
        return defined_attend(*args, **options).at[0, 4].set(0)

    rotate_and_write = same(reference.rotate_and_write)
    assert "attention" in errors(changed(rotate_and_write=rotate_and_write, attend=attend))


@pytest.mark.parametrize("rows", [1, 1024])
def test_a_product_that_is_wrong_at_one_row_count_is_found(rows: int):
    def matmul(x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        y = reference.matmul(x, w, dtype)
        return y.at[-1, 16:32].set(0) if len(x) == rows else y

    served = serving(SERVED, mixed=(64, 128, 512, 1024))
    assert list(errors(changed(matmul=matmul), served)) == ["products"]


def test_the_most_rows_of_a_step_are_proved_and_none_between():
    """As the native kernels serve with AMX; many more are no other tiles."""
    served = serving(SERVED, mixed=(64, 512, 1024))
    assert served.steps.product_rows == (1, 4, 16, 64, 256, 1024)
    assert serving(SERVED, mixed=(8192,)).steps.product_rows == (1, 4, 16, 256, 2048)


def test_a_wrong_gate_takes_all_products_out_with_their_layout():
    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        return gate(reference.matmul(x, w)[:, ::-1], x.dtype)

    def pack(w: jax.Array, parts: int = 1) -> jax.Array:
        return w

    kernels = changed(gated=gated, pack=pack)
    assert list(errors(kernels)) == ["products"]
    left = proof.without(kernels, ["products"])
    assert (left.pack, left.matmul, left.gated) == (None, reference.matmul, reference.gated)
    assert left.name == "changed"


def test_a_wrong_norm_and_a_wrong_head_are_found():
    def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        return reference.rms_norm(x, weight.at[7].set(0), eps)

    def project(x: jax.Array, table: jax.Array) -> jax.Array:
        return reference.project(x, table.at[511].set(0))

    assert list(errors(changed(rms_norm=rms_norm, project=project))) == ["norm", "head"]


def test_a_norm_that_is_wrong_in_another_width_is_found():
    def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        normed = reference.rms_norm(x, weight, eps)
        return normed.at[-1, 16:32].set(0) if x.shape[-1] == 96 else normed

    assert not errors(changed(rms_norm=rms_norm))
    served = replace(SERVED, norms=replace(SERVED.norms, widths=(192, 96)))
    assert list(errors(changed(rms_norm=rms_norm), served)) == ["norm"]
    assert not errors(changed(rms_norm=same(reference.rms_norm)), served)


@pytest.mark.parametrize("part", ["sum", "norm"])
def test_a_wrong_norm_of_a_sum_is_found(part: str):
    """The sum goes on to the next layer, its norm into the next product."""

    def norm_sum(
        x: jax.Array, added: jax.Array, weight: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        total, normed = reference.norm_sum(x, added, weight, eps)
        if part == "sum":
            return total.at[-1, 16:32].set(0), normed
        return total, reference.rms_norm(x, weight, eps)

    assert not errors(changed(norm_sum=same(reference.norm_sum)))
    wrong = changed(norm_sum=norm_sum)
    assert list(errors(wrong)) == ["norm"]
    assert proof.without(wrong, ["norm"]).norm_sum is reference.norm_sum


def test_numbers_that_are_not_finite_and_kernels_that_raise_are_found():
    def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        return reference.rms_norm(x, weight, eps).at[0, 0].set(jnp.nan)

    def project(x: jax.Array, table: jax.Array) -> jax.Array:
        raise NotImplementedError("no such instruction")

    found = {
        one.kernel: one for one in proof.prove(changed(rms_norm=rms_norm, project=project), SERVED)
    }
    assert found["norm"].error == float("inf") and not found["norm"].reason
    assert found["head"].reason == "NotImplementedError: no such instruction"
    assert str(found["head"]) == "head failed (NotImplementedError: no such instruction)"


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_weights_of_eight_bits_are_proved_too(scheme: str):
    served = serving(SERVED, matrices=(Matrix(192, 288, scheme),))

    def matmul(x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        return reference.matmul(x, w.at[3].set(0), dtype)

    assert not errors(changed(matmul=same(reference.matmul)), served)
    assert "products" in errors(changed(matmul=matmul), served)


@pytest.mark.parametrize(("rows", "gated"), [(1, False), (128, True)])
def test_a_product_of_rounded_rows_that_is_wrong_at_one_row_count_is_found(rows: int, gated: bool):
    """And gives way to weights that are widened, which is right and slower."""

    def matmul(x: jax.Array, w: Int8, dtype: Any = jnp.float32) -> jax.Array:
        y = reference.matmul_int8(x, w, dtype)
        return y.at[-1, 16:32].multiply(1.5) if len(x) == rows and not gated else y

    def gated_int8(x: jax.Array, w: Int8) -> jax.Array:
        y = reference.gated_int8(x, w)
        return y.at[-1, 16:32].multiply(1.5) if len(x) == rows and gated else y

    def pack(w: jax.Array, parts: int = 1) -> jax.Array:
        return w

    matrices = Matrix(192, 288, "int8"), Matrix(192, 512, "int8", gated=True)
    served = serving(SERVED, matrices=matrices)
    wrong = changed(int8=Int8Products(pack, matmul, gated_int8))
    assert list(errors(wrong, served)) == ["int8 product"]
    assert proof.without(wrong, ["int8 product"]).int8 is None


def test_rows_that_are_not_rounded_are_found():
    """A weight-only product is another product, and would be another model than the canary's."""

    def pack(w: jax.Array, parts: int = 1) -> jax.Array:
        return w

    def unrounded(x: jax.Array, w: Int8, dtype: Any = jnp.float32) -> jax.Array:
        return (reference.matmul(x, w.kernel) * w.scale).astype(dtype)

    served = serving(SERVED, matrices=(Matrix(192, 288, "int8"),))
    right = Int8Products(pack, reference.matmul_int8, reference.gated_int8)
    assert not errors(changed(int8=right), served)
    wrong = Int8Products(pack, unrounded, reference.gated_int8)
    assert list(errors(changed(int8=wrong), served)) == ["int8 product"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_fp8_are_proved_and_widened_ones_are_found(dtype: str):
    """A weight-only product is another product, and would be another model than the canary's."""

    def pack(w: jax.Array, parts: int = 1) -> jax.Array:
        return w

    def widened(x: Any, w: Fp8, dtype: Any = jnp.float32) -> jax.Array:
        return (reference.matmul(x, w.kernel) * w.scale).astype(dtype)

    served = serving(SERVED, matrices=(Matrix(192, 288, "fp8"),), dtype=dtype)
    assert not errors(changed(fp8=Fp8Products(pack, reference.matmul_fp8)), served)
    assert not errors(changed(fp8=Fp8Products(w8a8.pack_fp8, w8a8.matmul_fp8)), served)
    if dtype == "float32":  # in 16 bits the two are as close as rounding
        wrong = changed(fp8=Fp8Products(pack, widened))
        assert list(errors(wrong, served)) == ["fp8 product"]
        assert proof.without(wrong, ["fp8 product"]).fp8 is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_and_gates_that_are_rounded_to_fp8_are_proved(dtype: str):
    def norm_sum(x: jax.Array, added: jax.Array, weight: jax.Array, eps: float) -> Any:
        total, rows = ROUNDING.norm_sum(x, added, weight, eps)
        return total, replace(rows, codes=rows.codes.at[-1, 7].set(rows.codes[-1, 8]))

    def gated(x: Any, w: Fp8) -> RoundedRows:
        rows = ROUNDING.gated(x, w)
        return replace(rows, units=rows.units.at[-1].multiply(1.25)) if len(x) == 16 else rows

    matrices = Matrix(192, 288, "fp8"), Matrix(192, 512, "fp8", gated=True)
    served = serving(SERVED, matrices=matrices, dtype=dtype)
    assert not errors(changed(fp8=PRODUCTS), served)
    for wrong in (replace(ROUNDING, norm_sum=norm_sum), replace(ROUNDING, gated=gated)):
        kernels = changed(fp8=replace(PRODUCTS, rounding=wrong))
        assert list(errors(kernels, served)) == ["fp8 product"]


@pytest.mark.parametrize("scheme", ["plain", "fp8", "int4"])
def test_products_in_parts_are_proved(scheme: str):
    """A wrong product is found, and each wrong reader of one."""

    def matmul(x: Any, w: Any, scale: Any = None) -> PartialSums | None:
        product = PARTS.matmul(x, w, scale)
        if product is None or product.rows != 16:
            return product
        return replace(product, parts=product.parts.at[1].set(0))

    def norm_sum(x: Any, added: PartialSums, weight: Any, eps: float) -> Any:
        return PARTS.norm_sum(x, replace(added, parts=added.parts[:1]), weight, eps)

    def rounded_norm_sum(x: Any, added: PartialSums, weight: Any, eps: float) -> Any:
        total, rows = PARTS.rounded_norm_sum(x, added, weight, eps)
        return total, replace(rows, units=rows.units.at[0].multiply(1.25))

    def rotate_and_write(heads: PartialSums, *args: Any, **options: Any) -> Any:
        q, kv = PARTS.rotate_and_write(heads, *args, **options)
        return q.at[0, 1].multiply(1.5), kv

    heads = SERVED.attention.n_heads + 2 * SERVED.attention.n_kv_heads
    columns = heads * SERVED.attention.head_dim
    matrices = tuple(Matrix(192, size, scheme, group=64) for size in (SERVED.hidden_size, columns))
    served = serving(SERVED, matrices=matrices)
    found = {"plain": ["matmul", "norm_sum", "rotate_and_write"], "int4": []}
    found["fp8"] = [*found["plain"], "rounded_norm_sum"]
    assert not errors(changed(fp8=PRODUCTS, parts=PARTS), served)
    for wrong in (matmul, norm_sum, rounded_norm_sum, rotate_and_write):
        name = wrong.__name__
        kernels = changed(fp8=PRODUCTS, parts=replace(PARTS, **{name: wrong}))
        expected = ["products in parts"] if name in found[scheme] else []
        assert list(errors(kernels, served)) == expected
    assert proof.without(kernels, ["products in parts"]).parts is None


def test_a_row_in_fp8_has_its_own_units_alone_and_among_others():
    rng = np.random.default_rng(3)
    rows = (
        rng.standard_normal((8, 64), np.float32) * np.logspace(-6, 6, 8, dtype=np.float32)[:, None]
    )
    codes, units = w8a8.round_to_fp8(jnp.asarray(rows))
    for at in range(8):
        alone, unit = w8a8.round_to_fp8(jnp.asarray(rows[at : at + 1]))
        assert np.array_equal(alone.view(jnp.uint8), codes[at : at + 1].view(jnp.uint8))
        assert unit[0, 0] == units[at, 0]
    assert float(jnp.max(jnp.abs(codes.astype(jnp.float32)))) == w8a8.GREATEST_FP8
    spoilt, unit = w8a8.round_to_fp8(jnp.asarray([[1.0, jnp.inf], [0.0, 0.0]]))
    assert np.isnan(unit[0, 0]) and not np.any(spoilt[1].astype(jnp.float32))


def test_only_cards_with_fp8_units_multiply_fp8():
    pytest.importorskip("jax_triton")
    assert _triton_for(80).fp8 is None
    for sm in (89, 90, 100, 120):
        products = _triton_for(sm).fp8
        assert products is not None and products.pack is w8a8.pack_fp8


def test_weights_of_four_bits_are_proved_too():
    from jitney.kernels.int4 import matmul_int4

    def no_zeros(x: jax.Array, weights: Any, dtype: Any = jnp.float32) -> jax.Array:
        return matmul_int4(x, weights._replace(zeros=None), dtype=dtype)

    def gated(x: jax.Array, weights: Any, of: Any = matmul_int4) -> jax.Array:
        return gate(of(x, weights), x.dtype)

    served = serving(SERVED, matrices=(Matrix(192, 288, "int4", group=64),))
    assert not errors(changed(matmul_int4=same(matmul_int4)), served)
    assert list(errors(changed(matmul_int4=no_zeros), served)) == ["int4 product"]
    opening = replace(SERVED, matrices=(Matrix(192, 288, "int4", gated=True, group=64),))
    assert not errors(changed(matmul_int4=same(matmul_int4), gated_int4=gated), opening)

    def of_no_zeros(x: jax.Array, weights: Any) -> jax.Array:
        return gated(x, weights, no_zeros)

    wrong = changed(matmul_int4=same(matmul_int4), gated_int4=of_no_zeros)
    assert list(errors(wrong, opening)) == ["int4 product"]
    assert not errors(wrong, served)  # it is not called
    left = proof.without(wrong, ["int4 product"])
    assert (left.matmul_int4, left.gated_int4) == (matmul_int4, None)


MIXED_UP = {
    "another expert": lambda given, opening, closing, blocks: (
        given,
        opening,
        closing._replace(kernel=jnp.roll(closing.kernel, 1, axis=0)),
        blocks,
    ),
    "another row": lambda given, opening, closing, blocks: (
        given.at[-1].set(given[0]),
        opening,
        closing,
        blocks,
    ),
    "gates for ups": lambda given, opening, closing, blocks: (
        given,
        opening._replace(kernel=jnp.roll(opening.kernel, opening.kernel.shape[2] // 2, axis=2)),
        closing,
        blocks,
    ),
    "no scales": lambda given, opening, closing, blocks: (
        given,
        opening._replace(scale=jnp.ones_like(opening.scale)),
        closing,
        blocks,
    ),
}


@pytest.mark.parametrize("wrong", MIXED_UP)
def test_products_with_experts_that_are_wrong_are_found(wrong: str):
    """And give way to blocks that are multiplied one after the other."""
    scheme = "int8" if wrong == "no scales" else "plain"
    served = serving(
        SERVED, mixtures=(MixtureShape(96, (scheme, scheme), "silu"),), blocks=(16, 32)
    )

    def broken(x: Any, opening: Any, closing: Any, blocks: Any, activation: str) -> jax.Array:
        args = MIXED_UP[wrong](x, opening, closing, blocks)
        return plain_experts.experts(*args, activation)

    assert not errors(changed(experts=plain_experts.experts), served)
    kernels = changed(experts=broken)
    assert list(errors(kernels, served)) == ["experts"]
    assert proof.without(kernels, ["experts"]).experts is None


MIXTURES = tuple(MixtureShape(96, (scheme, scheme), "silu") for scheme in ("plain", "int8"))


def next_expert(product: Any) -> Any:
    """The product with the matrix behind the one that was asked for."""

    def turned(w: Any) -> Any:
        if isinstance(w, Int8):
            return Int8(turned(w.kernel), w.scale)
        if isinstance(w, OneOf):
            return OneOf(w.matrices, (w.number + 1) % len(w.matrices))
        return w

    return lambda x, w, *dtype, **count: product(x, turned(w), *dtype, **count)


def test_a_kernel_that_reads_another_of_many_matrices_is_found():
    """In each format, in what opens an expert and in what closes it; then each matrix is copied out
    before it is multiplied.
    """
    kernels = select("cpu", "auto")
    if kernels.name != "native":
        pytest.skip("native kernels do not run on this CPU")
    assert kernels.int8 is not None
    own = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "matrices": (), "blocks": (16, 32)}
    served = serving(SERVED, **own)
    proofs = proof.prove(kernels, serving(served, mixtures=MIXTURES))
    assert "experts" in [found.kernel for found in proofs] and all(found.ok for found in proofs)
    wrong_int8 = [
        replace(kernels.int8, **{name: next_expert(getattr(kernels.int8, name))})
        for name in ("matmul", "gated")
    ]
    for mixture, wrong in (
        (MIXTURES[0], {"matmul": next_expert(kernels.matmul)}),
        (MIXTURES[0], {"gated": next_expert(kernels.gated)}),
        (MIXTURES[1], {"int8": wrong_int8[0]}),
        (MIXTURES[1], {"int8": wrong_int8[1]}),
    ):
        broken = replace(kernels, **wrong)
        assert list(errors(broken, serving(served, mixtures=(mixture,)))) == ["experts"]
        assert not proof.without(broken, ["experts"]).takes_one_of


def test_the_references_products_are_given_no_matrix_among_many():
    """They take none: experts failed in the first step where products had been taken out."""
    kernels = changed(matmul=same(reference.matmul), takes_one_of=True)
    assert not proof.without(kernels, ["products"]).takes_one_of


@pytest.mark.parametrize("name", ["matmul", "gated"])
def test_a_product_that_leaves_out_a_row_too_many_is_found(name: str):
    """Where it is told how many rows there are, of a step and of a block of an expert's; then all
    rows are multiplied.
    """
    kernels = select("cpu", "auto")
    if kernels.name != "native":
        pytest.skip("native kernels do not run on this CPU")
    product = getattr(kernels, name)

    def cut_short(x: Any, w: Any, *dtype: Any, count: Any = None) -> Any:
        return product(x, w, *dtype, count=None if count is None else count - 1)

    broken = replace(kernels, **{name: cut_short})
    served = serving(SERVED, dtype="bfloat16", kv_dtype="bfloat16")
    assert not errors(kernels, served)
    assert list(errors(broken, served)) == ["products"]
    # Of weights without panels (AVX2) only 8 rows at most are multiplied by native kernels.
    of_experts = serving(served, matrices=(), blocks=(8, 32), mixtures=MIXTURES[:1])
    assert not errors(kernels, of_experts)
    assert list(errors(broken, of_experts)) == ["experts"]
    right = proof.without(broken, ["products"])
    assert not right.leaves_out_padding and right.of_rows(jnp.int32(3)) is right


def test_experts_in_four_bits_are_multiplied_one_after_the_other_and_not_proved():
    served = serving(SERVED, mixtures=(MixtureShape(96, ("int4", "int4"), "silu"),), blocks=(16,))
    assert proof.prove(changed(experts=plain_experts.experts), served) == ()


def test_a_last_block_that_is_wrong_is_found():
    """As by a kernel that ends a block too early."""

    def experts(x: Any, opening: Any, closing: Any, blocks: Any, activation: str) -> jax.Array:
        answers = plain_experts.experts(x, opening, closing, blocks, activation)
        last = (blocks.count - 1) * blocks.size
        return answers.at[last].set(0)

    served = serving(
        SERVED, mixtures=(MixtureShape(96, ("fp8", "fp8"), "gelu_tanh"),), blocks=(64,)
    )
    assert not errors(changed(experts=plain_experts.experts), served)
    assert list(errors(changed(experts=experts), served)) == ["experts"]


def test_the_cut_of_top_k_and_top_p_is_proved():
    from jitney.engine.core.executor.sampling import threshold

    def ignores_p(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        return threshold(scaled, top_k, jnp.ones_like(top_p))

    assert not errors(changed(threshold=threshold))
    assert list(errors(changed(threshold=ignores_p))) == ["sampling cut"]


@pytest.mark.parametrize("window,softcap", [(0, 0.0), (20, 0.0), (20, 2.0)])
def test_the_definition_of_attention_is_that_of_the_tests(window: int, softcap: float):
    case = Case((6, 2, 16), decode=(1, 33), prompts=((40, 7), (16, 16)), window=window)
    batch = make(replace(case, softcap=softcap))
    meta = batch.meta
    got = definitions.attention(
        np.asarray(batch.q),
        batch.kv,
        np.asarray(meta.kv_lens),
        np.asarray(meta.cu_q),
        np.asarray(meta.page_table),
        scale=batch.options["scale"],
        window=window,
        softcap=softcap,
    )
    assert np.abs(got[: batch.n_rows] - attention(batch, batch.kv)).max() < 1e-5


@pytest.mark.parametrize("wrong", ["", "start", "slot", "state"])
def test_recurrent_layers_that_are_wrong_are_found(wrong: str):
    served = serving(delta_net=DeltaShape(2, 4, 16, 32, 4))

    def broken(x, rates, weights, state, meta, *, eps):
        if wrong == "start":
            meta = meta._replace(positions=jnp.zeros_like(meta.positions))
        if wrong == "slot":
            meta = meta._replace(state=StateSlots.in_place(meta.state.reads[::-1]))
        o, after = delta_net.delta_net(x, rates, weights, state, meta, eps=eps)
        return o, after._replace(taps=state.taps) if wrong == "state" else after

    kernels = replace(reference_set(), name="broken", delta_net=broken)
    proofs = {one.kernel: one for one in proof.prove(kernels, served)}
    assert proofs["recurrent layers"].ok == (not wrong)
    assert proof.without(kernels, ["recurrent layers"]).delta_net is delta_net.delta_net


@pytest.mark.parametrize("wrong", [False, True])
def test_a_short_convolution_that_is_wrong_is_found(wrong: bool):
    served = serving(delta_net=ShortConvShape(32, 3))

    def own(x, weights, state, meta):
        o, after = delta_net.short_conv(x, weights, state, meta)
        return o, after._replace(taps=state.taps) if wrong else after

    kernels = replace(reference_set(), name="own", short_conv=own)
    proofs = {one.kernel: one for one in proof.prove(kernels, served)}
    assert proofs["recurrent layers"].ok == (not wrong)
    assert proof.without(kernels, ["recurrent layers"]).short_conv is delta_net.short_conv


def test_narrowed_sizes_keep_their_divisors():
    for size in (576, 960, 1536, 3072, 28672, 49152, 151936):
        small = _narrowed(size, 960)
        assert small <= size and small < 1920
        assert [small // 16 % d == 0 for d in range(1, 7)] == [
            size // 16 % d == 0 for d in range(1, 7)
        ]

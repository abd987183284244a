"""The reader of HLO and its account, on small programs written by hand whose bytes can be counted
on paper.
"""

from __future__ import annotations

import pytest
from collective_windows import Sums, sums_of
from compiled_specs import Spec, every_spec
from hlo import Array, arrays_of, parse
from kernel_costs import Load, blocks_read, kernel_cost
from memory_traffic import account
from places import DATA

from jitney.engine.core.weights.checkpoints.model_config import ExpertsConfig

STEP = """
HloModule step, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias) }

%scale (p0: f32[8,16], p1: f32[16]) -> bf16[8,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16]{0} parameter(1)
  %wide = f32[8,16]{1,0} broadcast(%p1), dimensions={1}
  %product = f32[8,16]{1,0} multiply(%p0, %wide)
  ROOT %narrow = bf16[8,16]{1,0} convert(%product)
}

%take (table: bf16[1000,32], ids: s32[8]) -> bf16[8,32] {
  %table = bf16[1000,32]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %at = s32[8,1]{1,0} bitcast(%ids)
  ROOT %rows = bf16[8,32]{1,0} gather(%table, %at), offset_dims={1}, collapsed_slice_dims={0}, slice_sizes={1,32}
}

%put (pool: bf16[500,64], at: s32[8,1], new: bf16[8,64]) -> bf16[500,64] {
  %pool = bf16[500,64]{1,0} parameter(0)
  %at.1 = s32[8,1]{1,0} parameter(1)
  %new = bf16[8,64]{1,0} parameter(2)
  ROOT %after = bf16[500,64]{1,0} scatter(%pool, %at.1, %new), update_window_dims={1}, to_apply=%keep
}

%halves (both: f32[8,64]) -> f32[8,32] {
  %both = f32[8,64]{1,0} parameter(0)
  %left = f32[8,32]{1,0} slice(%both), slice={[0:8], [0:32]}
  %right = f32[8,32]{1,0} slice(%both), slice={[0:8], [32:64]}
  ROOT %sum = f32[8,32]{1,0} add(%left, %right)
}

ENTRY %main (x: bf16[8,32], w: bf16[32,64], pool.1: bf16[500,64], table.1: bf16[1000,32], ids.1: s32[8]) -> (f32[8]) {
  %x = bf16[8,32]{1,0} parameter(0), sharding={replicated}
  %w = bf16[32,64]{1,0} parameter(1)
  %pool.1 = bf16[500,64]{1,0} parameter(2)
  %table.1 = bf16[1000,32]{1,0} parameter(3)
  %ids.1 = s32[8]{0} parameter(4)
  %embedded = bf16[8,32]{1,0} fusion(%table.1, %ids.1), kind=kLoop, calls=%take
  %dot = f32[8,64]{1,0} dot(%embedded, %w), lhs_contracting_dims={1}, metadata={op_name="jit(step)/dot"}
  %new.1 = bf16[8,64]{1,0} convert(%dot)
  %at.2 = s32[8,1]{1,0} bitcast(%ids.1)
  %written = bf16[500,64]{1,0} fusion(%pool.1, %at.2, %new.1), kind=kInput, calls=%put
  %summed = f32[8,32]{1,0} fusion(%dot), kind=kLoop, calls=%halves
  %copied = bf16[32,64]{0,1} copy(%w)
  %on_chip = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} copy(%w)
  ROOT %out = (bf16[500,64]{1,0}, /*index=1*/f32[8,32]{1,0}) tuple(%written, %summed)
}
"""

BRANCHES = """
HloModule branches

%nothing (p: f32[64]) -> f32[64] {
  ROOT %p = f32[64]{0} parameter(0)
}

%doubled (q: f32[64]) -> f32[64] {
  %q = f32[64]{0} parameter(0)
  ROOT %twice = f32[64]{0} add(%q, %q)
}

%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {
  %s = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[64]{0} get-tuple-element(%s), index=1
  %negated = f32[64]{0} negate(%v)
  ROOT %next = (s32[], f32[64]{0}) tuple(%i, %negated)
}

ENTRY %main (c: pred[], x: f32[64], s0: (s32[], f32[64])) -> f32[64] {
  %c = pred[] parameter(0)
  %x = f32[64]{0} parameter(1)
  %s0 = (s32[], f32[64]{0}) parameter(2)
  %either = f32[64]{0} conditional(%c, %x, %x), true_computation=%doubled, false_computation=%nothing
  %loop = (s32[], f32[64]{0}) while(%s0), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %result = f32[64]{0} get-tuple-element(%loop), index=1
}
"""


def no_kernels(name: str, taken: list[Array], made: list[Array]) -> tuple[float, float]:
    raise AssertionError(f"no kernel is called, but {name}")


def test_shapes_are_read_with_layouts_and_memory_spaces():
    tiled, scalar, half = arrays_of("(bf16[32,64]{1,0:T(8,128)(2,1)S(1)}, s32[], s4[10]{0})")
    assert (tiled.dims, tiled.space, tiled.nbytes) == ((32, 64), 1, 0.0)
    assert (scalar.dims, scalar.elements, scalar.nbytes) == ((), 1, 4.0)
    assert half.nbytes == 5.0


def test_instructions_are_read_with_operands_and_attributes():
    entry = parse(STEP).entry
    dot = entry.instructions["dot"]
    assert (dot.op, dot.operands, dot.numbers("lhs_contracting_dims")) == (
        "dot",
        ("embedded", "w"),
        (1,),
    )
    assert dot.quoted("op_name") == "jit(step)/dot"
    assert [made.name for made in entry.parameters] == ["x", "w", "pool.1", "table.1", "ids.1"]
    assert [array.dims for array in entry.root.arrays] == [(500, 64), (8, 32)]
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule empty")


def test_a_gather_counts_the_rows_it_takes():
    assert account(parse(STEP), no_kernels).moved["embedded"] == 8 * 32 * 2 + 8 * 32 * 2 + 8 * 4


def test_an_update_in_place_counts_the_rows_it_writes():
    made = account(parse(STEP), no_kernels)
    assert made.moved["written"] == 8 * 64 * 2 + 8 * 64 * 2 + 8 * 4
    assert "written" not in [name for name, _ in made.made]  # no pool is made anew


def test_slices_of_one_operand_are_not_counted_beyond_it():
    assert account(parse(STEP), no_kernels).moved["summed"] == 8 * 64 * 4 + 8 * 32 * 4


def test_a_product_counts_its_operands_and_operations():
    made = account(parse(STEP), no_kernels)
    assert made.moved["dot"] == 8 * 32 * 2 + 32 * 64 * 2 + 8 * 64 * 4
    assert made.operations == 2 * 8 * 64 * 32


def test_a_copy_is_seen_and_one_onto_the_chip_is_a_read():
    made = account(parse(STEP), no_kernels)
    assert ("copied", Array("bf16", (32, 64))) in made.made
    assert "on_chip" not in [name for name, _ in made.made]
    assert (made.moved["copied"], made.moved["on_chip"]) == (2 * 32 * 64 * 2, 32 * 64 * 2)


def test_branches_count_by_the_lesser_and_loops_by_their_trips():
    made = account(parse(BRANCHES), no_kernels)
    assert made.bytes == 5 * (64 * 4 * 2)


@pytest.mark.parametrize("context,splits", [(200, 0), (1024, 4), (9000, 18)])
def test_decode_attention_counts_keys_once_and_splits_in_use(context: int, splits: int):
    heads, dim, seqs = 32, 128, 8
    q, pool = Array("bf16", (seqs, heads, dim)), Array("bf16", (513, 16, 16, dim))
    parts, stats = Array("f32", (seqs, heads, 32, dim)), Array("f32", (seqs, heads, 32, 2))
    moved, done = kernel_cost(Load(seqs, context), pool.elements, 90)(
        "decode_attention", [q, pool], [q, parts, stats]
    )
    sums = seqs * heads * splits * (dim + 2) * 4
    tables = 4 * seqs * -(-context // 16)
    assert moved == q.nbytes + seqs * context * 16 * dim * 2 + tables + (sums or q.nbytes)
    assert done == 4 * heads * dim * seqs * context


def test_writing_counts_the_new_rows_of_the_pool():
    pool, heads = Array("s8", (513, 16, 16, 128)), Array("bf16", (8, 48, 128))
    moved, _ = kernel_cost(Load(8, 1024), pool.elements, 90)(
        "rotate_pages", [heads, pool], [Array("bf16", (8, 32, 128)), pool]
    )
    assert moved == 8 * (48 + 32) * 128 * 2 + 8 * 16 * 128


def test_experts_are_counted_once_for_each_block_of_their_rows():
    """Three rows that all go through both of two experts, in blocks of 16; on a TPU gates and ups
    are two operands of one array, which may lie the other way round.
    """
    experts = ExpertsConfig(2, 2, renormalised=True)
    x, y = Array("bf16", (3, 64)), Array("bf16", (64, 32))
    weights, turned = Array("bf16", (2, 64, 64)), Array("bf16", (2, 64, 64))
    cost = kernel_cost(Load(3, 1024), 7, 90, experts)
    moved, done = cost("open_experts", [x, weights, Array("s32", (64,))], [y])
    assert moved == pytest.approx(2 * 64 * 64 * 2 + 6 * (64 + 32) * 2)
    assert done == pytest.approx(2 * 6 * 64 * 64)
    rows = Array("bf16", (64, 64))
    assert cost("open_experts", [rows, turned, turned], [y]) == pytest.approx((moved, done))
    assert blocks_read(experts, 40, 40) == pytest.approx(2)  # of 64 rows: as many as choose it
    assert blocks_read(ExpertsConfig(1, 1, True), 200, 200) == pytest.approx(2)  # of 128


def test_programs_have_names_of_their_own_and_targets_their_configurations():
    specs = list(every_spec())
    assert len({str(spec) for spec in specs}) == len(specs)
    assert (
        str(Spec("h100", "qwen3-8b", 512, 64, plain=False))
        == "h100 qwen3-8b bf16 mixed-512 sampled"
    )
    data = DATA
    assert all((data / f"{name}.txtpb").exists() for name in ("h100", "a100", "l4"))


SUMS = """
HloModule sums

%reduced (p: bf16[8,16]) -> bf16[8,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %all-reduce.1 = bf16[8,16]{1,0} all-reduce(%p), to_apply=%add
}, execution_thread="sparsecore"

%product (x: bf16[8,4], w: bf16[4,16]) -> bf16[8,16] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[4,16]{1,0} parameter(1)
  ROOT %dot = bf16[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}
}

ENTRY %main (a: bf16[8,4], b: bf16[4,16]) -> bf16[8,16] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,16]{1,0} parameter(1)
  %start.1 = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%reduced
  %first = bf16[8,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%product
  %update.1 = ((bf16[8,16]{1,0}), bf16[8,16]{1,0}) call-update(%start.1, %first)
  %second = bf16[8,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%product
  %done.1 = bf16[8,16]{1,0} call-done(%update.1)
  %start.2 = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%reduced
  %update.2 = ((bf16[8,16]{1,0}), bf16[8,16]{1,0}) call-update(%start.2, %second)
  %done.2 = bf16[8,16]{1,0} call-done(%update.2)
  ROOT %waited = bf16[8,16]{1,0} all-reduce(%done.2), to_apply=%add
}
"""


def test_all_reduces_beside_a_product_are_told_from_those_that_wait():
    module = parse(SUMS)
    assert sums_of(module) == Sums(all=3, asynchronous=2, beside=1)
    assert account(module, no_kernels).collectives == 3 * 8 * 16 * 2

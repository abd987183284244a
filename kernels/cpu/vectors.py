"""Vector code for Numba: the inner loops of the CPU kernels, unrolled over registers of 16 float32.

Each function below makes a Numba intrinsic that emits LLVM vectors directly: Numba's own loops are vectorised only
where LLVM can prove what it must, and a decode kernel written with them ran four times slower. 16 lanes are one AVX-512
register; on narrower machines LLVM splits them. Addresses are plain integers (bytes), strides count elements, and
`bf16` says whether an operand is bfloat16 (widened by a shift of 16 bits) or float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import extending
from numba.core import cgutils, types

#: Its functions are called without the typing context that they are defined with.
intrinsic: Any = extending.intrinsic
#: llvmlite declares its builder's results loosely.
Value = Any

LANES = 16
#: Localities of llvm.prefetch: into the first-level cache, into the second.
NEAREST, SECOND = 3, 2
FLOAT, INT, HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16)
FLOATS, INTS, HALVES = (ir.VectorType(of, LANES) for of in (FLOAT, INT, HALF))


class Bfloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite does not name."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


Bfloat._create_instance()
NARROW, PAIRS = (ir.VectorType(Bfloat(), count) for count in (LANES, 2 * LANES))
#: Sums may be taken in any order; no other liberty, so NaN and infinity behave.
REASSOCIATE = ("reassoc",)
#: 2**f on [-0.5, 0.5], near-minimax; relative error under 2e-7.
EXP2 = (1.5353362e-4, 1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)


class Emit:
    """Shorthands over one LLVM builder."""

    def __init__(self, builder: ir.IRBuilder):
        self.b = builder

    def address(self, base: Value, index: Value, size: int) -> Value:
        return self.b.add(base, self.b.mul(index, ir.Constant(base.type, size)))

    def pointer(self, address: Value, to: ir.Type) -> Value:
        return self.b.inttoptr(address, to.as_pointer())

    def load(self, base: Value, index: Value, bf16: bool) -> Value:
        """16 elements from element `index` on, as float32."""
        if not bf16:
            return self.b.load(self.pointer(self.address(base, index, 4), FLOATS), align=4)
        halves = self.b.load(self.pointer(self.address(base, index, 2), HALVES), align=2)
        wide = self.b.shl(self.b.zext(halves, INTS), ir.Constant(INTS, [16] * LANES))
        return self.b.bitcast(wide, FLOATS)

    def store(self, value: Value, base: Value, index: Value, bf16: bool) -> None:
        """Round to nearest even when the target is bfloat16; a NaN stays one."""
        if not bf16:
            self.b.store(value, self.pointer(self.address(base, index, 4), FLOATS), align=4)
            return
        if multiplies_pairs():  # one instruction instead of ten; numbers below 1e-38 become 0
            narrow = self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", NARROW, value)
            self.b.store(self.b.bitcast(narrow, HALVES), self.pointer(self.address(base, index, 2), HALVES), align=2)
            return
        b, bits = self.b, self.b.bitcast(value, INTS)

        def ints(n: int) -> ir.Constant:
            return ir.Constant(INTS, [n] * LANES)

        odd = b.and_(b.lshr(bits, ints(16)), ints(1))
        rounded = b.lshr(b.add(b.add(bits, ints(0x7FFF)), odd), ints(16))
        quiet = b.or_(b.lshr(bits, ints(16)), ints(0x40))
        chosen = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
        b.store(b.trunc(chosen, HALVES), self.pointer(self.address(base, index, 2), HALVES), align=2)

    def int(self, number: int) -> ir.Constant:
        return ir.Constant(ir.IntType(64), number)

    def scalar(self, base: Value, index: Value) -> Value:
        return self.b.load(self.pointer(self.address(base, index, 4), FLOAT))

    def prefetch(self, address: Value, locality: int) -> None:
        """Ask for the cache line at an address, to read it soon, into the cache `locality`: NEAREST or SECOND."""
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT, INT, INT])
        prefetch = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0i8")
        hints = [ir.Constant(INT, hint) for hint in (0, locality, 1)]  # to read; data, no code
        self.b.call(prefetch, [self.pointer(address, ir.IntType(8)), *hints])

    def ask(self, base: Value, row: Value, stride: Value, ahead: int, count: int, bf16: bool) -> None:
        """Ask for the `count` elements that lie `ahead` rows after element `row`; 0: for none.

        The hardware foresees neither a column of a matrix nor enough of a long row.
        """
        size = 2 if bf16 else 4
        later = self.b.add(row, self.b.mul(stride, self.int(ahead)))
        for line in range(0, count if ahead else 0, 64 // size):
            self.prefetch(self.address(base, self.b.add(later, self.int(line)), size), NEAREST)

    @staticmethod
    def each(grid: list[list[Any]], do: Callable[[int, int], Any]) -> None:
        for r, row in enumerate(grid):
            for v in range(len(row)):
                do(r, v)

    def splat(self, scalar: Value) -> Value:
        one = self.b.insert_element(ir.Constant(FLOATS, ir.Undefined), scalar, ir.Constant(INT, 0))
        return self.b.shuffle_vector(one, ir.Constant(FLOATS, ir.Undefined), ir.Constant(INTS, [0] * LANES))

    def floats(self, number: float) -> ir.Constant:
        return ir.Constant(FLOATS, [number] * LANES)

    def call(self, name: str, result: ir.Type, *args: Value, flags: tuple[str, ...] = ()) -> Value:
        fn = cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(fn, args, fastmath=flags)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.call("llvm.fma.v16f32", FLOATS, x, y, z)

    def add_pairs(self, x: Value, y: Value, z: Value) -> Value:
        """z + the products of 16 pairs of bfloat16 (words of x and y), on CPUs with avx512_bf16."""
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, z, *(self.b.bitcast(v, PAIRS) for v in (x, y)))

    def total(self, vector: Value) -> Value:
        return self.call("llvm.vector.reduce.fadd.v16f32", FLOAT, ir.Constant(FLOAT, -0.0), vector, flags=REASSOCIATE)

    def exp2(self, x: Value) -> Value:
        """2**x for x <= 0; under -126 it is 2**-126, which no sum of at least 1 notices."""
        x = self.call("llvm.maxnum.v16f32", FLOATS, x, self.floats(-126.0))
        whole = self.call("llvm.nearbyint.v16f32", FLOATS, x)
        rest, series = self.b.fsub(x, whole), self.floats(EXP2[0])
        for coefficient in EXP2[1:]:
            series = self.fma(series, rest, self.floats(coefficient))
        exponent = self.b.add(self.b.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
        return self.b.fmul(series, self.b.bitcast(self.b.shl(exponent, ir.Constant(INTS, [23] * LANES)), FLOATS))


def multiplies_pairs() -> bool:
    """Whether this CPU has the instruction behind `tile(paired=True)`."""
    return bool(get_host_cpu_features().get("avx512bf16"))


def tile(rows: int, vectors: int, bf16: bool, ahead: int = 0, paired: bool = False) -> Any:
    """C [rows, 16 * vectors] (+)= A [rows, n] times B [n, 16 * vectors], all of C in registers.

    -> op(a, lda, b, ldb, c, ldc, n, add): addresses and strides; A and C float32, B bfloat16 or float32; add 0 or 1.
    paired: the elements of A and B are pairs of bfloat16, multiplied and added two by two.
    """

    @intrinsic
    def op(context, a, lda, b, ldb, c, ldc, n, add):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            a, lda, b, ldb, c, ldc, n, add = args
            at = [[builder.add(builder.mul(ldc, e.int(r)), e.int(LANES * v)) for v in range(vectors)]
                  for r in range(rows)]
            sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(vectors)] for _ in range(rows)]
            with builder.if_else(builder.icmp_signed("!=", add, e.int(0))) as (going_on, fresh):
                with going_on:
                    e.each(sums, lambda r, v: builder.store(e.load(c, at[r][v], False), sums[r][v]))
                with fresh:
                    e.each(sums, lambda r, v: builder.store(e.floats(0.0), sums[r][v]))
            with cgutils.for_range(builder, n) as loop:
                row = builder.mul(loop.index, ldb)
                e.ask(b, row, ldb, ahead, LANES * vectors, bf16)
                right = [e.load(b, builder.add(row, e.int(LANES * v)), bf16) for v in range(vectors)]
                for r in range(rows):
                    left = e.splat(e.scalar(a, builder.add(builder.mul(lda, e.int(r)), loop.index)))
                    for v in range(vectors):
                        add_product = e.add_pairs if paired else e.fma
                        builder.store(add_product(left, right[v], builder.load(sums[r][v])), sums[r][v])
            e.each(sums, lambda r, v: e.store(builder.load(sums[r][v]), c, at[r][v], False))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return op


def dots(rows: int, vectors: int, bf16: bool, ahead: int = 0) -> Any:
    """out[r, j] = sum of A[r, :] * B[j, :] over 16 * vectors elements, j < n: few rows against many, B read once.

    -> op(a, lda, b, ldb, n, out, ldo): A and out float32, B bfloat16 or float32. A stays in registers if it fits 16.
    """

    @intrinsic
    def op(context, a, lda, b, ldb, n, out, ldo):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            a, lda, b, ldb, n, out, ldo = args

            def left(r, v):
                return e.load(a, builder.add(builder.mul(lda, e.int(r)), e.int(LANES * v)), False)

            held = rows * vectors <= 16
            lefts = [[left(r, v) for v in range(vectors)] for r in range(rows)] if held else []
            with cgutils.for_range(builder, n) as loop:
                at = builder.mul(loop.index, ldb)
                e.ask(b, at, ldb, ahead, LANES * vectors, bf16)
                sums = [e.floats(0.0)] * rows
                for v in range(vectors):
                    right = e.load(b, builder.add(at, e.int(LANES * v)), bf16)
                    for r in range(rows):
                        sums[r] = e.fma(lefts[r][v] if held else left(r, v), right, sums[r])
                for r in range(rows):
                    where = e.address(out, builder.add(builder.mul(ldo, e.int(r)), loop.index), 4)
                    builder.store(e.total(sums[r]), e.pointer(where, FLOAT))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return op


def copy_row(source_bf16: bool, target_bf16: bool) -> Any:
    """target = source * factor over 16 * vectors elements -> op(source, target, vectors, factor)."""

    @intrinsic
    def op(context, source, target_, vectors, factor):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            factor = e.splat(args[3])
            with cgutils.for_range(builder, args[2]) as loop:
                at = builder.mul(loop.index, e.int(LANES))
                e.store(builder.fmul(e.load(args[0], at, source_bf16), factor), args[1], at, target_bf16)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.float32), generate

    return op


def transposed(bf16: bool) -> Any:
    """16 rows of 16 elements into float32 columns -> op(rows, offset, target, ldt).

    rows: address of 16 row addresses; offset: element of each row to start at. Four rounds of exchanges, each between
    registers that many rows apart.
    """

    @intrinsic
    def op(context, rows, offset, target_, ldt):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            square = []
            for r in range(LANES):
                row = builder.load(builder.gep(e.pointer(args[0], ir.IntType(64)), [ir.Constant(INT, r)]))
                square.append(e.load(row, args[1], bf16))
            for apart in (1, 2, 4, 8):
                for r in range(LANES):
                    if not r & apart:
                        upper, lower = square[r], square[r | apart]
                        keep = [j if not j & apart else LANES + (j ^ apart) for j in range(LANES)]
                        swap = [j | apart if not j & apart else LANES + j for j in range(LANES)]
                        square[r] = builder.shuffle_vector(upper, lower, ir.Constant(INTS, keep))
                        square[r | apart] = builder.shuffle_vector(upper, lower, ir.Constant(INTS, swap))
            for r in range(LANES):
                e.store(square[r], args[2], builder.mul(args[3], e.int(r)), False)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return op


@intrinsic
def pair_rows(context, first, second, target_, vectors):
    """Two rows of 16 * vectors bfloat16 into one of words: element i of the first below element i of the second."""

    def generate(target, builder, signature, args):
        e = Emit(builder)
        with cgutils.for_range(builder, args[3]) as loop:
            at = builder.mul(loop.index, e.int(LANES))
            low, high = (builder.zext(builder.load(e.pointer(e.address(row, at, 2), HALVES), align=2), INTS)
                         for row in args[:2])
            words = builder.or_(low, builder.shl(high, ir.Constant(INTS, [16] * LANES)))
            builder.store(words, e.pointer(e.address(args[2], at, 4), INTS), align=4)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def prefetch(context, address, size):
    """Ask for `size` bytes of memory that will be read soon."""

    def generate(target, builder, signature, args):
        e = Emit(builder)
        with cgutils.for_range(builder, builder.sdiv(args[1], e.int(64))) as loop:
            e.prefetch(e.address(args[0], loop.index, 64), SECOND)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def scratch(size: int) -> Any:
    """Address of `size` bytes on the stack of the calling function, aligned for vectors -> op()."""

    @intrinsic
    def op(context):
        def generate(target, builder, signature, args):
            with builder.goto_entry_block():  # alloca_once would fill it with zeros, element by element
                block = builder.alloca(ir.ArrayType(ir.IntType(8), size))
            block.align = 64
            return builder.ptrtoint(block, ir.IntType(64))

        return types.int64(), generate

    return op

"""Loads, stores and atomics at plain addresses, for Numba code that is called from C."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from jitney.kernels.cpu.vectors import intrinsic


def loader(kind: types.Type) -> Any:
    """op(address, index) -> element of that type."""

    @intrinsic
    def op(context, address, index):
        def generate(target, builder, signature, args):
            pointer = builder.inttoptr(args[0], target.get_value_type(kind).as_pointer())
            return builder.load(builder.gep(pointer, [args[1]]))

        return kind(types.int64, types.int64), generate

    return op


def storer(kind: types.Type) -> Any:
    """op(address, index, value)."""

    @intrinsic
    def op(context, address, index, value):
        def generate(target, builder, signature, args):
            pointer = builder.inttoptr(args[0], target.get_value_type(kind).as_pointer())
            builder.store(args[2], builder.gep(pointer, [args[1]]))
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, kind), generate

    return op


word, int32, float32 = loader(types.int64), loader(types.int32), loader(types.float32)
set_word, set_int32, set_float32 = storer(types.int64), storer(types.int32), storer(types.float32)


@intrinsic
def atomic_add(context, address, value):
    """Add to a word of memory; returns what it was. Sequentially consistent, as all three."""

    def generate(target, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(context, address):
    def generate(target, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_swap(context, address, value):
    """Replace a word; returns what it was."""

    def generate(target, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call_address(context, function, argument):
    """Call the C function int64 (int64) at an address."""

    def generate(target, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), generate

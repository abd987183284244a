"""Numba functions as XLA custom calls that share XLA's own threads.

XLA calls a handler with a call frame (xla/ffi/api/c_api.h, version 0.x; word indices below are into its structs). The
work is cut into tasks; XLA's pool is asked for helpers, and the calling thread works too, so a step never waits for a
helper that has not started. Tickets are drawn from a block of permanent memory, downwards: a helper that comes late
finds none left, or, if the block serves a newer call of the same handler by then, does a task of that one. (A block
belongs to one handler for good: a ticket drawn for one kind of work must not be spent on another.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from numba import cfunc, njit
from numba.core import types

from jitney.kernels.cpu import code
from jitney.kernels.cpu.memory import atomic_add, atomic_load, atomic_swap, call_address, set_word, word
from jitney.kernels.cpu.vectors import scratch

#: Words of XLA_FFI_CallFrame: extension, api, context, args' pointers, rets' pointers.
EXTENSION, API, CONTEXT, ARGS, RETS = 1, 2, 3, 9, 14
#: Words of XLA_FFI_Api: its version (two int32), ThreadPool_Schedule.
API_VERSION, SCHEDULE = 4, 17
#: Words of XLA_FFI_Buffer: data, dims. Of a metadata extension: the metadata; of that: the API version.
DATA, DIMS, METADATA, METADATA_VERSION = 3, 5, 3, 3
#: Words of a block: tickets left, tickets in all, tasks done, taken, frame, the handler's worker, whether to linger.
LEFT, TICKETS, DONE, TAKEN, FRAME, WORKER, LINGER = range(7)
#: Words of the board that all handlers share: the block published last, helpers that run or are asked for.
NEWEST, PRESENT = range(2)
#: Looks at the board before a helper leaves, about 100 us; it lingers only after calls of so few rows that the next
#: product is one of ours too: XLA's own products want the threads.
PATIENCE, LINGERING_ROWS = 30000, 8
BLOCKS, BLOCK_WORDS = 64, 16
#: Blocks of each handler, int64 [BLOCKS, BLOCK_WORDS], by name of its custom call.
blocks: dict[str, np.ndarray] = {}
board = np.zeros(BLOCK_WORDS, np.int64)
code.define("jitney_board", board.ctypes.data)
WORD = 8

schedule_arguments, own_block = scratch(5 * WORD), scratch(BLOCK_WORDS * WORD)


@njit
def argument(frame: int, index: int) -> int:
    """Address of an operand's data."""
    return word(word(word(frame, ARGS), index), DATA)


@njit
def result(frame: int, index: int) -> int:
    """Address of a result's data."""
    return word(word(word(frame, RETS), index), DATA)


@njit
def dim(frame: int, index: int, axis: int) -> int:
    """Size of an operand along an axis."""
    return word(word(word(word(frame, ARGS), index), DIMS), axis)


@njit
def is_metadata_call(frame: int) -> bool:
    """XLA asks every handler once which version of the interface it speaks: the runtime's own."""
    extension = word(frame, EXTENSION)
    if extension == 0:
        return False
    set_word(word(extension, METADATA), METADATA_VERSION, word(word(frame, API), API_VERSION))
    return True


@njit
def take_block(first: int) -> int:
    """Address of a block nobody uses, of those from `first` on, or 0."""
    for index in range(BLOCKS):
        block = first + index * BLOCK_WORDS * WORD
        if atomic_swap(block + TAKEN * WORD, 1) == 0:
            return block
    return 0


@njit
def ask_for_helpers(frame: int, count: int, worker: int, block: int) -> None:
    """Have XLA's pool call worker(block) `count` times, some day."""
    asked = schedule_arguments()
    set_word(asked, 0, 5 * WORD)
    set_word(asked, 1, 0)
    set_word(asked, 2, word(frame, CONTEXT))
    set_word(asked, 3, worker)
    set_word(asked, 4, block)
    for _ in range(count):
        call_address(word(word(frame, API), SCHEDULE), asked)


def handler(name: str, build: Callable[[], tuple[Any, Any]]) -> None:
    """Register custom call `name`: task(frame, i) for i in range(tickets(frame)), shared by all threads.

    build() -> (tickets, task), Numba functions; called only if their machine code is not on disk.
    """
    worker, built = f"{name}_worker", cache(build)
    blocks[name] = np.zeros((BLOCKS, BLOCK_WORDS), np.int64)
    code.define(f"{name}_blocks", blocks[name].ctypes.data)
    worker_at = code.address_of(worker, lambda: make_worker(built()[1]))
    blocks[name][:, WORKER] = worker_at
    code.define(worker, worker_at)
    code.define("jitney_helper", helper())
    entry = code.address_of(name, lambda: make_entry(built()[0], worker, f"{name}_blocks"))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(entry, None, None), platform="cpu", api_version=1)


def make_worker(task: Any) -> Any:
    """What each thread runs, given a block: tasks until none is left."""

    @cfunc(types.int64(types.int64))
    def worker(block):
        while True:
            left = atomic_add(block + LEFT * WORD, -1)
            if left <= 0:
                return 0
            task(word(block, FRAME), word(block, TICKETS) - left)
            atomic_add(block + DONE * WORD, 1)

    return worker


@cache
def helper() -> int:
    """Address of what XLA's pool runs for us: the block's tasks, then those of whatever call comes next, for a while.

    Waking a thread takes 50 us, a product of a few rows as long: a helper that left would come too late each time.
    """
    board_at = code.symbol_at("jitney_board")

    def make() -> Any:
        @cfunc(types.int64(types.int64))
        def help_out(block):
            board = board_at()
            patience = 0
            while True:
                if block != 0 and atomic_load(block + LEFT * WORD) > 0:
                    call_address(word(block, WORKER), block)
                    patience = PATIENCE * word(block, LINGER)
                patience -= 1
                if patience < 0:
                    break
                block = atomic_load(board + NEWEST * WORD)
            atomic_add(board + PRESENT * WORD, -1)
            return 0

        return help_out

    return code.address_of("jitney_helper", make)


def make_entry(tickets: Any, worker: str, blocks: str) -> Any:
    """What XLA calls, given a frame."""
    worker_at, blocks_at = code.symbol_at(worker), code.symbol_at(blocks)
    board_at, helper_at, helpers = code.symbol_at("jitney_board"), code.symbol_at("jitney_helper"), code.threads() - 1

    @cfunc(types.int64(types.int64))
    def entry(frame):
        if is_metadata_call(frame):
            return 0
        count = tickets(frame)
        shared = take_block(blocks_at()) if count > 1 and helpers > 0 else 0
        block = shared if shared != 0 else own_block()
        set_word(block, FRAME, frame)
        set_word(block, TICKETS, count)
        set_word(block, DONE, 0)
        set_word(block, LINGER, 1 if dim(frame, 0, 0) <= LINGERING_ROWS else 0)
        atomic_swap(block + LEFT * WORD, count)  # publishes all of it
        if shared != 0:
            atomic_swap(board_at() + NEWEST * WORD, block)
            missing = min(helpers, count - 1) - atomic_load(board_at() + PRESENT * WORD)
            if missing > 0:
                atomic_add(board_at() + PRESENT * WORD, missing)
                ask_for_helpers(frame, missing, helper_at(), block)
        call_address(worker_at(), block)
        while atomic_load(block + DONE * WORD) < count:
            pass
        if shared != 0:
            atomic_swap(block + TAKEN * WORD, 0)
        return 0

    return entry

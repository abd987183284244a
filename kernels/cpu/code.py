"""Machine code of Numba functions, kept on disk beside XLA's compiled programs.

Numba's own cache cannot keep functions that are made for a shape inside another function, and compiling them takes
seconds of every start. So the linked module is turned into an object file here, once, and loaded by LLVM from then on.
The code must hold no address of this process: those it needs are external symbols (`symbol_at`), defined before it is
loaded.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import llvmlite
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from jitney.kernels.cpu.vectors import intrinsic

log = logging.getLogger(__name__)

DIGEST = 16
#: Engines own the code they have loaded; it is called by address until the process ends.
engines: list[Any] = []


def symbol_at(name: str) -> Any:
    """Address of an external symbol, for Numba code -> op()."""

    @intrinsic
    def op(context):
        def generate(target, builder, signature, args):
            word = ir.IntType(64)
            known = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, word, name)
            return builder.ptrtoint(known, word)

        return types.int64(), generate

    return op


def define(name: str, address: int) -> None:
    """Let code that is loaded from now on find `address` under this symbol."""
    llvm.add_symbol(name, address)


def address_of(name: str, make: Callable[[], Any]) -> int:
    """Address of C function `name`: from disk, or of the Numba cfunc that `make` returns, which is then kept there."""
    path = kept_at(name)
    code = read(path) if path else None
    if code is None:
        code = compiled(name, make())
        if path:
            write(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    engines.append(engine)
    return engine.get_function_address(name)


def compiled(name: str, function: Any) -> bytes:
    """A cfunc, with all it calls, as an object file that exports it under `name`."""
    module = llvm.parse_assembly(function._library.get_llvm_str())
    module.get_function(function.native_name).name = name
    return machine().emit_object(module)


def machine() -> llvm.TargetMachine:
    """This machine's CPU, all of its features; a new one each time, since an engine takes it over."""
    # Numba's runtime defines the symbols that its code may name: with one missing LLVM leaves all of them at 0.
    rtsys.initialize(cpu_target.target_context)
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True)


def kept_at(name: str) -> Path | None:
    """Where the object file belongs; None when compiled programs are not kept."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / f"{name}-{fingerprint()}.o" if folder else None


@cache
def fingerprint() -> str:
    """What the code depends on: these sources, the compilers, this CPU and how many threads it has."""
    digest = blake2b(digest_size=12)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    parts = (numba.__version__, llvmlite.__version__, llvm.get_host_cpu_name(),
             llvm.get_host_cpu_features().flatten(), os.cpu_count(), threads())
    digest.update(repr(parts).encode())
    return digest.hexdigest()


def threads() -> int:
    """Threads this process may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(path: Path) -> bytes | None:
    """The object file, if it is there and whole: LLVM ends the process over one that is not."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST], content[DIGEST:]
    return code if blake2b(code, digest_size=DIGEST).digest() == digest else None


def write(path: Path, code: bytes) -> None:
    """Keep an object file; a disk that cannot is only slower next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(blake2b(code, digest_size=DIGEST).digest() + code)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("compiled kernels cannot be kept: %s", error)

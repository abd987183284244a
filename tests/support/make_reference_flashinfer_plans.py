"""Make tests/data/flashinfer_plans.json: plans of FlashInfer's own compiled code for some steps.

Run it by hand; it needs no GPU: `python tests/support/make_reference_flashinfer_plans.py FA2.so
FA3.so`, with the libraries of two modules that FlashInfer compiled
(`gen_batch_prefill_module("fa2", ...)` and `"fa3"`, any dtype and head dim: plans take the head dim
as a number), and apache-tvm-ffi, jax and a C compiler installed. Plans call the CUDA runtime for a
device, its processors and copies; a fake runtime, which copies in host memory, replaces it. Written
with flashinfer-python 0.7.2.post1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1]
OUTPUT = TESTS / "data" / "flashinfer_plans.json"
PROCESSORS = 5
CASES: list[dict[str, Any]] = [
    {
        "heads": (4, 2, 64),
        "prompts": ((420, 250), (17, 3), (9, 1)),
        "rows": 270,
        "seqs": 4,
        "page": 16,
        "pages": 32,
    },
    {
        "heads": (8, 1, 128),
        "prompts": ((300, 300), (160, 129), (999, 7)),
        "rows": 440,
        "seqs": 3,
        "page": 32,
        "pages": 32,
    },
    {
        "heads": (8, 8, 256),
        "prompts": ((60, 9),),
        "rows": 16,
        "seqs": 1,
        "page": 16,
        "pages": 8,
    },
]
#: C source of the fake runtime. Attribute numbers: 16 multiprocessors, 75 and 76 compute
#: capability, 97 shared memory of a block.
RUNTIME = """
#include <string.h>
static void* handle = 0;
void** __cudaRegisterFatBinary(void* a) { return &handle; }
void __cudaRegisterFatBinaryEnd(void** a) {}
void __cudaUnregisterFatBinary(void** a) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
int cudaSetDevice(int device) { return 0; }
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, void* stream) {
  memcpy(to, from, n);
  return 0;
}
int cudaDeviceGetAttribute(int* value, int what, int device) {
  *value = what == 16 ? %d : what == 75 ? 9 : what == 76 ? 0 : what == 97 ? 232448 : 1024;
  return 0;
}
"""


def main(paths: list[str]) -> None:
    if "JITNEY_PLANS" not in os.environ:
        sys.exit(over_a_runtime(paths))
    import tvm_ffi

    tiled, hopper = (tvm_ffi.load_module(str(Path(path).resolve())) for path in paths)
    cases = [
        {**case, "fa2": tiled_lists(tiled, case), "fa3": hopper_lists(hopper, case)}
        for case in CASES
    ]
    text = json.dumps({"processors": PROCESSORS, "cases": cases}, indent=None)
    OUTPUT.write_text(text.replace(', "fa', ',\n "fa').replace(', {"heads', ',\n{"heads') + "\n")


def over_a_runtime(paths: list[str]) -> int:
    """Run this program again with the fake runtime loaded; returns its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "runtime.c"), Path(folder, "libcudart.so.13")
        exported = Path(folder, "exported")
        source.write_text(RUNTIME % PROCESSORS)
        exported.write_text("libcudart.so.13 { global: *; };")
        flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcudart.so.13"]
        script = f"-Wl,--version-script={exported}"
        subprocess.run(["cc", *flags, script, "-o", str(library), str(source)], check=True)
        environ = os.environ | {"LD_PRELOAD": str(library), "JITNEY_PLANS": "1"}
        return subprocess.run([sys.executable, __file__, *paths], env=environ).returncode


def tensor(array: np.ndarray) -> Any:
    import tvm_ffi

    return tvm_ffi.from_dlpack(array)


def starts(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(first rows of the sequences, then the end; context lengths), absent sequences last."""
    absent = case["seqs"] - len(case["prompts"])
    rows = [0, *(rows for _, rows in case["prompts"]), *[0] * absent]
    lengths = [*(length for length, _ in case["prompts"]), *[0] * absent]
    return np.cumsum(rows).astype(np.int32), np.array(lengths, np.int32)


def words(memory: np.ndarray, offset: int, count: int) -> list[int]:
    return memory[offset : offset + 4 * count].view(np.int32).tolist()


def tiled_lists(module: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Lists of the tiles of "fa2", for a batch in which the unused rest of each row of the page
    table is a request too.
    """
    n_heads, n_kv, dim = case["heads"]
    cu_q, lengths = starts(case)
    first_pages = np.arange(case["seqs"]) * case["pages"]
    used = -(-lengths // case["page"])
    q_starts = np.append(np.stack([cu_q[:-1], cu_q[1:]], 1).reshape(-1), cu_q[-1])
    ends = np.stack([first_pages, first_pages + used], 1).reshape(-1)
    page_starts = np.append(ends, case["seqs"] * case["pages"])
    q_starts, page_starts = q_starts.astype(np.int32), page_starts.astype(np.int32)
    memory = [np.zeros(1 << 20, np.uint8) for _ in range(3)]
    requests = len(q_starts) - 1
    fields = list(
        module.plan(
            *map(tensor, memory),
            *map(tensor, (q_starts, page_starts, np.zeros(requests, np.int32))),
            *(case["rows"], requests, n_heads, n_kv, case["page"], True, dim, dim, True),
            *(-1, -1, True, 0, 0),  # no window, no split of contexts
        )
    )
    uploaded = memory[2]
    tiles = int(uploaded[fields[12] : fields[12] + fields[0]].sum())
    return {
        "rows_of_tile": fields[3],
        "flags": fields[13:],
        "requests": words(uploaded, fields[4], tiles),
        "tiles": words(uploaded, fields[5], tiles),
        "parts": words(uploaded, fields[6], tiles),
        "outputs": words(uploaded, fields[8], requests + 1),
        "total": words(uploaded, fields[2], 1),
    }


def hopper_lists(module: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Lists of "fa3"; works are (tile, first row, first page, rows, context, head, sequence)."""
    n_heads, n_kv, dim = case["heads"]
    cu_q, lengths = starts(case)
    first_pages = (np.arange(case["seqs"] + 1) * case["pages"]).astype(np.int32)
    memory = [np.zeros(1 << 20, np.uint8) for _ in range(3)]
    fields = list(
        module.plan(
            *map(tensor, memory),
            *map(tensor, (cu_q, first_pages, lengths)),
            *(case["rows"], case["seqs"], n_heads, n_kv, case["page"], True, dim, dim, True, -1),
        )
    )
    bounds = words(memory[2], fields[6], PROCESSORS + 1)
    lists = [words(memory[2], fields[at], bounds[-1]) for at in (0, 1, 2, 3, 4, 5, 7)]
    return {"fields": fields, "bounds": bounds, "works": list(zip(*lists, strict=True))}


if __name__ == "__main__":
    main(sys.argv[1:])

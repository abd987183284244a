"""The engine's own step with Triton kernels, compiled for an H100 without one: nothing is copied, all is one graph.

Needs jax's CUDA plugin (no CUDA libraries) in the folder that JITNEY_CUDA_PLUGIN names: `make test-compile` fetches it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLUGIN = os.environ.get("JITNEY_CUDA_PLUGIN", "")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not PLUGIN, reason="needs jax's CUDA plugin: make test-compile")


def compiled(rows: int, seqs: int, folder: Path) -> dict[str, Any]:
    """What `cuda_program` prints for one bucket."""
    environ = os.environ | {"PYTHONPATH": str(Path(PLUGIN).resolve()), "JAX_PLATFORMS": "cpu",
                            "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"}
    command = [sys.executable, str(HERE / "cuda_program.py"), str(rows), str(seqs), str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_decode_step_is_one_graph_over_the_pools_it_was_given(tmp_path: Path):
    step = compiled(32, 32, tmp_path)
    assert step["aliased"] >= step["pools"]
    assert step["temporaries"] < 64 << 20
    assert not step["copied"]
    assert step["kernels"] == 2 * 3  # write, attend, merge
    assert (step["command_buffers"], step["outside"]) == (1, 0)


def test_a_mixed_step_copies_no_pool(tmp_path: Path):
    step = compiled(512, 64, tmp_path)
    assert step["aliased"] >= step["pools"]
    assert step["temporaries"] < 256 << 20
    assert not step["copied"]
    assert step["kernels"] == 2 * 4
    assert (step["command_buffers"], step["outside"]) == (1, 0)

"""What libtpu makes of the Pallas kernel for v5e, v6e and v7x, without one: it fits, and the pool
stays where it is.

Needs libtpu in the folder that JITNEY_TPU_PLUGIN names: `make test-compile` fetches it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT

PLUGIN = os.environ.get("JITNEY_TPU_PLUGIN", "")
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}

pytestmark = pytest.mark.skipif(not PLUGIN, reason="needs libtpu: make test-compile")


@pytest.fixture(scope="module", params=TOPOLOGIES)
def compiled(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Case -> what `pallas_program` prints about it, for one TPU."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(PLUGIN).resolve()), *sys.path]),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, str(SUPPORT / "pallas_program.py"), TOPOLOGIES[request.param]]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_pool_is_written_where_it_lies(compiled: dict[str, dict[str, Any]]):
    assert compiled
    assert not [
        name for name, case in compiled.items() if case["aliased"] < case["pool"] or case["copied"]
    ]


def test_temporaries_are_those_of_the_rows(compiled: dict[str, dict[str, Any]]):
    assert not {
        name: case["temporaries"]
        for name, case in compiled.items()
        if case["temporaries"] > 64 << 20
    }

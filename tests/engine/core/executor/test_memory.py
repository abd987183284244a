"""Memory: what jax may take of a GPU, what is free of it, and how a full one is told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.config import ResolvedConfig
from jitney.engine.core.executor.memory import (
    PoolRoom,
    PoolShares,
    _free_bytes,
    claim_memory,
    in_one_line,
)
from jitney.engine.core.weights.checkpoints.families import tiny_config


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.92"}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        # jax refuses to start when both names are set.
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}),
    ],
)
def test_the_user_s_share_of_a_gpu_stands(before: dict[str, str], after: dict[str, str]):
    claim_memory(before)
    assert before == after


def test_the_pool_gets_what_weights_temporaries_and_the_reserve_leave():
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    device = SimpleNamespace(platform="gpu", device_kind="card", memory_stats=lambda: stats)
    assert _free_bytes(device, 100) == 1000 - 300 - 100 - 40
    config = ResolvedConfig.load(flags={"model": "tiny-random"}).config
    sizes: Any = None  # asked on CPUs only
    shares = PoolShares.of(tiny_config(), (100,), config.engine, 2048)
    room = PoolRoom(config.engine, sizes, [device], shares, None)
    assert room.pools(100).pages == (5,)
    recurrent = replace(shares, prefix_cache=False, seats=3, slot_bytes=50)
    assert replace(room, shares=recurrent).pools(100).pages == (4,)
    assert replace(room, shares=replace(recurrent, drafts=1)).pools(100).pages == (2,)
    with pytest.raises(ConfigError, match="no memory left for KV pages"):
        room.pools(600)


def test_a_device_that_does_not_say_needs_a_size():
    device = SimpleNamespace(platform="tpu", device_kind="chip", memory_stats=lambda: None)
    with pytest.raises(ConfigError, match=r"chip does not say .*: set pages or memory_gib"):
        _free_bytes(device, 0)


def test_a_full_memory_is_one_line_and_anything_else_stays_what_it_is():
    with (
        pytest.raises(ConfigError, match=r"memory is full, loading weights: .*memory_gib"),
        in_one_line("loading weights"),
    ):
        raise RuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte\nmore"
        )
    with pytest.raises(RuntimeError, match="INTERNAL"), in_one_line("loading weights"):
        raise RuntimeError("INTERNAL: something else")

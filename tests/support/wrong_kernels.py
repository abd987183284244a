"""A kernel set that is wrong on purpose, and settings of engines that are built in a moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jitney.engine.core import setup
from jitney.kernels import reference
from jitney.kernels.interface import KernelSet
from jitney.kernels.select import reference as reference_set

SMALL: dict[str, Any] = dict(
    max_seats=2,
    token_budget=16,
    pages=32,
    seat_buckets=(2,),
    token_buckets=(16,),
    dtype="float32",
)


def mixed_up(*args: Any, **options: Any) -> Any:
    """Attention with its first two heads exchanged."""
    o, kv = reference.paged_attention(*args, **options)
    return o.at[:, :2].set(o[:, 1::-1]), kv


def wrong_set() -> KernelSet:
    return replace(reference_set(), name="wrong", paged_attention=mixed_up)


def choose(monkeypatch: pytest.MonkeyPatch, kernels: KernelSet) -> None:
    """Make all engines that are built from now on use this set, whatever set they select."""
    monkeypatch.setattr(setup, "select", lambda platform, name, heads: kernels)

"""Patterns of layers, as files of several formats describe them; jax-free."""

from __future__ import annotations

from collections.abc import Sequence

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.layer_configs import RopeConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig


def windows_of(every: int, window: int, layers: int) -> tuple[int, ...]:
    """Windows of layers of which each `every`-th, counted from 1, sees all."""
    pattern = (*[window] * (every - 1), 0)
    return (pattern * layers)[:layers]


def ropes_by_window(config: ModelConfig, local: RopeConfig | None) -> tuple[RopeConfig | None, ...]:
    """The model's rotation for layers that see all, `local` for those with a window."""
    return tuple(local if window else config.rope(0) for window in config.windows)


def ropes_without_full(config: ModelConfig) -> tuple[RopeConfig | None, ...]:
    """The model's rotation for layers with a window, none for those that see all."""
    return tuple(config.rope(0) if window else None for window in config.windows)


def halves(kinds: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Numbers of the stored layers that each layer's halves are, from the kinds of these, of which
    mlp and moe are feed-forwards; -1: it has no feed-forward. Raises ModelError.
    """
    pairs: list[tuple[int, int]] = []
    for number, kind in enumerate(kinds):
        if kind not in ("mlp", "moe"):
            pairs.append((number, -1))
        elif not pairs or pairs[-1][1] >= 0:
            raise ModelError(
                f"layer {number}, {kind}, is not behind one that attends or is recurrent, which is "
                "not supported"
            )
        else:
            pairs[-1] = pairs[-1][0], number
    return tuple(pairs)

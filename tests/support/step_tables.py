"""Artificial step-time tables for tests."""

from __future__ import annotations

from jitney.engine.lab.simulation.step_table import Curve, StepTable


def constant_table(seconds: float) -> StepTable:
    """A table in which every step takes the same time, and the host takes none."""
    curves = [Curve(1, 1, seconds), Curve(2, 1, seconds)]
    return StepTable(curves, source=f"{seconds:g} s for every step")

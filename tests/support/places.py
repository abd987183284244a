"""Paths for the tests: the project, test data, and the programs that some tests start."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
DATA = TESTS / "data"
CONFIGS = ROOT / "configs"
DEPLOY = CONFIGS / "deploy"

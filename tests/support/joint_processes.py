"""Engines of several processes that compute together, and one of the same model in this process to
compare with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from jitney.engine import LLM


@contextmanager
def compiled_once(cache: Path, xla_flags: str = "") -> Iterator[None]:
    """Processes that start now keep their programs in the folder, and compile them in a hurry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JITNEY_CACHE", str(cache))
        patch.setenv("XLA_FLAGS", f"--xla_backend_optimization_level=0 {xla_flags}".strip())
        yield


def run_logged(story: Coroutine[Any, Any, None], seconds: float, log: list[str]) -> None:
    """Run it, within so many seconds; `log` gets what the supervisors say meanwhile."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await story

    handler = Keep()
    logging.getLogger("jitney.process").addHandler(handler)
    try:
        asyncio.run(limited())
    finally:
        logging.getLogger("jitney.process").removeHandler(handler)


def alone_in_a_hurry(settings: Mapping[str, Any]) -> LLM:
    """An engine in this process, compiled in a hurry, too."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return LLM(**settings, compilation_cache=False)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)

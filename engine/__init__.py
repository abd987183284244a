"""Jitney's engine: in-flight batching for large language models in JAX.

from jitney.engine import LLM, SamplingParams
outputs = LLM("smollm2-135m").generate(["The capital of France is"], SamplingParams(max_tokens=16))
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from jitney.engine.common.requests import SamplingParams

if TYPE_CHECKING:
    from jitney.engine.core import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

try:
    __version__ = version("jitney")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    """LLM imports jax, which most of the package does without: fetched when first asked for."""
    if name == "LLM":
        from jitney.engine.core import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

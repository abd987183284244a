"""For tests that look at the parts of a model, which `Model` does not tell of."""

from __future__ import annotations

from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.protocol import Model


def as_llama(model: Model) -> Llama:
    assert isinstance(model, Llama)
    return model

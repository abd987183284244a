"""Compares the vocabularies of two models; imports no jax."""

from __future__ import annotations

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource

#: Share of the tokens that may differ, as finetunes replace reserved ones.
_MOST_APART = 0.01


def check_vocabulary(target: ModelSource, draft: ModelSource) -> None:
    """Raise ConfigError if a draft model's vocabulary differs from the target's. A few tokens may
    differ or be missing: drafts of them are rejected, and no answer changes.
    """
    ours, theirs = (Tokenizer.load(source).vocabulary for source in (target, draft))
    apart = len(ours.items() ^ theirs.items())
    if apart > _MOST_APART * (len(ours) + len(theirs)):
        raise ConfigError(
            f"draft_model {draft.name} has another vocabulary than {target.name}: of {len(theirs)} "
            f"and {len(ours)} tokens {len(ours.items() & theirs.items())} have the same id; give a "
            "small model of the same family"
        )

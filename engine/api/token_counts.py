"""How many tokens a request has come to."""

from __future__ import annotations

from dataclasses import dataclass

from jitney.engine.api.generation import Generation


@dataclass(frozen=True, slots=True)
class _TokenCounts:
    """Tokens of a request."""

    prompt: int
    #: Of those, the tokens that came from the prefix cache.
    cached: int
    completion: int
    #: Of those, thoughts.
    reasoning: int


def counts_of(generation: Generation) -> _TokenCounts:
    """As things stand now."""
    return _TokenCounts(
        prompt=sum(len(prompt.ids) for prompt in generation.request.prompts),
        cached=sum(generation.cached_tokens),
        completion=generation.completion_tokens,
        reasoning=generation.reasoning_tokens,
    )

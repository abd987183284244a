"""How many tokens a request has come to."""

from __future__ import annotations

from dataclasses import dataclass

from jitney.engine.api.generation import Generation


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request."""

    prompt: int
    #: Of those, the tokens that came from the prefix cache.
    cached: int
    completion: int
    #: Of those, thoughts.
    reasoning: int


def counts_of(generation: Generation) -> TokenCounts:
    """As things stand now."""
    parsers = [choice.parser for choice in generation.choices if choice.parser is not None]
    return TokenCounts(
        prompt=sum(len(prompt.ids) for prompt in generation.request.prompts),
        cached=sum(generation.cached_tokens),
        completion=sum(choice.n_tokens for choice in generation.choices),
        reasoning=sum(parser.reasoning_tokens for parser in parsers),
    )

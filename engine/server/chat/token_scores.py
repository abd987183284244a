"""Tokens with their log-probabilities, as the clients of several APIs read them."""

from __future__ import annotations

from collections.abc import Callable

from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import TokenList
from jitney.engine.server.http.answers import ResponseModel
from jitney.engine.server.http.jsonio import LongJson

#: JSON has no minus infinity; OpenAI writes this for a token that cannot be chosen.
LOWEST = -9999.0


class TopLogprob(ResponseModel):
    """A token that might have been chosen; bytes: its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class PerToken[T](dict[int, T]):
    """Cache of values by token id."""

    def __init__(self, make: Callable[[int], T]):
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> T:
        value = self[token] = self._make(token)
        return value


def finite(logprob: float) -> float:
    """The log-probability as JSON can say it."""
    return max(logprob, LOWEST)


def id_text(token: int) -> str:
    """A token's id instead of its text, in vLLM's form."""
    return f"token_id:{token}"


class TokenScores:
    """Writes the log-probabilities of tokens. as_ids: the tokens are named by their ids."""

    def __init__(self, tokenizer: TokenBytes, *, as_ids: bool | None):
        def spelling(token: int) -> tuple[str, list[int]]:
            data = tokenizer.token_bytes(token)
            text = id_text(token) if as_ids else data.decode(errors="replace")
            return text, list(data)

        #: A token's text and its bytes.
        self._spellings = PerToken(spelling)

    def entries(self, tokens: TokenList) -> list[TokenLogprob]:
        """One entry a token."""
        return LongJson.of(lambda place: self.entry(tokens, place), len(tokens))

    def entry(self, tokens: TokenList, place: int) -> TokenLogprob:
        """One token, and the likeliest of its place."""
        assert tokens.scores is not None
        own = tokens.scores.logprob(place)
        text, data = self._spellings[tokens.ids[place]]
        top = [self._top(id, logprob) for id, logprob in tokens.scores.top(place)]
        return TokenLogprob(text, LOWEST if own is None else finite(own), data, top)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text, data = self._spellings[token]
        return TopLogprob(text, finite(logprob), data)

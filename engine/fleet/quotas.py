"""Limits of each API key over all engines of a fleet: concurrent sequences and tokens per minute
(counted by `engine.server.http.quotas`).

The ingress has no tokenizer: it estimates prompt tokens from characters, by the usage of earlier
answers, and corrects the estimate with the answer's own usage.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jitney.engine.common.requests import JsonObject
from jitney.engine.fleet.forwarding import ProxiedAnswer
from jitney.engine.fleet.request import READING, WRITING, ProxiedRequest
from jitney.engine.fleet.rollout.measuring import UsageWatch
from jitney.engine.server import Quotas

#: Fields that hold the texts of a prompt.
_PROMPTS = (
    "system",
    "instructions",
    "tools",
    "messages",
    "prompt",
    "input",
    "suffix",
    "input_prefix",
    "input_suffix",
    "input_extra",
    "query",
    "queries",
    "documents",
    "text_1",
    "text_2",
)
#: Fields that limit an answer's tokens; the field for that in Ollama's `options`.
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
_OPTION = "num_predict"
#: Parts of a message that are not text.
_NO_TEXT = frozenset(
    {"images", "image_url", "input_audio", "source", "file", "video_url", "audio_url"}
)
#: Characters per token assumed before the first usage; weight of the old value in their moving
#: average.
_FIRST_CHARS, _FADE = 4.0, 0.9
#: Most output tokens expected of a request without a limit.
_MOST_OUTPUT = 1 << 14


@dataclass(slots=True)
class FleetQuotas:
    """Limits of every key, 0 for none: `key_max_concurrent` and `key_tokens_per_minute` of a
    server. clock: returns the time in seconds.
    """

    max_concurrent: int = 0
    tokens_per_minute: int = 0
    clock: Callable[[], float] = time.monotonic
    _quotas: Quotas = field(init=False)
    #: Model -> moving average of characters per token.
    _chars_per_token: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self._quotas = Quotas(self.max_concurrent, self.tokens_per_minute, self.clock)

    def limit(self, max_concurrent: int, tokens_per_minute: int) -> None:
        """See `Quotas.limit`."""
        self._quotas.limit(max_concurrent, tokens_per_minute)
        self.max_concurrent, self.tokens_per_minute = max_concurrent, tokens_per_minute

    @contextmanager
    def holding(self, key: str, request: ProxiedRequest) -> Iterator[_Account]:
        """Context in which a request of this key is open. Raises RequestError: rate_limit, or
        invalid_value if it has more sequences than the key may ever have.
        """
        if request.route not in WRITING | READING or request.method != "POST":
            yield _Account(counts=False)
            return
        sequences = _sequences_of(request)
        with self._quotas.open(key), self._quotas.open_rest(key, sequences):
            if not self.tokens_per_minute:
                yield _Account(counts=False)
                return
            with self._charged(key, request, sequences) as account:
                yield account

    @contextmanager
    def _charged(self, key: str, request: ProxiedRequest, sequences: int) -> Iterator[_Account]:
        """Charge the expected tokens, and correct the charge by the real usage at the end."""
        n_ids, n_chars = _prompt_size(request.fields)
        chars_per_token = self._chars_per_token.get(request.model, _FIRST_CHARS)
        n_prompt = round(n_ids + n_chars / chars_per_token)
        most = _limit_of(request.fields)
        expected = 0
        if request.route in WRITING:
            expected = sequences * self._quotas.expect(key, n_prompt, most, most or _MOST_OUTPUT)
        with self._quotas.charging(key, n_prompt, expected) as spending:
            account = _Account()
            try:
                yield account
            finally:
                spending.give_back(n_prompt - account.prompt_tokens(n_prompt))
                spending.spend(account.usage.tokens)
        self._learn(request.model, n_ids, n_chars, account.usage.prompt)
        if sequences == 1 and account.is_whole:
            self._quotas.seen(key, n_prompt, most, account.usage.tokens)

    def _learn(self, model: str, n_ids: int, n_chars: int, n_prompt: int | None) -> None:
        """Update a model's characters per token from a prompt that is only text."""
        if n_ids or not n_chars or not n_prompt:
            return
        before = self._chars_per_token.get(model, n_chars / n_prompt)
        self._chars_per_token[model] = _FADE * before + (1 - _FADE) * n_chars / n_prompt


@dataclass(slots=True)
class _Account:
    """Token usage of one request."""

    #: Whether its tokens are limited, and so counted.
    counts: bool = True
    usage: UsageWatch = field(default_factory=UsageWatch)
    #: Whether the answer was read to its end.
    is_whole: bool = False
    _answered: bool = False

    def watched(self, answer: ProxiedAnswer) -> ProxiedAnswer:
        """The same answer, whose tokens are counted as it is read."""
        if not self.counts:
            return answer
        self._answered = answer.status < 300
        return ProxiedAnswer(answer.status, answer.headers, self._watched(answer.body))

    async def _watched(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in body:
            if self._answered:
                self.usage.see(part)
            yield part
        self.is_whole = self._answered

    def prompt_tokens(self, estimate: int) -> int:
        """Prompt tokens to charge: as the engine counted them; none for a refused request."""
        if not self._answered:
            return 0
        return estimate if self.usage.prompt is None else self.usage.prompt


def _sequences_of(request: ProxiedRequest) -> int:
    """Number of answers that a request asks for, over all its prompts; invalid numbers count 1."""
    if request.route not in WRITING:
        return 1
    numbers = [request.fields.get(name) for name in ("n", "best_of")]
    each = max([1, *(number for number in numbers if type(number) is int)])
    prompt = request.fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return each * len(prompt)
    return each


def _prompt_size(fields: JsonObject) -> tuple[int, int]:
    """(token ids, characters of text) of a prompt."""
    ids = chars = 0
    remaining = [fields.get(name) for name in _PROMPTS]
    while remaining:
        value = remaining.pop()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict):
            remaining.extend(part for name, part in value.items() if name not in _NO_TEXT)
        elif isinstance(value, list) and value and type(value[0]) is int:
            ids += len(value)
        elif isinstance(value, list):
            remaining.extend(value)
    return ids, chars


def _limit_of(fields: JsonObject) -> int | None:
    """The client's limit of output tokens; None without a limit."""
    options = fields.get("options")
    if isinstance(options, dict):
        fields = {**fields, _OPTION: options.get(_OPTION)}
    for name in (*_LIMITS, _OPTION):
        limit = fields.get(name)
        if type(limit) is int and limit > 0:
            return limit
    return None

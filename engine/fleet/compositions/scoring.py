"""Scores a text by the mean log-probability of its tokens under a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.compositions.answering import Answering, ModelAnswer
from jitney.engine.fleet.request import ProxiedRequest, Route
from jitney.engine.server import HttpError

#: Score of a text without tokens.
_NOTHING = float("-inf")
#: Fields of a request that affect the prompt made from its messages.
_TEMPLATE_FIELDS = ("messages", "chat_template_kwargs", "tools", "tool_choice", "cache_salt")


def _logprobs_between(answer: ModelAnswer, start: int, end: int) -> list[float]:
    """Log-probabilities of the tokens in a range of an echoed text. Raises HttpError."""
    logprobs = answer.choices[0].get("logprobs") or {}
    offsets, values = logprobs.get("text_offset"), logprobs.get("token_logprobs")
    if not offsets or not values:
        raise HttpError(502, "the engine echoes no log-probabilities", code="engine_dead")
    ends = [*offsets[1:], len(answer.choices[0]["text"])]
    return [
        value
        for value, from_, to in zip(values, offsets, ends, strict=False)
        if value is not None and to > start and from_ < end
    ]


class TextScorer:
    """Scores texts for one request: the model computes the likelihood of each as its own output."""

    def __init__(self, models: Answering, request: ProxiedRequest, scorer: str):
        self._models = models
        self._request = request
        self._scorer = scorer
        #: Token usage of each request to the scorer.
        self.usages: list[JsonDict] = []

    async def score(self, prompt: str, text: str) -> float:
        """The score of `text` after `prompt`. Raises HttpError, RequestError."""
        body: JsonDict = {"prompt": prompt + text, "echo": True, "logprobs": 0, "max_tokens": 1}
        answer = await self._ask(Route.COMPLETIONS, body)
        return _mean(_logprobs_between(answer, len(prompt), len(prompt + text)))

    async def score_answers(self, texts: Sequence[str]) -> list[float]:
        """The score of each text as the request's answer. Raises HttpError, RequestError."""
        if not self._request.is_chat:
            prompt = self._request.fields["prompt"]
            prompt = prompt if isinstance(prompt, str) else prompt[0]
            return await asyncio.gather(*(self.score(prompt, text) for text in texts))
        before = (await self._ask_chat({})).usage["prompt_tokens"]
        return await asyncio.gather(*(self._chat_score(text, before) for text in texts))

    async def _chat_score(self, text: str, before: int) -> float:
        """The score of a chat answer. before: number of prompt tokens without the answer."""
        messages = [*self._request.fields["messages"], {"role": "assistant", "content": text}]
        answer = await self._ask_chat(
            {
                "messages": messages,
                "add_generation_prompt": False,
                "continue_final_message": True,
                "prompt_logprobs": 0,
            }
        )
        entries = answer.body.get("prompt_logprobs") or answer.choices[0].get("prompt_logprobs")
        if entries is None:
            raise HttpError(502, "the engine scores no prompts", code="engine_dead")
        # The first entry is the token of the prompt itself.
        own = [next(iter(entry.values())) for entry in entries[before:] if entry]
        return _mean([each["logprob"] for each in own])

    async def _ask_chat(self, fields: JsonDict) -> ModelAnswer:
        body = self._request.fields
        template_fields = {name: body[name] for name in _TEMPLATE_FIELDS if name in body}
        return await self._ask(Route.CHAT, template_fields | {"max_tokens": 1} | fields)

    async def _ask(self, route: Route, body: JsonDict) -> ModelAnswer:
        answer = await self._models.answer(self._request.about(self._scorer, route, body))
        self.usages.append(answer.usage)
        return answer


def _mean(logprobs: Sequence[float]) -> float:
    return sum(logprobs) / len(logprobs) if logprobs else _NOTHING

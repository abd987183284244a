"""The kinds of models that score pairs of texts: pairs -> prompts, and outputs -> scores."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.ranking.bodies import Pair, RankingBody

if TYPE_CHECKING:
    from jitney.engine.core import Tokenizer

#: Names of models that answer yes or no in Qwen3-Reranker's words.
_YES_NO_NAME = re.compile(r"qwen3[-_.]?reranker", re.IGNORECASE)
#: Qwen3-Reranker's prompt, and the instruction of requests that bring none, as its card has them
#: (huggingface.co/Qwen/Qwen3-Reranker-0.6B).
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(slots=True)
class Prompts:
    """The prompts for a request's pairs."""

    #: Token ids.
    ids: list[list[int]]
    #: Prompts of each pair, from which its score comes.
    of_pairs: list[tuple[int, ...]]
    #: Places of documents that were cut because there was no room for them.
    cut: list[int]


def _query_is_too_long(tokens: int, room: int) -> RequestError:
    return RequestError(
        f"the query leaves no room for a document: with what stands around them it takes {tokens} "
        f"tokens of {room}",
        code="context_length_exceeded",
        param="query",
    )


@dataclass(frozen=True, slots=True)
class YesNo:
    """Qwen3-Reranker, a decoder: the score is the share of yes among yes and no."""

    tokenizer: Tokenizer
    yes: int
    no: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> YesNo:
        """The kind for a tokenizer. Raises RequestError unless both words are single tokens."""
        yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
        if yes is None or no is None:
            raise RequestError(
                "rerank yes_no needs a model whose vocabulary has the tokens yes and no",
                code="unsupported_parameter",
                param="model",
            )
        return cls(tokenizer, yes, no)

    def prompts(self, pairs: Sequence[Pair], body: RankingBody, room: int) -> Prompts:
        """The prompts of all pairs; blocks. room: most tokens of a prompt. Raises RequestError."""
        before, behind = self._encode(_BEFORE), self._encode(_BEHIND)
        made = Prompts([], [], [])
        for number, pair in enumerate(pairs):
            question = f"<Instruct>: {body.instruction or _INSTRUCTION}\n<Query>: {pair.query}\n"
            question += "<Document>:"
            fixed = len(before) + len(self._encode(question)) + len(behind)
            if fixed >= room:
                raise _query_is_too_long(fixed, room)
            ids = self._encode(f"{question} {pair.document}")
            if len(before) + len(ids) + len(behind) > room:
                made.cut.append(pair.place)
            most = min(room, fixed + (body.max_tokens_per_doc or room))
            made.ids.append([*before, *ids[: most - len(before) - len(behind)], *behind])
            made.of_pairs.append((number,))
        return made

    def score(self, logprobs: dict[int, float]) -> float:
        """logprobs: of both tokens."""
        return _sigmoid(logprobs[self.yes] - logprobs[self.no])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _Classifier:
    """A cross-encoder with one label, such as bge-reranker: the score is its logit's sigmoid."""

    tokenizer: Tokenizer

    def prompts(self, pairs: Sequence[Pair], body: RankingBody, room: int) -> Prompts:
        """See `YesNo.prompts`."""
        encode_pair = self.tokenizer.encode_pair
        made = Prompts([], [], [])
        for number, pair in enumerate(pairs):
            ids = encode_pair(pair.query, pair.document)
            most = room
            if body.max_tokens_per_doc is not None:
                most = min(room, len(encode_pair(pair.query, "")) + body.max_tokens_per_doc)
            if len(ids) > room:
                made.cut.append(pair.place)
            if len(ids) > most:
                try:
                    ids = encode_pair(pair.query, pair.document, most)
                except RequestError as error:
                    raise error.blaming("query") from None
            made.ids.append(ids)
            made.of_pairs.append((number,))
        return made

    @staticmethod
    def scores(prompts: Prompts, outputs: Sequence[bytes]) -> list[float]:
        """outputs: of each prompt, its logit."""
        logits = [float(np.frombuffer(each, np.float32)[0]) for each in outputs]
        return [_sigmoid(logits[number]) for (number,) in prompts.of_pairs]


@dataclass(frozen=True, slots=True)
class _Cosine:
    """A model that makes vectors of texts: the score of a pair is the cosine of theirs."""

    tokenizer: Tokenizer

    def prompts(self, pairs: Sequence[Pair], body: RankingBody, room: int) -> Prompts:
        """See `YesNo.prompts`. A text that comes several times is one prompt."""
        made = Prompts([], [], [])
        numbers: dict[tuple[int, ...], int] = {}

        def number_of(text: str, most: int) -> int:
            ids = self.tokenizer.first_tokens(text, most)
            number = numbers.setdefault(tuple(ids), len(made.ids))
            if number == len(made.ids):
                made.ids.append(ids)
            return number

        for pair in pairs:
            query = number_of(pair.query, room + 1)
            if len(made.ids[query]) > room:
                raise _query_is_too_long(len(made.ids[query]), room)
            most = min(room, body.max_tokens_per_doc or room)
            document = number_of(pair.document, most)
            if most == room and len(made.ids[document]) == room:
                made.cut.append(pair.place)
            made.of_pairs.append((query, document))
        return made

    @staticmethod
    def scores(prompts: Prompts, outputs: Sequence[bytes]) -> list[float]:
        """outputs: of each prompt, its vector of length 1."""
        vectors = [np.frombuffer(each, np.float32) for each in outputs]
        return [float(vectors[query] @ vectors[text]) for query, text in prompts.of_pairs]


def kind_of(info: EngineInfo, tokenizer: Tokenizer, setting: str) -> YesNo | _Classifier | _Cosine:
    """The kind of a model. setting: `rerank`. Raises RequestError if it cannot score."""
    if info.model.pooling == "classify":
        return _Classifier(tokenizer)
    if setting == "yes_no" or _YES_NO_NAME.search(info.model.name):
        return YesNo.of(tokenizer)
    if info.model.pooling is not None:
        return _Cosine(tokenizer)
    raise RequestError(
        "this model scores no pairs of texts: cross-encoders with one label do, models that make "
        "vectors (--embedding-pooling), and those that answer yes or no as Qwen3-Reranker does "
        "(--rerank yes_no)",
        code="unsupported_parameter",
        param="model",
    )


def _sigmoid(value: float) -> float:
    small = math.exp(-abs(value))
    return 1 / (1 + small) if value >= 0 else small / (1 + small)

"""Bodies and answers of the routes that rank and score: Cohere's, Jina's and vLLM's fields."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from msgspec import UNSET
from pydantic import Field, PlainValidator, model_validator

from jitney.engine.common.requests import JsonValue
from jitney.engine.server.chat.schema import CacheSalt, EngineBody, GenerationBody, Part, at_field
from jitney.engine.server.http.answers import Maybe, ResponseModel

#: Documents of one request.
_MOST_DOCUMENTS = 2048
_MOST_INSTRUCTION_CHARS = 4096


class Pair(NamedTuple):
    """Two texts to be compared. place: of the document among the request's."""

    query: str
    document: str
    place: int


class _Document(Part):
    """A document as an object; other fields than its text are not read."""

    text: str


_Documents = Annotated[list[str | _Document], Field(min_length=1, max_length=_MOST_DOCUMENTS)]
_Texts = str | Annotated[list[str], Field(min_length=1, max_length=_MOST_DOCUMENTS)]


def _texts(value: JsonValue) -> list[str]:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_DOCUMENTS:
        raise ValueError(f"must be a list of 1 to {_MOST_DOCUMENTS} documents")
    texts = [item.get("text") if isinstance(item, dict) else item for item in value]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) < len(texts):
        raise ValueError('must hold texts, or objects {"text": string}')
    return strings


class RankingBody(EngineBody):
    """Fields that the routes share."""

    counted: ClassVar[tuple[str, ...]] = ()

    #: A relevant document, in words. None: an answer to a web search.
    instruction: Annotated[str, Field(min_length=1, max_length=_MOST_INSTRUCTION_CHARS)] | None = (
        None
    )
    #: Number of first tokens that longer documents are cut to; None: as many as fit.
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    #: The same for query and document together, with the prompt around them.
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    cache_salt: CacheSalt | None = None

    @property
    def pairs(self) -> list[Pair]:
        """The pairs to compare, in order."""
        raise NotImplementedError

    def generation(self) -> GenerationBody:
        """A generation's body with the same fields."""
        return GenerationBody(
            model=self.model,
            cache_salt=self.cache_salt,
            user=self.user,
            priority=self.priority,
            timeout_ms=self.timeout_ms,
        )


class RerankBody(RankingBody):
    """POST /v1/rerank, /v2/rerank and /rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str], PlainValidator(_texts, json_schema_input_type=_Documents)]
    #: Documents in the answer, the best first; None: all.
    top_n: Annotated[int, Field(ge=1)] | None = None
    #: Whether documents are repeated. None: as Jina and vLLM do, but not below /v2 (Cohere).
    return_documents: bool | None = None

    @property
    def pairs(self) -> list[Pair]:
        return [Pair(self.query, text, place) for place, text in enumerate(self.documents)]


class ScoreBody(RankingBody):
    """POST /v1/score and /score: one query with every document, or as many queries as documents.
    The texts have vLLM's older names, text_1 and text_2, or the newer ones.
    """

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        queries, documents = self._sides
        if not queries:
            raise at_field("text_1", "must be given, or queries; not both")
        if not documents:
            raise at_field("text_2", "must be given, or documents; not both")
        if len(queries) not in (1, len(documents)):
            raise at_field("text_1", "must be one text, or as many as text_2")
        return self

    @property
    def pairs(self) -> list[Pair]:
        queries, documents = self._sides
        if len(queries) == 1:
            queries *= len(documents)
        both = zip(queries, documents, strict=True)
        return [Pair(query, document, place) for place, (query, document) in enumerate(both)]

    @property
    def _sides(self) -> tuple[list[str], list[str]]:
        """Queries and documents; none where a side has both of its names, or neither."""
        return _one_of(self.text_1, self.queries), _one_of(self.text_2, self.documents)


def _one_of(one: str | list[str] | None, other: str | list[str] | None) -> list[str]:
    if one is not None and other is not None:
        return []
    value = one if other is None else other
    return [value] if isinstance(value, str) else list(value or ())


class RankingUsage(ResponseModel):
    """Tokens that the model read."""

    prompt_tokens: int
    total_tokens: int


class RankedDocument(ResponseModel):
    """A document of the request."""

    text: str


class RankedResult(ResponseModel):
    """A document's place in the request, and how well it fits."""

    index: int
    relevance_score: float
    document: Maybe[RankedDocument] = UNSET


class RankingTokens(ResponseModel):
    """The same counts in Cohere's form."""

    input_tokens: int
    output_tokens: Literal[0] = 0


class RankingApiVersion(ResponseModel):
    """The version of Cohere's API."""

    version: Literal["2"] = "2"


class RankingMeta(ResponseModel):
    """Facts that Cohere's clients read beside the results."""

    api_version: RankingApiVersion
    tokens: RankingTokens


class RerankAnswer(ResponseModel):
    """The best first; equal ones in the order of the request."""

    id: str
    model: str
    results: list[RankedResult]
    usage: RankingUsage
    meta: RankingMeta


class ScoredPair(ResponseModel):
    """The score of a pair, by its place in the request."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(ResponseModel, kw_only=True):
    """One score for each pair, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoredPair]
    usage: RankingUsage

"""POST /v1/embeddings: vectors of texts, as OpenAI has it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
import orjson
from msgspec import Raw
from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.types import ASGIApp

from jitney.engine.common.engine_info import EngineInfo, ModelInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonValue
from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.endpoints import GenerationAnswer, read_body
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.request import RequestBuilder
from jitney.engine.server.chat.schema import EngineBody, GenerationBody, prompt_list
from jitney.engine.server.http.answers import ResponseModel
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.jsonio import LongJson, in_pieces
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.service import Service

#: Inputs of one request, as OpenAI has it.
_MOST_INPUTS = 2048
#: Fields that no generation has.
_OWN_FIELDS = {"add_special_tokens", "dimensions", "encoding_format", "input"}

_Input = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=_MOST_INPUTS)]
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[list[int]], Field(min_length=1, max_length=_MOST_INPUTS)]
)


#: Writes a vector of float32 numbers.
type _Written = Callable[[bytes], list[float] | str]


def _inputs(value: JsonValue) -> list[str | list[int]]:
    return prompt_list(value, _MOST_INPUTS, "input", empty_texts=True)


class EmbeddingsBody(EngineBody):
    """POST /v1/embeddings."""

    counted: ClassVar[tuple[str, ...]] = ()

    #: A text, texts, the token ids of one, or of several.
    input: Annotated[list[str | list[int]], PlainValidator(_inputs, json_schema_input_type=_Input)]
    #: base64: of float32 numbers, the low byte first. None: float.
    encoding_format: Literal["float", "base64"] | None = None
    #: Numbers of a vector; fewer only where the model's files allow it. None: all.
    dimensions: Annotated[int, Field(ge=1)] | None = None
    #: Number of last tokens that longer inputs are cut to; None: they are refused.
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    #: Whether the model's own special tokens are put around a text. None: yes.
    add_special_tokens: bool | None = None


class EmbeddingUsage(ResponseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(ResponseModel, kw_only=True):
    """The vector of one input, of length 1; a text in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(ResponseModel, kw_only=True):
    """One vector for each input, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def float_list(vector: bytes) -> list[float]:
    """Numbers of float32, written as the JSON list that they stand for."""
    text = orjson.dumps(np.frombuffer(vector, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
    return cast("list[float]", Raw(text))


def _base64(vector: bytes) -> str:
    return base64.b64encode(np.frombuffer(vector, np.float32).astype("<f4").tobytes()).decode()


class _Format(Format):
    """Vectors as numbers, or in base64."""

    def __init__(self, generation: Generation, tokenizer: TokenBytes, written: _Written):
        super().__init__(generation, tokenizer)
        self._written = written

    def whole(self) -> Pieces:
        tokens = self.generation.counts.prompt
        data = (
            Embedding(index=index, embedding=self._written(vector))
            for index, vector in enumerate(self.generation.embeddings)
        )
        answer = EmbeddingsAnswer(
            data=LongJson.of_each(data),
            model=self.request.model,
            usage=EmbeddingUsage(tokens, tokens),
        )
        return in_pieces(answer)


async def _embeddings(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, EmbeddingsBody)
    service.check_model(body.model)
    check_vectors(service.info, body.dimensions)
    fields = body.model_dump(exclude=_OWN_FIELDS, exclude_none=True)
    shared = GenerationBody.model_validate(fields)
    builder = RequestBuilder(service, shared, Context.of(request))
    special = body.add_special_tokens is not False
    generation = await builder.embeddings(body.input, special, body.dimensions)
    written = _base64 if body.encoding_format == "base64" else float_list
    return GenerationAnswer(service, generation, partial(_Format, written=written))


def check_vectors(info: EngineInfo, dimensions: int | None) -> None:
    """Raise RequestError for vectors that this engine does not make. dimensions: None: all."""
    if info.model.pooling is None:
        raise RequestError(
            "this server makes no vectors: start it with --embedding-pooling last or mean",
            code="unsupported_parameter",
            param="model",
        )
    if info.model.pooling == "classify":
        raise RequestError(
            "this model makes no vectors of texts: it scores pairs of them (/v1/rerank, /v1/score)",
            code="unsupported_parameter",
            param="model",
        )
    if dimensions is not None:
        _check_dimensions(info.model, dimensions)


def _check_dimensions(model: ModelInfo, dimensions: int) -> None:
    """Raises RequestError for shorter vectors than the model was trained for."""
    size, shorter = model.embedding_size, model.embedding_dimensions
    if dimensions == size or (shorter is not None and dimensions in (shorter or range(1, size))):
        return
    if shorter is None:
        allowed = (
            f"{size}, as many as the model makes: its config.json does not say that it was trained "
            "for shorter vectors (is_matryoshka, matryoshka_dimensions)"
        )
    elif shorter:
        allowed = f"one of {', '.join(map(str, (*shorter, size)))}"
    else:
        allowed = f"1 to {size}"
    raise RequestError(
        f"dimensions must be {allowed}", code="unsupported_parameter", param="dimensions"
    )


EMBEDDING_ROUTES = (
    HttpRoute(
        "POST /v1/embeddings",
        _embeddings,
        "vectors of texts",
        generates=True,
        body=EmbeddingsBody,
        answer=EmbeddingsAnswer,
    ),
)

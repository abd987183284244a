"""Finds the documents nearest to a request, by cosine similarity of a model's embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.fleet.compositions.answering import Answering, ModelAnswer, all_of, total_usage
from jitney.engine.fleet.request import ProxiedRequest, Route
from jitney.engine.server import HttpError

#: Most documents of one request, and of a file (vectors of 4,096 numbers then take 256 MiB).
_MOST_DOCUMENTS, _MOST_IN_A_FILE = 2048, 16384
#: Most inputs of one request to an engine.
_MOST_INPUTS = 16
#: Documents of a file per step of embedding; completed steps are kept if a later one fails.
_PORTION = 256

#: [texts, dimensions] f4, rows of Euclidean length 1.
type _Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embedder:
    """Embeds texts for one request."""

    models: Answering
    request: ProxiedRequest
    #: Name of the embedding model.
    model: str
    #: Texts that the model computes at the same time.
    seats: int
    #: Additional fields of each request.
    fields: JsonObject
    #: Token usage of each request.
    usages: list[JsonDict] = field(default_factory=list)

    def for_people(self) -> Embedder:
        """A copy whose requests are not in the background, for vectors that live requests need."""
        return replace(self, request=self.request.for_people())

    async def vectors(self, texts: Sequence[str]) -> _Vectors:
        """Vectors of non-empty texts, in order. Raises HttpError, RequestError."""
        inputs = min(self.seats, _MOST_INPUTS)
        at_once = asyncio.Semaphore(self.seats // inputs)

        async def ask(part: Sequence[str]) -> _Vectors:
            async with at_once:
                return await self._ask(part)

        parts = [texts[first : first + inputs] for first in range(0, len(texts), inputs)]
        made = await all_of(ask(part) for part in parts)
        return np.concatenate(made)

    @property
    def usage(self) -> JsonDict:
        total = total_usage(self.usages)
        del total["stages"]
        return total

    async def _ask(self, texts: Sequence[str]) -> _Vectors:
        body: JsonDict = {**self.fields, "input": list(texts), "encoding_format": "base64"}
        embedding = self.request.about(self.model, Route.EMBEDDINGS, body)
        answer = await self.models.answer(embedding)
        self.usages.append(answer.usage)
        return _vectors_in(answer, self.model, len(texts))


def _vectors_in(answer: ModelAnswer, model: str, count: int) -> _Vectors:
    """The normalised vectors of an answer. Raises HttpError if there are not `count` of them."""
    try:
        entries = sorted(answer.body["data"], key=lambda entry: entry["index"])
        vectors = np.stack([_vector(entry["embedding"]) for entry in entries])
    except (LookupError, TypeError, ValueError):
        vectors = np.zeros((0, 0), np.float32)
    if len(vectors) != count or not np.isfinite(vectors).all():
        raise HttpError(502, f"the engine of {model} sent no vectors", code="engine_dead")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)


def _vector(written: Any) -> npt.NDArray[np.float32]:
    """Parse a vector from base64, or from numbers for engines without base64. Raises ValueError."""
    if isinstance(written, str):
        return np.frombuffer(base64.b64decode(written, validate=True), "<f4")
    return np.asarray(written, np.float32)


class KeptDocuments:
    """Documents from the settings. They are embedded once, at the first request."""

    #: Most documents in the settings themselves; a file may have more.
    most: ClassVar[int] = _MOST_DOCUMENTS

    def __init__(self, texts: Sequence[str], prefix: str):
        """prefix: text put before each document when it is embedded."""
        self.texts = texts
        self._prefix = prefix
        self._vectors: list[_Vectors] = []
        self._embedding = asyncio.Lock()

    @classmethod
    def of_file(cls, file: Path, prefix: str) -> KeptDocuments:
        """Read JSON lines: texts, or objects with `text`. Raises ConfigError."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"{file}: cannot be read: {reason}") from None
        texts = [_document(file, at, line) for at, line in enumerate(lines, 1) if line.strip()]
        if not 0 < len(texts) <= _MOST_IN_A_FILE:
            raise ConfigError(
                f"{file}: must hold 1 to {_MOST_IN_A_FILE} documents, not {len(texts)}"
            )
        return cls(texts, prefix)

    async def vectors(self, embedder: Embedder, size: int) -> _Vectors:
        """The documents' vectors. size: dimensions of the request's vector. Vectors of another size
        come from a replaced engine and are computed again. Raises HttpError, RequestError; vectors
        computed before the error are kept.
        """
        async with self._embedding:
            if self._vectors and self._vectors[0].shape[1] != size:
                self._vectors = []
            done = sum(map(len, self._vectors))
            for first in range(done, len(self.texts), _PORTION):
                texts = self.texts[first : first + _PORTION]
                self._vectors.append(
                    await embedder.vectors([self._prefix + text for text in texts])
                )
            if len(self._vectors) > 1:
                self._vectors = [np.concatenate(self._vectors)]
            return self._vectors[0]


async def nearest(query: _Vectors, documents: _Vectors, keep: int) -> list[tuple[int, float]]:
    """(index, cosine similarity) of the `keep` documents nearest to `query`, the nearest first.
    Raises HttpError for vectors of different sizes.
    """
    if query.shape[1] != documents.shape[1]:
        raise HttpError(502, "the engines made vectors of different sizes", code="engine_dead")
    # 16,384 documents of 4,096 numbers take 30 ms: too long for the event loop.
    cosines = await asyncio.to_thread(np.matmul, documents, query[0])
    order = np.argsort(-cosines, kind="stable")[:keep]
    return [(int(place), float(cosines[place])) for place in order]


def documents_in(given: object) -> list[str]:
    """Validate a request's field `documents`. Raises RequestError."""
    if not isinstance(given, list) or not 0 < len(given) <= _MOST_DOCUMENTS:
        raise _bad_documents(f"must be a list of 1 to {_MOST_DOCUMENTS} texts")
    for place, text in enumerate(given):
        if not isinstance(text, str) or not text:
            raise _bad_documents(f"must be texts that are not empty; number {place} is none")
    return given


def _bad_documents(what: str) -> RequestError:
    return RequestError(f"documents {what}", param="documents")


def _document(file: Path, at: int, line: str) -> str:
    """The text of a line of a file. at: the line's number. Raises ConfigError."""
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{file}:{at}: must be a JSON text, or {{"text": "..."}}, and not empty')
    return text

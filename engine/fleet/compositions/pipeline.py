"""Pipelines: models run one after another, and a stage's output is part of the next one's prompt.

A stage generates, ranks texts by their likelihood under its model, finds the documents whose
vectors are nearest to the query's, or asks a reranker for the documents that fit the query. The
last stage answers the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import Section
from jitney.engine.fleet.compositions.answering import (
    Answering,
    ModelAnswer,
    ModelStream,
    Part,
    all_of,
    marked,
    total_usage,
)
from jitney.engine.fleet.compositions.body_checks import (
    parsed_body,
    refuse_fields,
    refuse_token_ids,
)
from jitney.engine.fleet.compositions.nearest import Embedder, KeptDocuments, documents_in, nearest
from jitney.engine.fleet.compositions.reranking import best_in, rerank_body
from jitney.engine.fleet.compositions.scoring import TextScorer
from jitney.engine.fleet.compositions.stage_budget import StageBudget
from jitney.engine.fleet.compositions.stage_template_worker import variables_of
from jitney.engine.fleet.compositions.stage_templates import StageRenderer
from jitney.engine.fleet.request import ProxiedRequest, Route
from jitney.engine.server import (
    CompletionBody,
    Notes,
    unknown_fields,
)

#: Variables of every template, and the variable for the text that is ranked.
_GIVEN = ("question", "messages")
_CANDIDATE = "candidate"
#: Field of a request with the documents for stages that have none in the settings.
_DOCUMENTS = "documents"
_MOST_STAGES = 16
_MOST_CANDIDATES = 256
#: Seats assumed for a model that does not report them.
_UNKNOWN_SEATS = 8
#: Fields of a request that a stage sets itself, beside its input texts.
_OWN_FIELDS = ("model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "echo")
#: Route -> its required fields, used to validate the fields that a stage adds.
_NEEDED: dict[Route, JsonDict] = {
    Route.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Route.COMPLETIONS: {"prompt": "x"},
    Route.EMBEDDINGS: {"input": "x", "encoding_format": "base64"},
    Route.RERANK: rerank_body("x", ["x"], 1),
}
#: Fields about the client's prompt, which engines do not receive.
_PROMPT_FIELDS = (
    "echo",
    "suffix",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "continue_final_message",
    "return_token_ids",
)
#: Output of a stage that gets no texts: one empty text.
_NONE_FOUND = {"text": "", "texts": [""], "scores": [0.0]}
_WHY = "its prompt goes through the templates of a pipeline"

_StageName = Annotated[
    str,
    Field(
        pattern=r"^[a-z_][a-z0-9_]{0,63}$",
        description="what later templates, errors and usage call it",
    ),
]
_Seats = Annotated[
    int | None,
    Field(
        ge=1,
        le=1 << 20,
        description="requests that the model computes at once; empty: as its engines say",
    ),
]
_Documents = Annotated[
    list[Annotated[str, Field(min_length=1)]] | None,
    Field(
        min_length=1,
        max_length=KeptDocuments.most,
        description="the documents; a stage that names none in any way has those of the request's "
        "field `documents`",
    ),
]
_DocumentsOf = Annotated[
    str | None,
    Field(description="instead of them: name of an earlier stage that makes several"),
]


class _GenerateStage(Section):
    """`kind = "generate"`: the model answers a prompt."""

    kind: Literal["generate"] = Field(description="the model answers a prompt")
    name: _StageName
    model: str = Field(description="name of a model of the fleet")
    prompt: str = Field(
        description="Jinja template: the user's message, or the prompt of a text completion"
    )
    system: str = Field(
        default="",
        description="Jinja template: the system's message; in a text completion it comes first",
    )
    route: Literal["chat", "completions"] | None = Field(
        default=None,
        description="what its model is asked by, empty: chat; the last stage uses the client's",
    )
    n: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="answers that it makes, empty: 1; the last stage makes as many as the client "
        "asks for",
    )
    fields: dict[str, Any] = Field(
        default={},
        description="more fields of the request, such as { max_tokens = 64 }; in the last stage "
        "the client's stand above them",
    )
    seats: _Seats = None

    @property
    def templates(self) -> dict[str, str]:
        return {"prompt": self.prompt, "system": self.system}


class _RankStage(Section):
    """`kind = "rank"`: texts are sorted by how likely the model finds each."""

    kind: Literal["rank"] = Field(description="texts are sorted by how likely the model finds each")
    name: _StageName
    model: str = Field(description="name of a model of the fleet that engines serve")
    candidates: list[str] | None = Field(
        default=None, min_length=1, max_length=_MOST_CANDIDATES, description="the texts"
    )
    candidates_of: str | None = Field(
        default=None, description="instead of them: name of an earlier stage that makes several"
    )
    prompt: str = Field(
        description="Jinja template of what stands before the scored text; `candidate` is the text "
        "in question"
    )
    scored: str = Field(
        description="Jinja template of the text whose mean log-probability is the candidate's score"
    )
    keep: int = Field(
        default=1, ge=1, le=_MOST_CANDIDATES, description="texts that it passes on, the best first"
    )
    seats: _Seats = None

    @property
    def templates(self) -> dict[str, str]:
        return {"prompt": self.prompt, "scored": self.scored}


class _EmbedStage(Section):
    """`kind = "embed"`: the documents nearest to a text, by the vectors that the model makes."""

    kind: Literal["embed"] = Field(
        description="the documents nearest to a text, by the vectors that the model makes"
    )
    name: _StageName
    model: str = Field(
        description="name of a model of the fleet whose engines make vectors: an encoder, or one "
        "with `embedding_pooling`"
    )
    query: str = Field(
        default="{{ question }}",
        description="Jinja template of the text whose nearest documents are looked for",
    )
    documents: _Documents = None
    file: str | None = Field(
        default=None,
        description="instead of them: a file of JSON lines, each a text or an object with `text`; "
        "relative to the folder of fleet.toml",
    )
    documents_of: _DocumentsOf = None
    prefix: str = Field(
        default="",
        description="stands before each document as it is embedded, such as `passage: `",
    )
    keep: int = Field(
        default=4,
        ge=1,
        le=_MOST_CANDIDATES,
        description="documents that it passes on, the nearest first",
    )
    fields: dict[str, Any] = Field(
        default={},
        description="more fields of /v1/embeddings, such as { truncate_prompt_tokens = 512 } for a "
        "model that reads no longer texts",
    )
    seats: _Seats = None

    @property
    def templates(self) -> dict[str, str]:
        return {"query": self.query}


class _RerankStage(Section):
    """`kind = "rerank"`: the documents that fit a text best, by the scores of the model's own
    rerank route.
    """

    kind: Literal["rerank"] = Field(
        description="the documents that fit a text best, by the model's own rerank route"
    )
    name: _StageName
    model: str = Field(
        description="name of a model of the fleet whose engines answer /v1/rerank: a "
        "cross-encoder, a Qwen3-Reranker, or one that makes vectors"
    )
    query: str = Field(
        default="{{ question }}",
        description="Jinja template of the text that the documents shall fit",
    )
    documents: _Documents = None
    documents_of: _DocumentsOf = None
    keep: int = Field(
        default=1,
        ge=1,
        le=_MOST_CANDIDATES,
        description="documents that it passes on, the best first",
    )
    fields: dict[str, Any] = Field(
        default={},
        description="more fields of /v1/rerank, such as { max_tokens_per_doc = 256 }",
    )
    seats: _Seats = None

    @property
    def templates(self) -> dict[str, str]:
        return {"query": self.query}


_Stage = _GenerateStage | _RankStage | _EmbedStage | _RerankStage


def _part_of(stage: _Stage) -> Part:
    """The stage's name and model, as answers, errors and usage show them."""
    return Part(stage.name, stage.model)


def _sources_of(stage: _EmbedStage | _RerankStage) -> list[str]:
    """Names of the settings that give its documents; at most one may be set."""
    names = ("documents", "file", "documents_of")
    return [name for name in names if getattr(stage, name, None) is not None]


class PipelineSettings(Section):
    """`kind = "pipeline"` in fleet.toml."""

    kind: Literal["pipeline"] = Field(description="models one after another")
    stages: list[Annotated[_Stage, Field(discriminator="kind")]] = Field(
        min_length=1,
        max_length=_MOST_STAGES,
        description="in their order, each a table [[models.NAME.stages]]; the last one generates",
    )
    max_waiting: int = Field(
        default=256,
        ge=0,
        le=1 << 20,
        description="requests that may wait until the slowest stage has seats for them",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        earlier_names: list[str] = []
        for stage in self.stages:
            if stage.name in (*earlier_names, *_GIVEN, _CANDIDATE):
                raise ValueError(f"two stages, or a variable, are called {stage.name}")
            _check_stage(stage, earlier_names)
            earlier_names.append(stage.name)
        _check_last(self.stages[-1])
        return self

    @property
    def parts(self) -> list[str]:
        """Names of the models that it uses."""
        return list(dict.fromkeys(stage.model for stage in self.stages))

    @property
    def scoring(self) -> list[str]:
        """Names of the models that must score or embed texts, which only engines do."""
        return [stage.model for stage in self.stages if not isinstance(stage, _GenerateStage)]

    @property
    def own_fields(self) -> set[str]:
        """Fields of a request that its stages read in addition to the route's fields."""
        kinds = (_EmbedStage, _RerankStage)
        searching = [stage for stage in self.stages if isinstance(stage, kinds)]
        return {_DOCUMENTS} if not all(map(_sources_of, searching)) else set()


def _check_stage(stage: _Stage, known: Sequence[str]) -> None:
    """Validate a stage. known: names of the stages before it. Raises ValueError."""
    variables = [*_GIVEN, *known]
    match stage:
        case _RankStage():
            variables.append(_CANDIDATE)
            _check_candidates(stage, known)
        case _EmbedStage():
            _check_documents(stage, known)
            _check_fields(stage, Route.EMBEDDINGS)
        case _RerankStage():
            _check_documents(stage, known)
            _check_fields(stage, Route.RERANK)
        case _GenerateStage():
            _check_fields(stage, Route.COMPLETIONS if stage.route == "completions" else Route.CHAT)
    for name, template in stage.templates.items():
        _check_template(f"stage {stage.name}: {name}", template, variables)


def _check_candidates(stage: _RankStage, known: Sequence[str]) -> None:
    """Raises ValueError."""
    if (stage.candidates is None) == (stage.candidates_of is None):
        raise ValueError(f"stage {stage.name}: give either candidates or candidates_of")
    if stage.candidates_of is not None and stage.candidates_of not in known:
        raise ValueError(f"stage {stage.name}: candidates_of must name an earlier stage")


def _check_documents(stage: _EmbedStage | _RerankStage, known: Sequence[str]) -> None:
    """Raises ValueError."""
    sources = _sources_of(stage)
    if len(sources) > 1:
        raise ValueError(f"stage {stage.name}: give one of {', '.join(sources)}")
    if stage.documents_of is not None and stage.documents_of not in known:
        raise ValueError(f"stage {stage.name}: documents_of must name an earlier stage")


def _check_template(where: str, template: str, given: Sequence[str]) -> None:
    """Validate a template. given: the variables that it may use. Raises ValueError."""
    try:
        unknown = variables_of(template) - set(given)
    except ValueError as error:
        raise ValueError(f"{where} is no Jinja template: {error}") from None
    if unknown:
        first = min(unknown)
        raise ValueError(f"{where} asks for {first!r}; it may ask for {', '.join(given)}")


def _check_last(stage: _Stage) -> None:
    """Raises ValueError."""
    where = f"stage {stage.name}"
    if not isinstance(stage, _GenerateStage):
        raise ValueError(f'{where}: the last stage must be of kind "generate"')
    for name in ("route", "n"):
        if getattr(stage, name) is not None:
            raise ValueError(f"{where}: {name} of the last stage is the client's; leave it out")
    _check_fields(stage, Route.COMPLETIONS)


def _check_fields(stage: _GenerateStage | _EmbedStage | _RerankStage, route: Route) -> None:
    """Validate a stage's `fields`. Raises ValueError."""
    needed = _NEEDED[route]
    for name in stage.fields:
        if name in _OWN_FIELDS or name in needed:
            raise ValueError(f"stage {stage.name}: fields: {name} is set by the stage itself")
    try:
        unknown = unknown_fields(route, needed | stage.fields)
    except RequestError as error:
        raise ValueError(f"stage {stage.name}: fields: {error}") from None
    if unknown:
        raise ValueError(f"stage {stage.name}: fields: no route has a field {unknown[0]}")


@dataclass(slots=True)
class _Run:
    request: ProxiedRequest
    #: Template variables: `_GIVEN`, then each finished stage's output by its name.
    variables: JsonDict
    #: Token usage of the finished stages.
    usages: list[JsonDict] = field(default_factory=list)
    #: Warnings of the finished stages for the client.
    warnings: list[str] = field(default_factory=list)

    def note(self, stage: _Stage, answer: ModelAnswer) -> None:
        self.usages += _part_of(stage).usage(answer.usage)
        warnings = answer.headers.get(Notes.WARNINGS)
        if warnings:
            self.warnings.append(f"stage {stage.name}: {warnings}")

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of the last answer, with the warnings of all stages."""
        last = headers.get(Notes.WARNINGS)
        warnings = [*self.warnings, last] if last else self.warnings
        return {**headers, Notes.WARNINGS: ", ".join(warnings)} if warnings else dict(headers)


class Pipeline:
    """A composed model that runs stages in order. models: answers for the stages' models."""

    def __init__(self, settings: PipelineSettings, models: Answering, folder: Path = Path()):
        """folder: base of the stages' file paths. Raises ConfigError for an unreadable file."""
        self._stages = settings.stages
        last = settings.stages[-1]
        assert isinstance(last, _GenerateStage)  # checked with the settings
        self._last, self._last_part = last, _part_of(last)
        #: The report that `marked` adds to answers.
        self._told: JsonDict = {"kind": "pipeline", "stage": last.name}
        self._models = models
        templates = {
            f"{stage.name}.{name}": template
            for stage in settings.stages
            for name, template in stage.templates.items()
        }
        self._renderer = StageRenderer(templates)
        self._reads_documents = bool(settings.own_fields)
        #: Name of a stage with documents in the settings -> those documents.
        self._kept: dict[str, KeptDocuments] = {}
        for stage in settings.stages:
            if isinstance(stage, _EmbedStage) and (kept := _kept_documents(stage, folder)):
                self._kept[stage.name] = kept
        stage_models = [stage.model for stage in self._stages]
        #: Separate limits for live requests and batch lines: lines wait at the engines for live
        #: requests, and would hold slots that live requests need.
        self._budget = StageBudget(stage_models, settings.max_waiting)
        self._lines_budget = StageBudget(stage_models, settings.max_waiting)

    async def start(self) -> None:
        await self._renderer.workers.start()

    async def close(self) -> None:
        await self._renderer.workers.close()

    async def seats(self) -> int | None:
        """Requests that the pipeline runs at the same time."""
        await self._look_at_seats()
        return self._budget.limit

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        """Run all stages and answer. Raises HttpError, RequestError."""
        async with self._last_request(request) as (last, run):
            with self._last_part.refusing(_passed_on(request)), self._timed(self._last, request):
                answer = await self._models.answer(last)
            body = answer.body | {"usage": self._usage(run, answer.usage)}
            headers = self._last_part.headers(run.headers(answer.headers))
            return ModelAnswer(marked(body, self._told), headers)

    @asynccontextmanager
    async def stream(self, request: ProxiedRequest) -> AsyncIterator[ModelStream]:
        """The last stage's stream. Raises HttpError, RequestError."""
        async with self._last_request(request) as (last, run):
            with self._last_part.refusing(_passed_on(request)), self._timed(self._last, request):
                async with self._models.stream(last) as stream:
                    headers = self._last_part.headers(run.headers(stream.headers))
                    report, usage = self._told, partial(self._usage, run)
                    yield ModelStream(self._last_part.chunks(stream, report, usage), headers)

    @asynccontextmanager
    async def _last_request(
        self, request: ProxiedRequest
    ) -> AsyncIterator[tuple[ProxiedRequest, _Run]]:
        """Run all stages but the last, and make its request. Raises HttpError, RequestError."""
        variables = _variables_of(request)
        if self._reads_documents:
            documents_in(request.own_fields.get(_DOCUMENTS))
        await self._look_at_seats()
        async with self._budget_of(request).place(request.deadline):
            run = _Run(request, variables)
            for stage in self._stages[:-1]:
                with _part_of(stage).refusing():
                    run.variables[stage.name] = await self._made(stage, run)
            with self._last_part.refusing():
                last = await self._for_last(run)
            yield last, run

    def _budget_of(self, request: ProxiedRequest) -> StageBudget:
        return self._lines_budget if request.background else self._budget

    @contextmanager
    def _timed(self, stage: _Stage, request: ProxiedRequest) -> Iterator[None]:
        """Report the seconds spent in this context to the budget as the stage's time."""
        began = time.monotonic()
        yield
        spent_s = time.monotonic() - began
        self._budget_of(request).spent(self._stages.index(stage), spent_s)

    async def _look_at_seats(self) -> None:
        for stage in self._stages:
            seats = stage.seats or await self._models.seats(stage.model) or _UNKNOWN_SEATS
            self._budget.set_seats(stage.model, seats)
            self._lines_budget.set_seats(stage.model, seats)

    async def _made(self, stage: _Stage, run: _Run) -> JsonDict:
        match stage:
            case _RankStage():
                return await self._ranked(stage, run)
            case _EmbedStage():
                return await self._found(stage, run)
            case _RerankStage():
                return await self._reranked(stage, run)
            case _GenerateStage():
                return await self._generated(stage, run)

    async def _generated(self, stage: _GenerateStage, run: _Run) -> JsonDict:
        prompt = await self._prompt(stage, run.variables, stage.route != "completions")
        body = stage.fields | prompt | {"n": stage.n or 1}
        route = Route.COMPLETIONS if stage.route == "completions" else Route.CHAT
        with self._timed(stage, run.request):
            answer = await self._models.answer(run.request.about(stage.model, route, body))
        run.note(stage, answer)
        texts = answer.texts
        return {"text": texts[0], "texts": texts}

    async def _prompt(
        self, stage: _GenerateStage, variables: Mapping[str, Any], is_chat: bool
    ) -> JsonDict:
        text = await self._render(stage, "prompt", variables)
        system = await self._render(stage, "system", variables) if stage.system else ""
        if not is_chat:
            return {"prompt": f"{system}\n\n{text}" if system else text}
        messages = [{"role": "system", "content": system}] if system else []
        return {"messages": [*messages, {"role": "user", "content": text}]}

    async def _render(self, stage: _Stage, template: str, variables: Mapping[str, Any]) -> str:
        return await self._renderer.render(f"{stage.name}.{template}", dict(variables))

    async def _for_last(self, run: _Run) -> ProxiedRequest:
        """The client's request with the pipeline's prompt."""
        request = run.request
        prompt = await self._prompt(self._last, run.variables, request.is_chat)
        client_fields = request.fields
        fields = {
            name: value for name, value in self._last.fields.items() if name not in client_fields
        }
        return request.to(self._last.model, **fields, **prompt)

    async def _ranked(self, stage: _RankStage, run: _Run) -> JsonDict:
        texts = stage.candidates or run.variables[stage.candidates_of or ""]["texts"]
        at_once = asyncio.Semaphore(self._budget.seats(stage.model))
        scorer = TextScorer(self._models, run.request, stage.model)

        async def score(text: str) -> float:
            async with at_once:
                variables = run.variables | {_CANDIDATE: text}
                prompt = await self._render(stage, "prompt", variables)
                return await scorer.score(prompt, await self._render(stage, "scored", variables))

        with self._timed(stage, run.request):
            scores = await all_of(score(text) for text in texts)
        usage = total_usage(scorer.usages)
        del usage["stages"]
        run.usages += _part_of(stage).usage(usage)
        order = sorted(range(len(texts)), key=lambda place: -scores[place])[: stage.keep]
        return _made_of(texts, [(place, scores[place]) for place in order])

    async def _found(self, stage: _EmbedStage, run: _Run) -> JsonDict:
        """The documents nearest to a text, and their cosine similarities."""
        query = await self._render(stage, "query", run.variables)
        seats = self._budget.seats(stage.model)
        embedder = Embedder(self._models, run.request, stage.model, seats, stage.fields)
        own_documents = self._kept.get(stage.name)
        if own_documents is None:
            texts = _texts_of_run(stage, run)
            prefixed = [stage.prefix + text for text in texts]
            with self._timed(stage, run.request):
                vectors = await embedder.vectors([query, *prefixed])
            own, documents = vectors[:1], vectors[1:]
        else:
            texts = own_documents.texts
            with self._timed(stage, run.request):
                own = await embedder.vectors([query])
            # Not timed: only the first request waits until the documents are embedded.
            documents = await own_documents.vectors(embedder.for_people(), own.shape[1])
        run.usages += _part_of(stage).usage(embedder.usage)
        return _made_of(texts, await nearest(own, documents, stage.keep))

    async def _reranked(self, stage: _RerankStage, run: _Run) -> JsonDict:
        """The documents that fit a text best, and their scores."""
        texts = stage.documents or _texts_of_run(stage, run)
        if not texts:
            return dict(_NONE_FOUND)
        query = await self._render(stage, "query", run.variables)
        body = {**stage.fields, **rerank_body(query, texts, stage.keep)}
        ranking = run.request.about(stage.model, Route.RERANK, body)
        with self._timed(stage, run.request):
            answer = await self._models.answer(ranking)
        run.note(stage, answer)
        return _made_of(texts, best_in(answer, len(texts), stage.keep))

    def _usage(self, run: _Run, of_last: JsonDict) -> JsonDict:
        return total_usage([*run.usages, *self._last_part.usage(of_last)])


def _kept_documents(stage: _EmbedStage, folder: Path) -> KeptDocuments | None:
    """A stage's documents from the settings; None without any. Raises ConfigError."""
    if stage.file is not None:
        return KeptDocuments.of_file(folder / Path(stage.file).expanduser(), stage.prefix)
    return KeptDocuments(stage.documents, stage.prefix) if stage.documents else None


def _made_of(texts: Sequence[str], best: Sequence[tuple[int, float]]) -> JsonDict:
    """The output of a stage that sorts texts. best: (index, score) of each, the best first."""
    if not best:
        return dict(_NONE_FOUND)
    best_texts = [texts[place] for place, _ in best]
    return {"text": best_texts[0], "texts": best_texts, "scores": [score for _, score in best]}


def _texts_of_run(stage: _EmbedStage | _RerankStage, run: _Run) -> list[str]:
    """Documents of the request or of an earlier stage, without empty ones."""
    if stage.documents_of is None:
        return documents_in(run.request.own_fields.get(_DOCUMENTS))
    return [text for text in run.variables[stage.documents_of]["texts"] if text]


def _passed_on(request: ProxiedRequest) -> set[str]:
    """Names of the request's fields that the last stage gets unchanged."""
    return set(request.fields) - {"messages", "prompt"}


def _variables_of(request: ProxiedRequest) -> JsonDict:
    """The variables for all templates. Raises RequestError for unsupported fields."""
    refuse_token_ids(request)
    refuse_fields(request, _PROMPT_FIELDS, _WHY)
    body = parsed_body(request)
    if isinstance(body, CompletionBody):
        if len(body.prompt) > 1:
            raise RequestError(f"prompt must be one text: {_WHY}", param="prompt")
        messages = [{"role": "user", "content": body.prompt[0]}]
    else:
        if body.add_generation_prompt is False:
            raise RequestError(
                f"add_generation_prompt must be true: {_WHY}", param="add_generation_prompt"
            )
        messages = [{"role": each.role, "content": each.content or ""} for each in body.messages]
    texts = [each["content"] for each in messages if each["role"] == "user"]
    return {"question": texts[-1] if texts else "", "messages": messages}

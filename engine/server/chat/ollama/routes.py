"""Ollama's routes."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jitney.engine.server.chat.endpoints import GenerationAnswer, read_body
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation_request import GenerationRequest
from jitney.engine.server.chat.ollama.answers import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingAnswer,
    OllamaGenerateAnswer,
    OllamaMessage,
    OllamaModelList,
    OllamaRunningList,
    OllamaShowAnswer,
    OllamaVersion,
)
from jitney.engine.server.chat.ollama.conversation import CHAT, PROMPT, of_chat, of_prompt
from jitney.engine.server.chat.ollama.format import (
    ChatFormat,
    EmbeddingFormat,
    EmbedFormat,
    GenerateFormat,
)
from jitney.engine.server.chat.ollama.models import described, listed, running, without_tag
from jitney.engine.server.chat.ollama.schema import (
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from jitney.engine.server.chat.openai.embeddings import check_vectors
from jitney.engine.server.chat.request import RequestBuilder, RouteKind
from jitney.engine.server.chat.schema import GenerationBody
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.http.service import Service
from jitney.engine.server.http.streaming import StreamingWriter

#: The release of Ollama that is implemented: clients choose their requests by it.
_VERSION = "0.12.11"
#: Media type of a stream.
_LINES = StreamingWriter.JSON_LINES["content-type"]
_EMBEDDINGS = RouteKind("embd-", "prompt", names={"input": "prompt"})


async def _chat(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, OllamaChatBody)
    if not body.messages:
        return _loaded(service, body, ChatFormat)
    context = Context.of(request)
    with CHAT.blaming():
        builder = _builder(service, body, context)
        sampling = builder.sampling(body.own_sampling)
        conversation = await service.slices.result(of_chat(body))
        generation = await builder.answer(conversation, sampling)
    return _answer(service, body, generation, ChatFormat)


async def _generate(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, OllamaGenerateBody)
    if not body.prompt and not body.suffix:
        return _loaded(service, body, GenerateFormat)
    context = Context.of(request)
    _, tokenizer = service.ready()
    with PROMPT.blaming():
        builder = _builder(service, body, context)
        if body.raw or body.suffix or not tokenizer.has_chat_template:
            generation = await _continued(builder, body)
        else:
            sampling = builder.sampling(body.own_sampling)
            conversation = of_prompt(body)
            generation = await builder.answer(conversation, sampling)
    return _answer(service, body, generation, GenerateFormat)


async def _continued(
    builder: RequestBuilder[GenerationBody], body: OllamaGenerateBody
) -> GenerationRequest:
    """The request that continues the prompt, or fills in before the suffix."""
    service = builder.service
    if body.think is not None:
        builder.context.notes.ignored.append("think")
    text = "\n\n".join([each for each in (body.system, body.prompt) if each])
    service.text.check_chars(len(text) + len(body.suffix), PROMPT.prompt_field)
    _, tokenizer = service.ready()
    own = body.own_sampling
    if not body.suffix:
        sampling = builder.sampling(own)
        ids = await service.text.off_loop(lambda: tokenizer.encode(text))
    else:
        fill_in = service.text.fill_in("suffix")
        sampling = builder.sampling(own, fill_in.ends)
        ids = await service.text.off_loop(lambda: fill_in.prompt(tokenizer, text, body.suffix))
    return await builder.tokens(PROMPT, [ids], sampling)


def _builder(
    service: Service, body: OllamaChatBody | OllamaGenerateBody, context: Context
) -> RequestBuilder[GenerationBody]:
    model = _served_name(service, body.model)
    body.note_context(service.info.model.context_length, context.notes)
    return RequestBuilder(service, body.generation(model), context)


def _answer(
    service: Service, body: OllamaBody, generation: GenerationRequest, format: type[Format]
) -> ASGIApp:
    """Run and answer a request; the answer has the client's name of the model."""
    generation = replace(generation, model=body.model or generation.model)
    return GenerationAnswer(service, generation, format)


def _loaded(
    service: Service, body: OllamaBody, format: type[ChatFormat | GenerateFormat]
) -> ASGIApp:
    """The answer to a request that only loads the model."""
    _served_name(service, body.model)
    answer = format.answer(body.model or service.model_name, OllamaMessage())
    answer.done, answer.done_reason = True, "load"
    return json_answer(answer)


def _served_name(service: Service, name: str | None) -> str | None:
    """A named model as it is served; None: none is named. Raises HttpError for others."""
    if name is not None and name not in service.listed_names:
        name = without_tag(name)
    service.check_model(name)
    return name


async def _embed(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, OllamaEmbedBody)
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_vectors(service.info, body.dimensions)
    cuts = body.truncate is not False
    generation = await _vectors(service, body, Context.of(request), texts, cuts=cuts)
    generation = replace(generation, dimensions=body.dimensions)
    return _answer(service, body, generation, EmbedFormat)


async def _embeddings(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request, OllamaEmbeddingsBody)
    check_vectors(service.info, None)
    with _EMBEDDINGS.blaming():
        generation = await _vectors(service, body, Context.of(request), [body.prompt], cuts=True)
    return _answer(service, body, generation, EmbeddingFormat)


async def _vectors(
    service: Service, body: OllamaBody, context: Context, texts: list[str], *, cuts: bool
) -> GenerationRequest:
    """cuts: of longer texts the beginning is read, else they are refused."""
    info, tokenizer = service.ready()
    shared = GenerationBody(model=_served_name(service, body.model))
    builder = RequestBuilder(service, shared, context)
    if not cuts:
        return await builder.embeddings(texts)
    chars, tokens = service.text.most_chars, info.request_limits.longest_prompt
    cut = await service.text.off_loop(
        lambda: [tokenizer.first_tokens(text[:chars], tokens) for text in texts]
    )
    return await builder.embeddings(cut)


async def _tags(server: ServerContext, request: Request) -> Response:
    """The models under each of their names, and adapters."""
    info = server.engine_info
    return json_answer(
        OllamaModelList([listed(server.card(name), info) for name in server.listed_names])
    )


async def _show(service: Service, request: Request) -> Response:
    body = await read_body(service, request, OllamaShowBody)
    name = _served_name(service, body.model or body.name)
    info, tokenizer = service.ready()
    parent = service.model_name if service.adapter_number(name) else ""
    return json_answer(described(info, tokenizer, service.turns.format, service.created, parent))


async def _running(server: ServerContext, request: Request) -> Response:
    """The models that would answer now."""
    info = server.engine_info
    return json_answer(
        OllamaRunningList([running(server.card(name), info) for name in server.running_names])
    )


async def _show_version(server: object, request: Request) -> Response:
    """The release of Ollama, not of this server."""
    return json_answer(OllamaVersion(_VERSION))


#: Any Content-Type is accepted: Ollama's examples use curl's default (a form).
OLLAMA_ROUTES = (
    HttpRoute(
        "POST /api/chat",
        _chat,
        "answer a chat, as Ollama has it",
        generates=True,
        body=OllamaChatBody,
        takes_any_type=True,
        answer=OllamaChatAnswer,
        event=OllamaChatAnswer,
        stream_type=_LINES,
        streams_unasked=True,
    ),
    HttpRoute(
        "POST /api/generate",
        _generate,
        "answer a prompt, as Ollama has it",
        generates=True,
        body=OllamaGenerateBody,
        takes_any_type=True,
        answer=OllamaGenerateAnswer,
        event=OllamaGenerateAnswer,
        stream_type=_LINES,
        streams_unasked=True,
    ),
    HttpRoute(
        "POST /api/embed",
        _embed,
        "vectors of texts, as Ollama has it",
        generates=True,
        body=OllamaEmbedBody,
        takes_any_type=True,
        answer=OllamaEmbedAnswer,
    ),
    HttpRoute(
        "POST /api/embeddings",
        _embeddings,
        "the vector of a text, as older clients of Ollama ask for it",
        generates=True,
        body=OllamaEmbeddingsBody,
        takes_any_type=True,
        answer=OllamaEmbeddingAnswer,
    ),
    HttpRoute(
        "POST /api/show",
        _show,
        "what the model is and can do, as Ollama has it",
        body=OllamaShowBody,
        takes_any_type=True,
        answer=OllamaShowAnswer,
    ),
)
#: The same for an engine and for a fleet.
OLLAMA_LISTS = (
    HttpRoute(
        "GET /api/tags",
        _tags,
        "the models, as Ollama lists them",
        answer=OllamaModelList,
    ),
    HttpRoute(
        "GET /api/ps",
        _running,
        "the models that are ready, as Ollama lists those that are loaded",
        answer=OllamaRunningList,
    ),
    HttpRoute(
        "GET /api/version",
        _show_version,
        "the release of Ollama whose forms these are",
        answer=OllamaVersion,
    ),
)

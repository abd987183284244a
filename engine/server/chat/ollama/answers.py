"""Bodies of Ollama's answers. Durations are in nanoseconds; answers that only load have none."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.choices import Ending
from jitney.engine.server.chat.token_scores import TokenLogprob
from jitney.engine.server.http.answers import Maybe, ResponseModel


class Generated(ResponseModel, kw_only=True):
    """Whole, or a line of a stream; only the last line has done_reason, durations and counts.

    total_duration: since the request arrived. load_duration: the wait for a seat, as the model is
    always loaded. prompt_eval_duration: from boarding to the first token; eval_duration: from the
    first token to the last. Counts are tokens. created_at: when this was written, RFC 3339.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: Maybe[Ending | Literal["load"] | None] = UNSET
    logprobs: Maybe[list[TokenLogprob]] = UNSET
    total_duration: Maybe[int] = UNSET
    load_duration: Maybe[int] = UNSET
    prompt_eval_count: Maybe[int] = UNSET
    prompt_eval_duration: Maybe[int] = UNSET
    eval_count: Maybe[int] = UNSET
    eval_duration: Maybe[int] = UNSET


class OllamaCalledFunction(ResponseModel):
    """index: of the call in its turn."""

    index: int
    name: str
    arguments: JsonDict


class OllamaToolCall(ResponseModel):
    """A call that the client is asked to make."""

    id: str
    function: OllamaCalledFunction


class OllamaMessage(ResponseModel, kw_only=True):
    """The model's message; thinking and tool_calls come where there are any."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: Maybe[str] = UNSET
    tool_calls: Maybe[list[OllamaToolCall]] = UNSET


class OllamaChatAnswer(Generated, kw_only=True):
    """POST /api/chat."""

    message: OllamaMessage


class OllamaGenerateAnswer(Generated, kw_only=True):
    """POST /api/generate."""

    response: str
    thinking: Maybe[str] = UNSET


class OllamaEmbedAnswer(ResponseModel, kw_only=True):
    """POST /api/embed: a vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingAnswer(ResponseModel):
    """POST /api/embeddings."""

    embedding: list[float]


class OllamaVersion(ResponseModel):
    """GET /api/version: the release of Ollama whose API this server implements."""

    version: str


class OllamaDetails(ResponseModel, kw_only=True):
    """Facts about a model; empty where not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _KnownModel(ResponseModel, kw_only=True):
    """The served model under one of its names. size: bytes of its weights. digest: of the facts
    that determine its answers and its speed.
    """

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(_KnownModel, kw_only=True):
    """The served model under one of its names, or with an adapter. modified_at: when the server
    started. size, digest: as in `OllamaRunningModel`.
    """

    modified_at: str


class OllamaModelList(ResponseModel):
    """GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunningModel(_KnownModel, kw_only=True):
    """size: bytes of its weights; size_vram: bytes of these on an accelerator. digest: of the facts
    that determine its answers and its speed. expires_at: far away, since the model stays loaded.
    """

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningList(ResponseModel):
    """GET /api/ps."""

    models: list[OllamaRunningModel]


type Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


class OllamaShowAnswer(ResponseModel, kw_only=True):
    """POST /api/show. model_info has GGUF's names; parameters: the default sampling, a line each;
    template: the chat template, in Jinja.
    """

    modelfile: Literal[""] = ""
    parameters: str
    template: str
    details: OllamaDetails
    model_info: JsonDict
    capabilities: list[Capability]
    modified_at: str

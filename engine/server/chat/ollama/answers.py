"""The forms of the answers of Ollama's routes, for the document that describes the routes.
Durations are nanoseconds; an answer that only loads the model has none.
"""

from __future__ import annotations

from typing import Literal

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.answers import Described


class _Durations(Described):
    """total_duration: since the request arrived. load_duration: that it waited for a seat; the
    model is loaded. prompt_eval_duration: from there to the first token; eval_duration: from that
    to the last one. Counts are tokens.
    """

    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaTopLogprob(Described):
    """A token that might have been chosen; bytes: its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTopLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[OllamaTopLogprob]


class _Generated(_Durations):
    """Whole, or the last line of a stream. The others have neither done_reason nor durations."""

    model: str
    #: When this was written, RFC 3339.
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    logprobs: list[OllamaLogprob] | None = None


class OllamaCalledFunction(Described):
    """index: of the call in its turn."""

    index: int
    name: str
    arguments: JsonDict


class OllamaToolCall(Described):
    """A call that the client is asked to make."""

    id: str
    function: OllamaCalledFunction


class OllamaMessage(Described):
    """What the model said; thinking and tool_calls come where there are any."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatAnswer(_Generated):
    """POST /api/chat."""

    message: OllamaMessage


class OllamaGenerateAnswer(_Generated):
    """POST /api/generate."""

    response: str
    thinking: str = ""


class OllamaEmbedAnswer(Described):
    """POST /api/embed: a vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingAnswer(Described):
    """POST /api/embeddings."""

    embedding: list[float]


class OllamaVersion(Described):
    """GET /api/version: of Ollama, whose forms of that version are spoken here."""

    version: str


class OllamaDetails(Described):
    """Of a model. What is not known is empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Described):
    """The served model under one of its names, or with an adapter. size: bytes of its weights.
    modified_at: when the server started. digest: of what decides its answers and its speed.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModelList(Described):
    """GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunningModel(Described):
    """expires_at: far away, since the model stays loaded. size_vram: of its size, bytes that an
    accelerator holds.
    """

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningList(Described):
    """GET /api/ps."""

    models: list[OllamaRunningModel]


class OllamaShowAnswer(Described):
    """POST /api/show. model_info has GGUF's names; parameters: the default sampling, a line each;
    template: the chat template, in Jinja.
    """

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: JsonDict
    capabilities: list[Literal["completion", "tools", "thinking", "insert", "embedding"]]
    modified_at: str

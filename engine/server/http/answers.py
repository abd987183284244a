"""The forms of the answers, for the document that describes the routes
(`engine.server.http.openapi`).

Answers are written elsewhere, piece by piece (`engine.server.chat.formats`,
`engine.server.http.routes`); a test holds what is written to what is described here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from jitney.engine.common.requests import JsonDict

_Finish = Literal["stop", "length"]


class Described(BaseModel):
    """Fields that are named here, and no others."""

    model_config = ConfigDict(extra="forbid")


class Error(Described):
    """What was wrong and what to do about it."""

    message: str
    type: str
    #: Dotted path of the field at fault.
    param: str | None
    code: str | None


class ErrorAnswer(Described):
    """The body of every answer that is an error."""

    error: Error


class AnthropicError(Described):
    """What was wrong and what to do about it. details: what a client looks at to go on by itself;
    only where there is such a thing.
    """

    type: str
    message: str
    details: JsonDict = {}
    #: Of a prompt that is too long.
    code: Literal["context_length_exceeded"] | None = None


class AnthropicErrorAnswer(Described):
    """The body of an error below /v1/messages."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class OllamaErrorAnswer(Described):
    """The body of an error below /api/."""

    error: str


class PromptTokensDetails(Described):
    """Of the prompt tokens, those whose keys and values were found in pages."""

    cached_tokens: int


class CompletionTokensDetails(Described):
    """Of the output tokens, those that were thoughts."""

    reasoning_tokens: int


class Usage(Described):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    #: Of chats.
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(Described):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Described):
    """A token that stands, or might have stood, in the prompt. rank: its place among all tokens, 1
    for the likeliest; null if it is not among those that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


#: One entry a token of the prompt, by token id; null for the first. Comes with prompt_logprobs.
_PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Described):
    """One answer to one prompt. The lists of token ids come with return_token_ids."""

    index: int
    text: str
    finish_reason: _Finish
    logprobs: CompletionLogprobs | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: _PromptLogprobs = []


class CompletionAnswer(Described):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatTopLogprob(Described):
    """A token that might have been chosen; bytes: its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    """The token that was chosen, and the most likely ones."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Described):
    """One entry a token."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Described):
    """arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Described):
    """A call that the client is asked to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledTool(Described):
    """input: the text that the tool is given."""

    name: str
    input: str


class CustomToolCall(Described):
    """A call of a custom tool that the client is asked to make."""

    id: str
    type: Literal["custom"]
    custom: CalledTool


class ChatMessage(Described):
    """What the model said. content is null where it only called tools; reasoning_content (also as
    reasoning, vLLM's name) and tool_calls come where there are any.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall | CustomToolCall] = []


class ChatChoice(Described):
    """One answer. token_ids come with return_token_ids."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None
    token_ids: list[int] = []


class ChatAnswer(Described):
    """POST /v1/chat/completions. prompt_token_ids come with return_token_ids."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: _PromptLogprobs = []


class ModelCard(Described):
    """The served model under one of its names, or with an adapter. root: what answers call it.
    parent: of an adapter, the model that it changes. max_model_len: tokens of a sequence, prompt
    included.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int | None


class ModelList(Described):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class AnthropicModel(Described):
    """A model as Anthropic's API shows it, to requests with the header anthropic-version."""

    type: Literal["model"]
    id: str
    display_name: str
    #: RFC 3339.
    created_at: str
    lifecycle: Literal["active"]
    #: Tokens of a sequence, prompt included; null until the engine is ready.
    max_input_tokens: int | None
    max_tokens: int | None
    max_model_len: int | None


class AnthropicModelList(Described):
    """GET /v1/models with the header anthropic-version: one page with all models."""

    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Status(BaseModel):
    """Of a probe."""

    status: str


class Version(BaseModel):
    """GET /version: more once the engine is ready."""

    version: str


class SettingInForce(Described):
    """A setting. section, key: as in a TOML file. value: of secrets how many there are. origin:
    "default", or where it stands in a file, the environment or the flags. counted: part of the
    digest.
    """

    section: str
    key: str
    value: bool | int | float | str | list[int] | list[str]
    origin: str
    counted: bool


class Configuration(Described):
    """GET /config. config_digest: empty until the engine is ready. settings: by flat name."""

    version: str
    config_digest: str
    settings: dict[str, SettingInForce]


class Sleeping(Described):
    """GET /is_sleeping."""

    is_sleeping: bool


class Asleep(Described):
    """POST /sleep. freed_bytes: of the device's memory; 0 if it slept already."""

    status: Literal["asleep"]
    freed_bytes: int


class Slot(BaseModel):
    """A seat, with llama.cpp's names where they exist."""

    id: int
    is_processing: bool
    state: str


class Document(BaseModel):
    """An OpenAPI document."""

    openapi: str
    info: JsonDict
    paths: JsonDict
    components: JsonDict

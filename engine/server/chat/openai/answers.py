"""The bodies of /v1/completions and /v1/chat/completions, and the events of their streams."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET

from jitney.engine.server.chat.choices import Ending
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.token_scores import TokenLogprob
from jitney.engine.server.http.answers import Maybe, ResponseModel


class PromptTokensDetails(ResponseModel):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """Output tokens that were thoughts."""

    reasoning_tokens: int


class Usage(ResponseModel, kw_only=True):
    """Tokens of a request. completion_tokens_details: of chats."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Maybe[CompletionTokensDetails] = UNSET

    @classmethod
    def of(cls, generation: Generation) -> Usage:
        counts, request = generation.counts, generation.request
        completion = 0 if request.prompt_only else counts.completion
        details: Maybe[CompletionTokensDetails] = UNSET
        if request.make_parser is not None:
            details = CompletionTokensDetails(counts.reasoning)
        return cls(
            prompt_tokens=counts.prompt,
            completion_tokens=completion,
            total_tokens=counts.prompt + completion,
            prompt_tokens_details=PromptTokensDetails(counts.cached),
            completion_tokens_details=details,
        )


class CompletionLogprobs(ResponseModel):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseModel):
    """A token of the prompt, or an alternative. rank: among all tokens, 1 for the likeliest; null
    if it is not among the requested alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


#: One entry a token of the prompt, by token id; null for the first. Comes with prompt_logprobs.
type PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(ResponseModel, kw_only=True):
    """One answer to one prompt, or its addition in a stream."""

    index: int
    text: str
    finish_reason: Ending | None
    logprobs: CompletionLogprobs | None
    token_ids: Maybe[list[int]] = UNSET
    prompt_token_ids: Maybe[list[int]] = UNSET
    prompt_logprobs: Maybe[PromptLogprobs] = UNSET


class CompletionAnswer(ResponseModel, kw_only=True):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(ResponseModel, kw_only=True):
    """An event of the stream of a completion. usage: with stream_options.include_usage; null except
    in the last event.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Maybe[Usage | None] = UNSET


class ChatLogprobs(ResponseModel):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(ResponseModel):
    """arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(ResponseModel, tag_field="type", tag="function"):
    """A call that the client is asked to make."""

    id: str
    function: CalledFunction


class CalledTool(ResponseModel):
    """input: the text that the tool is given."""

    name: str
    input: str


class CustomToolCall(ResponseModel, tag_field="type", tag="custom"):
    """A call of a custom tool that the client is asked to make."""

    id: str
    custom: CalledTool


class ChatMessage(ResponseModel, kw_only=True):
    """The model's message. content is null where it only called tools; reasoning_content (also as
    reasoning, vLLM's name) and tool_calls come where there are any.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: Maybe[str] = UNSET
    reasoning: Maybe[str] = UNSET
    tool_calls: Maybe[list[ToolCall | CustomToolCall]] = UNSET


type ChatEnding = Literal["stop", "length", "tool_calls"]


class ChatChoice(ResponseModel, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: ChatEnding
    logprobs: ChatLogprobs | None
    token_ids: Maybe[list[int]] = UNSET


class ChatAnswer(ResponseModel, kw_only=True):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Maybe[list[int]] = UNSET
    prompt_logprobs: Maybe[PromptLogprobs] = UNSET


class FunctionDelta(ResponseModel):
    """More of a call's arguments; the name comes first."""

    arguments: str
    name: Maybe[str] = UNSET


class CustomDelta(ResponseModel):
    """More of the text that a custom tool is given; the name comes first."""

    input: str
    name: Maybe[str] = UNSET


class ToolCallDelta(ResponseModel, kw_only=True):
    """More of the call with this index. id and type come with its name."""

    index: int
    id: Maybe[str] = UNSET
    type: Maybe[Literal["function", "custom"]] = UNSET
    function: Maybe[FunctionDelta] = UNSET
    custom: Maybe[CustomDelta] = UNSET


class ChatDelta(ResponseModel, kw_only=True):
    """An event's addition to the message."""

    role: Maybe[Literal["assistant"]] = UNSET
    content: Maybe[str | None] = UNSET
    reasoning_content: Maybe[str] = UNSET
    reasoning: Maybe[str] = UNSET
    tool_calls: Maybe[list[ToolCallDelta]] = UNSET


class ChatChunkChoice(ResponseModel, kw_only=True):
    """An event's addition to one answer."""

    index: int
    delta: ChatDelta
    finish_reason: ChatEnding | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: Maybe[list[int]] = UNSET
    prompt_token_ids: Maybe[list[int]] = UNSET


class ChatChunk(ResponseModel, kw_only=True):
    """An event of the stream of a chat. usage: as in `CompletionChunk`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Maybe[Usage | None] = UNSET

"""The forms of the answers of /v1/responses, for the document that describes the routes."""

from __future__ import annotations

from typing import Any, Literal

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.answers import ChatTokenLogprob, Described

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Described):
    """What the model said."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(Described):
    """What it thought before."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Described):
    """A message of the assistant."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: _Status
    content: list[OutputText]


class OutputReasoning(Described):
    """Thoughts. There are no summaries."""

    id: str
    type: Literal["reasoning"]
    status: _Status
    summary: list[None]
    content: list[ReasoningText]


class OutputCall(Described):
    """A call that the client is asked to make. arguments: JSON text, as the model wrote it.
    namespace: of a tool that has one.
    """

    id: str
    type: Literal["function_call"]
    status: _Status
    call_id: str
    name: str
    arguments: str
    namespace: str = ""


class OutputCustomCall(Described):
    """A call of a custom tool. input: the text that it is given; namespace: as above."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str = ""


class InputTokensDetails(Described):
    """Of the input, tokens found in the prefix cache. What is written to it is not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Described):
    """Of the output, thoughts."""

    reasoning_tokens: int


class ResponseUsage(Described):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Described):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "context_length_exceeded"]
    message: str


class Incomplete(Described):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Described):
    """POST and GET /v1/responses: the answer, and what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    temperature: float
    text: JsonDict
    tool_choice: Any
    tools: list[JsonDict]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class InputTokens(Described):
    """POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Described):
    """DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Described):
    """GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"]
    data: list[JsonDict]
    first_id: str
    last_id: str
    has_more: bool

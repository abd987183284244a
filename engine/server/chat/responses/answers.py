"""The response bodies of /v1/responses, and the events of its streams."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, field

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.token_scores import TokenLogprob
from jitney.engine.server.http.answers import Maybe, ResponseModel

type ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
type ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel, tag_field="type", tag="output_text"):
    """A text of the model."""

    text: str
    logprobs: list[TokenLogprob]
    annotations: list[None] = field(default_factory=list)


class ReasoningText(ResponseModel, tag_field="type", tag="reasoning_text"):
    """The model's thoughts before its answer."""

    text: str


class OutputMessage(ResponseModel, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(ResponseModel, tag_field="type", tag="reasoning"):
    """Thoughts. There are no summaries."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[None] = field(default_factory=list)


class OutputCall(ResponseModel, tag_field="type", tag="function_call"):
    """A call that the client is asked to make. arguments: JSON text, as the model wrote it.
    namespace: of a tool that has one.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: Maybe[str] = UNSET


class OutputCustomCall(ResponseModel, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. input: the text that it is given; namespace: as above."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: Maybe[str] = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(ResponseModel):
    """Input tokens that came from the prefix cache. Writes to it are not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(ResponseModel):
    """Output tokens that were thoughts."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, generation: Generation) -> ResponseUsage:
        counts = generation.counts
        return cls(
            counts.prompt,
            InputTokensDetails(counts.cached),
            counts.completion,
            OutputTokensDetails(counts.reasoning),
            counts.prompt + counts.completion,
        )


class ResponseFailure(ResponseModel):
    """The error of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded", "context_length_exceeded"]
    message: str


class Incomplete(ResponseModel):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(ResponseModel, kw_only=True):
    """POST and GET /v1/responses: the answer, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: Maybe[int] = UNSET
    status: ResponseStatus
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    temperature: float
    text: JsonDict
    tool_choice: Any
    tools: list[JsonDict]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None


class ResponseEvent(ResponseModel, tag_field="type", tag="response", kw_only=True):
    """An event of a stream."""

    #: Its number in the stream.
    sequence_number: int = 0


class _OfResponse(ResponseEvent, kw_only=True):
    """An event with the response's current state."""

    response: ResponseAnswer


class ResponseCreated(_OfResponse, tag="response.created"):
    """The first event."""


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(_OfResponse, tag="response.completed"):
    """The last event."""


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    """The last event of a response that was cut off."""


class ResponseFailed(_OfResponse, tag="response.failed"):
    """The last event of a response that failed."""


class _OfItem(ResponseEvent, kw_only=True):
    """An event with an item's current state."""

    output_index: int
    item: OutputItem


class OutputItemAdded(_OfItem, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_OfItem, tag="response.output_item.done"):
    """An item ends."""


class _InItem(ResponseEvent, kw_only=True):
    """An event about a part of an item."""

    item_id: str
    output_index: int


class _InPart(_InItem, kw_only=True):
    """An event about the only part of an item."""

    content_index: Literal[0] = 0


class ContentPartAdded(_InPart, tag="response.content_part.added", kw_only=True):
    """A part of an item begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_InPart, tag="response.content_part.done", kw_only=True):
    """A part of an item ends."""

    part: OutputText | ReasoningText


class EventTopLogprob(ResponseModel):
    """A token that might have been chosen."""

    token: str
    logprob: float


class EventLogprob(EventTopLogprob):
    """The token that was chosen, and the likeliest ones, without their bytes."""

    top_logprobs: list[EventTopLogprob]

    @classmethod
    def of(cls, scored: TokenLogprob) -> EventLogprob:
        top = [EventTopLogprob(each.token, each.logprob) for each in scored.top_logprobs]
        return cls(scored.token, scored.logprob, top)


class OutputTextDelta(_InPart, tag="response.output_text.delta", kw_only=True):
    """More of a text."""

    delta: str
    logprobs: list[EventLogprob]


class OutputTextDone(_InPart, tag="response.output_text.done", kw_only=True):
    """The end of a text."""

    text: str
    logprobs: list[EventLogprob]


class ReasoningTextDelta(_InPart, tag="response.reasoning_text.delta", kw_only=True):
    """More of a thought."""

    delta: str


class ReasoningTextDone(_InPart, tag="response.reasoning_text.done", kw_only=True):
    """The end of a thought."""

    text: str


class ArgumentsDelta(_InItem, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_InItem, tag="response.function_call_arguments.done", kw_only=True):
    """The end of a call's arguments."""

    name: str
    arguments: str


class CustomInputDelta(_InItem, tag="response.custom_tool_call_input.delta", kw_only=True):
    """More of a custom tool's input."""

    delta: str


class CustomInputDone(_InItem, tag="response.custom_tool_call_input.done", kw_only=True):
    """The end of a custom tool's input."""

    input: str


AnyResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)


class InputTokens(ResponseModel):
    """POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(ResponseModel):
    """DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(ResponseModel):
    """GET /v1/responses/{response_id}/input_items."""

    data: list[JsonDict]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"

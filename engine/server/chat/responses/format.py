"""Answers of /v1/responses: the response, and the stream of events that ends with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from msgspec.structs import replace

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, Ending, TokenList
from jitney.engine.server.chat.conversation.events import ContentDelta
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.responses.answers import (
    Incomplete,
    OutputItem,
    OutputMessage,
    ResponseAnswer,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseStatus,
    ResponseUsage,
)
from jitney.engine.server.chat.responses.output import Output
from jitney.engine.server.chat.responses.schema import ResponsesBody
from jitney.engine.server.chat.schema import OtherTool
from jitney.engine.server.chat.token_scores import TokenScores
from jitney.engine.server.http.errors import ErrorReply
from jitney.engine.server.http.jsonio import in_pieces

#: Called with the response, without log-probabilities, when it has ended.
type _Keep = Callable[[ResponseAnswer], None]


class ResponsesFormat(Format):
    """One response with one choice. keep: stores the response; None: it is not stored."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: TokenBytes,
        body: ResponsesBody,
        keep: _Keep | None,
    ):
        super().__init__(generation, tokenizer)
        self._body = body
        self._keep_response = keep
        scores = None
        if self.request.top_logprobs is not None:
            scores = TokenScores(tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._output = Output(scores, body.call_forms)
        self._sequence = 0
        #: Reason for its end; None while it goes on.
        self._ending: Ending | None = None

    def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        for _ in self._events(delta):
            pass

    def whole(self) -> Pieces:
        for _ in self._output.finish(self._status):
            yield b""
        yield from in_pieces(self._ended())

    def opening(self) -> bytes:
        """The first events of a stream: the response without output."""
        response = self._response("in_progress")
        frames: list[bytes] = []
        for event in (ResponseCreated(response=response), ResponseInProgress(response=response)):
            frames += self._frame(event)
        return b"".join(frames)

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        for event in self._events(delta):
            yield from self._frame(event)

    def tail(self) -> Pieces:
        for event in self._output.finish(self._status):
            yield from self._frame(event)
        last = ResponseIncomplete if self._ending == "length" else ResponseCompleted
        yield from self._frame(last(response=self._ended()))

    def failure(self, error: Exception, request_id: str) -> Pieces:
        for event in self._output.close("incomplete"):
            yield from self._frame(event)
        failed = self._response("failed")
        failed.error = _failure(ErrorReply.of(error, request_id))
        self._keep(failed)
        yield from self._frame(ResponseFailed(response=failed))

    def _events(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        """The events of a delta. Its tokens go with its first text."""
        if delta.finish is not None:
            self._ending = delta.finish
        tokens: TokenList | None = delta.tokens
        for event in delta.events:
            yield from self._output.push(event, tokens)
            if isinstance(event, ContentDelta):
                tokens = None

    def _frame(self, event: ResponseEvent) -> Iterator[bytes]:
        event.sequence_number = self._sequence
        self._sequence += 1
        yield b"event: %b\ndata: " % str(event.__struct_config__.tag).encode()
        yield from in_pieces(event)
        yield b"\n\n"

    @property
    def _status(self) -> Literal["incomplete", "completed"]:
        return "incomplete" if self._ending == "length" else "completed"

    def _ended(self) -> ResponseAnswer:
        """The response at its end; stored if the body asked for that."""
        response = self._response(self._status)
        if self._ending == "length":
            response.incomplete_details = Incomplete()
        else:
            response.completed_at = int(time.time())
        self._keep(response)
        response.output = self._output.items()
        return response

    def _keep(self, response: ResponseAnswer) -> None:
        if self._keep_response is not None:
            items = [_without_logprobs(item) for item in self._output.items()]
            self._keep_response(replace(response, output=items))

    def _response(self, status: ResponseStatus) -> ResponseAnswer:
        """The response in its current state, without its output."""
        body, sampling = self._body, self.request.sampling
        tools = [tool.shown() for tool in body.tools or () if not isinstance(tool, OtherTool)]
        return ResponseAnswer(
            id=self.request.id,
            created_at=self.request.created,
            model=self.request.model,
            status=status,
            usage=None if status == "in_progress" else ResponseUsage.of(self.generation),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": body.effort, "summary": None},
            safety_identifier=body.safety_identifier,
            temperature=sampling.temperature,
            text=_text(body),
            tool_choice=_tool_choice(body),
            tools=tools,
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            user=body.user,
        )


def _failure(answer: ErrorReply) -> ResponseFailure:
    """The error of a failed response. Codex CLI compacts its conversation on
    context_length_exceeded.
    """
    if answer.overflow is not None:
        return ResponseFailure("context_length_exceeded", answer.message)
    code = "rate_limit_exceeded" if answer.status == 429 else "server_error"
    return ResponseFailure(code, answer.message)


def _without_logprobs(item: OutputItem) -> OutputItem:
    if not isinstance(item, OutputMessage):
        return item
    return replace(item, content=[replace(part, logprobs=[]) for part in item.content])


def _text(body: ResponsesBody) -> JsonDict:
    shown = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        shown = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return {"format": shown, "verbosity": "medium"}


def _tool_choice(body: ResponsesBody) -> Any:
    if body.tool_choice is None:
        return "auto"
    if isinstance(body.tool_choice, str):
        return body.tool_choice
    return body.tool_choice.model_dump(exclude_none=True)

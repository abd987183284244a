"""Answers of /v1/responses: the response object, and the stream of typed events that ends with
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from jitney.engine.common.requests import JsonDict, SamplingParams
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, TokenList
from jitney.engine.server.chat.conversation.events import ContentDelta
from jitney.engine.server.chat.formats import Format, TokenScores
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.responses.output import Output, ResponseEvent
from jitney.engine.server.chat.responses.schema import ResponsesBody
from jitney.engine.server.chat.schema import OtherTool
from jitney.engine.server.http.errors import ErrorReply
from jitney.engine.server.http.jsonio import LongJson, in_pieces
from jitney.engine.server.http.slices import Pieces

#: Called with the response and its output items, without log-probabilities, when it has ended.
type _Keep = Callable[[JsonDict, list[JsonDict]], None]


#: Events that a stream begins with.
_OPENING = ("response.created", "response.in_progress")


class ResponsesFormat(Format):
    """One response, which repeats what its body asked for. It has one choice. keep: keeps the
    response, if it is to be kept.
    """

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
        self._scores = TokenScores(tokenizer, as_ids=self.request.tokens_as_ids)
        scored = None if self.request.top_logprobs is None else self._logprobs
        self._output = Output(scored, body.call_forms)
        self._sequence = 0
        #: Why the engine ended it; None while it goes on.
        self._finish: str | None = None

    def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        for _ in self._events(delta):
            pass

    def whole(self) -> Pieces:
        for _ in self._output.finish(self._status):
            yield b""
        yield from in_pieces(self._ended())

    def opening(self) -> bytes:
        """A stream begins with the response before anything of it is there."""
        response = self._response("in_progress")
        frames: list[bytes] = []
        for kind in _OPENING:
            frames += self._frame({"type": kind, "response": response})
        return b"".join(frames)

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        for event in self._events(delta):
            yield from self._frame(event)

    def tail(self) -> Pieces:
        for event in self._output.finish(self._status):
            yield from self._frame(event)
        yield from self._frame({"type": f"response.{self._status}", "response": self._ended()})

    def failure(self, error: Exception, request_id: str) -> Pieces:
        for event in self._output.close("incomplete"):
            yield from self._frame(event)
        reason = _failure(ErrorReply.of(error, request_id))
        failed = self._response("failed") | {"error": reason}
        self._keep(failed)
        yield from self._frame({"type": "response.failed", "response": failed})

    def _events(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        """What a stream says of a delta. Its tokens go with its first text."""
        if delta.finish is not None:
            self._finish = delta.finish
        tokens: TokenList | None = delta.tokens
        for event in delta.events:
            yield from self._output.push(event, tokens)
            if isinstance(event, ContentDelta):
                tokens = None

    def _frame(self, event: ResponseEvent) -> Iterator[bytes]:
        yield b"event: " + event["type"].encode() + b"\ndata: "
        yield from in_pieces(event | {"sequence_number": self._sequence})
        yield b"\n\n"
        self._sequence += 1

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _ended(self) -> JsonDict:
        """The response at its end, which is kept if that was asked for."""
        response = self._response(self._status)
        if self._finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self._keep(response)
        return response | {"output": self._output.items()}

    def _keep(self, response: JsonDict) -> None:
        if self._keep_response is not None:
            items = [_without_logprobs(item) for item in self._output.items()]
            self._keep_response(response | {"output": items}, items)

    def _response(self, status: str) -> JsonDict:
        """Without its output."""
        return _repeated(self._body, self.request.sampling) | {
            "id": self.request.id,
            "object": "response",
            "created_at": self.request.created,
            "model": self.request.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> JsonDict:
        counts = self.generation.counts
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning},
            "total_tokens": counts.prompt + counts.completion,
        }

    def _logprobs(self, tokens: TokenList, short: bool) -> Any:
        """As a value of JSON. short: without the tokens' bytes, as in events."""
        return LongJson.of(lambda place: self._scored(tokens, place, short), len(tokens))

    def _scored(self, tokens: TokenList, place: int, short: bool) -> JsonDict:
        scored = self._scores.entry(tokens, place)
        return _short(scored) if short else scored


def _failure(answer: ErrorReply) -> JsonDict:
    """Why a response failed. Codex CLI compacts its conversation on context_length_exceeded."""
    code = "rate_limit_exceeded" if answer.status == 429 else "server_error"
    if answer.overflow is not None:
        code = "context_length_exceeded"
    return {"code": code, "message": answer.message}


def _short(scored: JsonDict) -> JsonDict:
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in scored["top_logprobs"]]
    return {"token": scored["token"], "logprob": scored["logprob"], "top_logprobs": top}


def _without_logprobs(item: JsonDict) -> JsonDict:
    if item["type"] != "message":
        return item
    parts = [part | {"logprobs": []} for part in item["content"]]
    return item | {"content": parts}


def _repeated(body: ResponsesBody, sampling: SamplingParams) -> JsonDict:
    """What a response repeats of its request."""
    tools = [tool.shown() for tool in body.tools or () if not isinstance(tool, OtherTool)]
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": _reasoning(body),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": _text(body),
        "tool_choice": _tool_choice(body),
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _reasoning(body: ResponsesBody) -> JsonDict:
    effort = None if body.reasoning is None else body.reasoning.effort
    return {"effort": effort, "summary": None}


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

"""What a model writes as output items, and the typed events that tell a stream of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.choices import TokenList
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.server.chat.responses.tools import CallForm

#: Type of an item -> how its ids begin.
_ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "cto_",
    "reasoning": "rs_",
}

#: An event without its sequence number.
type ResponseEvent = JsonDict
#: The log-probabilities of tokens as a JSON value; the second answer is the shorter form of events.
type _Scored = Callable[[TokenList, bool], Any]


def new_item_id(kind: str) -> str:
    """Of an item of this type. Nobody can guess it."""
    return _ID_PREFIXES.get(kind, "item_") + uuid.uuid4().hex


class _OpenItem:
    """An item that is being written. Events that end it come from `done`."""

    kind = ""

    def __init__(self, place: int):
        self.id = new_item_id(self.kind)
        #: Position among the output items.
        self.place = place

    def at(self) -> JsonDict:
        return {"item_id": self.id, "output_index": self.place}

    def of_part(self, kind: str, **more: Any) -> ResponseEvent:
        """An event of its one part."""
        return {"type": f"response.{kind}"} | self.at() | {"content_index": 0} | more

    def shown(self, status: str) -> JsonDict:
        """The item as it stands."""
        raise NotImplementedError

    def begun(self) -> Iterator[ResponseEvent]:
        yield {
            "type": "response.output_item.added",
            "output_index": self.place,
            "item": self.shown("in_progress"),
        }

    def done(self, status: str) -> Iterator[ResponseEvent]:
        yield {
            "type": "response.output_item.done",
            "output_index": self.place,
            "item": self.shown(status),
        }


class _Message(_OpenItem):
    kind = "message"

    #: Whether its one part has been begun.
    _has_part = False

    def __init__(self, place: int, scored: _Scored | None):
        super().__init__(place)
        self._scored = scored
        self._texts: list[str] = []
        self._tokens = TokenList.empty(None)

    def shown(self, status: str) -> JsonDict:
        content = [self._part()] if self._has_part else []
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def begun(self) -> Iterator[ResponseEvent]:
        yield from super().begun()
        self._has_part = True
        yield self.of_part("content_part.added", part=self._part())

    def more(self, text: str, tokens: TokenList | None) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        logprobs: Any = []
        if self._scored is not None and tokens is not None:
            self._keep(tokens)
            logprobs = self._scored(tokens, True)
        yield self.of_part("output_text.delta", delta=text, logprobs=logprobs)

    def done(self, status: str) -> Iterator[ResponseEvent]:
        text, logprobs = "".join(self._texts), self._logprobs(True)
        yield self.of_part("output_text.done", text=text, logprobs=logprobs)
        yield self.of_part("content_part.done", part=self._part())
        yield from super().done(status)

    def _keep(self, tokens: TokenList) -> None:
        if self._tokens.scores is None:
            self._tokens = tokens.cleared()
        self._tokens.extend(tokens)

    def _logprobs(self, short: bool) -> Any:
        if self._scored is None or not self._tokens:
            return []
        return self._scored(self._tokens, short)

    def _part(self) -> JsonDict:
        return {
            "type": "output_text",
            "text": "".join(self._texts),
            "annotations": [],
            "logprobs": self._logprobs(False),
        }


class _Reasoning(_OpenItem):
    kind = "reasoning"

    def __init__(self, place: int):
        super().__init__(place)
        self._texts: list[str] = []
        self._has_part = False

    def shown(self, status: str) -> JsonDict:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self._part()] if self._has_part else [],
        }

    def begun(self) -> Iterator[ResponseEvent]:
        yield from super().begun()
        self._has_part = True
        yield self.of_part("content_part.added", part=self._part())

    def more(self, text: str) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        yield self.of_part("reasoning_text.delta", delta=text)

    def done(self, status: str) -> Iterator[ResponseEvent]:
        yield self.of_part("reasoning_text.done", text="".join(self._texts))
        yield self.of_part("content_part.done", part=self._part())
        yield from super().done(status)

    def _part(self) -> JsonDict:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class _Call(_OpenItem):
    """A call of a client's tool. form: what the client calls the tool."""

    #: The field of its text; the events of which begin with the type.
    field = ""
    events = ""

    def __init__(self, place: int, call_id: str, form: CallForm):
        super().__init__(place)
        self._call_id = call_id
        self._form = form
        self._texts: list[str] = []

    def shown(self, status: str) -> JsonDict:
        shown = {
            "id": self.id,
            "type": self.kind,
            "status": status,
            "call_id": self._call_id,
            "name": self._form.name,
            self.field: "".join(self._texts),
        }
        if self._form.namespace is not None:
            shown["namespace"] = self._form.namespace
        return shown

    def more(self, text: str) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        yield {"type": f"response.{self.events}.delta"} | self.at() | {"delta": text}

    def done(self, status: str) -> Iterator[ResponseEvent]:
        text = {self.field: "".join(self._texts)}
        yield {"type": f"response.{self.events}.done"} | self.at() | self._named() | text
        yield from super().done(status)

    def _named(self) -> JsonDict:
        """What else the last event of its text says."""
        return {}


class _FunctionCall(_Call):
    kind = "function_call"
    field = "arguments"
    events = "function_call_arguments"

    def _named(self) -> JsonDict:
        return {"name": self._form.name}


class _CustomCall(_Call):
    kind = "custom_tool_call"
    field = "input"
    events = "custom_tool_call_input"

    def shown(self, status: str) -> JsonDict:
        """Without a status, which this type of item has only among the input items."""
        shown = super().shown(status)
        del shown["status"]
        return shown


@dataclass(slots=True)
class _Closed:
    item: _OpenItem
    status: str


class Output:
    """The output items of one response, one open at a time. scored: writes log-probabilities, if
    they are wanted. forms: what the client calls its tools, by what the model calls them.
    """

    def __init__(self, scored: _Scored | None, forms: Mapping[str, CallForm]):
        self._scored = scored
        self._forms = forms
        self._closed: list[_Closed] = []
        self._open: _OpenItem | None = None

    def items(self) -> list[JsonDict]:
        """All that have ended."""
        return [closed.item.shown(closed.status) for closed in self._closed]

    def push(self, event: AssistantEvent, tokens: TokenList | None) -> Iterator[ResponseEvent]:
        """One more event of the model's turn, and what a stream says of it. tokens: that came with
        it.
        """
        match event:
            case ContentDelta():
                item = yield from self._item(_Message, lambda place: _Message(place, self._scored))
                yield from item.more(event.text, tokens)
            case ReasoningDelta():
                item = yield from self._item(_Reasoning, _Reasoning)
                yield from item.more(event.text)
            case ToolCallStart():
                yield from self.close("completed")
                form = self._forms.get(event.name, CallForm(event.name))
                kind = _CustomCall if event.is_custom else _FunctionCall
                call = kind(len(self._closed), event.id, form)
                self._open = call
                yield from call.begun()
            case ToolCallArguments():
                assert isinstance(self._open, _Call)
                yield from self._open.more(event.text)

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """The turn is over. A model that said nothing gave an empty message."""
        if not self._closed and self._open is None:
            yield from self._item(_Message, lambda place: _Message(place, self._scored))
        yield from self.close(status)

    def close(self, status: str) -> Iterator[ResponseEvent]:
        """End the item that is open, if one is."""
        item, self._open = self._open, None
        if item is not None:
            yield from item.done(status)
            self._closed.append(_Closed(item, status))

    def _item[I: _OpenItem](self, kind: type[I], make: Callable[[int], I]) -> Any:
        """The open item if it is of this kind; else a new one, whose events come first."""
        if isinstance(self._open, kind):
            return self._open
        yield from self.close("completed")
        item = make(len(self._closed))
        self._open = item
        yield from item.begun()
        return item

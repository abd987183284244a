"""What a model writes as output items, and the typed events that tell a stream of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from jitney.engine.server.chat.choices import TokenList
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.server.chat.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    CustomInputDelta,
    CustomInputDone,
    EventLogprob,
    ItemStatus,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
)
from jitney.engine.server.chat.responses.tools import CallForm
from jitney.engine.server.chat.token_scores import TokenScores
from jitney.engine.server.http.jsonio import LongJson

#: Type of an item -> how its ids begin.
_ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "cto_",
    "reasoning": "rs_",
}


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
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def shown(self, status: ItemStatus) -> OutputItem:
        """The item as it stands."""
        raise NotImplementedError

    def begun(self) -> Iterator[ResponseEvent]:
        yield OutputItemAdded(output_index=self.place, item=self.shown("in_progress"))

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        yield OutputItemDone(output_index=self.place, item=self.shown(status))


class _OpenText(_OpenItem):
    """An item with one part, which is a text."""

    #: Whether its one part has been begun.
    _has_part = False

    def begun(self) -> Iterator[ResponseEvent]:
        yield from super().begun()
        self._has_part = True
        yield ContentPartAdded(item_id=self.id, output_index=self.place, part=self._part())

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        yield self._text_done()
        yield ContentPartDone(item_id=self.id, output_index=self.place, part=self._part())
        yield from super().done(status)

    def _text_done(self) -> ResponseEvent:
        raise NotImplementedError

    def _part(self) -> OutputText | ReasoningText:
        raise NotImplementedError


class _Message(_OpenText):
    kind = "message"

    def __init__(self, place: int, scores: TokenScores | None):
        super().__init__(place)
        self._scores = scores
        self._tokens = TokenList.empty(None)

    def shown(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self.id, status, [self._part()] if self._has_part else [])

    def more(self, text: str, tokens: TokenList | None) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        logprobs: list[EventLogprob] = []
        if tokens is not None:
            self._keep(tokens)
            logprobs = self._short(tokens)
        yield OutputTextDelta(
            item_id=self.id, output_index=self.place, delta=text, logprobs=logprobs
        )

    def _text_done(self) -> OutputTextDone:
        return OutputTextDone(
            item_id=self.id,
            output_index=self.place,
            text=self.text,
            logprobs=self._short(self._tokens),
        )

    def _keep(self, tokens: TokenList) -> None:
        if self._tokens.scores is None:
            self._tokens = tokens.cleared()
        self._tokens.extend(tokens)

    def _short(self, tokens: TokenList) -> list[EventLogprob]:
        """Without the tokens' bytes, as events have them."""
        scores = self._scores
        if scores is None:
            return []
        return LongJson.of(lambda place: EventLogprob.of(scores.entry(tokens, place)), len(tokens))

    def _part(self) -> OutputText:
        logprobs = [] if self._scores is None else self._scores.entries(self._tokens)
        return OutputText(self.text, logprobs)


class _Reasoning(_OpenText):
    kind = "reasoning"

    def shown(self, status: ItemStatus) -> OutputReasoning:
        return OutputReasoning(self.id, status, [self._part()] if self._has_part else [])

    def more(self, text: str) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        yield ReasoningTextDelta(item_id=self.id, output_index=self.place, delta=text)

    def _text_done(self) -> ReasoningTextDone:
        return ReasoningTextDone(item_id=self.id, output_index=self.place, text=self.text)

    def _part(self) -> ReasoningText:
        return ReasoningText(self.text)


class _Call(_OpenItem):
    """A call of a client's tool. form: what the client calls the tool."""

    def __init__(self, place: int, call_id: str, form: CallForm):
        super().__init__(place)
        self._call_id = call_id
        self._name = form.name
        self._namespace = UNSET if form.namespace is None else form.namespace

    def more(self, text: str) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        yield self._delta(text)

    def done(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        yield self._text_done()
        yield from super().done(status)

    def _delta(self, text: str) -> ResponseEvent:
        raise NotImplementedError

    def _text_done(self) -> ResponseEvent:
        raise NotImplementedError


class _FunctionCall(_Call):
    kind = "function_call"

    def shown(self, status: ItemStatus) -> OutputCall:
        return OutputCall(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def _delta(self, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(item_id=self.id, output_index=self.place, delta=text)

    def _text_done(self) -> ArgumentsDone:
        return ArgumentsDone(
            item_id=self.id, output_index=self.place, name=self._name, arguments=self.text
        )


class _CustomCall(_Call):
    kind = "custom_tool_call"

    def shown(self, status: ItemStatus) -> OutputCustomCall:
        """Without a status, which this type of item has only among the input items."""
        return OutputCustomCall(self.id, self._call_id, self._name, self.text, self._namespace)

    def _delta(self, text: str) -> CustomInputDelta:
        return CustomInputDelta(item_id=self.id, output_index=self.place, delta=text)

    def _text_done(self) -> CustomInputDone:
        return CustomInputDone(item_id=self.id, output_index=self.place, input=self.text)


@dataclass(slots=True)
class _Closed:
    item: _OpenItem
    status: ItemStatus


class Output:
    """The output items of one response, one open at a time. scores: writes log-probabilities,
    if they are wanted. forms: what the client calls its tools, by what the model calls them.
    """

    def __init__(self, scores: TokenScores | None, forms: Mapping[str, CallForm]):
        self._scores = scores
        self._forms = forms
        self._closed: list[_Closed] = []
        self._open: _OpenItem | None = None

    def items(self) -> list[OutputItem]:
        """All that have ended."""
        return [closed.item.shown(closed.status) for closed in self._closed]

    def push(self, event: AssistantEvent, tokens: TokenList | None) -> Iterator[ResponseEvent]:
        """One more event of the model's turn, and what a stream says of it. tokens: that came with
        it.
        """
        match event:
            case ContentDelta():
                item = yield from self._item(_Message, lambda place: _Message(place, self._scores))
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

    def finish(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """The turn is over. A model that said nothing gave an empty message."""
        if not self._closed and self._open is None:
            yield from self._item(_Message, lambda place: _Message(place, self._scores))
        yield from self.close(status)

    def close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
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

"""A model's turn as output items, and the events of its stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping

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
    """An id for an item of this type, which cannot be guessed."""
    return _ID_PREFIXES.get(kind, "item_") + uuid.uuid4().hex


class Output:
    """The output items of one response, one open at a time. scores: writes log-probabilities, or
    None. forms: the client's names of tools, by the model's.
    """

    def __init__(self, scores: TokenScores | None, forms: Mapping[str, CallForm]):
        self._scores = scores
        self._forms = forms
        #: All items that have begun; the text of the open one is in `_texts` until it is closed.
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        #: Tokens of the open message, if log-probabilities are returned.
        self._tokens = TokenList.empty(None)

    def items(self) -> list[OutputItem]:
        """All complete items."""
        return self._items if self._open is None else self._items[:-1]

    def push(self, event: AssistantEvent, tokens: TokenList | None) -> Iterator[ResponseEvent]:
        """Add an event of the model's turn and its tokens; yields the stream's events."""
        match event:
            case ToolCallStart():
                yield from self._begin(self._call(event))
                return
            case ContentDelta():
                if not isinstance(self._open, OutputMessage):
                    yield from self._begin_message()
            case ReasoningDelta():
                if not isinstance(self._open, OutputReasoning):
                    yield from self._begin(
                        OutputReasoning(new_item_id("reasoning"), "in_progress", [])
                    )
            case ToolCallArguments():
                pass
        assert self._open is not None
        self._texts.append(event.text)
        yield self._delta(self._open, event.text, tokens)

    def finish(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the turn; if there is no item, add an empty message."""
        if not self._items:
            yield from self._begin_message()
        yield from self.close(status)

    def close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the item that is open, if one is."""
        item = self._open
        if item is None:
            return
        yield self._text_done(item)
        part = self._part(item)
        if part is not None:
            yield ContentPartDone(item_id=item.id, output_index=self._index, part=part)
        if not isinstance(item, OutputCustomCall):
            item.status = status
        self._open = None
        yield OutputItemDone(output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        """Position of the newest item."""
        return len(self._items) - 1

    def _begin_message(self) -> Iterator[ResponseEvent]:
        return self._begin(OutputMessage(new_item_id("message"), "in_progress", []))

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self.close("completed")
        self._open = item
        self._items.append(item)
        self._texts.clear()
        self._tokens = TokenList.empty(None)
        yield OutputItemAdded(output_index=self._index, item=item)
        part = self._part(item)
        if part is not None:
            yield ContentPartAdded(item_id=item.id, output_index=self._index, part=part)

    def _call(self, event: ToolCallStart) -> OutputCall | OutputCustomCall:
        form = self._forms.get(event.name, CallForm(event.name))
        namespace = UNSET if form.namespace is None else form.namespace
        if event.is_custom:
            id = new_item_id("custom_tool_call")
            return OutputCustomCall(id, event.id, form.name, "", namespace)
        id = new_item_id("function_call")
        return OutputCall(id, "in_progress", event.id, form.name, "", namespace)

    def _delta(self, item: OutputItem, text: str, tokens: TokenList | None) -> ResponseEvent:
        """The event of more text of an item."""
        index = self._index
        match item:
            case OutputMessage():
                logprobs = [] if tokens is None else self._short(tokens)
                if tokens is not None and self._scores is not None:
                    if self._tokens.scores is None:
                        self._tokens = tokens.cleared()
                    self._tokens.extend(tokens)
                return OutputTextDelta(
                    item_id=item.id, output_index=index, delta=text, logprobs=logprobs
                )
            case OutputReasoning():
                return ReasoningTextDelta(item_id=item.id, output_index=index, delta=text)
            case OutputCall():
                return ArgumentsDelta(item_id=item.id, output_index=index, delta=text)
            case OutputCustomCall():
                return CustomInputDelta(item_id=item.id, output_index=index, delta=text)

    def _text_done(self, item: OutputItem) -> ResponseEvent:
        """Write the whole text into the item; returns its event."""
        index, text = self._index, "".join(self._texts)
        match item:
            case OutputMessage():
                logprobs = self._short(self._tokens)
                return OutputTextDone(
                    item_id=item.id, output_index=index, text=text, logprobs=logprobs
                )
            case OutputReasoning():
                return ReasoningTextDone(item_id=item.id, output_index=index, text=text)
            case OutputCall():
                item.arguments = text
                return ArgumentsDone(
                    item_id=item.id, output_index=index, name=item.name, arguments=text
                )
            case OutputCustomCall():
                item.input = text
                return CustomInputDone(item_id=item.id, output_index=index, input=text)

    def _part(self, item: OutputItem) -> OutputText | ReasoningText | None:
        """Write the current part into an item that has a part; returns it."""
        text = "".join(self._texts)
        match item:
            case OutputMessage():
                logprobs = [] if self._scores is None else self._scores.entries(self._tokens)
                item.content = [OutputText(text, logprobs)]
                return item.content[0]
            case OutputReasoning():
                item.content = [ReasoningText(text)]
                return item.content[0]
            case _:
                return None

    def _short(self, tokens: TokenList) -> list[EventLogprob]:
        """Log-probabilities without the tokens' bytes, as events have them."""
        scores = self._scores
        if scores is None:
            return []
        return LongJson.of(lambda place: EventLogprob.of(scores.entry(tokens, place)), len(tokens))

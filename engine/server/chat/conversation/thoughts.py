"""Separates a model's thoughts from its content, and counts their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    ContentDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.server.chat.conversation.reading import Ended, Malformed, Reading, TextReader


class AssistantParser:
    """Splits the text of one sequence into events, independent of how the text is chunked. All text
    except markers is reported. is_forced: a grammar allows only thoughts and calls, so that content
    is the beginning of a call that was cut off.
    """

    def __init__(self, reader: TextReader, *, is_forced: bool = False):
        self._reader = reader
        self._is_forced = is_forced
        #: Tokens so far that were thoughts; exact where tokens come one by one.
        self.reasoning_tokens = 0
        #: Text that may belong to the closing marker, with the number of tokens of each piece.
        self._unsure: list[tuple[str, int]] = []

    def push(self, text: str, tokens: list[int]) -> list[AssistantEvent]:
        """Add text with its number of tokens; returns its events. A possible marker is held
        back.
        """
        was_thinking = self._reader.is_thinking
        events = self._reader.feed(text)
        if was_thinking:
            self._unsure.append((text, len(tokens)))
            if not self._reader.is_thinking:
                self._count(before=self._reader.last_marker)
            elif not self._reader.is_unsure:
                self._count()
        return self._shown(events)

    def finish(self, *, is_cut: bool = False) -> list[AssistantEvent]:
        """Events that were held back. is_cut: the model would have gone on writing."""
        was_thinking = self._reader.is_thinking
        events = self._reader.close(is_cut=is_cut)
        has_called = was_thinking and not self._reader.is_thinking
        self._count(before=self._reader.last_marker if has_called else "")
        return self._shown(events)

    def _shown(self, events: list[AssistantEvent]) -> list[AssistantEvent]:
        if not self._is_forced:
            return events
        return [event for event in events if not isinstance(event, ContentDelta)]

    def _count(self, before: str = "") -> None:
        """Count the pending tokens as thoughts: all, or those before a marker."""
        texts = "".join([text for text, _ in self._unsure])
        most = texts.find(before) if before else len(texts)
        length = 0
        for text, n_tokens in self._unsure:
            length += len(text)
            if length <= most:
                self.reasoning_tokens += n_tokens
        self._unsure = []


class ThinkReader(TextReader):
    """Thoughts between two tags at the beginning of a turn; the rest is for another reader. Blanks
    around the thoughts belong to the tags. A call inside counts only if the closing tag never comes
    and only blanks follow: models leave the tag out before calls.
    """

    #: The thoughts have ended; the other reader gets the rest.
    _is_over = False
    #: Reads what may be a call among the thoughts.
    _call: TextReader | None = None

    def __init__(
        self,
        start: str,
        end: str,
        new_answer: Callable[[], TextReader],
        call_markers: tuple[str, ...],
        *,
        is_open: bool,
    ):
        """call_markers: of calls among thoughts. is_open: the prompt ends with the first tag."""
        self._start = start
        self._end = end
        self._new_answer = new_answer
        self._call_markers = call_markers
        self._answer = new_answer()
        self._is_open = self.is_thinking = is_open
        super().__init__()

    @property
    def is_unsure(self) -> bool:
        return self._call is not None or super().is_unsure

    def feed(self, text: str) -> list[AssistantEvent]:
        if self._is_over:
            return self._answer.feed(text)
        if self.passes(text):
            return self._take_events()
        for position, char in enumerate(text):
            self._reading.send(char)
            if self._is_over:
                rest = "".join(self._since_mark) + text[position + 1 :]
                self.mark()
                return self._take_events() + self._answer.feed(rest)
        return self._take_events()

    def close(self, *, is_cut: bool) -> list[AssistantEvent]:
        events = [] if self._is_over else super().close(is_cut=is_cut)
        return events + self._answer.close(is_cut=is_cut)

    def read(self) -> Reading:
        if not self._is_open:
            yield from self._open()
        if self._is_open:
            self.is_thinking = True
            yield from self.drop_blanks()
            while (yield from self.until((self._end, *self._call_markers))) != self._end:
                yield from self._hold_call()
            self.is_thinking = False
            yield from self.drop_blanks()
            yield from self.next_char()
        self._is_over = True
        while True:
            yield from self.next_char()

    def _open(self) -> Reading:
        """Find out whether the turn begins with thoughts."""
        self.mark()
        try:
            yield from self.expect_next(self._start)
            self._is_open = True
            self.mark()
        except Malformed:
            yield from self.next_char()

    def _hold_call(self) -> Reading:
        """Hold back a possible call until it turns out to be none."""
        marker = self.last_marker
        self._call = self._new_answer()
        events = self._call.feed(marker)
        has_begun = False
        tail = ""
        try:
            while has_begun or not events:
                char = yield from self.next_char()
                tail = (tail + char)[-len(self._end) :]
                if tail == self._end:
                    self._call_markers = ()  # all text so far is thoughts
                    self.unread("".join(self._since_mark))
                    return
                more = self._call.feed(char)
                has_begun = has_begun or any(isinstance(each, ToolCallStart) for each in more)
                events += more
            self.give_back()
        except Ended:
            self._end_with(events + self._call.close(is_cut=self.is_cut), marker)
            raise
        finally:
            self._call = None

    def _end_with(self, events: list[AssistantEvent], marker: str) -> None:
        """Report the text held back at the end of the turn: as calls, or as thoughts."""
        starts = [at for at, event in enumerate(events) if isinstance(event, ToolCallStart)]
        if not starts or _content(events[starts[-1] :]).strip():
            return
        self.mark()
        for (kind, _), group in groupby(events, _kind):
            first, *more = group
            if kind is ContentDelta:
                thought = _content([first, *more])
                self.say(thought if thought.strip() else "")
            elif isinstance(first, ToolCallArguments):
                text = "".join([each.text for each in more if isinstance(each, ToolCallArguments)])
                self._events.append(replace(first, text=first.text + text))
            else:
                self._events += [first, *more]
        self.is_thinking = False
        self.last_marker = marker


def _kind(event: AssistantEvent) -> tuple[type, int]:
    """The kind of an event and the call that it belongs to."""
    return type(event), getattr(event, "index", 0)


def _content(events: list[AssistantEvent]) -> str:
    return "".join([event.text for event in events if isinstance(event, ContentDelta)])

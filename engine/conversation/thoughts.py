"""What a model thinks, told from what it says and counted."""

from __future__ import annotations

from jitney.engine.conversation.events import AssistantEvent
from jitney.engine.conversation.reading import Malformed, Reading, TextReader


class AssistantParser:
    """Splits the text of one sequence, as a reader reads it.

    However the text is cut into pieces, the events say the same once neighbours of one kind are
    joined. All of the text comes out, but for the markers between its parts.
    """

    def __init__(self, reader: TextReader):
        self._reader = reader
        #: Tokens so far that were thoughts, the marker that ends them not counted. Exact where
        #: tokens come one by one.
        self.reasoning_tokens = 0
        #: Text that may belong to the marker that ends the thoughts, and how many tokens brought
        #: each piece.
        self._unsure: list[tuple[str, int]] = []

    def push(self, text: str, tokens: list[int]) -> list[AssistantEvent]:
        """Add text, and the tokens that brought it; what is certain now. Text that may be the
        beginning of a marker is held back.
        """
        was_thinking = self._reader.is_thinking
        events = self._reader.feed(text)
        if was_thinking:
            self._unsure.append((text, len(tokens)))
            if not self._reader.is_thinking:
                self._count(before=self._reader.found)
            elif not self._reader.is_unsure:
                self._count()
        return events

    def finish(self) -> list[AssistantEvent]:
        """What was held back when no more text comes."""
        self._count()
        return self._reader.close()

    def _count(self, before: str = "") -> None:
        """Tokens that were thoughts: all, or those before a marker."""
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
    around the thoughts belong to the tags.

    is_open: the prompt ends with the first tag.
    """

    #: The thoughts are, and what comes is the other reader's.
    _is_over = False

    def __init__(self, start: str, end: str, answer: TextReader, *, is_open: bool):
        self._start = start
        self._end = end
        self._answer = answer
        self._is_open = self.is_thinking = is_open
        super().__init__()

    def feed(self, text: str) -> list[AssistantEvent]:
        if self._is_over:
            return self._answer.feed(text)
        if self.passes(text):
            return self._taken()
        for position, char in enumerate(text):
            self._reading.send(char)
            if self._is_over:
                rest = "".join(self._since_mark) + text[position + 1 :]
                self.mark()
                return self._taken() + self._answer.feed(rest)
        return self._taken()

    def close(self) -> list[AssistantEvent]:
        events = [] if self._is_over else super().close()
        return events + self._answer.close()

    def read(self) -> Reading:
        if not self._is_open:
            yield from self._open()
        if self._is_open:
            self.is_thinking = True
            yield from self.drop_blanks()
            yield from self.until((self._end,))
            self.is_thinking = False
            yield from self.drop_blanks()
            yield from self.next_char()
        self._is_over = True
        while True:
            yield from self.next_char()

    def _open(self) -> Reading:
        """See whether the turn begins with thoughts."""
        self.mark()
        try:
            yield from self.expect_next(self._start)
            self._is_open = True
            self.mark()
        except Malformed:
            yield from self.next_char()

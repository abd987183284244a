"""What a model writes as content blocks, and the typed events that tell a stream of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pydantic_core import from_json

from jitney.engine.conversation.events import (
    AssistantEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.types import JsonDict

type MessageEvent = JsonDict


class _Block:
    """A block that is being written."""

    def begun(self) -> JsonDict:
        """The block as it begins."""
        raise NotImplementedError

    def more(self, text: str) -> Iterator[JsonDict]:
        """Deltas that add a text."""
        raise NotImplementedError

    def ended(self) -> Iterator[JsonDict]:
        """Deltas that come last."""
        yield from ()

    def shown(self) -> JsonDict:
        """The whole block."""
        raise NotImplementedError


class _Text(_Block):
    def __init__(self) -> None:
        self._texts: list[str] = []

    def begun(self) -> JsonDict:
        return {"type": "text", "text": ""}

    def more(self, text: str) -> Iterator[JsonDict]:
        self._texts.append(text)
        yield {"type": "text_delta", "text": text}

    def shown(self) -> JsonDict:
        return {"type": "text", "text": "".join(self._texts)}


class _Thinking(_Block):
    """is_shown: else the block says only that there were thoughts."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._texts: list[str] = []
        self._digest = hashlib.sha256()

    def begun(self) -> JsonDict:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def more(self, text: str) -> Iterator[JsonDict]:
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        if self._is_shown:
            self._texts.append(text)
            yield {"type": "thinking_delta", "thinking": text}

    def ended(self) -> Iterator[JsonDict]:
        yield {"type": "signature_delta", "signature": self._digest.hexdigest()}

    def shown(self) -> JsonDict:
        text = "".join(self._texts)
        return {"type": "thinking", "thinking": text, "signature": self._digest.hexdigest()}


class _ToolUse(_Block):
    def __init__(self, id: str, name: str) -> None:
        self._id = id
        self._name = name
        self._texts: list[str] = []

    def begun(self) -> JsonDict:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}

    def more(self, text: str) -> Iterator[JsonDict]:
        self._texts.append(text)
        yield {"type": "input_json_delta", "partial_json": text}

    def shown(self) -> JsonDict:
        return self.begun() | {"input": _arguments("".join(self._texts))}


def _arguments(text: str) -> JsonDict:
    """The object that the text is, as far as it goes: it may have been cut off."""
    try:
        value = from_json(text.encode("utf-8", "replace"), allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class ContentBlocks:
    """The content of one message, one block open at a time. shows_thoughts: else they are left
    out of their blocks.
    """

    def __init__(self, *, shows_thoughts: bool):
        self._shows_thoughts = shows_thoughts
        self._blocks: list[_Block] = []
        self._open: _Block | None = None

    def content(self) -> list[JsonDict]:
        return [block.shown() for block in self._blocks]

    def push(self, event: AssistantEvent) -> Iterator[MessageEvent]:
        """One more event of the model's turn, and what a stream says of it."""
        match event:
            case ContentDelta():
                if not isinstance(self._open, _Text):
                    yield from self._begin(_Text())
            case ReasoningDelta():
                if not isinstance(self._open, _Thinking):
                    yield from self._begin(_Thinking(self._shows_thoughts))
            case ToolCallStart():
                yield from self._begin(_ToolUse(event.id, event.name))
                return
            case ToolCallArguments():
                pass
        assert self._open is not None
        yield from self._deltas(self._open.more(event.text))

    def close(self) -> Iterator[MessageEvent]:
        """End the block that is open, if one is."""
        if self._open is not None:
            yield from self._deltas(self._open.ended())
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
            self._open = None

    def _begin(self, block: _Block) -> Iterator[MessageEvent]:
        yield from self.close()
        self._open = block
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block.begun()}
        if index == 0:
            yield {"type": "ping"}

    def _deltas(self, deltas: Iterator[JsonDict]) -> Iterator[MessageEvent]:
        index = len(self._blocks) - 1
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}

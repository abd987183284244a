"""Base of all answer formats: each makes a response body, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterator

from jitney.engine.common.slices import Pieces
from jitney.engine.core import TokenBytes
from jitney.engine.server.chat.choices import Choice, ChoiceDelta, TokenList
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.http.jsonio import in_pieces
from jitney.engine.server.http.streaming import StreamingWriter


class Format:
    """Answers of one generation: `add` and `whole`; or `opening`, `chunks`, and `tail` or `failure`
    for a stream (SSE frames). Answers come in pieces: work for `TimeSlices`.
    """

    #: Keep-alive of a stream: an event without a field, which clients skip. `vllm bench serve`
    #: (0.32) misreads a single comment and loses all later events.
    keep_alive = b"\n\n"
    #: Headers of a stream.
    stream_headers = StreamingWriter.EVENT_STREAM

    def __init__(self, generation: Generation, tokenizer: TokenBytes):
        self.generation = generation
        self.request = generation.request
        #: The merged deltas of each choice, by its index, for a plain answer.
        self._totals = [ChoiceDelta(self._no_tokens()) for _ in generation.choices]

    def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        """Add a delta to a plain answer."""
        self._totals[choice.index].extend(delta)

    def _no_tokens(self) -> TokenList:
        return TokenList.empty(self.request.top_logprobs)

    def whole(self) -> Pieces:
        """The body of a plain answer."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """The frames before the first chunk."""
        return b""

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """The frames of one delta."""
        raise NotImplementedError

    def tail(self) -> Pieces:
        """The frames after the last chunk."""
        yield from ()

    def failure(self, error: Exception, request_id: str) -> Pieces:
        """The frames after the last chunk of a stream that failed."""
        raise NotImplementedError

    @staticmethod
    def event(body: object) -> Iterator[bytes]:
        """One event of the stream."""
        yield b"data: "
        yield from in_pieces(body)
        yield b"\n\n"

"""`jitney serve --record FILE`: every ended request as one line of times and lengths, and nothing
else.

No text, no token, no id and no key is kept: tenants are numbered in the order of their first ended
request. The lines are a trace that `jitney simulate --trace FILE` reads back, with what was
measured beside what came.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import msgspec

from jitney.engine.errors import ConfigError
from jitney.engine.process.client import EngineClient
from jitney.engine.simulation.workload import TraceLine
from jitney.engine.types import EngineRequest, FinishReason, SequenceOutput

log = logging.getLogger("jitney")

#: Seconds that the last lines get to reach the disk when the server ends.
CLOSE_S = 5.0
#: Digits of the times: microseconds.
DIGITS = 6


class Recorder:
    """Writes trace lines on a thread of its own, so that a slow disk holds up nobody; a disk error
    ends the recording with one warning, and the server goes on.

    Raises ConfigError if the file cannot be made, or holds something already.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic):
        self.clock, self.start = clock, clock()
        self.path = Path(path)
        try:
            self._file = self.path.open("ab", buffering=0)
            if os.fstat(self._file.fileno()).st_size:
                self._file.close()
                raise ConfigError(
                    f"record {path} holds something already: name another file, or move it away"
                )
        except OSError as error:
            raise ConfigError(f"record {path} cannot be written: {error.strerror}") from None
        self._lines: SimpleQueue[TraceLine | None] = SimpleQueue()
        self._tenants: dict[str, str] = {}
        self._broken = False  # written by the thread alone
        self._writer = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._writer.start()

    def ended(
        self,
        request: EngineRequest,
        n_output: int,
        finish: FinishReason,
        queue_s: float | None,
        first_token: float | None,
        n_cached: int = 0,
    ) -> None:
        """A sequence has just ended. first_token: when that came (clock), None if never. Never
        waits.

        n_cached: prompt tokens that were found in the prefix cache.
        """
        if self._broken:
            return
        self._lines.put(
            TraceLine(
                at=round(max(0.0, request.arrival - self.start), DIGITS),
                n_prompt=len(request.prompt),
                n_output=n_output,
                tenant=self._label(request.tenant),
                priority=request.priority,
                finish=finish,
                queue_s=None if queue_s is None else round(queue_s, DIGITS),
                ttft_s=None
                if first_token is None
                else round(first_token - request.arrival, DIGITS),
                e2e_s=round(self.clock() - request.arrival, DIGITS),
                n_cached=n_cached,
            )
        )

    def _label(self, tenant: str) -> str:
        """A name that tells tenants apart and says nothing about them; the anonymous one stays
        so.
        """
        return (
            self._tenants.setdefault(tenant, f"tenant-{len(self._tenants) + 1}") if tenant else ""
        )

    def close(self) -> None:
        """Let the lines that wait reach the disk, for at most CLOSE_S seconds."""
        self._lines.put(None)
        self._writer.join(CLOSE_S)

    def _write_all(self) -> None:
        encode = msgspec.json.Encoder().encode_lines
        more = True
        with self._file as file:
            while more:
                lines = [self._lines.get()]
                while not self._lines.empty():
                    lines.append(self._lines.get())
                more = None not in lines
                try:
                    file.write(encode([line for line in lines if line is not None]))
                except OSError as error:
                    self._broken = True
                    log.warning("recording to %s stops: %s", self.path, error.strerror)
                    return


class RecordedStream:
    """The outputs of one request as they pass to whoever asked; each sequence that ends leaves a
    line.
    """

    def __init__(
        self, stream: AsyncIterator[SequenceOutput], request: EngineRequest, recorder: Recorder
    ):
        self._stream, self._request, self._recorder = stream, request, recorder
        self._tokens = dict.fromkeys(range(request.sampling.n), 0)  # of the sequences that are open
        self._first: dict[int, float] = {}
        self._queued: dict[int, float] = {}
        self._cached: dict[int, int] = {}
        self._reasons: dict[int, FinishReason] = {}

    def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        return self

    async def __anext__(self) -> SequenceOutput:
        try:
            output = await self._stream.__anext__()
        except asyncio.CancelledError:
            self._left()
            raise
        self._took(output)
        return output

    async def aclose(self) -> None:
        """Nobody listens any more: what is open is aborted."""
        self._left()
        if (close := getattr(self._stream, "aclose", None)) is not None:
            await close()

    def ending(self, index: int | None, reason: FinishReason) -> None:
        """Somebody asked to end a sequence (None: all), whether its last output will still be
        listened to or not.
        """
        self._reasons |= dict.fromkeys(self._tokens if index is None else (index,), reason)

    @property
    def done(self) -> bool:
        """True when every sequence has left its line."""
        return not self._tokens

    def _took(self, output: SequenceOutput) -> None:
        index = output.index
        if index not in self._tokens:
            return
        if output.tokens:
            self._first.setdefault(index, self._recorder.clock())
            self._tokens[index] += len(output.tokens)
        if output.cached_tokens:
            self._cached.setdefault(index, output.cached_tokens)  # as found when it boarded first
        if output.queued_s is not None:
            self._queued[index] = output.queued_s
        if output.finish is not None:
            self._end(index, output.finish)

    def _left(self) -> None:
        for index in list(self._tokens):
            self._end(index, self._reasons.get(index, "abort"))

    def _end(self, index: int, finish: FinishReason) -> None:
        self._recorder.ended(
            self._request,
            self._tokens.pop(index),
            finish,
            self._queued.get(index),
            self._first.get(index),
            self._cached.get(index, 0),
        )


class RecordingClient:
    """An `EngineClient` that is another one, except that a recorder sees the outputs of its
    requests on their way.
    """

    def __init__(self, client: EngineClient, recorder: Recorder):
        self._client, self._recorder = client, recorder
        self._streams: dict[str, RecordedStream] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        """As `EngineClient.submit`; a request that is refused at once leaves no line."""
        self._streams = {name: stream for name, stream in self._streams.items() if not stream.done}
        stream = RecordedStream(self._client.submit(request), request, self._recorder)
        self._streams[request.id] = stream
        return stream

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """As `EngineClient.abort`."""
        if stream := self._streams.get(request_id):
            stream.ending(index, reason)
        self._client.abort(request_id, index, reason)


def recording(client: EngineClient, recorder: Recorder) -> EngineClient:
    """The client to hand to the endpoint, so that `recorder` learns of every request that ends."""
    return cast(
        EngineClient, RecordingClient(client, recorder)
    )  # the rest of the protocol is `__getattr__`'s

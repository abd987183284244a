"""`jitney serve --record FILE`: a line of times and lengths for every ended request. No text,
token, id or key is written: tenants are numbered. The lines are a trace for `jitney simulate
--trace FILE`, with the measured times beside the arrivals.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import RawIOBase
from pathlib import Path
from queue import SimpleQueue

import msgspec

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.trace import TraceLine

_log = logging.getLogger("jitney")

#: Seconds to write the last lines when the server ends.
_CLOSE_S = 5.0
#: Digits of the times: microseconds.
_DIGITS = 6


class Recorder:
    """Writes a line for each request that ends, as a listener of the history, on a thread of its
    own, so that a slow disk delays nothing; a disk error ends the recording with one warning.
    engine: its info, or None. Raises ConfigError if the file cannot be made, or is not empty.
    """

    def __init__(
        self,
        path: str | Path,
        clock: Callable[[], float] = time.monotonic,
        engine: Callable[[], EngineInfo | None] = lambda: None,
    ):
        self.start = clock()
        self._engine = engine
        self._named = ("", "")
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

    def ended(self, record: RequestRecord) -> None:
        """Queue the line of a sequence that has just ended. Never blocks."""
        if self._broken:
            return
        model, device = self._news()
        self._lines.put(
            TraceLine(
                at=round(max(0.0, record.arrival - self.start), _DIGITS),
                n_prompt=record.n_prompt,
                n_output=record.n_output,
                tenant=self._label(record.tenant),
                priority=record.priority,
                finish=record.finish,
                queue_s=_rounded(record.queue_s),
                ttft_s=_rounded(record.ttft_s),
                e2e_s=_rounded(record.e2e_s),
                n_cached=record.cached_tokens,
                model=model,
                device=device,
            )
        )

    def _news(self) -> tuple[str, str]:
        """A line with model and device, if they changed since the line before."""
        info = self._engine()
        if info is None or self._named == (info.model.name, info.device.name):
            return "", ""
        self._named = info.model.name, info.device.name
        return self._named

    def _label(self, tenant: str) -> str:
        """A pseudonym of a tenant; "" for the anonymous one."""
        return (
            self._tenants.setdefault(tenant, f"tenant-{len(self._tenants) + 1}") if tenant else ""
        )

    def close(self) -> None:
        """Write the queued lines, for at most _CLOSE_S seconds."""
        self._lines.put(None)
        self._writer.join(_CLOSE_S)

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
                    _append(file, encode([line for line in lines if line is not None]))
                except OSError as error:
                    self._broken = True
                    _log.warning("recording to %s stops: %s", self.path, error.strerror)
                    return


def _append(file: RawIOBase, lines: bytes) -> None:
    """Write the lines completely or not at all: a partial line makes the file unreadable."""
    begun = os.fstat(file.fileno()).st_size
    rest = memoryview(lines)
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except OSError:
        with suppress(OSError):
            file.truncate(begun)
        raise


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)

"""Trace files: one request per line, with measured times in recordings."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import EngineRequest, SamplingParams

#: Field -> its name in a file.
_NAMES = {
    "at": "t",
    "n_prompt": "in",
    "n_output": "out",
    "n_shared": "shared",
    "n_cached": "cached",
}


class Arrival(msgspec.Struct, frozen=True, rename=_NAMES):
    """A request of a trace."""

    #: Seconds from the start.
    at: float
    #: Lengths in tokens.
    n_prompt: int
    n_output: int
    #: Tenant in the fair order; "": none.
    tenant: str = ""
    #: Lower ones board sooner.
    priority: int = 0
    #: Number of its conversation, from 1; 0: none. Its prompts are prefixes of one another.
    conversation: int = 0
    #: Leading prompt tokens that all conversations share (a system prompt).
    n_shared: int = 0
    #: Prompt tokens that the recorded engine found in its prefix cache.
    n_cached: int = 0

    @classmethod
    def read_all(cls, path: str | Path) -> list[Arrival]:
        """The requests of a trace file, by time. Raises ConfigError."""
        return [line.arrival for line in TraceLine.read_all(path)]

    def request(self, name: str, prompt: list[int], at: float) -> EngineRequest:
        """A greedy request that arrives at `at` (loop's clock, s) and ends by length."""
        n_output = max(1, self.n_output)
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=n_output, ignore_eos=True)
        return EngineRequest(
            id=name,
            prompt=prompt,
            sampling=sampling,
            arrival=at,
            tenant=self.tenant,
            priority=self.priority,
        )


class TraceLine(Arrival, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A line of a trace file; only recordings have `n_cached` and the fields here."""

    #: Seconds from arrival to seat, first token and end; None: never, or not measured.
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    #: A FinishReason.
    finish: str | None = None
    #: What answered; on the first line, and where it changes.
    model: str = ""
    device: str = ""

    @property
    def arrival(self) -> Arrival:
        return Arrival(*[getattr(self, name) for name in Arrival.__struct_fields__])

    @classmethod
    def read_all(cls, path: str | Path) -> list[TraceLine]:
        """All lines of a trace or recording, by time. Raises ConfigError, naming file and line."""
        rows = _bytes_of(path).splitlines()
        lines = []
        for number, row in enumerate(rows, 1):
            if row.strip():
                lines.append(_read_line(row, f"{path}, line {number}"))
        if not lines:
            raise ConfigError(f"{path}: holds no request")
        return sorted(lines, key=lambda line: line.at)


_LINE = msgspec.json.Decoder(TraceLine)


def _bytes_of(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _read_line(row: bytes, where: str) -> TraceLine:
    try:
        line = _LINE.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'{where}: {error}; a line looks like {{"t": 0.5, "in": 120, "out": 64}}'
        ) from None
    error = _error_in(line)
    if error:
        raise ConfigError(f"{where}: {error}")
    return line


def _error_in(line: TraceLine) -> str:
    """The first value that is out of range, or ""."""
    if not (line.at >= 0 and math.isfinite(line.at)) or line.n_prompt < 1 or line.n_output < 0:
        return "t must be 0 or more, in at least 1 and out at least 0"
    if line.conversation < 0 or not 0 <= line.n_shared <= line.n_prompt:
        return "conversation must be 0 or more, shared from 0 to in"
    if line.n_shared and not line.conversation:
        return "shared is for requests with a conversation above 0"
    if not 0 <= line.n_cached <= line.n_prompt:
        return "cached must be 0 to in"
    return ""

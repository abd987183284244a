"""The lines of a trace file: one request each, with what was measured of it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import EngineRequest, SamplingParams


class Arrival(msgspec.Struct, frozen=True):
    """One request to come."""

    #: Seconds from the start.
    at: float
    #: Lengths in tokens.
    n_prompt: int
    n_output: int
    #: Whose it is in the fair order; empty: nobody's.
    tenant: str = ""
    #: Lower ones board sooner.
    priority: int = 0
    #: Its number among the traffic's conversations, from 1; 0: it belongs to none, and its prompt
    #: begins like no other. Prompts of one conversation begin alike, the shorter is the start of
    #: the longer.
    conversation: int = 0
    #: So many first tokens of a conversation's prompts are those of every conversation (a system
    #: prompt).
    n_shared: int = 0
    #: Prompt tokens that a recorded engine found in its prefix cache.
    n_cached: int = 0

    @classmethod
    def read_all(cls, path: str | Path) -> list[Arrival]:
        """The requests of a trace file, by time. ConfigError as in `TraceLine.read_all`."""
        return [line.arrival for line in TraceLine.read_all(path)]

    def request(self, name: str, prompt: list[int], at: float) -> EngineRequest:
        """It as it comes at `at` (seconds of the loop's clock): greedy, and ended by length
        alone.
        """
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


class TraceLine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={
        "at": "t",
        "n_prompt": "in",
        "n_output": "out",
        "n_shared": "shared",
        "n_cached": "cached",
    },
):
    """One line of a trace file. What follows `n_shared` was measured, and stands only in recordings
    (seconds).

    n_cached: prompt tokens that were found in the prefix cache. model, device: what answered; on
    the first line of a recording, and where it changes.
    """

    #: This and the next six: as in `Arrival`.
    at: float
    n_prompt: int
    n_output: int
    tenant: str = ""
    priority: int = 0
    conversation: int = 0
    n_shared: int = 0
    #: From its arrival to its seat, to its first token, and to its end; None: never, or not
    #: measured.
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    #: Why it ended, a FinishReason.
    finish: str | None = None
    n_cached: int = 0
    model: str = ""
    device: str = ""

    @property
    def arrival(self) -> Arrival:
        return Arrival(*[getattr(self, name) for name in Arrival.__struct_fields__])

    @classmethod
    def read_all(cls, path: str | Path) -> list[TraceLine]:
        """All lines of a trace or a recording, by time. ConfigError names the file, the line and
        what is wrong with it.
        """
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
    wrong = _fault_of(line)
    if wrong:
        raise ConfigError(f"{where}: {wrong}")
    return line


def _fault_of(line: TraceLine) -> str:
    """What no request can be, "" if nothing."""
    if not (line.at >= 0 and math.isfinite(line.at)) or line.n_prompt < 1 or line.n_output < 0:
        return "t must be 0 or more, in at least 1 and out at least 0"
    if line.conversation < 0 or not 0 <= line.n_shared <= line.n_prompt:
        return "conversation must be 0 or more, shared from 0 to in"
    if line.n_shared and not line.conversation:
        return "shared is for requests with a conversation above 0"
    if not 0 <= line.n_cached <= line.n_prompt:
        return "cached must be 0 to in"
    return ""

"""The pulse of one engine: the figures for a page of many engines, twice a second. Each pulse is
complete, so a lost one does no harm. Pulses do not reveal whose requests run.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple, Never

import msgspec
import numpy as np

from jitney.dashboard import sse
from jitney.dashboard.snapshot import seat_columns
from jitney.dashboard.sse import SEAT_NUMBERS, SEAT_STATES
from jitney.dashboard.viewers import LiveFeed, Viewer
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.server import EngineClient, Identity

#: Version of pulses: incremented with every incompatible change.
_PULSE_VERSION = 1


class _SeatCode(NamedTuple):
    #: Letters of seats; the index is that of the state in SEAT_STATES times `levels`, plus the
    #: level.
    letters: str
    #: Levels of a sequence's progress.
    levels: int


_SEAT_CODE = _SeatCode("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", 16)
_LEVELS = _SEAT_CODE.levels
#: Most seats of an engine that are accepted.
_MOST_SEATS = 65_536
#: Pulses a second, and most seconds between pulses without a change.
_HZ = 2.0
_HEARTBEAT_S = 1.0
_LETTERS = np.frombuffer(_SEAT_CODE.letters.encode(), np.uint8)
_N_PROMPT, _N_COMPUTED, _N_OUTPUT, _MAX_TOKENS = (
    SEAT_NUMBERS.index(name) for name in ("n_prompt", "n_computed", "n_output", "max_tokens")
)
_FREE = _SEAT_CODE.letters[SEAT_STATES.index("free") * _LEVELS]
_PREFILL, _DECODE = SEAT_STATES.index("prefill"), SEAT_STATES.index("decode")

type _Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
type _Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
type _Word = Annotated[str, msgspec.Meta(max_length=500)]


class _Loading(msgspec.Struct, frozen=True):
    #: As `messages.Progress` has them.
    stage: _Word
    done: _Count
    total: _Count


class Pulse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The current state of an engine. Totals count from its server's start."""

    #: Most bytes of a pulse.
    most_bytes: ClassVar[int] = 2 * _MOST_SEATS
    #: The encoding of `seats`.
    seat_code: ClassVar[_SeatCode] = _SEAT_CODE

    #: _PULSE_VERSION of the sender.
    version: _Count
    #: Id of the server's run; changes at its restart.
    run: _Word
    #: Seconds of the engine's time.monotonic().
    t: float
    #: As `sse.KeyFrame` has it.
    state: _Word
    model: _Word = ""
    #: One letter of `seat_code` per seat; empty while no engine serves.
    seats: Annotated[str, msgspec.Meta(max_length=_MOST_SEATS, pattern="^[A-Za-z0-9+/]*$")] = ""
    #: Seats taken, as of the newest step's plan.
    seats_busy: _Count = 0
    #: Sequences without a seat, and the predicted wait of a new request in seconds.
    waiting: _Count = 0
    predicted_wait_s: _Seconds = 0.0
    #: KV pages in use, and all.
    pages_used: _Count = 0
    pages: _Count = 0
    #: Total tokens: prompt tokens computed, and output tokens.
    prompt_tokens: _Count = 0
    output_tokens: _Count = 0
    #: Total useful rows, see `row_kinds`.
    useful_rows: _Count = 0
    #: Total sequences that boarded, and prompt tokens that were found in the prefix cache.
    boarded: _Count = 0
    cached_tokens: _Count = 0
    #: Engine processes that were started to replace one that ended.
    restarts: _Count = 0
    #: Whole seconds since the core's last message.
    silent_s: _Count = 0
    #: None unless it loads.
    progress: _Loading | None = None

    @classmethod
    def read(cls, data: bytes) -> Pulse:
        """A pulse from JSON. Raises ValueError if it is invalid or of another version."""
        pulse = _decode(data)
        if pulse.version != _PULSE_VERSION:
            raise ValueError(f"version {pulse.version}")
        return pulse

    @property
    def taken(self) -> int:
        """Occupied seats. While requests wait, a seat that was just freed counts as occupied."""
        seated = len(self.seats) - self.seats.count(_FREE)
        return max(seated, min(self.seats_busy, len(self.seats))) if self.waiting else seated


_decode = msgspec.json.Decoder(Pulse).decode


def _seat_letters(client: EngineClient, *, with_levels: bool) -> str:
    """All seats, a letter each. with_levels: with the progress of their sequences."""
    seats = seat_columns(client.history)
    levels = np.zeros(len(seats.state), np.int64)
    if with_levels:
        levels = _levels(seats.state, seats.numbers)
    return _LETTERS[seats.state * np.int64(_LEVELS) + levels].tobytes().decode()


def _levels(state: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """int64[S]: 0 to _LEVELS - 1; the last level is for complete sequences. numbers:
    SEAT_NUMBERS.
    """
    reads, writes = state == _PREFILL, state == _DECODE
    reached = np.where(reads, numbers[_N_COMPUTED], numbers[_N_OUTPUT])
    end = np.where(reads, numbers[_N_PROMPT], numbers[_MAX_TOKENS])
    levels = (_LEVELS - 1) * reached // np.maximum(end, 1)
    return np.where(reads | writes, np.clip(levels, 0, _LEVELS - 1), 0)


def _useful_rows(rows: Mapping[str, int]) -> int:
    """rows: computed so far, by kind."""
    return sum(rows[kind.name] for kind in ROW_KIND_TABLE.values() if kind.useful)


def _pulse_of(client: EngineClient, run: str, now: float, *, with_levels: bool) -> Pulse:
    """The current pulse; with_levels: see `_seat_letters`."""
    counters, info = client.counters, client.info
    model, pages, seats = "", 0, ""
    if info is not None:
        model, pages = info.model.name, info.sizes.pages
        if client.state in ("ready", "draining"):
            seats = _seat_letters(client, with_levels=with_levels)
    return Pulse(
        version=_PULSE_VERSION,
        run=run,
        t=round(now, 3),
        state=client.state,
        model=model,
        seats=seats,
        seats_busy=counters.gauge("seats_busy"),
        waiting=counters.waiting,
        predicted_wait_s=round(counters.predicted_wait, 3),
        pages_used=counters.gauge("pages_used"),
        pages=pages,
        prompt_tokens=counters.rows["prefill"],
        output_tokens=counters.rows["decode"] + counters.rows["accepted"],
        useful_rows=_useful_rows(counters.rows),
        boarded=client.history.boarded,
        cached_tokens=client.history.cached_tokens,
        restarts=counters.engine_restarts,
        silent_s=int(client.last_step_age()),
        progress=_loading(client),
    )


def _loading(client: EngineClient) -> _Loading | None:
    progress = client.progress
    if progress is None or client.state not in ("loading", "restarting"):
        return None
    return _Loading(progress.stage, progress.done, progress.total)


class Pulses(LiveFeed):
    """Sends the pulses of one engine."""

    _what = "the pulse"

    def __init__(self, client: EngineClient):
        super().__init__()
        self.client = client
        self.run = uuid.uuid4().hex[:8]

    def _welcome(self, last_id: str, identity: Identity) -> Viewer:
        return Viewer([self._encoded(identity, time.monotonic())], identity=identity)

    def _encoded(self, identity: Identity, now: float) -> bytes:
        """The pulse; how far others' sequences have come is for administrators."""
        pulse = _pulse_of(self.client, self.run, now, with_levels=identity.is_admin)
        return sse.encode("pulse", pulse)

    async def _send_all(self) -> Never:
        before, sent_at = None, 0.0
        while True:
            now = time.monotonic()
            pulse = _pulse_of(self.client, self.run, now, with_levels=True)
            same = before is not None and msgspec.structs.replace(before, t=pulse.t) == pulse
            if not same or now - sent_at >= _HEARTBEAT_S:
                self._send(sse.encode("pulse", pulse), now)
                before, sent_at = pulse, now
            await asyncio.sleep(1 / _HZ)

    def _send(self, whole: bytes, now: float) -> None:
        """Send a pulse to all viewers. whole: the administrators' pulse."""
        others = b""
        for viewer in self._viewers:
            if not viewer.identity.is_admin:
                others = others or self._encoded(viewer.identity, now)
            viewer.put(whole if viewer.identity.is_admin else others)

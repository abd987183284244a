"""State of one replica of a fleet: its newest pulse, its rates, and when it was lost."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

import msgspec

from jitney.dashboard import sse
from jitney.dashboard.pulse import Pulse
from jitney.dashboard.relay import Relay
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict

_log = logging.getLogger("jitney.dashboard")

#: Seconds without a pulse after which a replica is gone. Pulses come at least once a second.
_SILENCE_S = 3.0
#: First and longest pause in seconds between attempts to reach a lost replica.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 5.0
#: Window of rates in seconds.
_RATE_S = 5.0
#: Seconds of silence of the core after which a serving engine is shown as silent.
_QUIET_S = 3
_MILLION = 1e6
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")
_DATA = b"data: "
_OTHER_VERSION = "{} is of another version than this page"


class Card(TypedDict):
    """The state of one replica on the page; of a lost replica, the last one."""

    name: str
    url: str
    #: "connecting" before the first pulse; "starting" while its new process does not answer yet;
    #: "gone" while it does not answer; "silent" while only its server answers; else the state of
    #: `sse.KeyFrame`.
    state: str
    #: Time of the last pulse; null unless it is gone.
    since: float | None
    #: Reason why it is gone; empty if it is not.
    trouble: str
    model: str
    #: `Pulse.seat_code`, one a seat.
    seats: str
    #: Of them, those that are taken; and sequences that wait for one.
    taken: int
    waiting: int
    #: Predicted wait of a new request; null unless it is ready.
    predicted_wait_s: float | None
    #: KV pages in use, and all.
    pages_used: int
    pages: int
    #: Output and prompt tokens a second.
    output_rate: float
    prompt_rate: float
    #: Sequences that boarded a second, and the share of prompt tokens found in the prefix cache;
    #: null: none were read.
    boarding_rate: float
    hits: float | None
    #: Cost of a million useful tokens; null without a price per hour, or without tokens.
    price: float | None
    #: Restarts of engines and servers.
    restarts: int
    #: While it loads: stage, done, total.
    progress: JsonDict | None


class ReplicaAddress(NamedTuple):
    """The address of a replica."""

    url: str
    #: Its API key; empty: none needed.
    key: str = ""

    @classmethod
    def read(cls, text: str, key: str) -> tuple[str, ReplicaAddress]:
        """A replica's name and address from "NAME=URL", or from a URL alone, whose host and port
        are then its name. Raises ConfigError.
        """
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            return cls.name_of(text), cls(text, key)
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a replica: letters, digits and . _ : - only, 63 of them at "
                "most"
            )
        return name, cls(url, key)

    @staticmethod
    def name_of(url: str) -> str:
        """A replica's name on the page, from its URL or its own name."""
        place = url.partition("://")[2] or url
        name = re.sub(r"[^A-Za-z0-9._:-]+", "-", place.rstrip("/")).strip("-.:_")
        return name[:63] or "replica"


class _Rates:
    """Tokens a second, over the last _RATE_S."""

    def __init__(self) -> None:
        self._pulses: deque[Pulse] = deque()

    def add(self, now: Pulse) -> None:
        pulses = self._pulses
        pulses.append(now)
        while len(pulses) > 2 and pulses[1].t <= now.t - _RATE_S:
            pulses.popleft()

    def clear(self) -> None:
        self._pulses.clear()

    def of(self, name: str) -> float:
        """Rate of a total of `Pulse`; 0 before there are two."""
        if len(self._pulses) < 2:
            return 0.0
        first, last = self._pulses[0], self._pulses[-1]
        seconds = last.t - first.t
        return (getattr(last, name) - getattr(first, name)) / seconds if seconds > 0 else 0.0


def price_of(per_hour: float | None, useful_rate: float) -> float | None:
    """Cost of a million useful tokens at this rate, to three digits."""
    if per_hour is None or useful_rate <= 0:
        return None
    return float(f"{per_hour / 3600 / useful_rate * _MILLION:.3g}")


def hit_share(cached: float, computed: float) -> float | None:
    """Share of prompt tokens that were found in a prefix cache; None without any."""
    read = cached + computed
    return round(cached / read, 3) if read > 0 else None


def rounded(rate: float) -> float:
    """A rate rounded for display: large ones to whole tokens a second."""
    return round(rate, 1) if rate < 10 else float(round(rate))


@dataclass(eq=False)
class Member:
    """One replica of the fleet."""

    name: str
    engine: RemoteEngine
    #: Relay of its own page's feed.
    relay: Relay = field(init=False)
    #: The newest pulse; None before the first.
    pulse: Pulse | None = None
    #: Time of the last pulse, by time.monotonic() and since 1970.
    heard_at: float = 0.0
    heard: float = 0.0
    #: Whether it does not answer, and the reason.
    gone: bool = False
    trouble: str = ""
    #: Whether the fleet has started its process, which has not answered yet.
    starting: bool = False
    #: Restarts counted by earlier servers of this name, and the number of those servers.
    past_restarts: int = 0
    rates: _Rates = field(default_factory=_Rates)

    def __post_init__(self) -> None:
        self.relay = Relay(self.engine)

    @property
    def is_known(self) -> bool:
        """Whether its state is known: it sent a pulse, or is gone."""
        return bool(self.heard_at) or self.gone

    @property
    def answers(self) -> bool:
        return self.pulse is not None and bool(self.heard_at) and not self.gone

    def move_to(self, engine: RemoteEngine) -> None:
        self.engine = engine
        self.relay = Relay(engine)
        self.look_away()

    def take(self, pulse: Pulse) -> None:
        before = self.pulse
        if before is not None and before.run != pulse.run:
            self.past_restarts += before.restarts + 1
            self.rates.clear()
        if self.gone:
            self.rates.clear()
        self.pulse = pulse
        self.rates.add(pulse)
        self.gone, self.trouble = False, ""
        self.heard_at, self.heard = time.monotonic(), time.time()

    def told_starting(self, starting: bool) -> None:
        """Note whether the fleet has started its process, which has not answered yet. Once it has,
        earlier attempts to connect say nothing about it.
        """
        if self.starting and not starting and self.gone:
            self.look_away()
        self.starting = starting

    def lost(self, trouble: str) -> None:
        self.gone, self.trouble = True, trouble
        if not self.heard:
            self.heard = time.time()

    def check_silence(self, now: float) -> None:
        """now: time.monotonic()."""
        if self.answers and now - self.heard_at > _SILENCE_S:
            self.lost(f"{self.engine.url} says nothing any more")

    async def follow(self) -> None:
        """Read its pulses for ever; reconnect while it is gone."""
        wait = _FIRST_WAIT_S
        while True:
            try:
                async for event in self.engine.feed("pulse", Pulse.most_bytes):
                    self._take_event(event)
                    wait = _FIRST_WAIT_S
                self.lost(self.trouble or f"{self.engine.url} has ended its feed")
            except Unreachable as error:
                self.lost(str(error))
            except Exception:
                _log.exception("the pulse of %s could not be read", self.engine.url)
                self.lost("its pulse could not be read; this server's log says why")
            await asyncio.sleep(wait)
            wait = min(_LONGEST_WAIT_S, 1.5 * wait)

    def _take_event(self, event: bytes) -> None:
        """Handle an event of its feed. Raises Unreachable for one of another version."""
        name, _, rest = event.partition(b"\n")
        if name == b"event: bye":
            self.trouble = str(sse.decode(event)[1]["reason"])[:500]
            return
        if name != b"event: pulse":
            return
        try:
            pulse = Pulse.read(rest.strip().removeprefix(_DATA))
        except ValueError:
            raise Unreachable(_OTHER_VERSION.format(self.engine.url)) from None
        self.take(pulse)

    def look_away(self) -> None:
        """Drop the last figures, which would be stale for the next viewer."""
        self.gone, self.trouble = False, ""
        self.heard_at = self.heard = 0.0
        self.rates.clear()

    @property
    def state(self) -> str:
        if self.starting and not self.answers:
            return "starting"
        if self.gone:
            return "gone"
        if self.pulse is None or not self.heard_at:
            return "connecting"
        if self.pulse.state == "ready" and self.pulse.silent_s >= _QUIET_S:
            return "silent"
        return self.pulse.state

    def card(self, price_per_hour: float | None) -> Card:
        pulse = self.pulse or _NOTHING
        state = self.state
        since, price, wait_s, hits = None, None, None, None
        output = prompt = boarding = 0.0
        if state == "ready":
            wait_s = round(pulse.predicted_wait_s, 1)
        if state == "gone":
            since = round(self.heard)
        if self.answers:
            output, prompt = self.rates.of("output_tokens"), self.rates.of("prompt_tokens")
            boarding = self.rates.of("boarded")
            hits = hit_share(self.rates.of("cached_tokens"), prompt)
            price = price_of(price_per_hour, self.rates.of("useful_rows"))
        return {
            "name": self.name,
            "url": self.engine.url,
            "state": state,
            "since": since,
            "trouble": self.trouble if state == "gone" else "",
            "model": pulse.model,
            "seats": pulse.seats,
            "taken": pulse.taken,
            "waiting": pulse.waiting,
            "predicted_wait_s": wait_s,
            "pages_used": pulse.pages_used,
            "pages": pulse.pages,
            "output_rate": rounded(output),
            "prompt_rate": rounded(prompt),
            "boarding_rate": rounded(boarding),
            "hits": hits,
            "price": price,
            "restarts": self.past_restarts + pulse.restarts,
            "progress": msgspec.to_builtins(pulse.progress),
        }


_NOTHING = Pulse(version=0, run="", t=0.0, state="connecting")

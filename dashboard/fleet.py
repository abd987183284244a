"""The live feed of a fleet: pulses of the replicas are read while there are viewers, and changes
are sent to all. This module defines the fields of its events.

Events: "hello", "fleet" (`_FleetFrame`), "delta" (`_FleetDelta`) and "bye". Times are seconds since
1970 by this server's clock.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, Never, Required, TypedDict

from jitney.dashboard import sse
from jitney.dashboard.fleet_member import (
    Card,
    Member,
    ReplicaAddress,
    hit_share,
    price_of,
    rounded,
)
from jitney.dashboard.pulse import Pulse
from jitney.dashboard.remote import RemoteEngine
from jitney.dashboard.sse import SEAT_STATES
from jitney.dashboard.viewers import LiveFeed, Viewer
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import Identity

#: Version of the events: incremented with every incompatible change.
_FLEET_VERSION = 2
#: Most frames a second, and most bytes a second for a viewer, first key frames excepted: a large
#: frame is followed by a longer pause.
_HZ = 2.0
_MOST_BYTES_PER_S = 64_000
#: Seconds without a change after which a frame goes out all the same.
_HEARTBEAT_S = 1.0
#: Seconds that replicas are watched after a single request, and that such a request waits for their
#: first pulses.
_GLANCE_S, _FIRST_WORD_S = 15.0, 0.5
#: States of replicas that send no pulses.
_SILENT = ("gone", "connecting", "starting")
#: Letter of a seat -> letter of the same state without the sequence's progress.
_WITHOUT_LEVELS = str.maketrans(
    {
        letter: Pulse.seat_code.letters[place - place % Pulse.seat_code.levels]
        for place, letter in enumerate(Pulse.seat_code.letters)
    }
)


class Endpoint(NamedTuple):
    """State of an endpoint in front of the replicas."""

    #: Reason why /readyz fails; empty: it succeeds.
    unready: str = ""
    #: Models without a ready engine, whose requests are refused.
    unready_models: tuple[str, ...] = ()
    #: Requests of the last minute that were answered 429 or 5xx, by status; and since its start.
    refused: Mapping[str, int] = MappingProxyType({})
    refused_ever: int = 0
    #: Replicas, by name, whose process was started and that have not answered yet.
    starting: frozenset[str] = frozenset()
    #: Requests since its start by how their replica was chosen (`FleetMetrics.choices`).
    choices: Mapping[str, int] = MappingProxyType({})


class _Sums(TypedDict):
    """The whole fleet."""

    replicas: int
    #: Ready replicas among them.
    ready: int
    seats: int
    #: Occupied seats, and waiting sequences.
    taken: int
    waiting: int
    #: The longest predicted wait of the ready replicas, and that replica; null if none is ready.
    predicted_wait_s: float | None
    worst: str
    #: Output and prompt tokens a second.
    output_rate: float
    prompt_rate: float
    #: Cost of a million useful tokens over all replicas that answer; null as in `Card`.
    price: float | None
    #: Fields of `Endpoint`, if there is one. Without one, `refused` is null, and the fleet is
    #: unready if no replica is ready.
    unready: str
    unready_models: list[str]
    refused: dict[str, int] | None
    refused_ever: int
    choices: dict[str, int]
    #: Recent share of prompt tokens found in a prefix cache; null: there were no prompts.
    hits: float | None


class _Hello(TypedDict):
    """The first event."""

    version: int  # _FLEET_VERSION
    signed_in: bool  # the viewer may sign out
    role: str  # "admin", or "user", who cannot open a replica's own page
    seat_states: tuple[str, ...]  # `sse.SEAT_STATES`
    seat_letters: str  # `Pulse.seat_code`
    levels: int  # `Pulse.seat_code`
    price_per_hour: float | None  # of one replica
    compares: bool  # "rollouts" answers, to administrators
    keeps_work: bool  # "work" answers, and the API is beside the page


class _FleetFrame(TypedDict):
    """All replicas, sorted by name."""

    #: Seconds since 1970.
    t: float
    replicas: list[Card]
    sums: _Sums


class _FleetDelta(TypedDict, total=False):
    """Changes since the frame or delta before."""

    t: Required[float]
    #: Fields of `Card` by the replica's name.
    replicas: dict[str, JsonDict]
    #: Fields of `_Sums`.
    sums: JsonDict


class FleetView(LiveFeed):
    """The replicas of a fleet and their feed.

    price_per_hour: of one replica, in any currency. find: where the replicas are now, by name, if
    they come and go. endpoint: what the one in front of them says of itself, if there is one.
    """

    _what = "the fleet's feed"

    def __init__(
        self,
        replicas: Mapping[str, RemoteEngine] = MappingProxyType({}),
        *,
        find: Callable[[], Mapping[str, ReplicaAddress]] | None = None,
        endpoint: Callable[[], Endpoint] | None = None,
        price_per_hour: float | None = None,
    ):
        super().__init__()
        self.members: dict[str, Member] = {}
        self.price_per_hour = price_per_hour
        #: Whether visitors have shown a key.
        self.signed_in = False
        #: Whether rollouts exist, which the page can request.
        self.compares = False
        #: Whether the endpoint stores batches and jobs.
        self.keeps_work = False
        self._find = find
        self._endpoint = endpoint
        self._places: dict[str, ReplicaAddress] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        #: Timer that stops watching after `glance`.
        self._leaving: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        #: What viewers were sent last.
        self._sent: _FleetFrame | None = None
        self._sent_at = 0.0
        self.set_replicas(replicas)

    def set_replicas(self, replicas: Mapping[str, RemoteEngine]) -> None:
        """Set the replicas to watch. A known name is the same replica, perhaps at a new address."""
        before, self.members = self.members, {}
        for name in sorted(replicas, key=_in_order):
            self.members[name] = self._member(before.get(name), name, replicas[name])
        for name in before.keys() - replicas.keys():
            self._let_go(before[name])
        if self._task is not None:
            self._start()

    def _member(self, member: Member | None, name: str, engine: RemoteEngine) -> Member:
        if member is None:
            return Member(name, engine)
        if member.engine is not engine:
            self._let_go(member)
            member.move_to(engine)
        return member

    def _let_go(self, member: Member) -> None:
        if member.name in self._following:
            self._following.pop(member.name).cancel()
        closing = asyncio.create_task(member.engine.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def look_for_replicas(self) -> None:
        places = dict(self._find()) if self._find is not None else {}
        if places == self._places:
            return
        moved = places.items() - self._places.items()
        self._places = places
        engines = {name: self.members[name].engine for name in places if name in self.members}
        self.set_replicas(engines | {name: RemoteEngine(*place) for name, place in moved})

    async def close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        self._stop()
        await asyncio.gather(*(member.engine.close() for member in self.members.values()))

    def _welcome(self, last_id: str, identity: Identity) -> Viewer:
        self.look_for_replicas()
        viewer = Viewer([self._hello(identity)], lost=True, identity=identity)
        if self._sent is not None:
            self._send_all_of_it(viewer)
        return viewer

    async def glance(self) -> None:
        """Watch the replicas for a single request; waits briefly for those without a pulse yet."""
        self.look_for_replicas()
        self._start()
        loop = asyncio.get_running_loop()
        if self._leaving is not None:
            self._leaving.cancel()
        self._leaving = loop.call_later(_GLANCE_S, self._leave)
        end = loop.time() + _FIRST_WORD_S
        while loop.time() < end and not all(one.is_known for one in self.members.values()):
            await asyncio.sleep(_FIRST_WORD_S / 10)

    def _leave(self) -> None:
        """Stop watching if no viewer has come since the last one left."""
        self._leaving = None
        if not self._viewers:
            self._stop()

    def _start(self) -> None:
        """Start a task for each replica, and the one that sends frames."""
        for name, member in self.members.items():
            if name not in self._following:
                self._following[name] = asyncio.create_task(member.follow())
        super()._start()

    def _stop(self) -> None:
        if self._leaving is not None:
            return  # after the glance
        super()._stop()
        for task in self._following.values():
            task.cancel()
        self._following.clear()
        self._sent = None
        for member in self.members.values():
            member.look_away()

    def _hello(self, identity: Identity) -> bytes:
        data: _Hello = {
            "version": _FLEET_VERSION,
            "signed_in": self.signed_in,
            "role": identity.role.name.lower(),
            "seat_states": SEAT_STATES,
            "seat_letters": Pulse.seat_code.letters,
            "levels": Pulse.seat_code.levels,
            "price_per_hour": self.price_per_hour,
            "compares": self.compares,
            "keeps_work": self.keeps_work,
        }
        return sse.encode("hello", data)

    def frame(self) -> _FleetFrame:
        now = time.monotonic()
        endpoint = self._endpoint() if self._endpoint is not None else None
        for name, member in self.members.items():
            member.check_silence(now)
            member.told_starting(endpoint is not None and name in endpoint.starting)
        cards = [member.card(self.price_per_hour) for member in self.members.values()]
        return {"t": round(time.time(), 1), "replicas": cards, "sums": self._sums(cards, endpoint)}

    def _sums(self, cards: list[Card], endpoint: Endpoint | None) -> _Sums:
        ready = [card for card in cards if card["state"] == "ready"]
        answering = [card for card in cards if card["state"] not in _SILENT]
        unready = "" if ready or not cards else "no replica is ready"
        wait_s, worst = None, ""
        if ready:
            slowest = max(ready, key=lambda card: card["predicted_wait_s"] or 0.0)
            wait_s, worst = slowest["predicted_wait_s"], slowest["name"]
        return {
            "replicas": len(cards),
            "ready": len(ready),
            "seats": sum(map(len, map(itemgetter("seats"), answering))),
            "taken": sum(map(itemgetter("taken"), answering)),
            "waiting": sum(map(itemgetter("waiting"), answering)),
            "predicted_wait_s": wait_s,
            "worst": worst,
            "output_rate": rounded(sum(map(itemgetter("output_rate"), answering))),
            "prompt_rate": rounded(sum(map(itemgetter("prompt_rate"), answering))),
            "price": self._price(),
            "unready": unready if endpoint is None else endpoint.unready,
            "unready_models": [] if endpoint is None else list(endpoint.unready_models),
            "refused": None if endpoint is None else dict(endpoint.refused),
            "refused_ever": 0 if endpoint is None else endpoint.refused_ever,
            "choices": {} if endpoint is None else dict(endpoint.choices),
            "hits": self._hits(),
        }

    def _hits(self) -> float | None:
        members = [member for member in self.members.values() if member.answers]
        cached = sum(member.rates.of("cached_tokens") for member in members)
        return hit_share(cached, sum(member.rates.of("prompt_tokens") for member in members))

    def _price(self) -> float | None:
        """Cost of a million useful rows over the replicas that answer; None without a price."""
        if self.price_per_hour is None:
            return None
        members = [member for member in self.members.values() if member.answers]
        useful = sum(member.rates.of("useful_rows") for member in members)
        return price_of(self.price_per_hour * len(members), useful)

    async def _send_all(self) -> Never:
        """Send frames; the pause after each grows with its bytes."""
        while True:
            n_bytes = self._tell_once()
            await asyncio.sleep(max(1 / _HZ, n_bytes / _MOST_BYTES_PER_S))

    def _tell_once(self) -> int:
        """Send the changes; returns the most bytes that a viewer got."""
        self.look_for_replicas()
        before, now = self._sent, self.frame()
        changes = None if before is None else _changes(before, now)
        quiet = changes is not None and changes.keys() == {"t"}
        if quiet and time.monotonic() - self._sent_at < _HEARTBEAT_S:
            return 0
        self._sent, self._sent_at = now, time.monotonic()
        encoded: dict[bool, bytes] = {}
        for viewer in self._viewers:
            if changes is None or viewer.lost:
                self._send_all_of_it(viewer)
                continue
            is_admin = viewer.identity.is_admin
            if is_admin not in encoded:
                encoded[is_admin] = sse.encode("delta", changes if is_admin else _dimmed(changes))
            viewer.put(encoded[is_admin])
        return max(map(len, encoded.values()), default=0)

    def _send_all_of_it(self, viewer: Viewer) -> None:
        """The newest frame that was sent."""
        frame = self._sent
        assert frame is not None
        if not viewer.identity.is_admin:
            frame = {**frame, "replicas": [_dim_card(card) for card in frame["replicas"]]}
        viewer.lost = False
        viewer.put(sse.encode("fleet", frame))


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort key of names: r2 comes before r10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _without_levels(seats: str) -> str:
    """The seats for users, without the progress of sequences."""
    return seats.translate(_WITHOUT_LEVELS)


def _dim_card(card: Card) -> Card:
    return {**card, "seats": _without_levels(card["seats"])}


def _dimmed(changes: _FleetDelta) -> _FleetDelta:
    replicas = changes.get("replicas", {})
    return {**changes, "replicas": {name: _dim(fields) for name, fields in replicas.items()}}


def _dim(fields: JsonDict) -> JsonDict:
    if "seats" not in fields:
        return fields
    return {**fields, "seats": _without_levels(fields["seats"])}


def _changes(before: _FleetFrame, now: _FleetFrame) -> _FleetDelta | None:
    """The delta between two frames; None if their replicas differ."""
    if not _same_replicas(before["replicas"], now["replicas"]):
        return None
    changes: _FleetDelta = {"t": now["t"]}
    replicas = {}
    for old, new in zip(before["replicas"], now["replicas"], strict=True):
        fields = sse.changed(old, new)
        if fields:
            replicas[new["name"]] = fields
    if replicas:
        changes["replicas"] = replicas
    sums = sse.changed(before["sums"], now["sums"])
    if sums:
        changes["sums"] = sums
    return changes


def _same_replicas(before: Iterable[Card], now: Iterable[Card]) -> bool:
    return [card["name"] for card in before] == [card["name"] for card in now]

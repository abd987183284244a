"""Recent incidents of an engine: outages, refusals, trouble with disks and webhooks, its drain."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec

#: Most stored outages, and series of other incidents; seconds without one that end a series;
#: refusals with stored tenants.
_KEEP_OUTAGES, _KEEP_CROWDS, _CALM_S, _KEEP_REFUSED = 64, 20, 30.0, 16384

#: A sequence: its request's id, and its index.
type _Stream = tuple[str, int]


class _Outage(msgspec.Struct):
    """A time in which no core served, after one that did. Times are by the history's clock."""

    #: Time at which the loss of the core was noticed.
    began: float
    #: The cause, such as "the engine process was killed by SIGKILL".
    cause: str
    #: Number of the restart that ends it, counted from the server's start.
    restart: int
    #: Open requests that continue in the next core, and those that ended with an error.
    n_resumed: int
    n_lost: int
    #: Interrupted streams, and those that have continued since, or ended.
    n_streams: int = 0
    n_flowing: int = 0
    #: Times at which another core was ready, and all streams had continued; None: not yet, or
    #: never.
    ready: float | None = None
    flowing: float | None = None


class _Refusals(msgspec.Struct):
    """A series of refused requests. Times are by the history's clock."""

    #: Times of the first and the newest refusal.
    began: float
    newest: float
    #: Answers by status and code, such as "429 queue_full".
    counts: dict[str, int] = {}
    #: Retry-After of the newest one, seconds; None: it had none.
    retry_s: float | None = None


class _Trouble(msgspec.Struct):
    """A series of failures outside the engine. Times are by the history's clock."""

    #: A kind of incident, see `dashboard.notes.TROUBLES`.
    code: str
    #: Times of the first and the last failure; their number; cause of the last one.
    began: float
    newest: float
    count: int = 0
    cause: str = ""


class Incidents:
    """The newest incidents. clock: seconds."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        #: Each list is in order of time.
        self.outages: deque[_Outage] = deque(maxlen=_KEEP_OUTAGES)
        self.refusals: deque[_Refusals] = deque(maxlen=_KEEP_CROWDS)
        self.troubles: deque[_Trouble] = deque(maxlen=_KEEP_CROWDS)
        #: Refused requests by code, since the start.
        self.rejected: Counter[str] = Counter()
        #: (when, tenant) of the newest refusals.
        self.refused_tenants: deque[tuple[float, str]] = deque(maxlen=_KEEP_REFUSED)
        #: Time of the stop signal, and number of open sequences; None: there was none.
        self.drain: tuple[float, int] | None = None
        # Streams interrupted by the loss of a core, until they continue or end.
        self._stopped: set[_Stream] = set()

    @property
    def _outage(self) -> _Outage | None:
        return self.outages[-1] if self.outages else None

    def stream_stopped(self, stream: _Stream) -> None:
        """Note that the loss of the core interrupted a stream."""
        self._stopped.add(stream)

    def outage_began(self, cause: str, *, n_resumed: int, n_lost: int) -> None:
        """Begin an outage: a core that served is lost. If none was ready since, extend the last
        one.
        """
        last, n_streams = self._outage, len(self._stopped)
        if last is not None and last.ready is None:
            last.cause, last.restart = cause, last.restart + 1
            last.n_lost += n_lost
            last.n_streams = last.n_flowing + n_streams
            return
        restart = 1 if last is None else last.restart + 1
        self.outages.append(_Outage(self._clock(), cause, restart, n_resumed, n_lost, n_streams))

    def core_ready(self, t: float) -> None:
        outage = self._outage
        if outage is not None and outage.ready is None:
            outage.ready = t
            self._see_flow(outage, t)

    def stream_flows(self, stream: _Stream, t: float) -> None:
        """Note that a stream has a token again, or has ended."""
        if stream not in self._stopped:
            return
        self._stopped.discard(stream)
        outage = self._outage
        if outage is not None:
            outage.n_flowing += 1
            self._see_flow(outage, t)

    def _see_flow(self, outage: _Outage, t: float) -> None:
        """Note when all streams flow again."""
        if outage.ready is not None and outage.flowing is None and not self._stopped:
            outage.flowing = t

    def refused(self, status: int, code: str, retry_s: float | None, tenant: str = "") -> None:
        """Record an answer of 429 or 503, by the server or by the engine. retry_s: its Retry-After;
        tenant: its key's digest.
        """
        now, name = self._clock(), f"{status} {code}".strip()
        self.rejected[code or str(status)] += 1
        self.refused_tenants.append((now, tenant))
        if not self.refusals or now - self.refusals[-1].newest > _CALM_S:
            self.refusals.append(_Refusals(now, now))
        refusals = self.refusals[-1]
        refusals.newest, refusals.retry_s = now, retry_s
        refusals.counts[name] = refusals.counts.get(name, 0) + 1

    def drain_began(self, n_open: int) -> None:
        """Record that the server drains."""
        self.drain = self.drain or (self._clock(), n_open)

    def disk_full(self) -> None:
        self.trouble("disk_full", "the log names it")

    def trouble(self, code: str, cause: str) -> None:
        """Record a failure. code: of `_Trouble`; cause: in words."""
        now = self._clock()
        newest = next((one for one in reversed(self.troubles) if one.code == code), None)
        if newest is None or now - newest.newest > _CALM_S:
            newest = _Trouble(code, now, now)
            self.troubles.append(newest)
        newest.newest, newest.cause = now, cause
        newest.count += 1

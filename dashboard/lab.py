"""The policy lab: the last minutes' traffic again, under other policies and settings, on the
simulator.

The live engine only lends its history: arrivals, lengths, and step times to learn from. The
simulation has a process of its own, at the lowest priority, one at a time, for a limited time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import time
from typing import Any

import msgspec
import numpy as np
from pydantic import ValidationError

from jitney.dashboard.timeline import stay_columns
from jitney.engine.api.errors import HttpError
from jitney.engine.config.schema import EngineSection
from jitney.engine.errors import RequestError
from jitney.engine.process.client import EngineClient
from jitney.engine.process.link import NOT_FOR_THE_CORE
from jitney.engine.scheduler.policies import POLICIES
from jitney.engine.simulation.replay import Engine, Job, Served
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.history import KEEP_S, History
from jitney.engine.telemetry.request_record import RequestRecord
from jitney.engine.telemetry.summary import seated

#: Seconds that all policies of one experiment may take together.
LIMIT_S = 120.0
#: Step records the times are learned from: the newest.
MOST_RECORDS = 20_000
#: Settings that an experiment may change.
SETTINGS = (
    "max_seats",
    "token_budget",
    "pages",
    "batch_size",
    "max_wait_ms",
    "static_timeout_ms",
    "order",
    "prefill_share",
    "target_itl_ms",
    "max_predicted_wait_s",
    "max_waiting_requests",
    "max_waiting_tokens",
)
SERVED = ("stop", "length")


class Wish(msgspec.Struct, forbid_unknown_fields=True):
    """An experiment. minutes: of traffic, back from now. settings: of SETTINGS. speed: 2.0 is twice
    the traffic.

    price_per_hour: of the device, in any currency; None leaves cost out of the figures.
    """

    minutes: float = 5.0
    policies: list[str] = msgspec.field(default_factory=lambda: list(POLICIES))
    settings: dict[str, Any] = {}
    speed: float = 1.0
    price_per_hour: float | None = None


class Lab:
    """One engine's experiments. settings: [engine] of its configuration; None: not known, nothing
    can be simulated.
    """

    def __init__(
        self, client: EngineClient, settings: EngineSection | None, limit_s: float = LIMIT_S
    ):
        self.client, self.settings, self.limit_s = client, settings, limit_s
        self._number = 0
        self._state, self._error = "idle", ""
        self._progress: float | None = None
        self._started: float | None = None
        self._result: dict[str, Any] | None = None
        self._task: asyncio.Task[None] | None = None

    def status(self) -> dict[str, Any]:
        """Where the newest experiment stands, and what the next one could use."""
        requests = self.client.history.ended(time.monotonic() - KEEP_S)
        first = min((request.arrival for request in requests), default=0.0)
        return {
            "state": self._state,
            "id": self._number,
            "progress": self._progress,
            "started": self._started,
            "error": self._error,
            "result": self._result,
            "policies": list(POLICIES),
            "settings": self._current(),
            "arrivals": len(requests),
            "minutes": round((time.monotonic() - first) / 60, 2) if requests else 0,
        }

    def _current(self) -> dict[str, Any]:
        if self.settings is None:
            return {}
        info = self.client.info
        told = {name: getattr(self.settings, name) for name in SETTINGS}
        told["static_timeout_ms"] = (
            None  # off, unless asked for: it is there for the tail of a server's traffic
        )
        return told | ({"pages": info.pages} if info else {})

    def start(self, wish: Wish) -> None:
        """Begin an experiment. Raises HttpError 409 while one runs, RequestError if it makes no
        sense.
        """
        if self._task is not None and not self._task.done():
            raise HttpError(
                409, "an experiment is running; wait for it, or stop it", code="lab_busy"
            )
        job, frame = self._job(wish)
        self._number += 1
        self._state, self._error, self._progress, self._result = "running", "", 0.0, None
        self._started = round(time.monotonic(), 4)
        self._task = asyncio.create_task(self._run(job, frame))

    async def stop(self) -> None:
        """End the running experiment, if there is one."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._state, self._progress = "idle", None

    def _job(self, wish: Wish) -> tuple[Job, dict[str, Any]]:
        """What the worker needs, and what is put around its answer."""
        info, history, now = self.client.info, self.client.history, time.monotonic()
        if self.settings is None or info is None:
            raise RequestError(
                "the engine is not ready, so there is nothing to simulate", code="loading"
            )
        check(wish, self.settings)
        start = max(now - 60 * wish.minutes, history.kept_from)
        requests = sorted(
            (
                request
                for request in [*history.ended(start), *history.open()]
                if request.arrival >= start
            ),
            key=lambda request: request.arrival,
        )
        records = history.records.since(-1)[-MOST_RECORDS:]
        if not any(
            request.finished is not None and request.stays for request in requests
        ) or not len(records):
            raise RequestError(
                "no request of that time has ended yet: there is no traffic to replay",
                param="minutes",
            )
        first = requests[0].arrival
        last = max(now if request.finished is None else request.finished for request in requests)
        window, _ = history.records.between(first, last)
        stays = history.stays(first, last)
        engine = Engine(
            self.settings.model_dump(mode="json"),
            info.context_length,
            info.pages,
            info.seat_buckets,
            info.token_buckets,
            on_device=info.platform != "cpu",
        )
        job = Job(
            arrivals=arrivals(requests, first),
            engine=engine,
            changes=wish.settings,
            policies=wish.policies,
            records=npy(records),
            times=[served(request, last) for request in requests],
            seconds=last - first,
            window=npy(window),
            seats=info.seats,
            seated_s=seated((stay for _, stay in stays), first, last),
            recorded=info.policy,
            speed=wish.speed,
            price_per_hour=wish.price_per_hour,
        )
        frame = {
            "minutes": wish.minutes,
            "from": round(first, 4),
            "to": round(last, 4),
            "requests": len(requests),
            "counted": counted(requests),
            "on_board_before": len({t.number for t, _ in stays if t.arrival < first}),
            "speed": wish.speed,
            "settings": wish.settings,
            "cached_tokens": sum(request.cached_tokens for request in requests),
            "measured": {
                "policy": info.policy,
                "seats": info.seats,
                "rides": measured_stays(history, first, last),
            },
        }
        return job, frame

    async def _run(self, job: Job, frame: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.limit_s):
                found = await self._simulate(job)
            frame["measured"]["figures"] = found.pop("measured")
            self._result, self._state = frame | found, "done"
        except TimeoutError:
            self._fail(
                f"it took longer than {self.limit_s:g} s: try fewer minutes or fewer policies"
            )
        except Failed as error:
            self._fail(str(error))
        self._progress = None

    def _fail(self, why: str) -> None:
        self._state, self._error = "failed", why

    async def _simulate(self, job: Job) -> dict[str, Any]:
        """The worker's result. Raises Failed; leaving early ends the process."""
        environ = {
            name: value for name, value in os.environ.items() if name not in NOT_FOR_THE_CORE
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "jitney.engine.simulation.replay",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            limit=1 << 26,
        )
        assert process.stdin is not None and process.stdout is not None  # asked for above
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(msgspec.msgpack.encode(job))
                await process.stdin.drain()
                process.stdin.close()
            async for line in process.stdout:
                news = msgspec.json.decode(line)
                if "result" in news:
                    return news["result"]
                if "error" in news:
                    raise Failed(news["error"])
                self._progress = news["progress"]
            raise Failed("the simulation ended without a result; the server's log says why")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Failed(Exception):
    """An experiment that brought nothing."""


def check(wish: Wish, settings: EngineSection) -> None:
    """Raise RequestError naming the field unless the wish makes sense, beside the engine's own
    settings.
    """
    if not 0 < wish.minutes <= KEEP_S / 60:
        raise RequestError(
            f"minutes must be more than 0 and at most {KEEP_S / 60:g}", param="minutes"
        )
    if not 0.1 <= wish.speed <= 10:
        raise RequestError("speed must be at least 0.1 and at most 10", param="speed")
    if wish.price_per_hour is not None and not 0 < wish.price_per_hour < 1e6:
        raise RequestError(
            "price_per_hour must be more than 0 and less than a million, or null",
            param="price_per_hour",
        )
    if (
        not wish.policies
        or len(set(wish.policies)) < len(wish.policies)
        or set(wish.policies) - set(POLICIES)
    ):
        raise RequestError(
            f"policies must name some of: {', '.join(POLICIES)}, each once", param="policies"
        )
    for name in wish.settings:
        if name not in SETTINGS:
            raise RequestError(
                f"{name[:40]} cannot be changed here; known: {', '.join(SETTINGS)}",
                param="settings",
            )
    plain = settings.model_dump(mode="python") | wish.settings
    try:
        EngineSection.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        raise RequestError(
            f"{name}: {first['msg'].removeprefix('Value error, ')}", param=name
        ) from None


def arrivals(requests: list[RequestRecord], first: float) -> list[Arrival]:
    """The requests as traffic, in seconds since `first`; all of them, however they ended."""
    tenants: dict[str, str] = {}
    lengths = np.array(
        sorted(request.n_output for request in requests if request.finish in SERVED), np.int64
    )
    found = []
    for request in requests:
        tenant = tenants.setdefault(request.tenant, str(len(tenants)))
        found.append(
            Arrival(
                at=request.arrival - first,
                n_prompt=request.n_prompt,
                n_output=wanted(request, lengths),
                tenant=tenant,
                priority=request.priority,
                n_cached=request.cached_tokens,
            )
        )
    return found


def wanted(request: RequestRecord, lengths: np.ndarray) -> int:
    """How many tokens a request asks for. lengths: of the answers that were given to the end,
    ascending.

    Who was cut short asks for as much as it got. Whose answer nobody saw to its end (it runs or
    waits still, or was refused, or left the queue) asks for as much as some answer that was longer
    than what it has so far.
    """
    if request.finished is not None and request.stays:
        return max(1, request.n_output)
    longer = lengths[np.searchsorted(lengths, request.n_output, "right") :]
    most = request.max_tokens or max(request.n_output + 1, int(lengths[-1]) if len(lengths) else 1)
    if not len(longer):
        return max(1, min(most, request.n_output + 1))
    draw = np.random.default_rng(request.number).integers(
        len(longer)
    )  # the same request asks for the same every time
    return max(1, min(most, int(longer[draw])))


def counted(requests: list[RequestRecord]) -> dict[str, int]:
    """How many of the requests are in which state in the end. left: ended in the queue,
    but not refused.
    """
    states: dict[str, int] = dict.fromkeys(("ended", "running", "waiting", "refused", "left"), 0)
    for request in requests:
        if request.finished is None:
            states["waiting" if request.stay is None else "running"] += 1
        elif request.stays:
            states["ended"] += 1
        else:
            states["refused" if request.finish == "error" else "left"] += 1
    return states


def served(request: RequestRecord, end: float) -> Served:
    """The request as it went until `end`, where the record ends."""
    finished, finish = request.finished, request.finish
    if finished is None:
        finished, finish = end, request.state
    return Served(
        request.number,
        request.n_prompt,
        request.n_output,
        request.arrival,
        request.boarded,
        request.first_token,
        finished,
        finish,
    )


def measured_stays(history: History, first: float, last: float) -> dict[str, list[Any]]:
    """The stays of that time as they were, in seconds from its beginning."""
    columns = stay_columns(history.stays(first, last)[-MOST_RECORDS:])
    for name in ("from", "first_token", "to"):
        columns[name] = [None if t is None else round(t - first, 4) for t in columns[name]]
    return columns


def npy(records: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, records, allow_pickle=False)
    return file.getvalue()

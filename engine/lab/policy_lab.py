"""The policy lab: replays the traffic of the last minutes on the simulator, under other policies
and settings.

Only the history of the live engine is used: arrivals, lengths, and measured step times. One
simulation runs at a time, in its own process at the lowest priority, with a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import ValidationError

from jitney.dashboard import Experiment, stay_columns
from jitney.engine.common.child_process import end_child, start_child
from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.history import History
from jitney.engine.common.request_record import RequestRecord, Stay
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import TimeSlices
from jitney.engine.common.trace import Arrival
from jitney.engine.config import EngineSection, settings
from jitney.engine.server import EngineClient, HttpError

if TYPE_CHECKING:
    from jitney.engine.lab.simulation.replay import BucketsJob, RecordedEngine, ReplayJob

_POLICIES = settings()["policy"].choices
#: Timeout of an experiment with all its policies, seconds.
_LIMIT_S = 120.0
#: Returns [engine] of a server's configuration, whose sizes are known once the engine starts.
type _SettingsNow = Callable[[], EngineSection]
#: Most step records for step times, and most stays that are shown; the newest ones count.
_MOST_RECORDS = 20_000
#: Most bytes of one line of the worker's answer.
_MOST_BYTES = 1 << 26
#: Requests that are prepared between two pauses for the event loop.
_PIECE = 64
#: Settings that an experiment may change.
_SETTINGS = (
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

#: An experiment that was never begun, as `Lab.status` shows it. progress: the finished share.
_NO_EXPERIMENT: JsonDict = {
    "state": "idle",  # or "running", "done" or "failed"
    "id": 0,
    "progress": None,
    "started": None,
    "error": "",
    "result": None,
}


@dataclass(frozen=True, slots=True)
class _Traffic:
    #: All requests that arrived in this time, by arrival, with any end.
    requests: list[RequestRecord]
    #: Requests with their stays in seats in this time.
    stays: list[tuple[RequestRecord, Stay]]
    #: First arrival; end of the last request, or of the recording.
    first: float
    last: float
    #: The newest step records of all, for step times; the step records of this time.
    records: np.ndarray
    window: np.ndarray


class Lab:
    """The experiments of one engine. settings: returns [engine] of its configuration; None: it is
    unknown, and nothing can be simulated.
    """

    def __init__(
        self, client: EngineClient, settings: _SettingsNow | None, limit_s: float = _LIMIT_S
    ):
        self.client = client
        self.settings = settings
        self.limit_s = limit_s
        #: The newest experiment.
        self._newest = dict(_NO_EXPERIMENT)
        self._task: asyncio.Task[None] | None = None
        self._slices = TimeSlices()
        self._preparing = False
        self._proposing = asyncio.Lock()

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    def status(self) -> JsonDict:
        """The state of the newest experiment, and the settings and traffic for the next one."""
        now = time.monotonic()
        requests = self.client.history.ended(now - History.keep_s)
        first = min((request.arrival for request in requests), default=now)
        return {
            **self._newest,
            "policies": list(_POLICIES),
            "settings": self._current_settings(),
            "arrivals": len(requests),
            "minutes": round((now - first) / 60, 2),
        }

    def _current_settings(self) -> JsonDict:
        if self.settings is None:
            return {}
        settings = self.settings()
        current = {name: getattr(settings, name) for name in _SETTINGS}
        # Off by default in experiments: its purpose is the end of a server's traffic.
        current["static_timeout_ms"] = None
        if self.client.info is not None:
            current["pages"] = self.client.info.sizes.pages
        return current

    async def start(self, experiment: Experiment) -> None:
        """Begin an experiment. Raises HttpError 409 while one runs, and RequestError."""
        if self._running or self._preparing:
            raise HttpError(
                409, "an experiment is running; wait for it, or stop it", code="lab_busy"
            )
        self._preparing = True
        try:
            job, basis = await self._slices.result(self._prepare(experiment))
        finally:
            self._preparing = False
        started = round(time.monotonic(), 4)
        begun = {"state": "running", "id": self._newest["id"] + 1, "started": started}
        self._newest = _NO_EXPERIMENT | begun | {"progress": 0.0}
        self._task = asyncio.create_task(self._run(job, basis))

    def _prepare(self, experiment: Experiment) -> Generator[None, None, tuple[ReplayJob, JsonDict]]:
        """The worker's job, and the part of the result that is known before. For `TimeSlices`."""
        info = self.client.info
        if self.settings is None or info is None:
            raise RequestError(
                "the engine is not ready, so there is nothing to simulate", code="loading"
            )
        if info.model.encoder:
            raise RequestError(
                "the policy lab simulates models that write text; this one is an encoder",
                code="unsupported_parameter",
            )
        settings = self.settings()
        _check(experiment, settings)
        traffic = yield from _recorded(self.client.history, experiment.minutes)
        job = yield from _job(experiment, traffic, info, settings)
        basis = yield from _basis(experiment, traffic, info)
        return job, basis

    async def stop(self) -> None:
        if self._task is not None and self._running:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._newest |= {"state": "idle", "progress": None}

    async def _run(self, job: ReplayJob, basis: JsonDict) -> None:
        try:
            async with asyncio.timeout(self.limit_s):
                result = await self._simulate(job)
            basis["measured"]["figures"] = result.pop("measured")
            self._newest |= {"state": "done", "result": basis | result}
        except TimeoutError:
            self._fail(
                f"it took longer than {self.limit_s:g} s: try fewer minutes or fewer policies"
            )
        except _Failed as error:
            self._fail(str(error))
        self._newest["progress"] = None

    def _fail(self, error: str) -> None:
        self._newest |= {"state": "failed", "error": error}

    async def _simulate(self, job: ReplayJob | BucketsJob) -> JsonDict:
        """The worker's result. Raises _Failed. Cancelling it ends the process."""
        process = await start_child("jitney.engine.lab.simulation.replay", limit=_MOST_BYTES)
        assert process.stdin is not None and process.stdout is not None  # pipes, see start_child
        try:
            await _send_job(job, process.stdin)
            return await self._result_from(process.stdout)
        finally:
            await end_child(process)

    async def buckets(self) -> JsonDict:
        """See `PolicyLab`; one call runs at a time. Raises RequestError also if it fails."""
        async with self._proposing:
            records = self.client.history.records.since(-1)[-_MOST_RECORDS:]
            info = self.client.info
            if self.settings is None or info is None or not len(records):
                raise RequestError("no step is recorded yet, so no size can be better")
            # Imported here, since only a proposal needs the simulator.
            from jitney.engine.lab.simulation.replay import BucketsJob

            engine = _recorded_engine(info, self.settings())
            try:
                async with asyncio.timeout(self.limit_s):
                    return await self._simulate(BucketsJob(engine=engine, records=_npy(records)))
            except (TimeoutError, _Failed) as error:
                raise RequestError(f"no sizes could be proposed: {error}") from None

    async def _result_from(self, output: asyncio.StreamReader) -> JsonDict:
        async for line in output:
            message = msgspec.json.decode(line)
            if "result" in message:
                return message["result"]
            if "error" in message:
                raise _Failed(message["error"])
            self._newest["progress"] = message["progress"]
        raise _Failed("the simulation ended without a result; the server's log says why")


class _Failed(Exception):
    """An experiment ended without a result."""


async def _send_job(job: ReplayJob | BucketsJob, worker: asyncio.StreamWriter) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.write(msgspec.msgpack.encode(job))
        await worker.drain()
        worker.close()


def _recorded(history: History, minutes: float) -> Generator[None, None, _Traffic]:
    """The traffic of the last minutes. Raises RequestError if no request has ended in them."""
    now = time.monotonic()
    requests = _arrived_since(history, max(now - 60 * minutes, history.kept_from))
    yield
    records = history.records.since(-1)[-_MOST_RECORDS:]
    if not any(map(_rode_to_the_end, requests)) or not len(records):
        raise RequestError(
            "no request of that time has ended yet: there is no traffic to replay",
            param="minutes",
        )
    first = requests[0].arrival
    last = max(min(request.end, now) for request in requests)
    yield
    window, _ = history.records.between(first, last)
    stays = yield from history.stays(first, last)
    return _Traffic(requests, stays, first, last, records, window)


def _rode_to_the_end(request: RequestRecord) -> bool:
    return request.finished is not None and bool(request.stays)


def _arrived_since(history: History, start: float) -> list[RequestRecord]:
    candidates = [*history.ended(start), *history.open()]
    requests = [request for request in candidates if request.arrival >= start]
    return sorted(requests, key=lambda request: request.arrival)


def _job(
    experiment: Experiment, traffic: _Traffic, info: EngineInfo, settings: EngineSection
) -> Generator[None, None, ReplayJob]:
    # Imported here, since only an experiment needs the simulator and its scheduler.
    from jitney.engine.lab.simulation.replay import ReplayJob

    stays = [stay for _, stay in traffic.stays]
    requests: list[RequestRecord] = []
    for place, request in enumerate(traffic.requests):
        requests.append(request.until(traffic.last))
        if place % _PIECE == 0:
            yield
    arrivals = yield from _arrivals(traffic.requests, traffic.first)
    return ReplayJob(
        arrivals=arrivals,
        engine=_recorded_engine(info, settings),
        changes=experiment.settings,
        policies=experiment.policies,
        records=_npy(traffic.records),
        requests=requests,
        seconds=traffic.last - traffic.first,
        window=_npy(traffic.window),
        seats=info.sizes.seats,
        seated_s=sum(stay.seconds(traffic.first, traffic.last) for stay in stays),
        recorded=info.queue.policy,
        speed=experiment.speed,
        price_per_hour=experiment.price_per_hour,
    )


def _recorded_engine(info: EngineInfo, settings: EngineSection) -> RecordedEngine:
    from jitney.engine.lab.simulation.replay import RecordedEngine

    return RecordedEngine(
        settings=settings.model_dump(mode="json"),
        context_length=info.model.context_length,
        pages=info.sizes.pages,
        seat_buckets=info.sizes.seat_buckets,
        token_buckets=info.sizes.token_buckets,
        machine=info.device.name,
        on_device=info.device.platform != "cpu",
        padding_is_free=info.sizes.padding_is_free,
        most_segments=info.sizes.most_segments,
    )


def _basis(
    experiment: Experiment, traffic: _Traffic, info: EngineInfo
) -> Generator[None, None, JsonDict]:
    before = {request.number for request, _ in traffic.stays if request.arrival < traffic.first}
    yield
    stays = yield from _measured_stays(traffic)
    return {
        "minutes": experiment.minutes,
        "from": round(traffic.first, 4),
        "to": round(traffic.last, 4),
        "requests": len(traffic.requests),
        "counted": _counted(traffic.requests),
        "on_board_before": len(before),
        "speed": experiment.speed,
        "settings": experiment.settings,
        "cached_tokens": sum(request.cached_tokens for request in traffic.requests),
        "measured": {
            "policy": info.queue.policy,
            "seats": info.sizes.seats,
            "stays": stays,
        },
    }


def _check(experiment: Experiment, settings: EngineSection) -> None:
    """Raise RequestError that names the field if the experiment is invalid."""
    History.check_minutes(experiment.minutes)
    if not 0.1 <= experiment.speed <= 10:
        raise RequestError("speed must be at least 0.1 and at most 10", param="speed")
    price = experiment.price_per_hour
    if price is not None and not 0 < price < 1e6:
        raise RequestError(
            "price_per_hour must be more than 0 and less than a million, or null",
            param="price_per_hour",
        )
    names = experiment.policies
    if not names or len(set(names) & set(_POLICIES)) < len(names):
        known = ", ".join(_POLICIES)
        raise RequestError(f"policies must name some of: {known}, each once", param="policies")
    changes = experiment.settings
    for name in changes:
        if name not in _SETTINGS:
            known = ", ".join(_SETTINGS)
            raise RequestError(
                f"{name[:40]} cannot be changed here; known: {known}", param="settings"
            )
    try:
        EngineSection.model_validate(settings.model_dump(mode="python") | changes)
    except ValidationError as error:
        raise _field_error(error) from None


def _field_error(error: ValidationError) -> RequestError:
    """The first validation error, with the field's name."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"])) or "settings"
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{name}: {message}", param=name)


def _arrivals(requests: list[RequestRecord], first: float) -> Generator[None, None, list[Arrival]]:
    """All requests as traffic, in seconds since `first`. Work for `TimeSlices`."""
    tenants: dict[str, str] = {}
    lengths = sorted(request.n_output for request in requests if request.served)
    ascending = np.array(lengths, np.int64)
    traffic = []
    for place, request in enumerate(requests):
        arrival = Arrival(
            at=request.arrival - first,
            n_prompt=request.n_prompt,
            n_output=_wanted(request, ascending),
            tenant=tenants.setdefault(request.tenant, str(len(tenants))),
            priority=request.priority,
            n_cached=request.cached_tokens,
        )
        traffic.append(arrival)
        if place % _PIECE == 0:
            yield
    return traffic


def _wanted(request: RequestRecord, lengths: np.ndarray) -> int:
    """Output tokens of a request in the replay. lengths: of the complete answers, ascending.

    A request that was cut short has the tokens that it received. A request without an end (still
    running or waiting, refused, or gone from the queue) gets the length of a random complete answer
    that is longer than its own so far.
    """
    if _rode_to_the_end(request):
        return max(1, request.n_output)
    longer = lengths[np.searchsorted(lengths, request.n_output, "right") :]
    length = request.n_output + 1
    if len(longer):
        # Seeded, so that a request has the same length in every experiment.
        length = int(np.random.default_rng(request.number).choice(longer))
    return max(1, min(length, request.max_tokens or length))


def _counted(requests: list[RequestRecord]) -> dict[str, int]:
    """Number of requests by final state. left: they left the queue without being refused."""
    counts: dict[str, int] = dict.fromkeys(("ended", "running", "waiting", "refused", "left"), 0)
    for request in requests:
        if _rode_to_the_end(request):
            state = "ended"
        elif request.finish == "error":
            state = "refused"
        elif request.finished is not None:
            state = "left"
        else:
            state = "waiting" if request.stay is None else "running"
        counts[state] += 1
    return counts


def _measured_stays(traffic: _Traffic) -> Generator[None, None, dict[str, list[Any]]]:
    """The measured stays in seats of that time, in seconds from its start."""
    columns = yield from stay_columns(traffic.stays[-_MOST_RECORDS:])
    for name in ("from", "first_token", "to"):
        times = columns[name]
        columns[name] = [None if t is None else round(t - traffic.first, 4) for t in times]
        yield
    return columns


def _npy(records: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, records, allow_pickle=False)
    return file.getvalue()

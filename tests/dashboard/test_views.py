"""The data of the views of memory, programs, tenants and work, beside what plain loops find."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_infos import engine_info
from fakes import FakeClock

from jitney.dashboard.fleet_answers import search_requests, tenants_of_all
from jitney.dashboard.fleet_member import Member
from jitney.dashboard.memory import memory
from jitney.dashboard.programs import programs
from jitney.dashboard.tenants import label_of, tenants
from jitney.dashboard.work import WorkList
from jitney.engine.common.database import DatabaseKeeper
from jitney.engine.common.engine_info import BucketCompilation
from jitney.engine.common.history import History
from jitney.engine.common.messages import SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.http.access import EVERYBODY, Identity
from jitney.engine.server.http.quotas import Quotas
from jitney.engine.server.http.routing import Role
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.records import Batch, Job, StoredFile
from jitney.engine.server.tasks.store import TaskStore

PAGE = 16


def drained(work):
    """The result of a generator."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@pytest.fixture
def clock() -> FakeClock:
    """A history's time, which a test moves."""
    made = FakeClock()
    made.now = 1000.0
    return made


@pytest.fixture
def history(clock) -> History:
    history = History(clock=clock)
    history.core_ready(engine_info(seats=8))
    return history


def ride(history: History, clock: FakeClock, name: str, *, seat: int, times, n_prompt: int, **more):
    """A request that arrives, boards, has its first token and ends at these times."""
    came, boarded, first, end = times
    clock.now = came
    request = EngineRequest(
        id=name,
        prompt=[1] * n_prompt,
        sampling=SamplingParams(max_tokens=512),
        arrival=came,
        tenant=more.get("tenant", ""),
        user=more.get("user", ""),
    )
    history.submit(request)
    event = SequenceEvent("seated", name, 0, seat, 0, boarded, 0, 0)
    history.take(StepReport([], events=[event]))
    clock.now = first
    one = SequenceOutput(request_id=name, index=0, tokens=[1], cached_tokens=more.get("cached", 0))
    history.take(StepReport([one]))
    clock.now = end
    rest = [1] * (more["n_output"] - 1)
    history.take(
        StepReport([SequenceOutput(request_id=name, index=0, tokens=rest, finish="length")])
    )


def test_pages_of_tenants_grow_as_their_tokens_do(history, clock):
    ride(history, clock, "a", seat=0, times=(1010, 1020, 1030, 1130), n_prompt=160, n_output=320,
         user="ann")  # fmt: skip
    ride(history, clock, "b", seat=1, times=(1140, 1140, 1150, 1200), n_prompt=64, n_output=64,
         cached=48, user="ben")  # fmt: skip
    clock.now = 1300.0
    found = drained(memory(history, clock.now, PAGE, EVERYBODY))
    times = np.linspace(found["from"], found["t"], len(found["tenants"][0]["pages"]))
    lines = {line["name"]: line["pages"] for line in found["tenants"]}

    def needed(t: float) -> int:
        """Pages of the first request at that time, by its story."""
        if t < 1020 or t >= 1130:
            return 0
        if t < 1030:
            return math.ceil(160 * (t - 1020) / 10 / PAGE)
        return math.ceil((160 + 320 * (t - 1030) / 100) / PAGE)

    assert lines["user ann"] == [needed(t) for t in times]
    assert max(lines["user ben"]) == 8
    depths = {row["from"]: row for row in found["depths"]}
    assert depths[0] == {"from": 0, "prompts": 2, "tokens": 128, "found": 48}
    assert depths[64] == {"from": 64, "prompts": 1, "tokens": 96, "found": 0}


def test_shares_waits_and_limits_of_tenants(history, clock):
    ann, ben = "a" * 64, "b" * 64
    for number, wait in enumerate((1, 2, 30)):
        ride(history, clock, f"a{number}", seat=number, times=(1010, 1010 + wait, 1045, 1050),
             n_prompt=10, n_output=5, cached=4, tenant=ann)  # fmt: skip
    ride(history, clock, "b", seat=4, times=(1050, 1050, 1051, 1077), n_prompt=7, n_output=3,
         tenant=ben)  # fmt: skip
    quotas = Quotas(max_concurrent=8, tokens_per_minute=600, clock=clock)
    with quotas.open(ann, 3), quotas.charging(ann, 100, 0.0):
        found = drained(tenants(history, clock.now, EVERYBODY, quotas))
    first, second = found["tenants"]
    assert (first["name"], second["search"]) == ("key aaaaaaaa", ben)
    assert first["seat_s"] == (40 - 1) + (40 - 2) + (40 - 30) and second["seat_s"] == 27
    assert first["share"] == pytest.approx(87 / 114) and first["fair_share"] == 0.5
    assert first["wait_s"] == {"p50": 2, "p95": 30}
    assert first["useful_tokens"] == 3 * (10 - 4 + 5) and found["useful_tokens"] == 33 + 10
    assert (first["open"], first["max_open"], first["left"]) == (3, 8, 500)
    assert (second["open"], second["left"]) == (0, 600)
    alone = drained(tenants(history, clock.now, Identity(Role.USER, ben), quotas))
    assert [row["search"] for row in alone["tenants"]] == [ben]
    assert alone["tenants"][0]["fair_share"] is None


def test_sizes_and_parts_add_up_to_the_steps():
    rng = np.random.default_rng(0)
    steps = np.zeros(200, STEP_DTYPE)
    steps["bucket_tokens"] = rng.choice([1, 4, 64], 200)
    steps["bucket_seats"] = np.where(steps["bucket_tokens"] == 64, 4, steps["bucket_tokens"])
    steps["mixed"] = steps["bucket_tokens"] == 64
    steps["padding"] = rng.integers(0, steps["bucket_tokens"])
    steps["device_s"] = rng.random(200)
    steps["compiled"][7] = 1
    info = engine_info(seats=4, seat_buckets=(1, 2, 4), token_buckets=(64,))
    mixed = BucketCompilation(bucket="mixed-64", seconds=2.5, from_cache=True)
    kernels = msgspec.structs.replace(info.kernels, compilations=[mixed])
    found = programs(steps, msgspec.structs.replace(info, kernels=kernels))
    sizes = {row["name"]: row for row in found["sizes"]}
    assert list(sizes) == ["decode-1", "decode-2", "decode-4", "mixed-64"]
    assert sizes["decode-2"]["steps"] == 0 and sizes["decode-2"]["mean_s"] is None
    for row in sizes.values():
        own = [step for step in steps if row["name"].endswith(f"-{step['bucket_tokens']}")]
        assert row["steps"] == len(own)
        assert row["padding"] == sum(int(step["padding"]) for step in own)
        ran = sum(float(step["device_s"]) for step in own if not step["compiled"])
        assert row["device_s"] == pytest.approx(ran, rel=1e-5)
    assert sum(row["late"] for row in sizes.values()) == 1
    assert (sizes["mixed-64"]["compile_s"], sizes["mixed-64"]["from_cache"]) == (2.5, True)
    assert sizes["decode-1"]["compile_s"] is None
    mixed = [float(step["device_s"]) for step in steps if step["mixed"] and not step["compiled"]]
    assert found["parts"]["mixed"]["device"]["mean"] == pytest.approx(np.mean(mixed), rel=1e-4)


async def test_work_is_listed_and_cancelled_by_its_owner_or_an_administrator(tmp_path):
    """Rows of the store as they are, not as a route tells them."""

    keeper = await StoreKeeper.open(tmp_path / "data")
    times = {"in_progress": int(time.time()) - 10}
    batch = Batch("batch_1", "a" * 64, "/v1/completions", {}, "", 1, 1 << 40, "in_progress",
                  times, input_file_id="file-1", completion_window="24h", total=40, completed=9,
                  failed=1)  # fmt: skip
    job = Job("job_1", "b" * 64, "/v1/completions", {}, "", 1, 1 << 40)
    file = StoredFile("file-1", "a" * 64, "batch", "in.jsonl", 12, 1)
    await keeper.do(TaskStore.insert, batch)
    await keeper.do(TaskStore.insert, job, body=b"{}", digest="d")
    await keeper.do(TaskStore.insert, file)
    work = WorkList(lambda: _Kept(keeper))  # type: ignore[arg-type,return-value]
    everything = await work.listing(EVERYBODY)
    mine = await work.listing(Identity(Role.USER, "b" * 64))
    await keeper.close()
    everything, mine = everything, mine
    (batch,) = everything["batches"]
    assert batch["owner"] == "key aaaaaaaa" and batch["open"] and not batch["own"]
    assert batch["left_s"] == pytest.approx(30, abs=4)
    assert [file["name"] for file in everything["files"]] == ["in.jsonl"]
    assert (mine["batches"], mine["files"]) == ([], [])
    assert [(job["id"], job["own"]) for job in mine["jobs"]] == [("job_1", True)]


class _Kept:
    """A store as `InternalRequests` hands out its rows."""

    def __init__(self, keeper: DatabaseKeeper[TaskStore]):
        self.keeper = keeper

    async def newest(self, owner, limit):
        kinds = (Batch, Job, StoredFile)
        return {
            kind.TABLE: (await self.keeper.do(TaskStore.page, kind, owner, limit=limit))[0]
            for kind in kinds
        }


def test_accounts_have_short_names():
    assert label_of("0123456789abcdef" * 4) == "key 01234567"
    assert label_of("user ann") == "user ann"
    assert label_of("user ") == label_of("") == "no key"


async def test_answers_of_replicas_are_one(history, clock):
    """Two replicas with the same history; a third does not answer."""
    tenant = "a" * 64
    ride(history, clock, "a", seat=0, times=(1010, 1020, 1030, 1130), n_prompt=16, n_output=5,
         tenant=tenant)  # fmt: skip
    answers = {
        "tenants": drained(tenants(history, clock.now, EVERYBODY)),
        "requests": {"t": 1130.0, "requests": [{"request": "a", "arrival": 1010.0}]},
    }
    members = [_Replica(name, answers) for name in ("r1", "r2")] + [_Replica("gone", {})]

    merged = await tenants_of_all(members, EVERYBODY)
    others = await tenants_of_all(members, Identity(Role.USER, "b" * 64))
    merged, others, requests = merged, others, await search_requests(members, "all", "a")
    (row,) = merged["tenants"]
    assert (row["requests"], row["output_tokens"], row["seat_s"]) == (2, 10, 220)
    assert row["share"] == 1 and row["wait_s"] == {"p50": 10, "p95": 10}
    assert others["tenants"] == [] and merged["missing"] == ["gone"]
    assert [(row["replica"], row["age_s"]) for row in requests["requests"]] == [
        ("r1", 120.0),
        ("r2", 120.0),
    ]


class _Replica(Member):
    """One that answers from memory."""

    def __init__(self, name: str, answers):
        self.name = name
        self.engine: Any = SimpleNamespace(
            answer=lambda method, path, query: _Answer(answers.get(path))
        )


class _Answer(SimpleNamespace):
    def __init__(self, value):
        super().__init__(value=value, status_code=200 if value is not None else 502)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    async def aiter_bytes(self):
        yield msgspec.json.encode(self.value)

"""A candidate behind a fleet's endpoint: sticky keys, a slower one named and rolled back, one that
fails without anybody noticing, and what administrators are told.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script, served, until
from fleet_engines import FakeEngine, Served, engines, fleet_of
from places import ROOT

from jitney.engine.common.errors import ConfigError, ErrorInfo
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.metrics import FleetMetrics
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.fleet.rollout import rollout_keeper
from jitney.engine.fleet.rollout.answer_shape import AnswerShape
from jitney.engine.fleet.rollout.candidate import ModelWithCandidate, _key_of, _Pace, _Wait
from jitney.engine.fleet.rollout.comparison import ARMS, FIGURES, ArmName, RequestOutcome
from jitney.engine.fleet.rollout.rollout import KeyPlace, PromotionRule, Rollout
from jitney.engine.fleet.rollout.rollout_keeper import RolloutKeeper
from jitney.engine.fleet.sections import CandidateSection, ReplicasSection

TOKENS = 10


class Clock:
    """Seconds that the engines' tokens make pass."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class TimedClient(FakeClient):
    """An engine whose tokens take their time on a scripted clock, with some noise."""

    def __init__(self, clock: Clock, token_s: float, **info: Any):
        super().__init__(Script(text="x" * 200), **info)
        self.clock, self.token_s = clock, token_s
        self.noise = random.Random(5)

    async def _outputs_of(
        self, request: EngineRequest, script: Script
    ) -> AsyncIterator[SequenceOutput]:
        pace = self.token_s * self.noise.lognormvariate(0, 0.1)
        async for output in super()._outputs_of(request, script):
            self.clock.now += pace
            yield output


@dataclass
class Arms:
    """A served fleet of two engines: the model's, and its candidate's."""

    served: Served
    stable: FakeEngine
    candidate: FakeEngine

    @property
    def model(self) -> ModelWithCandidate:
        model = self.served.fleet.models["m"]
        assert isinstance(model, ModelWithCandidate)
        return model

    @property
    def keeper(self) -> RolloutKeeper:
        (keeper,) = self.served.parts.rollouts
        return keeper

    def arm_of(self, user: str) -> ArmName:
        return self.model.rollout.place(_key_of(asked(user=user))).arm

    def ask(
        self, http: httpx.Client, user: str, path: str = "/v1/completions", **fields: Any
    ) -> str:
        """The name of the engine that answered."""
        body = {"model": "m", "prompt": "Where to?", "max_tokens": TOKENS, "user": user} | fields
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-jitney-replica"]


@contextmanager
def arms(
    folder: Path,
    stable: FakeEngine | None = None,
    candidate: FakeEngine | None = None,
    rule: str = "share = 0.3",
    fleet: str = "",
    **settings: Any,
) -> Iterator[Arms]:
    fakes = (stable or FakeEngine(), candidate or FakeEngine())
    with engines(*fakes) as (one, two):
        text = (
            f'[fleet]\npoll_s = 0.3\n{fleet}\n[models.m]\nurls = ["{one.url}"]\n'
            f'[models.m.candidate]\nurls = ["{two.url}"]\n{rule}\n'
        )
        with fleet_of(folder, text, **settings) as served:
            served.wait_ready(one.name, two.name)
            yield Arms(served, one, two)


def look(found: Arms) -> None:
    """As the fleet does every ten seconds."""
    found.model.rollout.look()


def test_a_slower_candidate_is_named_with_its_interval_and_rolled_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Two engines on a scripted clock, one of them 10 % slower; a look after every 20 requests."""
    caplog.set_level(logging.INFO, "jitney.fleet")
    clock = Clock()
    stable = FakeEngine(TimedClient(clock, 0.1))
    slower = FakeEngine(TimedClient(clock, 0.1 / 0.9))
    seen: dict[str, set[str]] = {}
    with arms(tmp_path, stable, slower, "share = 0.5") as found, found.served.http() as http:
        found.model.clock = clock
        rollout = found.model.rollout
        for number in range(2000):
            user = f"user-{number % 700}"
            seen.setdefault(user, set()).add(found.ask(http, user))
            if number % 20 == 19:
                until(lambda: sum(map(rollout.comparison.requests, ARMS)) == number + 1)  # noqa: B023
                look(found)
            if rollout.state != "running":
                break
        assert rollout.state == "rolled_back" and number > 100
        assert all(len(names) == 1 for names in seen.values())
        assert {name for names in seen.values() for name in names} == {stable.name, slower.name}
        report = http.get("/fleet/rollouts/m").json()
        speed = next(each for each in report["figures"] if each["name"] == "tokens_per_s")
        assert speed["verdict"] == "worse" and speed["high"] < 0.95
        assert speed["low"] < 0.9 < speed["high"]
        assert report["decision"]["by"] == "rule"
        (line,) = [text for text in caplog.messages if "rolled back" in text]
        assert "worse than allowed: tokens_per_s" in line
        assert f"{speed['estimate']:.3f} ({speed['low']:.3f} to {speed['high']:.3f})" in line
        assert {found.ask(http, user) for user in list(seen)[:40]} == {stable.name}


def test_how_a_candidate_stands_is_in_the_metrics():
    replicas = [Replica("a"), Replica("b")]
    replicas[0].became("ready")
    rollout = Rollout("m", "int8", PromotionRule(share=0.25))
    metrics = FleetMetrics(lambda: {"m": replicas}, lambda: [rollout])
    before = metrics.render().decode()
    assert 'jitney_fleet_rollout_share{candidate="int8",model="m"} 0.25' in before
    assert 'jitney_fleet_replicas{model="m",state="ready"} 1.0' in before
    assert 'jitney_fleet_replicas{model="m",state="gone"} 0.0' in before
    assert 'predicted_wait_seconds{model="m",replica="a"} 0.0' in before
    assert 'predicted_wait_seconds{model="m",replica="b"}' not in before, "it takes no requests"
    waits = [replica.shown()["predicted_wait_s"] for replica in replicas]
    assert waits == [0.0, None]
    assert "rollout_interval{" not in before, "nothing is known yet"
    for number in range(2000):
        for arm in ARMS:
            seconds = (2.0 if arm == "candidate" else 1.0) + number % 7 / 70
            outcome = RequestOutcome(True, 100, seconds, None, 0.1)
            rollout.observe(KeyPlace(arm, number % 40), outcome)
    rollout.decide("roll_back")
    text = metrics.render().decode()
    low = re.search(r'interval{bound="low",figure="tokens_per_s",model="m"} (\S+)', text)
    assert low is not None and 0.4 < float(low[1]) < 0.6
    assert 'jitney_fleet_rollout_worse{figure="tokens_per_s",model="m"} 1.0' in text
    assert 'jitney_fleet_rollout_share{candidate="int8",model="m"} 0.0' in text
    rolled_back = 'jitney_fleet_rollout_state{candidate="int8",model="m",state="rolled_back"} 1.0'
    assert rolled_back in text
    assert 'jitney_fleet_rollout_requests{arm="candidate",model="m"} 2000.0' in text


def test_keys_stay_where_they_are_over_a_restart_of_the_fleet(tmp_path: Path):
    """And what was measured, and decided, stays known."""
    users = [f"user-{number}" for number in range(20)]
    state = f'state_dir = "{tmp_path / "state"}"'
    fakes = FakeEngine(), FakeEngine()
    with engines(*fakes) as (one, two):
        text = (
            f'[fleet]\npoll_s = 0.3\n{state}\n[models."a/b"]\nurls = ["{one.url}"]\n'
            'upstream_model = "m"\n'
            f'[models."a/b".candidate]\nurls = ["{two.url}"]\nshare = 0.3\nname = "NAME"\n'
            'upstream_model = "m"\n'
        )
        first = text.replace("NAME", "v2")
        with fleet_of(tmp_path, first) as served, served.http() as http:
            served.wait_ready(one.name, two.name)
            before = Arms(served, one, two)
            arms_of = {user: before.ask(http, user, model="a/b") for user in users}
            assert set(arms_of.values()) == {one.name, two.name}
        assert [file.name for file in (tmp_path / "state").iterdir()] == ["rollout-a%2Fb.json"]
        with fleet_of(tmp_path, first) as served, served.http() as http:
            served.wait_ready(one.name, two.name)
            after = Arms(served, one, two)
            assert {user: after.ask(http, user, model="a/b") for user in users} == arms_of
            report = http.get("/fleet/rollouts/a/b").json()
            assert sum(arm["requests"] for arm in report["arms"].values()) == 2 * len(users)
            answer = http.post("/fleet/rollouts/a/b", json={"action": "promote"})
            assert answer.json()["state"] == "promoted"
            kept = (tmp_path / "state" / "rollout-a%2Fb.json").read_text()
            assert json.loads(kept)["state"] == "promoted"  # at once: a kill would not undo it
        with fleet_of(tmp_path, first) as served, served.http() as http:
            served.wait_ready(one.name, two.name)
            again = Arms(served, one, two)
            assert {again.ask(http, user, model="a/b") for user in users} == {two.name}
        with fleet_of(tmp_path, text.replace("NAME", "v3")) as served, served.http() as http:
            report = http.get("/fleet/rollouts").json()["rollouts"][0]
            assert (report["state"], report["candidate"]) == ("running", "v3")
            assert report["arms"]["stable"]["requests"] == 0


def test_a_broken_file_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "rollout-m.json").write_text('{"version": 1, "model": "m"')
    with arms(tmp_path, fleet=f'state_dir = "{tmp_path}"') as found:
        assert found.model.rollout.state == "running"
    assert "rollout m begins anew: its file" in caplog.text
    assert json.loads((tmp_path / "rollout-m.json").read_text())["candidate"] == "candidate"


def test_a_candidate_that_fails_is_counted_and_nobody_notices(tmp_path: Path):
    failing = FakeEngine(FakeClient(Script(error=ErrorInfo("internal_error", "no"))))
    rule = "share = 0.5"
    with arms(tmp_path, candidate=failing, rule=rule) as found, found.served.http() as http:
        names = {found.ask(http, f"user-{number}") for number in range(80)}
        assert names == {found.stable.name}
        comparison = found.model.rollout.comparison
        assert comparison.level("candidate", "errors") == 1.0
        assert comparison.level("stable", "errors") == 0.0
        look(found)
        assert found.model.rollout.state == "rolled_back"
        before = len(failing.heads)
        found.ask(http, "user-0")
        assert len(failing.heads) == before


PAGE = b"<!doctype html><title>Welcome</title>"
STREAM = "text/event-stream"


@dataclass
class Wrong:
    """Another program where the candidate should be: it answers probes as an engine does."""

    #: What generating routes say: all of it at once, or nothing at all.
    status: int = 200
    media_type: str = "text/html"
    body: bytes = PAGE
    hangs: bool = False
    engine: FakeEngine = field(default_factory=FakeEngine)
    #: Requests of generating routes that came.
    came: int = 0

    def becomes(self, other: Wrong) -> None:
        self.status, self.media_type, self.body = other.status, other.media_type, other.body
        self.hangs, self.came = other.hangs, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.engine(scope, receive, send)
            return
        self.came += 1
        if self.hangs and not self.body:
            await _left(receive)
            return
        headers = [(b"content-type", self.media_type.encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        more = self.hangs
        await send({"type": "http.response.body", "body": self.body, "more_body": more})
        if self.hangs:
            leaving = asyncio.create_task(_left(receive))
            while not leaving.done():  # it lives, and says nothing
                await send({"type": "http.response.body", "body": b": .\n\n", "more_body": True})
                await asyncio.sleep(0.02)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def beside(folder: Path, wrong: Wrong, share: float, timeout_s: float) -> Iterator[Arms]:
    """An engine, and this as its candidate."""
    with engines(FakeEngine()) as (one,), served(wrong) as (url, _):
        text = (
            f'[fleet]\npoll_s = 0.3\n[models.m]\nurls = ["{one.url}"]\n[models.m.candidate]\n'
            f'urls = ["{url}"]\nshare = {share}\ntimeout_s = {timeout_s}\n'
        )
        with fleet_of(folder, text) as fleet:
            wrong.engine.url = url
            fleet.wait_ready(one.name, wrong.engine.name)
            yield Arms(fleet, one, wrong.engine)


PLAIN: dict[str, Any] = {"stream": False}
STREAMED: dict[str, Any] = {"stream": True}
EMBEDDING: dict[str, Any] = {"path": "/v1/embeddings", "input": "a", "prompt": None}


@pytest.mark.parametrize(
    ("timeout_s", "cases"),
    [
        (
            60.0,
            [
                (PLAIN, Wrong()),
                (STREAMED, Wrong()),
                (PLAIN, Wrong(media_type="application/json", body=b'{"ok":true}')),
                (
                    STREAMED,
                    Wrong(media_type="application/json", body=b'{"choices":[{"text":"plain"}]}'),
                ),
                (STREAMED, Wrong(media_type=STREAM, body=b"")),
                (STREAMED, Wrong(media_type=STREAM, body=b"data: {}\n\ndata: [DONE]\n\n")),
                (STREAMED, Wrong(media_type=STREAM, body=b'data: {"error":{"message":"no"}}\n\n')),
                (PLAIN, Wrong(status=302)),
                (PLAIN, Wrong(status=404)),
                (PLAIN, Wrong(404, "application/json", b'{"detail":"Not Found"}')),
                (EMBEDDING, Wrong(500, "application/json", b'{"error":{"message":"no"}}')),
                (EMBEDDING, Wrong(media_type="application/json", body=b'{"ok":true}')),
            ],
        ),
        (
            1.0,
            [
                (PLAIN, Wrong(body=b"", hangs=True)),
                (EMBEDDING, Wrong(body=b"", hangs=True)),
                (STREAMED, Wrong(body=b"", hangs=True)),
                (STREAMED, Wrong(media_type=STREAM, body=b": keep-alive\n\n", hangs=True)),
            ],
        ),
    ],
    ids=["answers", "hangs"],
)
def test_what_is_no_answer_of_the_api_is_counted_and_nobody_notices(
    tmp_path: Path, timeout_s: float, cases: list[tuple[dict[str, Any], Wrong]]
):
    wrong = Wrong()
    with beside(tmp_path, wrong, 0.5, timeout_s) as found, found.served.http() as http:
        users = [f"user-{number}" for number in range(40)]
        moved = [user for user in users if found.arm_of(user) == "candidate"][:4]
        stay = [user for user in users if found.arm_of(user) == "stable"][:4]
        for fields, case in cases:
            wrong.becomes(case)
            found.model.rollout.decide("restart")
            comparison = found.model.rollout.comparison

            def ask(user: str, fields: dict[str, Any] = fields) -> str:
                return found.ask(http, user, **fields)

            with ThreadPoolExecutor(len(moved)) as pool:
                assert {ask(user) for user in stay} == {found.stable.name}
                assert set(pool.map(ask, moved)) == {found.stable.name}
            until(lambda: comparison.requests("candidate") == len(moved))  # noqa: B023
            assert wrong.came >= len(moved), case
            assert comparison.level("candidate", "errors") == 1.0, case
            assert comparison.level("stable", "errors") == 0.0, case


def test_a_stream_that_falls_silent_in_its_middle_ends_and_is_counted(tmp_path: Path):
    """What was sent cannot be taken back: it ends with the API's error."""
    begun = b'data: {"choices":[{"text":"Hello","index":0}]}\n\n'
    wrong = Wrong(media_type=STREAM, body=begun, hangs=True)
    with beside(tmp_path, wrong, 0.99, 2.0) as found, found.served.http() as http:
        body = {"model": "m", "prompt": "a", "max_tokens": 5, "stream": True, "user": "u"}
        text = http.post("/v1/completions", json=body).text
        assert "Hello" in text and '"code":"engine_dead"' in text and text.endswith("[DONE]\n\n")
        until(lambda: found.model.rollout.comparison.requests("candidate") == 1)
        assert found.model.rollout.comparison.level("candidate", "errors") == 1.0


def test_a_client_that_leaves_a_hanging_candidate_counts_against_it(tmp_path: Path):
    """Before its time is over, and after three times what the stable arm ever took."""
    wrong = Wrong(body=b"", hangs=True)
    with beside(tmp_path, wrong, 0.3, 600.0) as found, found.served.http() as http:
        users = [f"user-{number}" for number in range(40)]
        moved = next(user for user in users if found.arm_of(user) == "candidate")
        slowest_s = 0.0
        for user in users:
            if found.arm_of(user) == "stable":
                began = time.monotonic()
                found.ask(http, user)
                slowest_s = max(slowest_s, time.monotonic() - began)
        body = {"model": "m", "prompt": "Where to?", "user": moved}
        timeout = httpx.Timeout(60, read=max(1.0, 10 * slowest_s))
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=timeout)
        until(lambda: found.model.rollout.comparison.requests("candidate") == 1)
        assert found.model.rollout.comparison.level("candidate", "errors") == 1.0


def test_a_candidate_may_take_longer_where_the_stable_arm_does():
    """Three times its slowest of late, those that are open among them; each route by itself."""
    pace, one, other = _Pace(), object(), object()
    wait = _Wait("first", "/v1/completions", False, False)
    assert pace.limit(wait, 100.0, 10.0) == 10.0
    pace.begin(wait, one, 100.0)
    pace.begin(wait, other, 140.0)
    assert pace.limit(wait, 150.0, 10.0) == 150.0
    pace.end(wait, one)
    pace.took(wait, 60.0)
    assert pace.limit(wait, 160.0, 10.0) == 180.0
    for _ in range(400):
        pace.took(wait, 1.0)
    assert pace.limit(wait, 140.0, 10.0) == 10.0
    assert pace.limit(wait, 150.0, 10.0) == 30.0, "the other is still open"
    assert pace.limit(wait.next, 150.0, 10.0) == 10.0


def test_what_the_stable_arm_takes_and_the_candidate_refuses_counts_against_it(tmp_path: Path):
    """Such as a prompt that is too long for its context; what both refuse is the client's fault."""
    refusal = b'{"error":{"message":"too long","code":"context_length_exceeded"}}'
    wrong = Wrong(status=400, media_type="application/json", body=refusal)
    with beside(tmp_path, wrong, 0.99, 60.0) as found, found.served.http() as http:
        assert found.ask(http, "user-1") == found.stable.name
        comparison = found.model.rollout.comparison
        assert comparison.level("candidate", "errors") == 1.0
        body = {"model": "m", "prompt": "a", "max_tokens": -1, "user": "user-2"}
        assert http.post("/v1/completions", json=body).json()["error"]["param"] == "max_tokens"
        assert comparison.requests("candidate") == 1


@pytest.mark.parametrize(("arm", "counted"), [("stable", 0), ("candidate", 1)])
def test_a_refusal_for_lack_of_room_counts_where_the_arm_has_no_more_to_do(
    tmp_path: Path, arm: ArmName, counted: int
):
    """The stable engine has three requests, the candidate none."""
    full = FakeEngine(FakeClient(Script(error=ErrorInfo("queue_full", "full"))))
    rule = "share = 0.5"
    sides = {arm: full}
    with arms(tmp_path, sides.get("stable"), sides.get("candidate"), rule) as found:
        replica = found.served.replicas()[found.stable.name]
        for _ in range(3):
            replica.begin()
        users = [f"user-{number}" for number in range(40)]
        user = next(one for one in users if found.arm_of(one) == arm)
        with found.served.http() as http:
            body = {"model": "m", "prompt": "Where to?", "user": user}
            status = http.post("/v1/completions", json=body).status_code
        assert status == (429 if arm == "stable" else 200)
        until(lambda: full.client.requests)
        until(lambda: not replica.open - 3)
        assert found.model.rollout.comparison.requests(arm) == counted


def test_a_candidate_that_is_gone_is_counted_too(tmp_path: Path):
    with arms(tmp_path) as found, found.served.http() as http:
        users = [f"user-{number}" for number in range(10)]
        first = {user: found.ask(http, user) for user in users}
        moved = [user for user in users if first[user] == found.candidate.name]
        assert moved
        found.candidate.client.state = "draining"  # unready from now on
        replica = found.served.replicas()[found.candidate.name]
        until(lambda: replica.state == "unready")
        assert {found.ask(http, user) for user in moved} == {found.stable.name}
        share = found.model.rollout.comparison.level("candidate", "errors")
        assert share == pytest.approx(0.5)
        found.candidate.client.state = "ready"
        until(lambda: replica.state == "ready")
        assert {found.ask(http, user) for user in moved} == {found.candidate.name}


def test_what_loads_after_a_decision_by_hand_is_no_failure(tmp_path: Path):
    """Engines of a candidate that was rolled back may have ended."""
    with arms(tmp_path, rule="share = 0.9") as found, found.served.http() as http:
        users = [f"user-{number}" for number in range(5)]
        asked = [user for user in users if found.ask(http, user) == found.candidate.name]
        replica = found.served.replicas()[found.candidate.name]
        found.candidate.client.state = "draining"  # unready from now on
        until(lambda: replica.state == "unready")
        assert http.post("/fleet/rollouts/m", json={"action": "restart"}).status_code == 200
        assert {found.ask(http, user) for user in asked} == {found.stable.name}
        assert found.model.rollout.comparison.requests("candidate") == 0
        found.candidate.client.state = "ready"
        until(lambda: replica.state == "ready")
        assert {found.ask(http, user) for user in asked} == {found.candidate.name}
        assert asked
        # The last one is counted once its answer has left.
        until(lambda: found.model.rollout.comparison.requests("candidate") == len(asked))


@pytest.mark.parametrize("full, counted", [(False, 1), (True, 0)])
def test_a_background_line_that_fails_counts_and_one_that_finds_no_room_does_not(
    tmp_path: Path, full: bool, counted: int
):
    code = "queue_full" if full else "internal_error"
    failing = FakeEngine(FakeClient(Script(error=ErrorInfo(code, "no"))))
    line = {"x-jitney-background": "1"}
    with (
        arms(tmp_path, candidate=failing, rule="share = 0.99") as found,
        found.served.http(headers=line) as batch,
    ):
        assert found.ask(batch, "user-1") == found.stable.name
        assert failing.client.requests
        assert found.model.rollout.comparison.requests("candidate") == counted


def test_a_stream_of_infill_is_whole_with_its_last_event():
    last = b'data: {"index":0,"content":"","tokens":[],"stop":true,"stop_type":"eos"}'
    assert AnswerShape.ends(last)
    assert not AnswerShape.ends(b'data: {"index":0,"content":"\\"stop\\":true","stop":false}')


def test_vectors_of_many_megabytes_are_not_parsed():
    """38 ms of the loop's time for 20 MB."""
    shape = AnswerShape.of(ProxiedRequest("POST", "/v1/embeddings", []))
    assert [shape.fits(b'{"data":[]}'), shape.fits(b"{}"), shape.fits(b"{}" * (1 << 20))] == [
        True,
        False,
        True,
    ]


def test_streams_are_measured_as_they_pass_and_mistakes_are_not(tmp_path: Path):
    """Lines of batches yield to other requests: how long they take says nothing of an engine."""
    line = {"x-jitney-background": "1"}
    with arms(tmp_path) as found, found.served.http() as http:
        comparison = found.model.rollout.comparison
        with found.served.http(headers=line) as batch:
            names = {found.ask(batch, f"user-{number}") for number in range(8)}
        assert names == {found.stable.name, found.candidate.name}
        until(lambda: sum(map(comparison.requests, ARMS)) == 8)
        assert {comparison.level(arm, "errors") for arm in ARMS} == {0.0}
        assert {comparison.level(arm, "tokens_per_s") for arm in ARMS} == {None}
        for number in range(8):
            body = {"model": "m", "prompt": "a", "max_tokens": -1, "user": f"user-{number}"}
            assert http.post("/v1/completions", json=body).status_code == 400
        assert sum(map(comparison.requests, ARMS)) == 8

        found.model.rollout.decide("restart")
        comparison = found.model.rollout.comparison
        for number in range(8):
            found.ask(http, f"user-{number}", stream=True)
        until(lambda: sum(map(comparison.requests, ARMS)) == 8)
        for arm in ARMS:
            assert comparison.sums[arm]["first_token_s"].requests == comparison.requests(arm)
        first = comparison.level("stable", "first_token_s")
        speed = comparison.level("stable", "tokens_per_s")
        cost = comparison.level("stable", "token_cost")
        assert first is not None and first > 0
        assert speed is not None and speed > 0 and cost is not None and cost > 0


def test_what_the_engines_are_set_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_keeper, "_LOOK_S", 0.05)
    one = FakeEngine(FakeClient(config_digest="a" * 64))
    two = FakeEngine(FakeClient(config_digest="b" * 64))
    with arms(tmp_path, one, two) as found, found.served.http() as http:
        until(lambda: all(found.model.rollout.configs.values()))
        told = http.get("/fleet/rollouts").json()["rollouts"][0]["arms"]
        assert told["stable"]["configs"] == ["a" * 64]
        assert told["candidate"]["configs"] == ["b" * 64]
        assert told["candidate"]["replicas"] == [two.name]
        until(lambda: bool(found.model.rollout.report()["looks"]))


def test_who_may_decide_and_what_is_refused(tmp_path: Path):
    users, admins = (digest_key("user"),), (digest_key("boss"),)
    with arms(tmp_path, api_keys=users, admin_keys=admins) as found:
        with found.served.http(headers={"authorization": "Bearer user"}) as http:
            assert http.get("/fleet/rollouts").status_code == 403
            assert http.post("/fleet/rollouts/m", json={"action": "promote"}).status_code == 403
        with found.served.http(headers={"authorization": "Bearer boss"}) as http:
            refused = http.post("/fleet/rollouts/m", json={"action": "explode"})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "action"
            assert http.post("/fleet/rollouts/m", json={}).status_code == 400
            assert http.post("/fleet/rollouts/none", json={"action": "promote"}).status_code == 404
            assert http.get("/fleet/rollouts/none").status_code == 404
            for action, state, share in (
                ("promote", "promoted", 1.0),
                ("roll_back", "rolled_back", 0.0),
                ("restart", "running", 0.3),
            ):
                report = http.post("/fleet/rollouts/m", json={"action": action}).json()
                assert (report["state"], report["share"]) == (state, share)
                assert report["decision"]["by"] == "hand"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("share = 1.0", "candidate.share: must be less than 1"),
        ("may_lose = { speed = 0.1 }", "speed is unknown"),
        ("may_lose = { errors = 0.0 }", "errors must be more than 0"),
        ('name = "a b"', "candidate.name"),
        ("min_requests = 1", "candidate.min_requests: must be greater than or equal to 30"),
        ('urls = ["http://a:1"]', "candidate names an engine that the model has already"),
        ("shares = 0.1", "shares"),
        ('candidate = { urls = ["http://c:1"] }', "no candidate of its own"),
    ],
)
def test_a_bad_candidate_is_one_line(tmp_path: Path, lines: str, words: str):
    urls = "" if "urls" in lines.split("=")[0] else 'urls = ["http://b:1"]\n'
    file = tmp_path / "fleet.toml"
    file.write_text(f'[models.m]\nurls = ["http://a:1"]\n[models.m.candidate]\n{urls}{lines}\n')
    with pytest.raises(ConfigError) as caught:
        FleetConfig.read(file)
    message = str(caught.value)
    assert "\n" not in message and "[models.m]" in message and words in message


def asked(headers: tuple[tuple[bytes, bytes], ...] = (), **fields: Any) -> ProxiedRequest:
    return ProxiedRequest("POST", "/v1/chat/completions", list(headers), fields)


def test_a_key_is_a_user_else_a_conversation():
    chat = [{"role": "user", "content": "Where to?"}]
    assert _key_of(asked(user="u", messages=chat)) == _key_of(asked(user="u", prompt="other"))
    assert _key_of(asked(metadata={"user_id": "u"})) == _key_of(asked(user="u"))
    assert _key_of(asked(user="")) == _key_of(asked())
    session = ((b"x-session-id", b"s"),)
    assert _key_of(asked(session, messages=chat)) == _key_of(asked(session, prompt="other"))
    longer = [*chat, {"role": "assistant", "content": "Home"}, {"role": "user", "content": "ok"}]
    assert _key_of(asked(messages=chat)) == _key_of(asked(messages=longer))
    assert _key_of(asked(messages=chat)) != _key_of(asked(prompt="other"))


def test_the_documentation_says_of_every_field_what_the_code_says():
    text = (ROOT / "docs" / "rollout.md").read_text()
    for name, info in CandidateSection.model_fields.items():
        if name not in ReplicasSection.model_fields:
            assert f"| `{name}` |" in text and f" | {info.description} |" in text, name
    for name in FIGURES:
        assert f"| `{name}` |" in text

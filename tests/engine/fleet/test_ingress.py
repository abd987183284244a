"""A fleet's endpoint over fake engines: passing on, trying the next one, going on elsewhere."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ollama
import pytest
from api_fakes import FakeClient, Script, until
from fleet_engines import (
    CHAT,
    ROUND_ROBIN,
    FakeEngine,
    events,
    fleet_of,
    said,
    serving,
    toml,
)

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.requests import EngineRequest
from jitney.engine.fleet.prompt_prefixes import prompt_prefixes
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server.process.client import OutputListener

TEXT = "Hello, wörld!"


def full(retry_after: float) -> Script:
    return Script(error=ErrorInfo("queue_full", "no room", retry_after=retry_after))


def test_an_answer_is_passed_on_as_it_is(tmp_path: Path):
    fakes = [FakeEngine()]
    with serving(tmp_path, *fakes) as (_, http):
        headers = {"x-request-id": "mine", "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
        answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
        direct = http.post(fakes[0].url + "/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        own = {"id", "created"}
        assert {k: v for k, v in answer.json().items() if k not in own} == {
            k: v for k, v in direct.json().items() if k not in own
        }
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-jitney-replica"] == fakes[0].name
        assert fakes[0].heads[0]["traceparent"] == headers["traceparent"]
        assert fakes[0].heads[0]["x-request-id"] == "mine"


def test_a_stream_is_passed_on_byte_by_byte(tmp_path: Path):
    body = CHAT | {"stream": True, "seed": 5, "stream_options": {"include_usage": True}}
    fakes = [FakeEngine()]
    with serving(tmp_path, *fakes) as (_, http):
        answer = http.post("/v1/chat/completions", json=body)
        assert said(answer.text) == TEXT
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert events(answer.text)[-1]["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
        assert fakes[0].client.requests[0].sampling.seed == 5


def test_every_form_is_passed_on(tmp_path: Path):
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Where to?"},
        "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 5},
        "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
        "/v1/responses": {"input": "Where to?"},
        "/v1/responses/input_tokens": {"input": "Where to?"},
        "/tokenize": {"prompt": "Where to?"},
    }
    with serving(tmp_path, FakeEngine()) as (_, http):
        for path, body in bodies.items():
            assert http.post(path, json=body | {"model": "m"}).status_code == 200, path
        for path in ("/v1/completions", "/v1/messages"):
            wrong = bodies[path] | {"model": "m", "max_tokens": -1}
            assert http.post(path, json=wrong).status_code == 400


def test_ollamas_clients_find_the_models_of_a_fleet(tmp_path: Path):
    body = {"model": "m:latest", "messages": CHAT["messages"]}
    answered: list[str] = []
    gate = threading.Event()
    engine = FakeEngine(FakeClient(Script(TEXT, gate=gate, free=1)))
    with serving(tmp_path, engine) as (served, http):
        client = ollama.Client(host=served.url, trust_env=False)
        assert [each.model for each in client.list().models] == ["m"]
        assert [each.context_length for each in client.ps().models] == [256]
        assert "completion" in (client.show("m:latest").capabilities or ())
        assert client.embed("m", "ab").embeddings == [[1.0, 2.0]]
        for part in client.chat("m:latest", CHAT["messages"], stream=True):
            answered.append(part.message.content or "")
            gate.set()  # as it comes, not all at its end: the first piece came before
        assert "".join(answered) == TEXT and part.done_reason == "stop"
        streamed = http.post("/api/chat", json=body)
        assert streamed.headers["content-type"] == "application/x-ndjson"
        unknown = http.post("/api/generate", json={"model": "none", "prompt": "a"})
        assert unknown.status_code == 404 and isinstance(unknown.json()["error"], str)
        ranked = http.post("/v1/rerank", json={"model": "m", "query": "q", "documents": ["a"]})
        assert [each["index"] for each in ranked.json()["results"]] == [0]


def test_ollamas_stream_whose_engine_dies_ends_with_a_line_that_says_so(tmp_path: Path):
    with serving(tmp_path, FakeEngine(dies_after=4)) as (served, _):
        client = ollama.Client(host=served.url, trust_env=False)
        with pytest.raises(ollama.ResponseError, match="engine"):
            list(client.chat("m", CHAT["messages"], stream=True))


def test_models_are_listed_and_unknown_ones_refused(tmp_path: Path):
    text = toml(["http://127.0.0.1:1"]) + '[models.other]\nurls = ["http://127.0.0.1:2"]\n'
    with fleet_of(tmp_path, text) as served, served.http() as http:
        listed = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["m", "other"]
        assert http.get("/v1/models/other").json()["kind"] == "replicas"
        assert http.get("/v1/models/none").status_code == 404
        unknown = http.post("/v1/chat/completions", json=CHAT | {"model": "none"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        unnamed = http.post("/v1/chat/completions", json=CHAT | {"model": None})
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == http.get("/livez").status_code == 200
        gone = http.post("/v1/chat/completions", json=CHAT)
        assert gone.status_code == 503 and gone.headers["retry-after"]
        form = {"files": {"file": b"..."}, "data": {"purpose": "batch"}}
        for kept in (http.get("/v1/jobs"), http.get("/v1/batches"), http.post("/v1/files", **form)):
            assert (kept.status_code, kept.json()["error"]["code"]) == (503, "no_store")
        # A form, too, is told that there is no such route, not that it should be JSON.
        unknown = http.post("/v1/uploads", **form)
        assert unknown.status_code == 404 and "/v1/uploads" in unknown.json()["error"]["message"]


def test_bad_bodies_are_refused_as_an_engine_does(tmp_path: Path):
    with (
        fleet_of(tmp_path, toml(["http://127.0.0.1:1"]), body_limit=2000) as served,
        served.http() as http,
    ):
        json_type = {"content-type": "application/json"}
        path = "/v1/chat/completions"
        for body in (b"", b"[]", b"{", b'{"a":' * 300):
            answer = http.post(path, content=body, headers=json_type)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_json"
        assert http.post(path, content=b" " * 2001, headers=json_type).status_code == 413
        assert http.post(path, content=b"{}").status_code == 415
        assert http.get(path).status_code == 405
        assert http.get("/livez", headers={"host": "a#b"}).status_code == 400


def test_keys_are_asked_for_and_replaced(tmp_path: Path):
    keys: dict[str, Any] = {"api_keys": (digest_key("user"),), "admin_keys": (digest_key("boss"),)}
    fake = FakeEngine(settings={"admin_keys": (digest_key("engine"),)})
    with serving(tmp_path, fake, key="engine", **keys) as (_, http):
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 401
        user = {"authorization": "Bearer user"}
        assert http.post("/v1/chat/completions", json=CHAT, headers=user).status_code == 200
        assert fake.heads[-1]["authorization"] == "Bearer engine"
        assert http.get("/metrics", headers=user).status_code == 403
        boss = {"authorization": "Bearer boss"}
        assert "jitney_fleet_attempts" in http.get("/metrics", headers=boss).text
        known = http.get("/fleet/replicas", headers=boss).json()["models"]["m"]
        assert known[0]["state"] == "ready" and known[0]["seats"] == 8


def test_turns_of_a_conversation_go_to_one_replica(tmp_path: Path):
    fakes = [FakeEngine() for _ in range(3)]
    with serving(tmp_path, *fakes) as (_, http):
        places = []
        for number in range(12):
            messages = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"Question {number}"},
            ]
            seen = set()
            for _ in range(3):
                body = CHAT | {"messages": messages}
                answer = http.post("/v1/chat/completions", json=body)
                seen.add(answer.headers["x-jitney-replica"])
                messages = [*messages, {"role": "user", "content": "And then?"}]
            assert len(seen) == 1
            places += seen
        assert len(set(places)) > 1


def test_a_conversation_that_the_brake_moved_stays_where_its_pages_are(tmp_path: Path):
    """Its first turn finds its own replica busy and goes to the other; so does every later one."""
    fakes = [FakeEngine(FakeClient(Script(delay_s=0.001), seats=1)) for _ in range(2)]
    with serving(tmp_path, *fakes) as (served, http):
        messages = [{"role": "user", "content": "Where to?"}]
        model = served.fleet.models["m"]
        home = http.post("/v1/chat/completions", json=CHAT).headers["x-jitney-replica"]
        busy = served.replicas()[home]
        before = model.engines._prefixes.replica_of  # type: ignore[attr-defined]
        assert before(prefixes_of(messages)) == home
        messages = [{"role": "user", "content": "Another one"}]
        while next(model.engines.ring.walk(prefixes_of(messages)[0])) != home:  # type: ignore[attr-defined]
            messages[0]["content"] += "!"
        places = []
        for turn in range(4):
            if turn < 2:
                busy.open += 50 - 100 * turn
                busy.changed()
            body = CHAT | {"messages": messages}
            answer = http.post("/v1/chat/completions", json=body)
            places.append(answer.headers["x-jitney-replica"])
            messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": ""}]
        counted = http.get("/metrics").text
        assert places[0] != home and len(set(places)) == 1
        for choice, count in (("hashed", 1), ("spread", 1), ("known", 3)):
            assert f'jitney_fleet_choices_total{{choice="{choice}",model="m"}} {count}.0' in counted


def prefixes_of(messages: list[dict[str, str]]) -> list[bytes]:
    request = ProxiedRequest("POST", "/v1/chat/completions", [], {"messages": messages})
    return prompt_prefixes(request, 1024)


def test_prefixes_grow_with_a_conversation_and_with_a_text():
    system = {"role": "system", "content": "Be brief."}
    first, then = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    short, long = prefixes_of([system, first]), prefixes_of([system, first, then])
    assert len(short) == 2 and long[:2] == short and len(long) == 3
    assert prefixes_of([system | {"content": "Be long."}, first])[1] != short[1]
    few, more, most, ids = (
        prompt_prefixes(ProxiedRequest.post("m", "/v1/completions", {"prompt": prompt}), 4)
        for prompt in ("x" * 5, "x" * 8, "x" * 9, list(range(9)))
    )
    assert (len(few), len(more)) == (2, 3) and more[:2] == few and most == more
    assert len(ids) == 3
    for odd in (7, {"a": 1}, [[1, 2]], None):
        request = ProxiedRequest.post("m", "/tokenize", {"prompt": odd})
        assert len(prompt_prefixes(request, 4)) == 1


def test_the_next_one_answers_for_one_that_is_full(tmp_path: Path):
    with serving(tmp_path, FakeEngine(FakeClient(full(7.0))), FakeEngine()) as (_, http):
        for number in range(8):
            body = CHAT | {"messages": [{"role": "user", "content": str(number)}]}
            assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_all_full_tells_the_shortest_wait(tmp_path: Path):
    fakes = [FakeEngine(FakeClient(full(seconds))) for seconds in (9.0, 4.0)]
    with serving(tmp_path, *fakes) as (_, http):
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
        assert answer.json()["error"]["code"] == "queue_full"


def test_one_that_dies_before_its_answer_is_replaced(tmp_path: Path):
    """In turn, so that both are asked: by prefix all might be one's."""
    fakes = [FakeEngine(dies_after=0), FakeEngine()]
    with serving(tmp_path, *fakes, model=ROUND_ROBIN) as (_, http):
        for number in range(8):
            body = CHAT | {"messages": [{"role": "user", "content": str(number)}]}
            for stream in (False, True):
                answer = http.post("/v1/chat/completions", json=body | {"stream": stream})
                assert answer.status_code == 200 and TEXT in (
                    said(answer.text) if stream else answer.text
                )
        assert fakes[0].heads and fakes[1].heads


@pytest.mark.parametrize("dies_after", [1, 6])
def test_a_stream_goes_on_at_another_replica(tmp_path: Path, dies_after: int):
    fakes = [FakeEngine(dies_after=dies_after), FakeEngine()]
    with serving(tmp_path, *fakes, model=ROUND_ROBIN) as (served, http):
        for _ in range(4):
            body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
            answer = http.post("/v1/chat/completions", json=body)
            assert said(answer.text) == TEXT
            assert len({event["id"] for event in events(answer.text)}) == 1
        seeds = [request.sampling.seed for fake in fakes for request in fake.client.requests]
        assert None not in seeds
        metrics = served.fleet.metrics.render().decode()
        assert 'outcome="resumed"' in metrics and 'outcome="died"' in metrics


def test_an_engine_that_says_it_is_going_is_left(tmp_path: Path):
    going = FakeEngine(FakeClient(Script(fail_after=4)))
    with serving(tmp_path, going, FakeEngine(), model=ROUND_ROBIN) as (_, http):
        for _ in range(2):
            answer = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
            assert said(answer.text) == TEXT


def test_another_answer_ends_the_stream_with_the_apis_error(tmp_path: Path):
    other = FakeEngine(FakeClient(Script("Hello, somebody else", delay_s=0.001)))
    with serving(tmp_path, FakeEngine(dies_after=12), other, model=ROUND_ROBIN) as (_, http):
        answers = [
            http.post("/v1/chat/completions", json=CHAT | {"stream": True}) for _ in range(2)
        ]
        ends = [events(answer.text)[-1].get("error", {}).get("code") for answer in answers]
        assert sorted(map(str, ends)) == ["None", "engine_dead"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_streams_that_cannot_be_repeated_end_in_their_own_form(tmp_path: Path, path: str):
    body: dict[str, Any] = {"model": "m", "stream": True}
    body |= {"input": "Hi"} if path == "/v1/responses" else CHAT
    with serving(tmp_path, FakeEngine(dies_after=6)) as (_, http):
        text = http.post(path, json=body).text
    event, data = text.strip().split("\n\n")[-1].split("\n")
    assert event == "event: error" and json.loads(data.removeprefix("data: "))["type"] == "error"


def test_a_request_that_ends_engines_does_not_end_them_all(tmp_path: Path):
    fakes = [FakeEngine(dies_after=0) for _ in range(4)]
    with serving(tmp_path, *fakes) as (_, http):
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "request_failed"
        assert sum(len(fake.heads) for fake in fakes) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_replica_died_waits_for_another(tmp_path: Path, stream: bool):
    client = FakeClient(Script(delay_s=0.001))
    client.scripts = [client.script, full(0.1), full(0.1)]
    fakes = [FakeEngine(client, dies_after=0, deaths=1)]
    with serving(tmp_path, *fakes) as (_, http):
        answer = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert answer.status_code == 200
        assert TEXT in (said(answer.text) if stream else answer.text)
        assert len(fakes[0].heads) == 4


class _Crowded(FakeClient):
    """Its predicted wait is too long for newcomers."""

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        self.scripts = [] if request.admitted else [full(0.1)]
        super().submit(request, listener)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_lost_replica_had_admitted_is_not_refused_for_its_wait(tmp_path: Path, stream: bool):
    fakes = [FakeEngine(dies_after=3 * stream), FakeEngine(_Crowded(Script(delay_s=0.001)))]
    with serving(tmp_path, *fakes, model=ROUND_ROBIN, fleet="resume_wait_s = 1.0") as (_, http):
        answer = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert answer.status_code == 200
    assert TEXT in (said(answer.text) if stream else answer.text)
    assert fakes[1].heads[-1]["x-jitney-admitted"] == "1"
    assert "x-jitney-admitted" not in fakes[0].heads[0]


def test_a_request_that_waits_is_still_given_to_three_replicas_at_most(tmp_path: Path):
    client = FakeClient(Script(delay_s=0.001))
    client.scripts = [client.script, full(0.1)]
    fakes = [FakeEngine(client, dies_after=0)]
    with serving(tmp_path, *fakes) as (_, http):
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["error"]["code"] == "request_failed"
        assert len(fakes[0].heads) == 4, "three that it died with, one that it refused"


def test_a_client_that_leaves_ends_the_work(tmp_path: Path):
    client = FakeClient(Script(hang=True))
    with serving(tmp_path, FakeEngine(client)) as (served, http):
        with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}):
            until(lambda: bool(client.open))
        until(lambda: bool(client.aborts) and not client.open)
        assert client.aborts == [(client.requests[0].id, None, "abort")]
        (replica,) = served.replicas().values()
        until(lambda: replica.open == 0 and not served.fleet._open._count)


def test_a_replica_that_goes_is_left_out_and_comes_back(tmp_path: Path):
    fakes = [FakeEngine(), FakeEngine()]
    with serving(tmp_path, *fakes) as (served, http):
        fakes[0].client.state = "restarting"
        replica = served.replicas()[fakes[0].name]
        until(lambda: replica.state == "unready")
        assert "started again" in replica.reason
        for number in range(6):
            body = CHAT | {"messages": [{"role": "user", "content": str(number)}]}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.headers["x-jitney-replica"] == fakes[1].name
        fakes[0].client.state = "ready"
        until(lambda: replica.state == "ready")


def test_a_silent_replica_is_given_up_and_its_streams_go_on(tmp_path: Path):
    slow = FakeEngine(FakeClient(Script(delay_s=0.001)))
    slow.client.scripts = [Script(hang=True)]
    lines = {"model": ROUND_ROBIN, "fleet": "lost_after_s = 0.01"}
    with serving(tmp_path, slow, FakeEngine(), **lines) as (served, http):
        replica = served.replicas()[slow.name]

        def lose_it() -> None:
            until(lambda: replica.open == 1)
            replica.url = "http://127.0.0.1:1"  # nobody answers there

        losing = threading.Thread(target=lose_it)
        losing.start()
        for _ in range(2):
            answer = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
            assert said(answer.text) == TEXT
        losing.join()
        assert replica.state == "gone"


def test_kept_responses_are_found_at_their_engine(tmp_path: Path):
    with serving(tmp_path, FakeEngine(), FakeEngine(), model=ROUND_ROBIN) as (served, http):
        for stream in (False, True):
            body = {"model": "m", "input": "Hi", "stream": stream}
            first = http.post("/v1/responses", json=body)
            id = first.text.partition('"id":"')[2].partition('"')[0]
            assert id.startswith("resp_")
            place = first.headers["x-jitney-replica"]
            for forget in (False, True):  # one ingress that saw it go by, and a new one
                if forget:
                    served.fleet._keepers._values.clear()
                shown = http.get(f"/v1/responses/{id}")
                assert shown.json()["id"] == id
                for path in ("/v1/responses", "/v1/responses/input_tokens"):
                    follow = {"model": "m", "input": "?", "previous_response_id": id}
                    more = http.post(path, json=follow)
                    assert more.status_code == 200
                    assert more.headers["x-jitney-replica"] == place
            assert http.delete(f"/v1/responses/{id}").json()["deleted"] is True
        unknown = http.get("/v1/responses/resp_0")
        assert unknown.status_code == 404


def test_a_drain_refuses_and_waits(tmp_path: Path):
    gate = threading.Event()
    with serving(tmp_path, FakeEngine(FakeClient(Script(gate=gate, free=1)))) as (served, http):
        with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as it:
            until(lambda: served.fleet._open._count)
            served.fleet.begin_drain()
            refused = served.http().post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "draining",
            )
            gate.set()
            assert said(it.read().decode()) == TEXT
        until(lambda: not served.fleet._open._count)


def test_a_request_for_an_adapter_goes_to_an_engine_that_holds_it(tmp_path: Path):
    """The others would answer 404."""
    held: list[tuple[str, ...]] = [("fr",), ("de",), ("fr", "de"), ()]
    fakes = [FakeEngine(FakeClient(adapters=names)) for names in held]
    with serving(tmp_path, *fakes, model='adapters = ["fr", "de", "es"]') as (_, http):

        def ask(model: str, content: str = "Where to?") -> int:
            said = {"role": "user", "content": content}
            body = CHAT | {"model": model, "messages": [said]}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code != 200 or answer.json()["model"] == model
            return answer.status_code

        cards = http.get("/v1/models").json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            ("m", None),
            ("fr", "m"),
            ("de", "m"),
            ("es", "m"),
        ]
        assert http.get("/v1/models/fr").json()["parent"] == "m"
        for number in range(8):
            assert [ask(name, f"{number}") for name in ("m", "fr", "de")] == [200] * 3
        assert ask("es") == 503  # nobody holds it now
        assert ask("it") == 404
    for fake, names in zip(fakes, held, strict=True):
        numbers = {request.adapter for request in fake.client.requests}
        assert numbers <= set(range(len(names) + 1))
    assert sum(len(fake.client.requests) for fake in fakes) == 24


def test_a_turn_of_another_adapter_is_another_beginning():
    request = ProxiedRequest("POST", "/v1/completions", [], {"prompt": "x" * 9})
    keys = [prompt_prefixes(replace(request, adapter=name), 4) for name in ("", "fr", "de")]
    assert len({key for each in keys for key in each}) == sum(map(len, keys))

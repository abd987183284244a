"""Beginnings and ends: refusals by the engine, deadlines, clients that leave, draining, probes,
metrics, seats.
"""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from api_fakes import ByteTokenizer, FakeClient, Reply, Script, call, make_app, opening, run

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.messages import Progress
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.common.requests import EngineRequest, SamplingParams

PROMPT = {"model": "m", "prompt": "ab"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}
ROUTES = [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)]
MODES = [(path, body | {"stream": stream}) for path, body in ROUTES for stream in (False, True)]
modes = pytest.mark.parametrize(("path", "body"), MODES, ids=lambda value: str(value)[-28:])


@modes
@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (ErrorInfo("queue_full", "full", retry_after=2.25), 429, "rate_limit_error", ("3", "2250")),
        (ErrorInfo("queue_full", "full"), 429, "rate_limit_error", ("1", "1000")),
        (
            ErrorInfo("context_length_exceeded", "long", "prompt"),
            400,
            "invalid_request_error",
            (None, None),
        ),
        (ErrorInfo("deadline_exceeded", "late"), 504, "server_error", (None, None)),
        (ErrorInfo("engine_dead", "dead"), 503, "server_error", ("5", "5000")),
        (ErrorInfo("nan_logits", "nan"), 500, "server_error", (None, None)),
    ],
)
def test_what_the_engine_refuses_has_its_own_status_streamed_or_not(
    path, body, error, status, kind, headers
):
    client = FakeClient(Script(error=error))
    reply = run(call(make_app(client), path, body))
    assert reply.status == status and reply.headers["content-type"] == "application/json"
    code = error.code if error.code != "invalid_value" else None
    assert reply.error == {
        "message": error.message,
        "type": kind,
        "param": error.param,
        "code": code,
    }
    assert (reply.headers.get("retry-after"), reply.headers.get("retry-after-ms")) == headers


@modes
def test_an_internal_error_says_nothing_but_its_request_id(path, body, caplog):
    client = FakeClient()
    client.submit = lambda request, listener: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    reply = run(call(make_app(client), path, body))
    assert reply.status == 500 and reply.error["code"] == "internal_error"
    assert reply.headers["x-request-id"] in reply.error["message"] and b"division" not in reply.body
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_an_engine_that_dies_mid_way(path, body):
    script = Script("abcdef", fail_after=3)
    assert run(call(make_app(FakeClient(script)), path, body)).status == 503
    reply = run(call(make_app(FakeClient(script)), path, body | {"stream": True}))
    frames = reply.body.decode().split("\n\n")
    assert reply.status == 200 and reply.complete and frames[-2:] == ["data: [DONE]", ""]
    assert json.loads(frames[-3][6:]) == {
        "error": {
            "message": "the engine stopped",
            "type": "server_error",
            "param": None,
            "code": "engine_dead",
        }
    }


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_deadlines_while_decoding(path, body):
    class Late(FakeClient):
        async def _outputs_of(self, request, script):
            yield SequenceOutput(request_id=request.id, index=0, tokens=[65])
            yield SequenceOutput(request_id=request.id, index=0, finish="deadline")

    reply = run(call(make_app(Late()), path, body | {"timeout_ms": 50}))
    assert reply.status == 504 and reply.error["code"] == "deadline_exceeded"
    client = Late()
    reply = run(call(make_app(client), path, body | {"timeout_ms": 50, "stream": True}))
    assert reply.status == 200 and b'"code":"deadline_exceeded"' in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")


def test_the_servers_deadline_bounds_the_clients():
    client = FakeClient()
    app = make_app(client, request_timeout_s=10)
    for body in (PROMPT, PROMPT | {"timeout_ms": 86_400_000}, PROMPT | {"timeout_ms": 5000}):
        run(call(app, "/v1/completions", body))
    spans = [request.deadline - request.arrival for request in client.requests]  # type: ignore[operator]
    assert spans == pytest.approx([10, 10, 5])


def test_one_refused_prompt_ends_its_siblings():
    client = FakeClient()
    client.scripts = [
        Script("x" * 50, delay_s=0.01),
        Script(error=ErrorInfo("queue_full", "full"), first_delay_s=0.05),
    ]
    reply = run(call(make_app(client), "/v1/completions", {"model": "m", "prompt": ["a", "b"]}))
    assert (
        reply.status == 429
        and client.aborts == [(client.requests[0].id, None, "abort")]
        and not client.open
    )


async def test_answers_that_turn_clients_away_are_counted_by_their_reason():
    """By the engine, a key's limit, and a state in which nobody is served; other refusals are the
    client's own affair, and lines of batches are tried again.
    """

    full = Script(error=ErrorInfo("queue_full", "full", retry_after=2.25))
    client = FakeClient(full)
    history = client.history
    app = make_app(client, key_max_concurrent=2)
    path, background = "/v1/completions", {"x-jitney-background": "1"}
    assert (await call(app, path, PROMPT)).status == 429
    assert (await call(app, path, PROMPT | {"temperature": 9})).status == 400
    assert (await call(app, "/v1/nothing", PROMPT)).status == 404
    assert (await call(app, path, PROMPT, headers=background)).status == 429
    assert [dict(one.counts) for one in history.incidents.refusals] == [{"429 queue_full": 1}]
    assert history.incidents.refusals[0].retry_s == 2.25
    client.scripts = [Script("x" * 50, hang=True)]
    streams = [asyncio.create_task(call(app, path, PROMPT)) for _ in range(2)]
    while len(client.open) < 2:
        await asyncio.sleep(0)
    assert (await call(app, path, PROMPT)).status == 429
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    client.state = "restarting"
    assert (await call(app, path, PROMPT)).status == 503
    assert (await call(app, "/readyz", method="GET")).status == 503
    (refusals,) = history.incidents.refusals
    assert refusals.counts == {"429 queue_full": 1, "429 rate_limit": 1, "503 restarting": 1}


def test_a_submit_that_fails_half_way_ends_what_was_submitted():
    class Shy(FakeClient):
        def submit(self, request, listener):
            if self.requests:
                self.state = "dead"
            return super().submit(request, listener)

    client = Shy(Script(hang=True))
    reply = run(call(make_app(client), "/v1/completions", {"model": "m", "prompt": ["a", "b"]}))
    assert reply.status == 503 and reply.error["code"] == "engine_dead"
    assert client.aborts == [(client.requests[0].id, None, "abort")]


@modes
@pytest.mark.parametrize(
    "script", [Script(hang=True), Script("x" * 99, delay_s=0.05)], ids=["queued", "running"]
)
def test_a_client_that_leaves_ends_its_request(path, body, script):
    client = FakeClient(script)
    app = make_app(client)
    reply = run(call(app, path, body, leave_after=0.1))
    assert not reply.complete
    assert client.aborts == [(client.requests[0].id, None, "abort")] and not client.open
    text = run(call(app, "/metrics", method="GET")).body.decode()
    assert (
        "jitney_disconnects_total 1.0" in text
        and 'jitney_request_finished_total{reason="abort"} 1.0' in text
    )
    assert f'jitney_requests_total{{class="4xx",route="{path}"}} 1.0' in text


def test_leaving_ends_all_sequences_of_all_prompts():
    client = FakeClient(Script(hang=True))
    run(
        call(
            make_app(client),
            "/v1/completions",
            {"model": "m", "prompt": ["a", "b"], "n": 3},
            leave_after=0.05,
        )
    )
    assert [abort[0] for abort in client.aborts] == [request.id for request in client.requests]


def test_leaving_while_the_body_is_under_way():
    client = FakeClient()
    part = {"type": "http.request", "body": b"{", "more_body": True}
    reply = run(
        call(make_app(client), "/v1/completions", messages=[part, {"type": "http.disconnect"}])
    )
    assert reply.status == 0 and not client.requests


def test_leaving_while_the_prompt_is_tokenised():
    left = threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            left.wait(5.0)
            return super().encode(text)

    client = FakeClient()
    app = make_app(client)
    app.state.service.tokenizer = Slow()

    async def leave() -> int:
        reply = await call(app, "/v1/completions", PROMPT, leave_after=0.05)
        left.set()
        return reply.status

    assert not run(leave())
    assert not client.requests


def test_a_tokeniser_that_takes_too_long_is_not_waited_for():
    answered = threading.Event()

    class Stuck(ByteTokenizer):
        def apply_chat_template(self, messages, **variables):
            answered.wait(5.0)
            return "x"

    app = make_app(tokenize_timeout_s=0.05)
    app.state.service.tokenizer = Stuck()

    async def ask() -> Reply:
        reply = await call(app, "/v1/chat/completions", CHAT)
        answered.set()
        return reply

    reply = run(ask())
    assert reply.status == 400 and "too long" in reply.error["message"]


def test_an_error_after_the_headers_is_an_event():
    gate = threading.Event()
    script = Script(error=ErrorInfo("queue_full", "full"), gate=gate)
    app = opening(gate, make_app(FakeClient(script), header_wait_s=0.02))
    reply = run(call(app, "/v1/completions", PROMPT | {"stream": True}))
    assert reply.status == 200 and b'data: {"error":{"message":"full"' in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")


def test_an_answer_that_cannot_be_formatted_ends_its_request_only(caplog):
    class Broken(ByteTokenizer):
        def token_bytes(self, id):
            if id in b"ab":
                return super().token_bytes(id)
            raise ValueError("secret detail")

    client = FakeClient()
    app = make_app(client)
    app.state.service.tokenizer = Broken()
    for stream in (False, True):
        reply = run(call(app, "/v1/completions", PROMPT | {"stream": stream}))
        assert reply.status == 500 and b"secret" not in reply.body
    assert len(client.aborts) == 2 and "secret detail" in caplog.text


async def test_draining_lets_the_open_ones_finish():
    gate = threading.Event()
    client = FakeClient(Script("x" * 10, gate=gate))
    app = make_app(client)
    service = app.state.service
    await service.drained()
    open_one = asyncio.create_task(call(app, "/v1/completions", PROMPT))
    while not client.requests:
        await asyncio.sleep(0.001)
    service.begin_drain()
    refused = await call(app, "/v1/completions", PROMPT)
    probes = [
        (await call(app, path, method="GET")).status for path in ("/livez", "/readyz", "/startupz")
    ]
    assert not open_one.done()
    gate.set()
    await asyncio.wait_for(service.drained(), 30)
    finished = await open_one
    assert (refused.status, refused.error["code"]) == (503, "draining") and refused.headers[
        "retry-after"
    ] == "5"
    assert probes == [200, 503, 200] and finished.status == 200


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("loading", "loading"),
        ("restarting", "restarting"),
        ("dead", "engine_dead"),
        ("draining", "draining"),
    ],
)
def test_states_of_the_engine(state, code):
    client = FakeClient()
    client.state = state
    app = make_app(client)
    for path, body in ROUTES:
        reply = run(call(app, path, body))
        assert (reply.status, reply.error["code"]) == (503, code) and "retry-after" in reply.headers
    assert [
        run(call(app, path, method="GET")).status for path in ("/livez", "/readyz", "/health")
    ] == [200, 503, 503]


def test_loading_is_told_with_its_progress():
    client = FakeClient()
    client.state, client.info, client.progress = "loading", None, Progress("compile", 3, 9)
    app = make_app(client)
    app.state.service.tokenizer = None
    for path in ("/readyz", "/startupz"):
        reply = run(call(app, path, method="GET"))
        assert reply.status == 503 and "compile 3 of 9" in reply.error["message"]
    assert run(call(app, "/metrics", method="GET")).status == 200
    assert run(call(app, "/v1/models", method="GET")).json()["data"][0]["max_model_len"] is None
    assert run(call(app, "/slots", method="GET")).status == 503


def test_an_engine_without_signs_of_life_is_not_ready():
    client = FakeClient()
    app = make_app(client, heartbeat_s=5)
    client.age = 4.9
    assert run(call(app, "/readyz", method="GET")).status == 200
    client.age = 5.1
    assert run(call(app, "/readyz", method="GET")).error["code"] == "engine_dead"
    assert run(call(app, "/livez", method="GET")).status == 200


def test_models_version_and_slots():
    app = make_app(model="org/name")
    listed = run(call(app, "/v1/models", method="GET")).json()
    one = run(call(app, "/v1/models/org/name", method="GET")).json()
    assert listed == {"object": "list", "data": [one]}
    assert one == {
        "id": "org/name",
        "object": "model",
        "created": one["created"],
        "owned_by": "jitney",
        "root": "org/name",
        "max_model_len": 256,
    }
    shown = run(call(app, "/version", method="GET")).json()
    assert list(shown) == [
        "version",
        "config_digest",
        "platform",
        "device",
        "tensor_parallel",
        "expert_parallel",
        "data_parallel",
        "kernels",
        "kernels_out",
        "dtype",
        "weights",
        "kv_dtype",
        "pages",
        "window_pages",
        "checkpoints",
        "sampling_defaults",
        "embedding_pooling",
        "adapters",
        "weight_bytes",
        "step_bytes",
        "code_bytes",
        "kernel_proofs",
    ]
    assert shown["embedding_pooling"] == "mean"
    assert shown["tensor_parallel"] == 1
    busy, free = run(call(app, "/slots", method="GET")).json()
    assert busy == {
        "id": 0,
        "is_processing": True,
        "state": "decode",
        "n_ctx": 256,
        "request_id": "r",
        "index": 0,
        "n_prompt_tokens": 5,
        "n_prompt_tokens_processed": 5,
        "n_decoded": 3,
        "n_remain": 6,
        "n_pages": 1,
        "background": False,
    }
    assert free["is_processing"] is False and free["request_id"] is None


def samples(app) -> dict[str, float]:
    text = run(call(app, "/metrics", method="GET")).body.decode()
    return {
        name: float(value)
        for name, value in (
            line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
        )
    }


def record(**values):
    item = np.zeros((), STEP_DTYPE)
    for name, value in values.items():
        item[name] = value
    return item[()]


def test_metrics_count_requests_and_the_engines_rows():
    client = FakeClient(Script("abc", cached_tokens=1))
    app = make_app(client)
    run(call(app, "/v1/completions", PROMPT))
    run(call(app, "/v1/completions", PROMPT | {"n": 0}))
    client.counters.observe_step(
        record(
            mixed=1,
            bucket_tokens=8,
            prefill=5,
            decode=2,
            padding=1,
            seats_busy=3,
            seats=8,
            pages_used=9,
            waiting=4,
            preempted=1,
            device_s=0.25,
            gap_s=0.25,
            compiled=1,
        )
    )
    client.counters.observe_step(
        record(
            bucket_tokens=4,
            decode=4,
            seats_busy=4,
            seats=8,
            pages_used=8,
            pages_cached=2,
            device_s=0.003,
        )
    )
    client.counters.observe_outputs(
        [
            SequenceOutput(
                request_id="r", index=0, finish="error", error=ErrorInfo("nan_logits", "nan")
            )
        ]
    )
    client.counters.predicted_wait = 2.5
    for number, background in enumerate((False, True)):
        sampling = SamplingParams(n=1 + number)
        client.history.submit(
            EngineRequest(
                id=f"r{number}",
                prompt=[1],
                sampling=sampling,
                arrival=0.0,
                background=background,
            )
        )
    got = samples(app)
    want = {
        'jitney_requests_total{class="2xx",route="/v1/completions"}': 1,
        'jitney_requests_total{class="4xx",route="/v1/completions"}': 1,
        'jitney_request_finished_total{reason="stop"}': 1,
        'jitney_rejected_total{reason="invalid_value"}': 1,
        "jitney_prompt_tokens_total": 2,
        "jitney_cached_prompt_tokens_total": 1,
        "jitney_generated_tokens_total": 4,
        "jitney_ttft_seconds_count": 1,
        "jitney_itl_seconds_count": 3,
        "jitney_e2e_seconds_count": 1,
        "jitney_queue_seconds_sum": 0.01,
        "jitney_output_tokens_per_sequence_sum": 4,
        'jitney_rows_total{kind="prefill"}': 5,
        'jitney_rows_total{kind="decode"}': 6,
        'jitney_rows_total{kind="padding"}': 1,
        'jitney_steps_total{kind="mixed"}': 1,
        'jitney_steps_total{kind="decode"}': 1,
        "jitney_preemptions_total": 1,
        "jitney_nan_rows_total": 1,
        'jitney_compiles_total{when="late"}': 1,
        "jitney_seats": 8,
        "jitney_seats_busy": 4,
        "jitney_kv_pages": 64,
        "jitney_kv_pages_used": 8,
        "jitney_kv_pages_cached": 2,
        "jitney_requests_waiting": 0,
        "jitney_engine_up": 1,
        'jitney_step_seconds_bucket{kind="mixed",le="0.2",rows="8"}': 0,
        'jitney_step_seconds_bucket{kind="mixed",le="0.5",rows="8"}': 1,
        'jitney_step_seconds_sum{kind="mixed",rows="8"}': 0.5,
        'jitney_step_seconds_bucket{kind="decode",le="0.005",rows="4"}': 1,
        "jitney_work_seconds_count": 1,
        'jitney_requests_open{lane="live"}': 1,
        'jitney_requests_open{lane="background"}': 2,
        "jitney_predicted_wait_seconds": 2.5,
        "jitney_predicted_wait_limit_seconds": 60,
        'jitney_seat_fill_ratio_bucket{le="0.4"}': 1,
        'jitney_seat_fill_ratio_bucket{le="+Inf"}': 2,
    }
    assert {name: got.get(name) for name in want} == pytest.approx(want)
    client.counters.observe_idle(0)
    got = samples(app)
    assert got["jitney_seats_busy"] == got["jitney_predicted_wait_seconds"] == 0
    assert client.counters.last["decode"] == 4


def test_labels_stay_few():
    app = make_app()
    before = len(samples(app))
    for number in range(50):
        run(call(app, f"/v1/models/{number}", method="GET"))
        run(call(app, f"/{number}", method=f"X{number}"))
    assert len(samples(app)) - before <= 6


def test_vllm_names_when_asked_for():
    app = make_app(FakeClient(Script("abc")), metrics_compat="vllm")
    run(call(app, "/v1/completions", PROMPT))
    got = samples(app)
    want = {
        'vllm:num_requests_running{model_name="m"}': 0,
        'vllm:num_requests_waiting{model_name="m"}': 0,
        'vllm:kv_cache_usage_perc{model_name="m"}': 0,
        'vllm:prefix_cache_queries_total{model_name="m"}': 2,
        'vllm:prefix_cache_hits_total{model_name="m"}': 0,
        'vllm:num_preemptions_total{model_name="m"}': 0,
        'vllm:request_success_total{finished_reason="stop",model_name="m"}': 1,
        'vllm:time_to_first_token_seconds_count{model_name="m"}': 1,
        'vllm:inter_token_latency_seconds_count{model_name="m"}': 3,
        'vllm:e2e_request_latency_seconds_count{model_name="m"}': 1,
        "vllm:cache_config_info"
        '{block_size="16",enable_prefix_caching="True",num_gpu_blocks="64"}': 1,
    }
    assert {name: got.get(name) for name in want} == want
    assert not any(name.startswith("vllm:") for name in samples(make_app()))


def test_the_digest_is_a_label_of_one_metric():
    app = make_app(FakeClient(config_digest="0123456789abcdef" * 4))
    assert run(call(app, "/version", method="GET")).json()["config_digest"][:12] == "0123456789ab"
    text = run(call(app, "/metrics", method="GET")).body.decode()
    (line,) = [line for line in text.splitlines() if "0123456789ab" in line]
    assert line.startswith("jitney_build_info{") and 'config="0123456789ab"' in line

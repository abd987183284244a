"""Spans of generation requests, as OpenTelemetry's own in-memory exporter gets them; and the ids
that routers send.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from api_fakes import FakeClient, Script, call, make_app, run
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from jitney.engine.common.errors import ConfigError, ErrorInfo
from jitney.engine.common.messages import SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.http.tracing import Tracing
from jitney.engine.server.process.client import OutputListener

PROMPT = {"prompt": "ab"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class RememberingClient(FakeClient):
    """One whose history hears of everything, as a server's does."""

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        self.history.submit(request)
        super().submit(request, self._remembering(request, listener))

    def _remembering(self, request: EngineRequest, listener: OutputListener) -> OutputListener:
        seated: set[int] = set()

        def remember(output: SequenceOutput) -> None:
            if output.index not in seated and output.error is None:
                seated.add(output.index)
                self.history.take(StepReport([], events=[self._seated(request, output)]))
            self.history.take(StepReport([output]))
            listener(output)

        return remember

    def _seated(self, request: EngineRequest, output: SequenceOutput) -> SequenceEvent:
        return SequenceEvent(
            event="seated",
            request_id=request.id,
            index=output.index,
            seat=output.index,
            step=0,
            t=request.arrival,
            n_in=len(request.prompt),
            n_out=0,
        )


def traced(path: str, body: dict, script: Script | None = None, **kw) -> list[ReadableSpan]:
    """The spans of one request, in the order of their ends."""
    client = RememberingClient(script)
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    client.history.listeners.append(tracing.ended)
    app = make_app(client)
    app.state.service.tracing = tracing
    run(call(app, path, body, **kw))
    assert not tracing._parents, "nothing is left of a request that is over"
    tracing.close()
    return list(exporter.get_finished_spans())


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else format_span_id(span.parent.span_id)


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return format_span_id(span.context.span_id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_below_its_callers_with_its_phases_below(stream: bool):
    headers = TRACEPARENT | {"x-request-id": "r-1", "x-session-id": "s-1"}
    spans = traced("/v1/completions", PROMPT | {"stream": stream}, headers=headers)
    *phases, request = spans
    assert request.name == "POST /v1/completions" and request.kind is SpanKind.SERVER
    assert parent_of(request) == PARENT
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    for span in spans:
        assert span.context is not None
        assert format_trace_id(span.context.trace_id) == TRACE
        assert span.attributes is not None and span.attributes["jitney.request_id"] == "r-1"
        assert span.start_time is not None and span.end_time is not None
        assert span.start_time <= span.end_time
    assert {parent_of(span) for span in phases} == {id_of(request)}
    assert request.attributes is not None
    assert request.attributes["session.id"] == "s-1"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.usage.input_tokens"] == 2
    assert request.attributes["gen_ai.usage.output_tokens"] == 15
    queue, prefill, decode = phases
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert decode.attributes is not None and decode.attributes["jitney.finish"] == "stop"
    assert request.resource.attributes["service.name"] == "jitney"


def test_a_request_that_never_boarded_waited_and_failed():
    refused = Script(error=ErrorInfo("queue_full", "too many"))
    queue, request = traced("/v1/completions", PROMPT, refused)
    assert queue.name == "queue" and queue.attributes is not None
    assert queue.attributes["jitney.finish"] == "error"
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 429
    assert request.status.status_code is StatusCode.UNSET
    dead = Script(error=ErrorInfo("nan_logits", "not finite"))
    assert traced("/v1/completions", PROMPT, dead)[-1].status.status_code is StatusCode.ERROR


def test_a_refused_body_is_a_span_too_and_a_bad_traceparent_is_none():
    [span] = traced("/v1/completions", {"prompt": 5}, headers={"traceparent": "00-zz-1-01"})
    assert parent_of(span) is None and span.attributes is not None
    assert span.attributes["http.response.status_code"] == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
)
def test_an_environment_that_asks_for_what_is_not_there(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        Tracing()


def test_without_the_flag_nothing_of_it_is_loaded():
    code = (
        "import sys, jitney.engine.cli.serve, jitney.engine.server.app\n"
        "import jitney.engine.server.chat.endpoints\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_without_the_package_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[otel\]"):
        Tracing()


def test_a_session_is_echoed_and_logged_if_it_is_harmless(caplog: pytest.LogCaptureFixture):
    app = make_app()
    with caplog.at_level(logging.INFO, logger="jitney.access"):
        reply = run(call(app, "/v1/completions", PROMPT, headers={"x-session-id": "s.1-X_"}))
        assert reply.headers["x-session-id"] == "s.1-X_"
        for bad in ("", "a b", "<script>", "x" * 129, "é", "a\x1b[31m"):
            reply = run(call(app, "/v1/completions", PROMPT, headers={"x-session-id": bad}))
            assert reply.status == 200 and "x-session-id" not in reply.headers
    lines = [record.getMessage() for record in caplog.records if record.name == "jitney.access"]
    assert lines[0].endswith(" session=s.1-X_")
    assert not any("session" in line for line in lines[1:])

"""Spans of generation requests for OpenTelemetry (extra `otel`): one for each HTTP request, below
its caller's own (W3C trace context), and below it the phases of each sequence. OpenTelemetry's own
variables (OTEL_EXPORTER_OTLP_ENDPOINT ...) set exporter, resource and sampler. Without `otel`
nothing of this is imported.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.extras import how_to_install
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.http.context import Context

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

#: Seconds that the last spans get to be sent when the server ends.
_CLOSE_S = 3.0
#: Headers of W3C trace context.
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_SERVICE = "jitney"


@dataclass(slots=True)
class _Parent:
    """The parent of an engine request's spans."""

    context: TraceContext
    request_id: str
    #: Its sequences that have not ended.
    still_open: int


class Tracing:
    """Makes and sends the spans. processor: None: the environment's exporter. Raises ConfigError if
    OpenTelemetry is not installed, or the environment is wrong.
    """

    def __init__(self, processor: SpanProcessor | None = None):
        try:
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(f"otel needs OpenTelemetry: {how_to_install('otel')}") from None
        resource = Resource.create()
        if not os.environ.get("OTEL_SERVICE_NAME"):
            resource = Resource({SERVICE_NAME: _SERVICE}).merge(_without_default(resource))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(_exporter()))
        self._tracer = self._provider.get_tracer(_SERVICE)
        #: By engine request.
        self._parents: dict[str, _Parent] = {}

    def begin(self, scope: Scope) -> None:
        """A request that generates has come: its span begins, below the one that it names."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = Context.of(scope)
        assert context.route is not None  # it generates
        carrier = dict(_trace_headers(scope))
        above = TraceContextTextMapPropagator().extract(carrier)
        attributes = {
            "http.request.method": scope["method"],
            "http.route": context.route.path,
            "jitney.request_id": context.request_id,
        }
        if context.session_id:
            attributes["session.id"] = context.session_id
        context.span = self._tracer.start_span(
            f"{scope['method']} {context.route.path}",
            above,
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

    def end(self, context: Context, status: int) -> None:
        from opentelemetry.trace import StatusCode

        span = context.span
        assert span is not None  # `begin` made it
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("gen_ai.usage.input_tokens", context.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", context.completion_tokens)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def submitted(self, request: EngineRequest, context: Context) -> None:
        """The engine has a part of the request: its sequences' spans will stand below it."""
        from opentelemetry.trace import set_span_in_context

        if context.span is not None:
            above = set_span_in_context(context.span)
            self._parents[request.id] = _Parent(above, context.request_id, request.sampling.n)

    def ended(self, record: RequestRecord) -> None:
        """A sequence is over. A listener of the history: its record has all times."""
        parent = self._parents.get(record.request_id)
        if parent is None:
            return
        parent.still_open -= 1
        if not parent.still_open:
            del self._parents[record.request_id]
        to_epoch = time.time() - time.monotonic()
        for name, start, end in _phases(record):
            span = self._tracer.start_span(
                name,
                parent.context,
                start_time=_nanoseconds(start + to_epoch),
                attributes=_attributes(record, parent),
            )
            span.end(_nanoseconds(end + to_epoch))

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of a sequence's phases, as far as it came."""
    end = record.end
    boarded = end if record.boarded is None else record.boarded
    yield "queue", record.arrival, max(record.arrival, boarded)
    if record.boarded is None:
        return
    first = end if record.first_token is None else record.first_token
    yield "prefill", boarded, max(boarded, first)
    if record.first_token is not None:
        yield "decode", first, max(first, end)


type _Attributes = dict[str, str | int]

#: Name of an attribute -> field of the record.
_RECORDED = {
    "engine_request_id": "request_id",
    "sequence": "index",
    "prompt_tokens": "n_prompt",
    "cached_tokens": "cached_tokens",
    "output_tokens": "n_output",
    "preemptions": "preemptions",
    "accepted_drafts": "accepted",
    "rejected_drafts": "rejected",
    "finish": "finish",
}


def _attributes(record: RequestRecord, parent: _Parent) -> _Attributes:
    figures = {f"jitney.{name}": getattr(record, field) for name, field in _RECORDED.items()}
    return {"jitney.request_id": parent.request_id} | figures


def _trace_headers(scope: Scope) -> Iterator[tuple[str, str]]:
    for name, value in scope["headers"]:
        if name in _TRACE_HEADERS:
            yield name.decode(), value.decode("latin-1")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _without_default(resource: Resource) -> Resource:
    """The resource without the SDK's "unknown_service", so that our name counts."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    attributes = dict(resource.attributes)
    if str(attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        del attributes[SERVICE_NAME]
    return Resource(attributes)


def _exporter() -> SpanExporter:
    """The exporter of OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL; default: OTLP/HTTP."""
    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if name != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER {name} is not known here: otlp or console")
    protocol = _protocol()
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # pyright: ignore[reportMissingImports]
                OTLPSpanExporter,
            )
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise ConfigError(f"otel needs the package {package}") from None
    return OTLPSpanExporter()


def _protocol() -> str:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name)
        if protocol in ("grpc", "http/protobuf"):
            return protocol
        if protocol:
            raise ConfigError(f"{name} {protocol} is not known here: http/protobuf or grpc")
    return "http/protobuf"

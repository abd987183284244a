"""Prometheus metrics: what the HTTP side counts itself, and what it reads from the engine's running
totals.

Every label has few values: route templates, status classes, finish reasons, ledger kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jitney.engine.process import counters as engine
from jitney.engine.types import EngineState

if TYPE_CHECKING:
    from jitney.engine.api.service import Service

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class ServerMetrics:
    """All metrics of one service, in a registry of their own."""

    def __init__(self, service: Service):
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = self._counter("requests", "HTTP requests answered", "route", "class")
        self.finished = self._counter("request_finished", "sequences ended, by reason", "reason")
        self.rejected = self._counter(
            "rejected", "generation requests refused, by error code", "reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of accepted requests")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "prompt tokens whose KV came from the prefix cache"
        )
        self.generated_tokens = self._counter("generated_tokens", "tokens generated for clients")
        self.disconnects = self._counter(
            "disconnects", "generation requests whose client left early"
        )
        self.ttft = self._histogram(
            "ttft_seconds", "arrival to the first token, per sequence", _SECONDS
        )
        self.itl = self._histogram(
            "itl_seconds", "time between two tokens of a sequence", _ITL_SECONDS
        )
        self.e2e = self._histogram("e2e_seconds", "arrival to the end of a sequence", _SECONDS)
        self.queue = self._histogram("queue_seconds", "arrival to boarding, per sequence", _SECONDS)
        self.prompt_lengths = self._histogram(
            "prompt_tokens_per_request", "tokens per prompt", _TOKENS
        )
        self.output_lengths = self._histogram(
            "output_tokens_per_sequence", "tokens per sequence", _TOKENS
        )
        self.registry.register(_EngineCollector(service))
        if service.settings.metrics_compat == "vllm":
            self.registry.register(_VllmNames(service, self))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jitney_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jitney_{name}", text, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers, read when somebody asks."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._seats_and_pages()
        yield from self._kernels()
        yield from self._canary()
        yield from self._grammars()
        yield from self._compilation()
        yield from self._steps()

    def _state(self) -> Iterator[Metric]:
        client, info = self._service.client, self._service.client.info
        draining = self._service.draining or client.state == "draining"
        yield _gauge("draining", "1 while no new requests are taken", int(draining))
        is_up = client.state in ("ready", "draining")
        yield _gauge("engine_up", "1 while the engine serves", int(is_up))
        age = client.last_step_age()
        yield _gauge("last_step_age_seconds", "time since the engine's last sign of life", age)
        states = {name: int(name == client.state) for name in get_args(EngineState)}
        yield _labelled_gauge("engine_state", "1 for the state that the engine is in", states)
        yield _labelled(
            "engine_restarts",
            "engine processes started to replace one that ended",
            "cause",
            client.counters.restart_causes,
        )
        yield _counter(
            "requests_resumed",
            "requests that went on in another engine process",
            client.counters.resumed,
        )
        labels = {"version": version("jitney")}
        if info is not None:
            for name in ("model", "platform", "device", "kernels", "dtype"):
                labels[name] = str(getattr(info, name))
        yield InfoMetricFamily("jitney_build", "what is running", labels)

    def _seats_and_pages(self) -> Iterator[Metric]:
        counters, info = self._service.client.counters, self._service.client.info
        busy = counters.gauge("seats_busy")
        yield _gauge("requests_running", "sequences in a seat", busy)
        yield _gauge("requests_waiting", "sequences waiting for a seat", counters.waiting)
        yield _gauge("seats", "seats", info.seats if info else 0)
        yield _gauge("seats_busy", "seats taken", busy)
        yield _gauge("kv_pages", "KV pages", info.pages if info else 0)
        used, cached = counters.gauge("pages_used"), counters.gauge("pages_cached")
        yield _gauge("kv_pages_used", "KV pages held by sequences", used)
        yield _gauge("kv_pages_cached", "KV pages kept for the prefix cache alone", cached)
        yield _counter(
            "preemptions", "sequences put back to waiting for lack of pages", counters.preemptions
        )

    def _kernels(self) -> Iterator[Metric]:
        """What the proof at start said of each kernel."""
        info = self._service.client.info
        error = GaugeMetricFamily(
            "jitney_kernel_error",
            "largest distance of a kernel's results from their definition, at start",
            labels=["kernel"],
        )
        out = GaugeMetricFamily(
            "jitney_kernel_out",
            "1 if a kernel was wrong at start and the reference serves in its place",
            labels=["kernel"],
        )
        for proof in info.proofs if info else ():
            error.add_metric([proof.kernel], proof.error)
            out.add_metric([proof.kernel], int(not proof.ok))
        yield error
        yield out

    def _canary(self) -> Iterator[Metric]:
        counters = self._service.client.counters
        yield _gauge(
            "canary_worst_difference",
            "largest difference of a log-probability from the reference's",
            counters.canary_worst,
        )
        yield _counter(
            "canary_checked",
            "sequences computed again with the reference kernels",
            counters.canary_checked,
        )
        yield _counter(
            "canary_mismatches",
            "of them, those that differed by more than rounding explains",
            counters.canary_mismatched,
        )

    def _grammars(self) -> Iterator[Metric]:
        counters = self._service.client.counters
        yield _counter("grammar_masks", "tokens chosen under a grammar's mask", counters.masks)
        yield _counter(
            "grammar_mask_seconds",
            "time spent computing masks, beside the device's work",
            counters.mask_seconds,
        )
        yield _counter("grammars_compiled", "grammars compiled", counters.grammars_compiled)
        yield _counter(
            "grammar_compile_seconds",
            "time spent compiling grammars, beside the steps",
            counters.grammar_seconds,
        )
        yield _gauge("grammars_cached", "compiled grammars kept", counters.grammars_kept)

    def _compilation(self) -> Iterator[Metric]:
        counters, info = self._service.client.counters, self._service.client.info
        compiles = {"start": info.executables if info else 0, "late": counters.compiles}
        yield _labelled("compiles", "executables compiled", "when", compiles)
        seconds = info.compile_seconds if info else 0.0
        yield _counter("compile_seconds", "time spent compiling at start", seconds)

    def _steps(self) -> Iterator[Metric]:
        counters = self._service.client.counters
        yield _labelled("rows", "computed rows by where they went", "kind", counters.rows)
        yield _labelled("steps", "engine steps", "kind", counters.steps)
        yield _counter("nan_rows", "rows whose logits were not finite", counters.nan_rows)
        steps = HistogramMetricFamily(
            "jitney_step_seconds", "one step's result to the next one's", labels=["kind"]
        )
        for kind, histogram in counters.step_seconds.items():
            steps.add_metric([kind], *_samples(histogram))
        yield steps
        yield _histogram(
            "host_gap_seconds",
            "time the device waited for the host before a step",
            counters.host_gap_seconds,
        )
        yield _histogram(
            "seat_fill_ratio", "seats taken of all seats, per step", counters.seat_fill_ratio
        )


class _VllmNames(Collector):
    """The same numbers under the names that gateways scrape from vLLM."""

    def __init__(self, service: Service, metrics: ServerMetrics):
        self._service = service
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._prefix_cache()
        yield self._finished()
        yield self._renamed("time_to_first_token_seconds", self._metrics.ttft)
        yield self._renamed("inter_token_latency_seconds", self._metrics.itl)
        yield self._renamed("e2e_request_latency_seconds", self._metrics.e2e)

    def _engine(self) -> Iterator[Metric]:
        counters, info = self._service.client.counters, self._service.client.info
        used = counters.gauge("pages_used") / info.pages if info else 0.0
        busy = counters.gauge("seats_busy")
        yield self._gauge("num_requests_running", "sequences in a seat", busy)
        yield self._gauge("num_requests_waiting", "sequences waiting for a seat", counters.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV pages held by sequences, 1 is all", used)
        yield self._counter("num_preemptions", "preemptions", counters.preemptions)

    def _prefix_cache(self) -> Iterator[Metric]:
        looked_up, hits = self._metrics.prompt_tokens, self._metrics.cached_tokens
        yield self._counter("prefix_cache_queries", "prompt tokens looked up", _value(looked_up))
        yield self._counter("prefix_cache_hits", "prompt tokens found", _value(hits))
        info = self._service.client.info
        if info is not None:
            config = GaugeMetricFamily(
                "vllm:cache_config_info",
                "KV cache",
                labels=["block_size", "num_gpu_blocks", "enable_prefix_caching"],
            )
            config.add_metric([str(info.page_size), str(info.pages), str(info.prefix_cache)], 1)
            yield config

    def _finished(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "sequences ended well", labels=["model_name", "finished_reason"]
        )
        for sample in _totals(self._metrics.finished):
            reason = sample.labels["reason"]
            if reason in ("stop", "length", "abort"):
                family.add_metric([self._service.model_name, reason], sample.value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        metric.add_metric([self._service.model_name], value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        metric.add_metric([self._service.model_name], value)
        return metric

    def _renamed(self, name: str, histogram: Histogram) -> Metric:
        [source] = histogram.collect()
        metric = Metric(f"vllm:{name}", source.documentation, "histogram")
        for sample in source.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(source.name)
                labels = {"model_name": self._service.model_name, **sample.labels}
                metric.add_sample(f"vllm:{name}{suffix}", labels, sample.value)
        return metric


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"jitney_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"jitney_{name}", text, value)


def _histogram(name: str, text: str, histogram: engine.Histogram) -> Metric:
    buckets, total = _samples(histogram)
    return HistogramMetricFamily(f"jitney_{name}", text, buckets, total)


def _labelled_gauge(name: str, text: str, states: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"jitney_{name}", text, labels=["state"])
    for key, value in states.items():
        family.add_metric([key], value)
    return family


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"jitney_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _samples(histogram: engine.Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets as Prometheus wants them, and the sum."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total


def _totals(counter: Counter) -> list[Sample]:
    """The counts themselves, without the times at which they were made."""
    [family] = counter.collect()
    return [sample for sample in family.samples if sample.name.endswith("_total")]


def _value(counter: Counter) -> float:
    [sample] = _totals(counter)
    return sample.value

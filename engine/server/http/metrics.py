"""Prometheus metrics: what the HTTP side counts, and the engine's running totals. Every label has
few values: route templates, status classes, finish reasons, ledger kinds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from operator import attrgetter
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

from jitney.engine.common.device_use import WINDOW_S, DeviceUse
from jitney.engine.common.engine_info import EngineInfo, EngineState, KernelProof, short_digest
from jitney.engine.server.process.counters import Histogram as StepHistogram

if TYPE_CHECKING:
    from jitney.engine.server.http.service import Service
    from jitney.engine.server.process.client import EngineClient

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
        self.itl = _TokenGaps()
        self.registry.register(self.itl)
        self.e2e = self._histogram("e2e_seconds", "arrival to the end of a sequence", _SECONDS)
        self.queue = self._histogram("queue_seconds", "arrival to boarding, per sequence", _SECONDS)
        self.work = self._histogram(
            "work_seconds", "boarding to the end of a sequence: the rest of its time", _SECONDS
        )
        self.prompt_lengths = self._histogram(
            "prompt_tokens_per_request", "tokens per prompt", _TOKENS
        )
        self.output_lengths = self._histogram(
            "output_tokens_per_sequence", "tokens per sequence", _TOKENS
        )
        self.registry.register(_EngineCollector(service))
        if service.settings.server.metrics_compat == "vllm":
            self.registry.register(_VllmNames(service, self))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jitney_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jitney_{name}", text, buckets=buckets, registry=self.registry)


class _TokenGaps(Collector):
    """Observed for every token: prometheus_client's histogram takes 2 us, its locks included."""

    def __init__(self):
        self._histogram = StepHistogram(_ITL_SECONDS)
        self.observe = self._histogram.observe

    def collect(self) -> Iterator[Metric]:
        yield _histogram("itl_seconds", "time between two tokens of a sequence", self._histogram)


type _Samples = tuple[list[tuple[str, float]], float]
type _Value = Callable[[EngineClient], float]


def _newest(field: str) -> _Value:
    """Reads a field of the newest step's record."""
    return lambda client: client.counters.gauge(field)


def _of_engine(number: Callable[[EngineInfo], float]) -> _Value:
    """Reads a number of the engine's info; 0 before that is known."""
    return lambda client: 0 if client.info is None else number(client.info)


#: Name -> help text, and how to read the value.
_GAUGES = {
    "engine_up": (
        "1 while the engine serves",
        lambda client: int(client.state in ("ready", "draining")),
    ),
    "last_step_age_seconds": (
        "time since the engine's last sign of life",
        lambda client: client.last_step_age(),
    ),
    "requests_running": ("sequences in a seat", _newest("seats_busy")),
    "requests_waiting": ("sequences waiting for a seat", attrgetter("counters.waiting")),
    "predicted_wait_seconds": (
        "predicted wait of a request behind all that wait, for a seat and the prompts before it",
        attrgetter("counters.predicted_wait"),
    ),
    "predicted_wait_limit_seconds": (
        "predicted wait beyond which requests are refused (max_predicted_wait_s); 0: no limit",
        _of_engine(lambda info: info.queue.max_predicted_wait_s),
    ),
    "seats": ("seats", _of_engine(lambda info: info.sizes.seats)),
    "seats_busy": ("seats taken", _newest("seats_busy")),
    "padding_is_free": (
        "1 where rows that pad a step take next to no time: nothing is multiplied for them",
        _of_engine(lambda info: int(info.sizes.padding_is_free)),
    ),
    "kv_pages": ("KV pages", _of_engine(lambda info: info.sizes.pages)),
    "kv_pages_used": ("KV pages held by sequences", _newest("pages_used")),
    "kv_pages_cached": ("KV pages kept for the prefix cache alone", _newest("pages_cached")),
    "canary_worst_difference": (
        "largest difference of a log-probability from the reference's",
        attrgetter("counters.canary_worst"),
    ),
    "grammars_cached": ("compiled grammars kept", attrgetter("counters.grammars_kept")),
}
_COUNTERS = {
    "requests_resumed": (
        "requests that went on in another engine process",
        attrgetter("counters.resumed"),
    ),
    "preemptions": (
        "sequences put back to waiting for lack of pages",
        attrgetter("counters.preemptions"),
    ),
    "canary_checked": (
        "sequences computed again with the reference kernels",
        attrgetter("counters.canary_checked"),
    ),
    "canary_mismatches": (
        "of them, those that differed by more than rounding explains",
        attrgetter("counters.canary_mismatched"),
    ),
    "grammar_masks": ("tokens chosen under a grammar's mask", attrgetter("counters.masks")),
    "grammar_mask_seconds": (
        "time spent computing masks, beside the device's work",
        attrgetter("counters.mask_seconds"),
    ),
    "grammars_compiled": ("grammars compiled", attrgetter("counters.grammars_compiled")),
    "grammar_compile_seconds": (
        "time spent compiling grammars, beside the steps",
        attrgetter("counters.grammar_seconds"),
    ),
    "compile_seconds": (
        "time spent compiling at start",
        _of_engine(lambda info: info.kernels.compile_seconds),
    ),
    "nan_rows": ("rows whose logits were not finite", attrgetter("counters.nan_rows")),
}
#: Name -> help text, label, and how to read the values.
_LABELLED = {
    "engine_restarts": (
        "engine processes started to replace one that ended",
        "cause",
        attrgetter("counters.restart_causes"),
    ),
    "compiles": (
        "executables compiled",
        "when",
        lambda client: {
            "start": _of_engine(lambda info: info.kernels.executables)(client),
            "late": client.counters.compiles,
        },
    ),
    "rows": ("computed rows by where they went", "kind", attrgetter("counters.rows")),
    "steps": ("engine steps", "kind", attrgetter("counters.steps")),
}
_LABELLED_GAUGES = {
    "engine_state": (
        "1 for the state that the engine is in",
        "state",
        lambda client: {
            name: int(name == client.state) for name in get_args(EngineState.__value__)
        },
    ),
    "requests_open": (
        "sequences without an end, as the server counts them: also while no engine runs",
        "lane",
        lambda client: {
            "live": client.history.n_open - client.history.n_open_background,
            "background": client.history.n_open_background,
        },
    ),
    "kernel_error": (
        "largest distance of a kernel's results from their definition, at start",
        "kernel",
        lambda client: {proof.kernel: proof.error for proof in _proofs(client)},
    ),
    "kernel_out": (
        "1 if a kernel was wrong at start and another serves in its place",
        "kernel",
        lambda client: {proof.kernel: int(not proof.ok) for proof in _proofs(client)},
    ),
}
#: Histograms of the counters.
_HISTOGRAMS = {
    "host_gap_seconds": "time the device waited for the host before a step",
    "seat_fill_ratio": "seats taken of all seats, per step",
}
#: Metrics of the device over the last seconds: name -> text, and how to read it.
_DEVICE: dict[str, tuple[str, Callable[[DeviceUse], float | None]]] = {
    "busy_share": (
        f"share of the last {WINDOW_S:g} s in which a step ran",
        attrgetter("busy"),
    ),
    "bandwidth_share": (
        "bytes that steps read and write over their time, of the most that was measured at start; "
        "absent where that is not known",
        attrgetter("bandwidth"),
    ),
    "operations_share": (
        "operations of steps over their time, of the most that was measured at start; absent where "
        "that is not known",
        attrgetter("operations"),
    ),
    "bytes_per_second": ("bytes that steps read and write over their time", attrgetter("bytes_s")),
    "operations_per_second": ("operations of steps over their time", attrgetter("operations_s")),
    "ceiling_bytes_per_second": (
        "the most bytes a second, measured at start",
        attrgetter("ceiling_bytes_s"),
    ),
    "ceiling_operations_per_second": (
        "the most operations a second, measured at start",
        attrgetter("ceiling_operations_s"),
    ),
}
_VERSION = {"version": version("jitney")}
#: Fields of the engine's info.
_BUILD = ("model", "platform", "device", "kernels", "dtype")


class _EngineCollector(Collector):
    """The engine's own numbers, read at each scrape."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        client = self._service.client
        is_draining = self._service.draining or client.state == "draining"
        yield _gauge("draining", "1 while no new requests are taken", int(is_draining))
        for part in _PARTS:
            yield from part(client)


def _numbers(client: EngineClient) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (text, read) in table.items():
            yield kind(f"jitney_{name}", text, read(client))


def _labelled(client: EngineClient) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, _LABELLED_GAUGES), (CounterMetricFamily, _LABELLED)):
        for name, (text, label, read) in table.items():
            family = kind(f"jitney_{name}", text, labels=[label])
            for key, value in read(client).items():
                family.add_metric([key], value)
            yield family


def _proofs(client: EngineClient) -> Sequence[KernelProof]:
    return client.info.kernels.proofs if client.info else ()


def _build(client: EngineClient) -> Iterator[Metric]:
    labels: dict[str, str] = {}
    if client.info:
        shown = client.info.flat()
        labels = {name: str(shown[name]) for name in _BUILD}
        labels["config"] = short_digest(client.info.config_digest)
    yield InfoMetricFamily("jitney_build", "what is running", _VERSION | labels)


def _histograms(client: EngineClient) -> Iterator[Metric]:
    yield _step_seconds(client)
    for name, text in _HISTOGRAMS.items():
        yield _histogram(name, text, getattr(client.counters, name))


def _device(client: EngineClient) -> Iterator[Metric]:
    """Metrics of the device; unknown values have no sample."""
    use = DeviceUse.of(client.info, client.history.records, time.monotonic())
    for name, (text, value) in _DEVICE.items():
        yield _gauge(f"device_{name}", text, value(use))


_PARTS = (_numbers, _labelled, _build, _histograms, _device)


def _step_seconds(client: EngineClient) -> Metric:
    family = HistogramMetricFamily(
        "jitney_step_seconds",
        "one step's result to the next one's, by the rows of its program",
        labels=["kind", "rows"],
    )
    for (kind, rows), histogram in sorted(client.counters.step_seconds.items()):
        family.add_metric([kind, str(rows)], *_samples(histogram))
    return family


#: vLLM's names of histograms -> this server's histograms.
_RENAMED = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:e2e_request_latency_seconds": "e2e",
}


class _VllmNames(Collector):
    """The numbers under the names that gateways scrape from vLLM."""

    def __init__(self, service: Service, metrics: ServerMetrics):
        self._service = service
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._prefix_cache()
        yield self._finished()
        rows = self._service.client.counters.rows
        right, wrong = rows["accepted"], rows["rejected"]
        yield self._counter("spec_decode_num_draft_tokens", "drafts checked", right + wrong)
        yield self._counter("spec_decode_num_accepted_tokens", "of them right ones", right)
        for name, field in _RENAMED.items():
            yield self._renamed(name, field)

    def _engine(self) -> Iterator[Metric]:
        counters, info = self._service.client.counters, self._service.client.info
        used = counters.gauge("pages_used") / info.sizes.pages if info else 0.0
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
            sizes = info.sizes
            values = (sizes.page_size, sizes.pages, sizes.prefix_cache)
            config.add_metric([str(value) for value in values], 1)
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
        return self._named(GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"]), value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._named(CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"]), value)

    def _named(self, metric: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        metric.add_metric([self._service.model_name], value)
        return metric

    def _renamed(self, name: str, field: str) -> Metric:
        [source] = getattr(self._metrics, field).collect()
        metric = Metric(name, source.documentation, "histogram")
        for sample in source.samples:
            if not sample.name.endswith("_created"):
                labels = {"model_name": self._service.model_name, **sample.labels}
                metric.add_sample(sample.name.replace(source.name, name, 1), labels, sample.value)
        return metric


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"jitney_{name}", text, value)


def _histogram(name: str, text: str, histogram: StepHistogram) -> Metric:
    return HistogramMetricFamily(f"jitney_{name}", text, *_samples(histogram))


def _samples(histogram: StepHistogram) -> _Samples:
    """Cumulative buckets as Prometheus wants them, and the sum."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total


def _totals(counter: Counter) -> list[Sample]:
    """The values of a counter, without the timestamps of their creation."""
    [family] = counter.collect()
    return [sample for sample in family.samples if sample.name.endswith("_total")]


def _value(counter: Counter) -> float:
    [sample] = _totals(counter)
    return sample.value

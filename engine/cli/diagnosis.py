"""Finds the cause of slowness in an engine's metrics: for each complaint an ordered list of causes,
with one thing to change. docs/diagnose.md has the same lists.

An unknown figure is NaN. Every comparison with NaN is false, so no rule applies to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from jitney.engine.common.records import ROW_KINDS
from jitney.engine.common.scrape import Scrape

type _Complaint = Literal["latency", "throughput", "batches", "memory"]

_NAN = math.nan
#: The complaints in words.
COMPLAINTS: dict[_Complaint, str] = {
    "latency": "latency is high",
    "throughput": "throughput is low",
    "batches": "batches do not fill",
    "memory": "memory is short",
}


@dataclass(frozen=True, slots=True)
class _Scrapes:
    """Scrapes of one engine, oldest first."""

    scrapes: Sequence[Scrape]

    def gauge(self, name: str) -> float:
        """Mean over the scrapes that have the metric."""
        values = self.values(name)
        return fmean(values) if values else _NAN

    def values(self, name: str) -> list[float]:
        values = [scrape.value(name) for scrape in self.scrapes]
        return [value for value in values if not math.isnan(value)]

    def newest(self, name: str, **labels: str) -> float:
        return self.scrapes[-1].value(name, **labels)

    def grown(self, name: str, **labels: str) -> float:
        """Increase of a counter; NaN if it fell, since another server answers then."""
        first = self.scrapes[0].value(name, **labels)
        last = self.newest(name, **labels)
        if math.isnan(first) and self.scrapes[0].value("engine_up") >= 0:
            first = 0.0  # the counter appeared after the first scrape
        return last - first if last >= first else _NAN

    def mean(self, histogram: str, **labels: str) -> float:
        """Mean of a histogram's observations between the first scrape and the last."""
        count = self.grown(f"{histogram}_count", **labels)
        return _share(self.grown(f"{histogram}_sum", **labels), count)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else _NAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one engine between the first scrape and the last.

    Gauges are means over all scrapes; times are means in seconds. NaN: unknown, or nothing to
    average.
    """

    seconds: float
    up: float = _NAN
    seats: float = _NAN
    running: float = _NAN
    waiting: float = _NAN
    #: Fewest waiting sequences of any scrape.
    least_waiting: float = _NAN
    #: 1 if the policy holds seats until the whole batch ends, else 0.
    holds_seats: float = _NAN
    queue_s: float = _NAN
    first_token_s: float = _NAN
    token_gap_s: float = _NAN
    steps: float = _NAN
    decode_step_s: float = _NAN
    mixed_step_s: float = _NAN
    #: Shares of the steps' time: steps with prompt rows, waiting for the host, grammar masks.
    mixed_share: float = _NAN
    gap_share: float = _NAN
    mask_share: float = _NAN
    #: Shares of rows: prompt rows among prompt and decode rows; padding and recomputed rows among
    #: all rows. Padding is NaN if it costs almost nothing.
    prompt_share: float = _NAN
    padding_share: float = _NAN
    recomputed_share: float = _NAN
    output_tok_s: float = _NAN
    prompt_tok_s: float = _NAN
    #: Mean tokens of a prompt, and the share of them found in the prefix cache.
    prompt_tokens: float = _NAN
    cached_share: float = _NAN
    #: Shares of taken seats, of pages in use, and of pages kept for the prefix cache alone.
    seat_share: float = _NAN
    page_share: float = _NAN
    cached_page_share: float = _NAN
    #: Counts.
    preempted: float = _NAN
    late_compiles: float = _NAN
    kernels_out: float = _NAN
    #: Shares of the device's measured maximum: see `device_use.DeviceUse`.
    bandwidth: float = _NAN
    operations: float = _NAN

    @classmethod
    def of(cls, scrapes: Sequence[Scrape], seconds: float, policy: str = "") -> Figures:
        """The figures of at least two scrapes, oldest first; seconds: from the first to the last.

        policy: the engine's, "" if unknown.
        """
        seen = _Scrapes(scrapes)
        rows = {kind: seen.grown("rows_total", kind=kind) for kind in ROW_KINDS}
        generated = rows["decode"] + rows["accepted"]
        computed, useful = sum(rows.values()), rows["prefill"] + generated
        step_s = seen.grown("step_seconds_sum")
        seats, pages = seen.gauge("seats"), seen.gauge("kv_pages")
        running = seen.gauge("requests_running")
        costs_padding = seen.gauge("padding_is_free") == 0
        return cls(
            seconds=seconds,
            up=seen.newest("engine_up"),
            seats=seats,
            running=running,
            waiting=seen.gauge("requests_waiting"),
            least_waiting=min(seen.values("requests_waiting"), default=_NAN),
            holds_seats=float(policy != "continuous") if policy else _NAN,
            queue_s=seen.mean("queue_seconds"),
            first_token_s=seen.mean("ttft_seconds"),
            token_gap_s=seen.mean("itl_seconds"),
            steps=seen.grown("step_seconds_count"),
            decode_step_s=seen.mean("step_seconds", kind="decode"),
            mixed_step_s=seen.mean("step_seconds", kind="mixed"),
            mixed_share=_share(seen.grown("step_seconds_sum", kind="mixed"), step_s),
            gap_share=_share(seen.grown("host_gap_seconds_sum"), step_s),
            mask_share=_share(seen.grown("grammar_mask_seconds_total"), step_s),
            prompt_share=_share(rows["prefill"], useful),
            padding_share=_share(rows["padding"], computed) if costs_padding else _NAN,
            recomputed_share=_share(rows["recomputed"], computed),
            output_tok_s=generated / seconds,
            prompt_tok_s=rows["prefill"] / seconds,
            prompt_tokens=seen.mean("prompt_tokens_per_request"),
            cached_share=_share(
                seen.grown("cached_prompt_tokens_total"), seen.grown("prompt_tokens_total")
            ),
            seat_share=_share(running, seats),
            page_share=_share(seen.gauge("kv_pages_used"), pages),
            cached_page_share=_share(seen.gauge("kv_pages_cached"), pages),
            preempted=seen.grown("preemptions_total"),
            late_compiles=seen.grown("compiles_total", when="late"),
            kernels_out=seen.newest("kernel_out"),
            bandwidth=seen.gauge("device_bandwidth_share"),
            operations=seen.gauge("device_operations_share"),
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of a complaint."""

    complaint: _Complaint
    #: A few words.
    name: str
    #: The condition.
    shows: Callable[[Figures], bool]
    #: Text with the figures: a format string over the fields of `Figures`.
    seen: str
    cause: str
    #: The one thing to change; "": nothing.
    change: str = ""


class Finding(NamedTuple):
    """The answer to a complaint. change: "" if nothing need be changed."""

    complaint: _Complaint
    name: str
    seen: str
    cause: str
    change: str


#: Shares above which a part is most of the whole, and a resource is full.
_MOST, _FULL = 0.5, 0.9
#: A share worth a change; the share of cached prompt tokens below which the prefix cache helps
#: little.
_MUCH, _CACHED = 0.15, 0.3
#: Shares of the device's measured maximum: above the first, steps can hardly be faster; below the
#: second, they could compute more rows.
_SATURATED, _UNDERUSED = 0.6, 0.3

_OUT_OF_PAGES = (
    "{preempted:.0f} sequences were preempted for lack of pages; {page_share:.0%} of the pages are "
    "in use"
)
_FULL_PAGES = (
    "{waiting:.1f} sequences wait; {page_share:.0%} of the pages are in use, {seat_share:.0%} of "
    "the seats"
)
_SMALLER_KV = "set kv_dtype to int8 (fp8 on a GPU that has it): twice the tokens in the same memory"
_PROMPT_ROWS = (
    "prompts have {prompt_tokens:.0f} tokens on average, {cached_share:.0%} of them cached; "
    "{prompt_share:.0%} of prompt and decode rows are prompt rows"
)
_SHARE_PREFIXES = (
    "move text that prompts share to their start, where the prefix cache finds it, and changing "
    "dates, names and ids to the end"
)
_HOST = "the device waits for the host {gap_share:.0%} of the time"
_MORE_HOST = (
    "give the server a core of its own, or less work: other programs, log-probabilities and "
    "grammars cost it time"
)
_MASKS = "grammar masks take {mask_share:.0%} of the steps' time"
_PADDED = "{padding_share:.0%} of the computed rows are padding"
_TUNE = "run `jitney plan buckets` over recorded traffic and set the sizes that it prints"
_AT_BANDWIDTH = "steps use {bandwidth:.0%} of the memory bandwidth"
_AT_OPERATIONS = "steps use {operations:.0%} of the arithmetic"

#: The causes of each complaint, in the order of checking.
RULES = (
    *(
        Rule(
            complaint,
            "no engine",
            lambda f: f.up == 0,
            "no engine serves",
            "it is loading, restarting, sleeping or dead",
            "see jitney_engine_state in /metrics and the end of the log",
        )
        for complaint in COMPLAINTS
    ),
    Rule(
        "latency",
        "compiled while serving",
        lambda f: f.late_compiles > 0,
        "{late_compiles:.0f} programs were compiled while serving",
        "all programs should be compiled at the start; all requests waited for the compiler",
        "find the step in the log (STEP n WAITED FOR THE COMPILER) and report it",
    ),
    Rule(
        "latency",
        "kernels taken out",
        lambda f: f.kernels_out > 0,
        "{kernels_out:.0f} kernels were wrong at the start",
        "the slower reference kernels replace them",
        "run `jitney doctor`, which shows their errors",
    ),
    Rule(
        "latency",
        "pages run out",
        lambda f: f.preempted > 0 and f.page_share > _FULL,
        _OUT_OF_PAGES,
        "preempted sequences are recomputed",
        _SMALLER_KV,
    ),
    Rule(
        "latency",
        "wait for a seat",
        lambda f: f.queue_s > _MOST * f.first_token_s and f.seat_share > _FULL,
        "{queue_s:.2f} s of {first_token_s:.2f} s to the first token are waiting; {seat_share:.0%} "
        "of the seats are taken, {waiting:.1f} sequences wait",
        "more requests arrive than the engine can serve",
        "add an engine, or lower max_predicted_wait_s: more requests are refused, and accepted "
        "ones wait less",
    ),
    Rule(
        "latency",
        "batch policy",
        lambda f: f.queue_s > _MOST * f.first_token_s and f.holds_seats == 1,
        "{queue_s:.2f} s of {first_token_s:.2f} s to the first token are waiting, with "
        "{seat_share:.0%} of the seats taken",
        "the policy makes requests wait for a whole batch",
        "set policy to continuous",
    ),
    Rule(
        "latency",
        "wait for pages",
        lambda f: f.queue_s > _MOST * f.first_token_s and f.page_share > _FULL,
        _FULL_PAGES,
        "seats are free, but no pages for the next sequence",
        _SMALLER_KV,
    ),
    Rule(
        "latency",
        "long prompts",
        lambda f: f.first_token_s > 0 and f.prompt_share > _MOST and f.cached_share < _CACHED,
        "{first_token_s:.2f} s to the first token, of which {queue_s:.2f} s are waiting; "
        + _PROMPT_ROWS,
        "first tokens wait for the rows of long prompts",
        _SHARE_PREFIXES,
    ),
    Rule(
        "latency",
        "many prompt rows",
        lambda f: f.first_token_s > 0 and f.prompt_share > _MOST,
        "{first_token_s:.2f} s to the first token, of which {queue_s:.2f} s are waiting; "
        + _PROMPT_ROWS,
        "prompts arrive faster than their rows are computed",
        "raise token_budget: more prompt rows per step, and more time between tokens",
    ),
    Rule(
        "latency",
        "prompts beside streams",
        lambda f: f.mixed_step_s > 2 * f.decode_step_s and f.mixed_share > _MOST,
        "{token_gap_s:.3f} s between tokens; steps with prompt rows take {mixed_step_s:.3f} s, "
        "others {decode_step_s:.3f} s",
        "streams share their steps with prompts",
        "set target_itl_ms to an acceptable time between tokens: prompts get fewer rows per step",
    ),
    Rule(
        "latency", "the host", lambda f: f.gap_share > _MUCH, _HOST, "the host is slow", _MORE_HOST
    ),
    Rule(
        "latency",
        "grammars",
        lambda f: f.mask_share > _MUCH,
        _MASKS,
        "grammars of answers are expensive",
        "simplify the largest schema; `jitney_grammar_mask_seconds_total` shows the effect",
    ),
    Rule(
        "latency",
        "padding",
        lambda f: f.padding_share > _MOST,
        _PADDED,
        "the compiled sizes do not fit the traffic",
        _TUNE,
    ),
    Rule(
        "latency",
        "the memory's bandwidth",
        lambda f: f.bandwidth > _SATURATED,
        _AT_BANDWIDTH + "; {token_gap_s:.3f} s between tokens",
        "steps cannot be faster with these weights on this device",
        "set weights to int8 or int4",
    ),
    Rule(
        "latency",
        "the device's arithmetic",
        lambda f: f.operations > _SATURATED,
        _AT_OPERATIONS,
        "the device can compute no more rows per step",
        "add an engine, or split the model over more devices (tensor_parallel)",
    ),
    Rule(
        "throughput",
        "few requests",
        lambda f: f.least_waiting == 0 and f.seat_share < _MOST,
        "{running:.1f} of {seats:.0f} seats are taken, at times no request waits; "
        "{output_tok_s:.0f} tokens/s",
        "the clients do not send enough requests at once",
        "send more requests at once: from as many clients as there are seats",
    ),
    Rule(
        "throughput",
        "recomputed rows",
        lambda f: f.recomputed_share > 0.05,
        "{recomputed_share:.0%} of the rows are recomputed; {preempted:.0f} sequences were "
        "preempted",
        "pages run out, and preempted sequences are recomputed",
        _SMALLER_KV,
    ),
    Rule(
        "throughput",
        "padding",
        lambda f: f.padding_share > _MOST,
        _PADDED,
        "the compiled sizes do not fit the traffic",
        _TUNE,
    ),
    Rule(
        "throughput",
        "the host",
        lambda f: f.gap_share > _MUCH,
        _HOST,
        "the host is slow",
        _MORE_HOST,
    ),
    Rule(
        "throughput",
        "prompts",
        lambda f: f.prompt_share > 0.8 and f.cached_share < _CACHED,
        _PROMPT_ROWS + "; {prompt_tok_s:.0f} prompt tokens/s, {output_tok_s:.0f} output tokens/s",
        "most of the work is computing prompts",
        _SHARE_PREFIXES,
    ),
    Rule(
        "throughput",
        "too few seats",
        lambda f: (
            f.seat_share > _FULL
            and f.waiting >= 1
            and f.operations < _UNDERUSED
            and f.operations < f.bandwidth
        ),
        "all seats are taken, {waiting:.1f} sequences wait; steps use {bandwidth:.0%} of the "
        "memory bandwidth and {operations:.0%} of the arithmetic",
        "each step reads all weights for few rows",
        "raise max_seats",
    ),
    Rule(
        "throughput",
        "the memory's bandwidth",
        lambda f: f.bandwidth > _SATURATED,
        _AT_BANDWIDTH,
        "weights, keys and values are read as fast as possible",
        "set weights to int8 or int4, and kv_dtype to int8",
    ),
    Rule(
        "throughput",
        "the device's arithmetic",
        lambda f: f.operations > _SATURATED,
        _AT_OPERATIONS,
        "the device is fully used",
        "add an engine",
    ),
    Rule(
        "batches",
        "no requests",
        lambda f: f.steps == 0,
        "no step ran in {seconds:.0f} s",
        "no request was open",
        "send requests and run this again",
    ),
    Rule(
        "batches",
        "full batches",
        lambda f: f.seat_share > _FULL,
        "{running:.1f} of {seats:.0f} seats are taken",
        "batches are as large as max_seats allows",
    ),
    Rule(
        "batches",
        "empty queue",
        lambda f: f.steps > 0 and f.least_waiting == 0,
        "{running:.1f} of {seats:.0f} seats are taken; {waiting:.1f} sequences wait, at times none",
        "the clients do not send enough requests at once",
        "send more requests at once",
    ),
    Rule(
        "batches",
        "batch policy",
        lambda f: f.holds_seats == 1,
        "{waiting:.1f} sequences wait with {seat_share:.0%} of the seats taken",
        "the policy holds seats until the whole batch ends",
        "set policy to continuous",
    ),
    Rule(
        "batches",
        "no pages",
        lambda f: f.page_share > _FULL,
        _FULL_PAGES,
        "seats are free, but no pages for the next sequence",
        _SMALLER_KV,
    ),
    Rule(
        "batches",
        "prompts take the rows",
        lambda f: f.prompt_share > _MOST,
        "{waiting:.1f} sequences wait with {seat_share:.0%} of the seats taken; " + _PROMPT_ROWS,
        "prompts take the rows of each step, and sequences board only as their prompts begin",
        _SHARE_PREFIXES,
    ),
    Rule(
        "memory",
        "preemption",
        lambda f: f.preempted > 0,
        _OUT_OF_PAGES,
        "running sequences have more tokens than the pages hold",
        _SMALLER_KV,
    ),
    Rule(
        "memory",
        "few free pages",
        lambda f: f.page_share > _FULL,
        "sequences use {page_share:.0%} of the pages; none was preempted",
        "few pages are free: longer answers will cause preemptions",
        _SMALLER_KV,
    ),
    Rule(
        "memory",
        "enough memory",
        lambda f: f.page_share <= _FULL and f.preempted == 0,
        "sequences use {page_share:.0%} of the pages, and none was preempted; "
        "{cached_page_share:.0%} are kept for the prefix cache and freed when needed",
        "memory is not the limit",
    ),
)


class _Shown(float):
    """A figure in a sentence."""

    def __format__(self, spec: str) -> str:
        return "an unknown number" if math.isnan(self) else super().__format__(spec)


def diagnose(figures: Figures) -> dict[_Complaint, Finding | None]:
    """The first cause of each complaint whose condition holds; None: no cause found."""
    findings: dict[_Complaint, Finding | None] = dict.fromkeys(COMPLAINTS)
    figures_shown = {name: _Shown(value) for name, value in asdict(figures).items()}
    for rule in RULES:
        if findings[rule.complaint] is None and rule.shows(figures):
            seen = rule.seen.format_map(figures_shown)
            findings[rule.complaint] = Finding(
                rule.complaint, rule.name, seen, rule.cause, rule.change
            )
    return findings

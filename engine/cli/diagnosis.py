"""Why an engine is slow, by its own live figures: for each complaint a short list of causes, looked
at in order, and one thing to change. docs/diagnose.md has the same lists.

A figure that is not known is NaN, which no comparison holds for: no rule speaks of what the figures
do not show.
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
#: The complaints, in words.
COMPLAINTS: dict[_Complaint, str] = {
    "latency": "latency is high",
    "throughput": "throughput is low",
    "batches": "batches do not fill",
    "memory": "memory is short",
}


@dataclass(frozen=True, slots=True)
class _Watched:
    """Scrapes of one engine, the oldest first."""

    scrapes: Sequence[Scrape]

    def gauge(self, name: str) -> float:
        """Mean of all scrapes that know it."""
        values = self.values(name)
        return fmean(values) if values else _NAN

    def values(self, name: str) -> list[float]:
        values = [scrape.value(name) for scrape in self.scrapes]
        return [value for value in values if not math.isnan(value)]

    def newest(self, name: str, **labels: str) -> float:
        return self.scrapes[-1].value(name, **labels)

    def grown(self, name: str, **labels: str) -> float:
        """By how much a counter rose; NaN where it fell: another server answers."""
        first = self.scrapes[0].value(name, **labels)
        last = self.newest(name, **labels)
        if math.isnan(first) and self.scrapes[0].value("engine_up") >= 0:
            first = 0.0  # its first sample came in between
        return last - first if last >= first else _NAN

    def mean(self, histogram: str, **labels: str) -> float:
        """Of what was observed between the first scrape and the last."""
        count = self.grown(f"{histogram}_count", **labels)
        return _share(self.grown(f"{histogram}_sum", **labels), count)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else _NAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one engine over the seconds between the first scrape and the last. Gauges are means of all
    scrapes; times are means in seconds. NaN: not known, or nothing happened that it could be of.
    """

    seconds: float
    up: float = _NAN
    #: Sequences, and of those that wait the least at any scrape.
    seats: float = _NAN
    running: float = _NAN
    waiting: float = _NAN
    least_waiting: float = _NAN
    #: 1 under a policy that keeps seats until a whole batch has ended.
    holds_seats: float = _NAN
    queue_s: float = _NAN
    first_token_s: float = _NAN
    token_gap_s: float = _NAN
    steps: float = _NAN
    decode_step_s: float = _NAN
    mixed_step_s: float = _NAN
    #: Share of the steps' time that went to steps with prompt rows; that the device waited for the
    #: host; that masks of grammars took.
    mixed_share: float = _NAN
    gap_share: float = _NAN
    mask_share: float = _NAN
    #: Shares of the computed rows. Padding is NaN where it costs next to nothing.
    prompt_share: float = _NAN
    padding_share: float = _NAN
    recomputed_share: float = _NAN
    output_tok_s: float = _NAN
    prompt_tok_s: float = _NAN
    #: Tokens of a prompt, and the share of them that was found in pages.
    prompt_tokens: float = _NAN
    cached_share: float = _NAN
    #: Shares of the seats taken, of the pages held, and of those kept for the prefix cache alone.
    seat_share: float = _NAN
    page_share: float = _NAN
    cached_page_share: float = _NAN
    #: Counts.
    preempted: float = _NAN
    late_compiles: float = _NAN
    kernels_out: float = _NAN
    #: Of the device: see `device_use.DeviceUse`.
    bandwidth: float = _NAN
    operations: float = _NAN

    @classmethod
    def of(cls, scrapes: Sequence[Scrape], seconds: float, policy: str = "") -> Figures:
        """scrapes: two at least, the oldest first, `seconds` apart. policy: the engine's, empty if
        it is not known.
        """
        seen = _Watched(scrapes)
        rows = {kind: seen.grown("rows_total", kind=kind) for kind in ROW_KINDS}
        computed, useful = sum(rows.values()), rows["prefill"] + rows["decode"]
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
            output_tok_s=rows["decode"] / seconds,
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
    #: In three or four words.
    name: str
    #: Whether the figures show it.
    shows: Callable[[Figures], bool]
    #: What is seen: a format string over the fields of `Figures`.
    seen: str
    cause: str
    #: The one thing to change; empty: nothing need be.
    change: str = ""


class Finding(NamedTuple):
    """The answer to a complaint. change: empty where nothing need be changed."""

    complaint: _Complaint
    name: str
    seen: str
    cause: str
    change: str


#: From which share on a part of something is most of it; and a full one.
_MOST, _FULL = 0.5, 0.9
#: A share that is worth a change; and the share of the prompts' tokens below which few are found in
#: pages.
_MUCH, _FOUND = 0.15, 0.3
#: Shares of what was measured at most: of steps that can hardly be faster, and that could compute
#: more rows.
_AT_MOST, _IDLE_UNITS = 0.6, 0.3

_OUT_OF_PAGES = (
    "{preempted:.0f} sequences were put back to wait for lack of pages, {page_share:.0%} of the "
    "pages are held"
)
_FULL_PAGES = (
    "{waiting:.1f} wait, {page_share:.0%} of the pages are held, {seat_share:.0%} of seats"
)
_SMALLER_KV = "set kv_dtype to int8 (fp8 on a GPU that has it): twice the tokens in the same memory"
_READS_PROMPTS = (
    "prompts of {prompt_tokens:.0f} tokens on average, {cached_share:.0%} of them found in pages; "
    "{prompt_share:.0%} of the useful rows read prompts"
)
_SHARE_PREFIXES = (
    "put what prompts have in common, if anything, first, so that the prefix cache finds it: "
    "dates, names and ids that change come last"
)
_HOST = "the device waits for the host {gap_share:.0%} of the time"
_MORE_HOST = (
    "give the server a core of its own, or less to do: other programs, log-probabilities and "
    "answers under a grammar cost it time"
)
_MASKS = "masks of grammars take {mask_share:.0%} of the steps' time"
_PADDED = "{padding_share:.0%} of the computed rows are padding"
_TUNE = "run `jitney plan buckets` over recorded traffic and set the sizes that it gives"
_AT_BANDWIDTH = "steps read {bandwidth:.0%} of what the memory gives at most"
_AT_OPERATIONS = "steps compute {operations:.0%} of what the device does at most"

#: For each complaint its causes, in the order in which to look.
RULES = (
    *(
        Rule(
            complaint,
            "no engine",
            lambda f: f.up == 0,
            "no engine serves",
            "it loads, is started again, sleeps or is dead",
            "look at jitney_engine_state in /metrics and at the last lines of the log",
        )
        for complaint in COMPLAINTS
    ),
    Rule(
        "latency",
        "compiled while serving",
        lambda f: f.late_compiles > 0,
        "{late_compiles:.0f} programs were compiled while serving",
        "all should be compiled at start: everybody waits for the compiler",
        "look up the step in the log (STEP n WAITED FOR THE COMPILER) and report it",
    ),
    Rule(
        "latency",
        "kernels taken out",
        lambda f: f.kernels_out > 0,
        "{kernels_out:.0f} kernels were wrong at start",
        "the slower reference serves in their place",
        "run `jitney doctor`; it says which, and by how much",
    ),
    Rule(
        "latency",
        "pages run out",
        lambda f: f.preempted > 0 and f.page_share > _FULL,
        _OUT_OF_PAGES,
        "what they had computed is computed again",
        _SMALLER_KV,
    ),
    Rule(
        "latency",
        "wait for a seat",
        lambda f: f.queue_s > _MOST * f.first_token_s and f.seat_share > _FULL,
        "{queue_s:.2f} s of {first_token_s:.2f} s to the first token are waiting; {seat_share:.0%} "
        "of the seats are taken, {waiting:.1f} wait",
        "more comes than the engine serves",
        "add an engine; if that cannot be, lower max_predicted_wait_s: refusals come sooner, and "
        "those who are let in wait less",
    ),
    Rule(
        "latency",
        "a policy that waits",
        lambda f: f.queue_s > _MOST * f.first_token_s and f.holds_seats == 1,
        "{queue_s:.2f} s of {first_token_s:.2f} s to the first token are waiting, with "
        "{seat_share:.0%} of the seats taken",
        "the policy lets requests wait for a whole batch",
        "set policy to continuous",
    ),
    Rule(
        "latency",
        "wait for pages",
        lambda f: f.queue_s > _MOST * f.first_token_s and f.page_share > _FULL,
        _FULL_PAGES,
        "there is a seat for the next one, and no room for its keys and values",
        _SMALLER_KV,
    ),
    Rule(
        "latency",
        "long prompts",
        lambda f: f.first_token_s > 0 and f.prompt_share > _MOST and f.cached_share < _FOUND,
        "{first_token_s:.2f} s to the first token, of which {queue_s:.2f} s are waiting; "
        + _READS_PROMPTS,
        "prompts are read row by row, its own and those before it",
        _SHARE_PREFIXES,
    ),
    Rule(
        "latency",
        "many prompt rows",
        lambda f: f.first_token_s > 0 and f.prompt_share > _MOST,
        "{first_token_s:.2f} s to the first token, of which {queue_s:.2f} s are waiting; "
        + _READS_PROMPTS,
        "prompts come faster than their rows are computed",
        "raise token_budget: more prompt rows a step, for longer pauses between tokens",
    ),
    Rule(
        "latency",
        "prompts beside streams",
        lambda f: f.mixed_step_s > 2 * f.decode_step_s and f.mixed_share > _MOST,
        "{token_gap_s:.3f} s between tokens; steps with prompt rows take {mixed_step_s:.3f} s, "
        "others {decode_step_s:.3f} s",
        "streams go on in the same steps in which prompts are read",
        "set target_itl_ms to the pause that is bearable: prompts get fewer rows a step",
    ),
    Rule(
        "latency", "the host", lambda f: f.gap_share > _MUCH, _HOST, "the host is slow", _MORE_HOST
    ),
    Rule(
        "latency",
        "grammars",
        lambda f: f.mask_share > _MUCH,
        _MASKS,
        "answers are held to grammars that are dear to follow",
        "simplify the largest schema; `jitney_grammar_mask_seconds_total` shows the gain",
    ),
    Rule(
        "latency",
        "padding",
        lambda f: f.padding_share > _MOST,
        _PADDED,
        "steps are compiled for other sizes than come",
        _TUNE,
    ),
    Rule(
        "latency",
        "the memory's bandwidth",
        lambda f: f.bandwidth > _AT_MOST,
        _AT_BANDWIDTH + "; {token_gap_s:.3f} s between tokens",
        "a step cannot be faster with these weights on this device",
        "store the weights in int8 or int4 (weights)",
    ),
    Rule(
        "latency",
        "the device's arithmetic",
        lambda f: f.operations > _AT_MOST,
        _AT_OPERATIONS,
        "so many rows a step are all that the device can multiply",
        "add an engine, or split the model over more devices (tensor_parallel)",
    ),
    Rule(
        "throughput",
        "nobody asks for more",
        lambda f: f.least_waiting == 0 and f.seat_share < _MOST,
        "{running:.1f} of {seats:.0f} seats are taken, at times nobody waits; {output_tok_s:.0f} "
        "tokens/s",
        "the clients do not send more at once",
        "send more requests at once: clients that wait for each answer, as many as there are seats",
    ),
    Rule(
        "throughput",
        "work done twice",
        lambda f: f.recomputed_share > 0.05,
        "{recomputed_share:.0%} of the rows are computed again; {preempted:.0f} sequences were put "
        "back to wait",
        "pages run out, and what lost its pages begins anew",
        _SMALLER_KV,
    ),
    Rule(
        "throughput",
        "padding",
        lambda f: f.padding_share > _MOST,
        _PADDED,
        "steps are compiled for other sizes than come",
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
        lambda f: f.prompt_share > 0.8 and f.cached_share < _FOUND,
        _READS_PROMPTS + "; {prompt_tok_s:.0f} prompt tokens/s, {output_tok_s:.0f} of answers",
        "most of the work is reading prompts",
        _SHARE_PREFIXES,
    ),
    Rule(
        "throughput",
        "too few seats",
        lambda f: (
            f.seat_share > _FULL
            and f.waiting >= 1
            and f.operations < _IDLE_UNITS
            and f.operations < f.bandwidth
        ),
        "all seats are taken, {waiting:.1f} wait; steps use {bandwidth:.0%} of the memory's "
        "bandwidth and {operations:.0%} of the arithmetic",
        "each step reads all weights for few rows",
        "raise max_seats",
    ),
    Rule(
        "throughput",
        "the memory's bandwidth",
        lambda f: f.bandwidth > _AT_MOST,
        _AT_BANDWIDTH,
        "weights, keys and values are read as fast as they can be",
        "store weights in int8 or int4 (weights), and keys and values in int8 (kv_dtype)",
    ),
    Rule(
        "throughput",
        "the device's arithmetic",
        lambda f: f.operations > _AT_MOST,
        _AT_OPERATIONS,
        "the device is used up",
        "add an engine",
    ),
    Rule(
        "batches",
        "nothing is asked of it",
        lambda f: f.steps == 0,
        "no step was done in {seconds:.0f} s",
        "no request was open",
        "send requests, and look again",
    ),
    Rule(
        "batches",
        "they are full",
        lambda f: f.seat_share > _FULL,
        "{running:.1f} of {seats:.0f} seats are taken",
        "batches are as large as max_seats allows",
    ),
    Rule(
        "batches",
        "nobody waits",
        lambda f: f.steps > 0 and f.least_waiting == 0,
        "{running:.1f} of {seats:.0f} seats are taken, {waiting:.1f} wait, at times nobody",
        "the clients do not send more at once",
        "send more requests at once",
    ),
    Rule(
        "batches",
        "a policy that waits",
        lambda f: f.holds_seats == 1,
        "{waiting:.1f} wait with {seat_share:.0%} of the seats taken",
        "the policy keeps seats until a whole batch has ended",
        "set policy to continuous",
    ),
    Rule(
        "batches",
        "no pages",
        lambda f: f.page_share > _FULL,
        _FULL_PAGES,
        "the next one finds a seat, and no room for its keys and values",
        _SMALLER_KV,
    ),
    Rule(
        "batches",
        "prompts are read",
        lambda f: f.prompt_share > _MOST,
        "{waiting:.1f} wait with {seat_share:.0%} of the seats taken; " + _READS_PROMPTS,
        "the rows of each step go to prompts: a sequence sits down when its prompt's turn comes",
        _SHARE_PREFIXES,
    ),
    Rule(
        "memory",
        "sequences are put back",
        lambda f: f.preempted > 0,
        _OUT_OF_PAGES,
        "more tokens are open than the pages hold",
        _SMALLER_KV,
    ),
    Rule(
        "memory",
        "pages are nearly all held",
        lambda f: f.page_share > _FULL,
        "{page_share:.0%} of the pages are held by sequences, and none was put back",
        "there is no room to spare: longer answers will put sequences back",
        _SMALLER_KV,
    ),
    Rule(
        "memory",
        "it is not short",
        lambda f: f.page_share <= _FULL and f.preempted == 0,
        "{page_share:.0%} of the pages are held by sequences, none was put back to wait; "
        "{cached_page_share:.0%} are kept for prompts that come again, and given up when needed",
        "the memory is not what holds requests up",
    ),
)


class _Shown(float):
    """A figure in a sentence."""

    def __format__(self, spec: str) -> str:
        return "an unknown number" if math.isnan(self) else super().__format__(spec)


def diagnose(figures: Figures) -> dict[_Complaint, Finding | None]:
    """The first cause of each complaint that the figures show, in the order of RULES; None: they
    show none.
    """
    findings: dict[_Complaint, Finding | None] = dict.fromkeys(COMPLAINTS)
    figures_shown = {name: _Shown(value) for name, value in asdict(figures).items()}
    for rule in RULES:
        if findings[rule.complaint] is None and rule.shows(figures):
            seen = rule.seen.format_map(figures_shown)
            findings[rule.complaint] = Finding(
                rule.complaint, rule.name, seen, rule.cause, rule.change
            )
    return findings

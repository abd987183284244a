"""The page's list of requests, and one request in full with the causes of its duration. Generators
are work for `TimeSlices`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jitney.dashboard.sse import tenth_ms as _t
from jitney.dashboard.tenants import label_of
from jitney.engine.common.errors import status_of
from jitney.engine.common.history import History
from jitney.engine.common.records import RecordRing
from jitney.engine.common.request_record import ComputedChunk, RequestRecord, Stay
from jitney.engine.common.requests import JsonDict, account_of
from jitney.engine.server import EVERYBODY, Identity

#: Makes JSON, with pauses in between.
type _Work = Generator[None, None, JsonDict]

#: Requests that are processed between two pauses.
_LOOKS = 64
#: Most output token times in one answer.
_MAX_TIMES = 4096
#: Fields of a step that a chunk shows.
_STEP_FIELDS = ("from", "to", "shared_with", "rows", "bucket", "padding", "compiled")
#: Fields of a step's record that it is made of.
_STEP_NUMBERS = ("bucket_tokens", "padding", "seats_busy", "compiled")
#: Most sequences listed as occupants of a seat that another one waited for.
_MOST_SITTERS = 5
#: Beyond every step's number.
_NEVER = 2**62


def _row(request: RequestRecord, adapter: str) -> JsonDict:
    """A sequence's row of the table; times on the server's monotonic clock, seconds. One that
    was refused has the state "refused", and the status that it was answered with. adapter: name;
    empty: none.
    """
    same = {name: getattr(request, name) for name in _SAME}
    if request.refused:
        same["state"], same["status"] = "refused", status_of(request.code)
    times = {shown: _t(getattr(request, name)) for shown, name in _TIMES.items()}
    account = label_of(account_of(request.tenant, request.user))
    own = {"request": request.request_id, "account": account, "adapter": adapter}
    return {**own, **same, **times}


#: Columns of the table that are fields of the record, and the record's names for the times.
_SAME = (
    "index",
    "client_id",
    "route",
    "user",
    "state",
    "seat",
    "n_prompt",
    "n_output",
    "max_tokens",
    "priority",
    "finish",
    "code",
    "message",
    "preemptions",
    "cached_tokens",
    "accepted",
    "rejected",
)
_TIMES = {
    "arrival": "arrival",
    "seated": "boarded",
    "first_token": "first_token",
    "finished": "finished",
    "queued_s": "queue_s",
    "ttft_s": "ttft_s",
    "e2e_s": "e2e_s",
    "retry_s": "retry_s",
}


def listing(
    history: History,
    state: str,
    limit: int,
    cursor: int,
    now: float,
    *,
    search: str = "",
    identity: Identity = EVERYBODY,
) -> _Work:
    """At most `limit` sequences that `identity` may see, the newest first, of those before number
    `cursor`; next: the cursor to go on with, null at the end. search: a part of the request's id,
    x-request-id, user, key's digest or error code, in any case.
    """
    filters = _Filters(state, cursor, search.lower(), identity)
    shown: list[RequestRecord] = []
    for place, request in enumerate(history.newest()):
        if place % _LOOKS == 0:
            yield
        if filters.includes(request):
            shown.append(request)
        if len(shown) > limit:
            break
    rows = yield from rows_of((one, history.adapter_of(one)) for one in shown[:limit])
    more = len(shown) > limit
    return {"t": _t(now), "requests": rows, "next": shown[limit - 1].number if more else None}


class _Filters(NamedTuple):
    #: "all", "open", "refused" or a state of a record.
    state: str
    #: Only sequences before this number.
    cursor: int
    #: Lower case.
    search: str
    #: The viewer.
    identity: Identity

    def includes(self, request: RequestRecord) -> bool:
        may_see = self.identity.may_see(request.tenant)
        is_in = request.number < self.cursor and _is_in(request, self.state)
        return may_see and is_in and (not self.search or self._is_found(request))

    def _is_found(self, request: RequestRecord) -> bool:
        ids = (request.request_id, request.client_id, request.tenant)
        texts = (*ids, request.user, request.code)
        return any(self.search in text.lower() for text in texts)


def rows_of(
    requests: Iterable[tuple[RequestRecord, str]],
) -> Generator[None, None, list[JsonDict]]:
    """Rows of the table, of sequences and the names of their adapters. Work for `TimeSlices`."""
    rows = []
    for request, adapter in requests:
        rows.append(_row(request, adapter))
        yield
    return rows


def _is_in(request: RequestRecord, state: str) -> bool:
    """state: see `_Filters`."""
    if state == "all":
        return True
    if state == "open":
        return request.finished is None
    if state == "refused" or request.refused:
        return request.refused and state == "refused"
    return request.state == state


def detail(
    history: History, request: RequestRecord, now: float, identity: Identity = EVERYBODY
) -> _Work:
    """The row, and the phases, chunks, tokens, company and causes of a sequence (see
    `Steps.causes`), and who sat in its seat while it waited, as `identity` may see it.
    """
    steps = Steps(history, request, now)
    yield
    chunks: list[JsonDict] = []
    for chunk in list(request.chunks):
        chunks.append(steps.chunk(chunk))
        yield
    sitters = yield from _sitters(history, request, identity)
    found = {"sitters": sitters, "chunks": chunks, "causes": steps.causes()}
    return _story(steps, history.adapter_of(request)) | found


def kept_detail(request: RequestRecord, adapter: str) -> JsonDict:
    """Like `detail`, for an ended request whose steps are not stored any more: its causes are its
    phases. adapter: its name.
    """
    steps = Steps(History(records=RecordRing(1)), request, request.end)
    return _story(steps, adapter) | {"causes": _causes_by_phase(request)}


def _story(steps: Steps, adapter: str) -> JsonDict:
    """The part of a detail that needs no history but the steps."""
    return _row(steps.request, adapter) | {
        "parameters": steps.request.parameters,
        "sitters": [],
        "phases": _phases(steps.request, steps.now),
        "chunks": [],
        "cadence": steps.cadence(),
        "shared": steps.shared(),
    }


def _sitters(
    history: History, request: RequestRecord, identity: Identity
) -> Generator[None, None, list[JsonDict]]:
    """The newest sequences that occupied, while a sequence waited, the seat in which it boarded.
    to: the time when each left. An empty `request`: of another client.
    """
    if not request.stays:
        return []
    first = request.stays[0]
    sitters: list[JsonDict] = []
    for place, other in enumerate([*history.ended(request.arrival), *history.open()]):
        if place % _LOOKS == 0:
            yield
        for _, stay in other.stays_within(request.arrival, first.start):
            if stay.seat == first.seat:
                name = other.request_id if identity.may_see(other.tenant) else ""
                index = other.index if name else 0
                left = min(stay.left, first.start)
                sitters.append({"request": name, "index": index, "to": _t(left)})
    return sorted(sitters, key=lambda one: one["to"])[-_MOST_SITTERS:]


def _causes_by_phase(request: RequestRecord) -> list[JsonDict]:
    """See `Steps.causes`: what came after a preemption, until it decoded again, is its cost."""
    seconds: Counter[str] = Counter()
    for place, phase in enumerate(_phases(request, request.end)):
        kind = phase["kind"]
        is_again = (place > 0 and kind == "queue") or (
            "preemption" in seconds and kind == "prefill"
        )
        seconds["preemption" if is_again else kind] += phase["to"] - phase["from"]
    causes = [_cause(code, value, request) for code, value in seconds.items() if value > _LEAST_S]
    return sorted(causes, key=lambda cause: -cause["seconds"])


def _phases(request: RequestRecord, now: float) -> list[JsonDict]:
    """queue, prefill and decode in order, again after each preemption; `to` is null for the one
    that goes on. None for one that was refused, which never waited.
    """
    result = []
    if request.refused:
        return result
    since = request.arrival
    for stay in request.stays:
        result += [_queue(since, stay.start), *_stay_phases(stay)]
        since = stay.end if stay.end is not None else now
    if not request.stays or _lost_its_seat(request):
        result.append(_queue(since, request.finished))
    return result


def _lost_its_seat(request: RequestRecord) -> bool:
    return bool(request.stays) and request.stays[-1].how == "preempted"


def _queue(start: float, end: float | None) -> JsonDict:
    return _phase("queue", -1, (start, end), (-1, -1))


def _stay_phases(stay: Stay) -> list[JsonDict]:
    read, last = stay.first_token, stay.first_step
    if read is None:
        read, last = stay.end, stay.last_step
    prefill = _phase("prefill", stay.seat, (stay.start, read), (stay.step, last))
    return [prefill, *_decode_phase(stay)]


def _decode_phase(stay: Stay) -> Iterator[JsonDict]:
    """The decode phase of a stay; None for less than two tokens."""
    is_over = stay.end is not None and stay.last_step <= stay.first_step
    if stay.first_token is not None and not is_over:
        times = stay.first_token, stay.end
        yield _phase("decode", stay.seat, times, (stay.first_step + 1, stay.last_step))


def _phase(
    kind: str, seat: int, times: tuple[float, float | None], steps: tuple[int, int]
) -> JsonDict:
    """steps: the first and the last; the last is -1 while it is not known."""
    first, last = steps
    begin, end = map(_t, times)
    phase = {"kind": kind, "seat": seat, "from": begin, "to": end}
    n_steps = max(0, last - first + 1) if last >= 0 else 0
    return phase | {"step_from": first, "step_to": last, "steps": n_steps}


class Steps:
    """The recorded steps that a sequence took part in."""

    def __init__(self, history: History, request: RequestRecord, now: float):
        newest = history.records.last_step
        first = request.stays[0].step if request.stays else _NEVER
        last = max((_last_step(stay, newest) for stay in request.stays), default=-1)
        self.request = request
        self.now = now
        #: STEP_DTYPE[steps], with one more before the first: its end is when the first could begin.
        #: ready: when each was done.
        self.records, self.ready = history.records.steps(first - 2, last)
        self.number = self.records["step"].astype(np.int64)
        started = self.records["started"]
        #: f8[steps]: when the device could begin the step, and seconds until it was done.
        self.began = np.r_[started[:1], np.maximum(self.ready[:-1], started[1:])]
        self.spans = np.maximum(0.0, self.ready - self.began)

    def seated(self) -> np.ndarray:
        """bool[steps]: the sequence sat in a seat."""
        return self._any((stay.step, self._last(stay)) for stay in self.request.stays)

    def bringing(self) -> np.ndarray:
        """bool[steps]: the step brought a token of this sequence."""
        stays = self.request.stays
        return self._any((s.first_step, self._last(s)) for s in stays if s.first_token is not None)

    def _last(self, stay: Stay) -> int:
        newest = int(self.number[-1]) if len(self.number) else -1
        return _last_step(stay, newest)

    def _any(self, ranges: Iterable[tuple[int, int]]) -> np.ndarray:
        """bool[steps]: within one of the ranges of step numbers, both ends included."""
        within = np.zeros(len(self.number), bool)
        for low, high in ranges:
            within |= (self.number >= low) & (self.number <= high)
        return within

    def with_prompts(self) -> np.ndarray:
        """bool[steps]: the step had prompt rows, of any sequence."""
        return self.records["prefill"] + self.records["recomputed"] > 0

    def chunk(self, chunk: ComputedChunk) -> JsonDict:
        """A prompt chunk and its step; the step's fields are null if its record was dropped."""
        places = np.flatnonzero(self.number == chunk.step)
        step = self._step(int(places[0])) if len(places) else dict.fromkeys(_STEP_FIELDS)
        return chunk._asdict() | step

    def _step(self, place: int) -> JsonDict:
        """_STEP_FIELDS of a step, for a sequence with a chunk in it."""
        numbers = {name: int(self.records[place][name]) for name in _STEP_NUMBERS}
        bucket, padding, seats_busy, compiled = numbers.values()
        times = _t(self.began[place]), _t(self.ready[place])
        values = (*times, max(0, seats_busy - 1), bucket - padding, bucket, padding, compiled)
        return dict(zip(_STEP_FIELDS, values, strict=True))

    def cadence(self) -> JsonDict:
        """Times of the output tokens (the newest _MAX_TIMES), and the gaps between them."""
        places = np.flatnonzero(self.bringing())[: self.request.n_output]
        times = self.ready[places]
        return {
            "t": np.round(times[-_MAX_TIMES:], 4).tolist(),
            **dict.fromkeys(("gap_p50", "gap_p95", "gap_max", "slowest")),
            **self._gaps(places, times),
        }

    def _gaps(self, places: np.ndarray, times: np.ndarray) -> JsonDict:
        """Gaps between tokens at `times`, with the steps at `places`; empty if there is none."""
        if len(times) < 2:
            return {}
        gaps = np.diff(times)
        worst = int(np.argmax(gaps))
        slowest = {"t": _t(times[worst + 1]), "gap": _t(gaps[worst])}
        before, place = places[worst : worst + 2].tolist()
        return {
            "gap_p50": _t(np.quantile(gaps, 0.5)),
            "gap_p95": _t(np.quantile(gaps, 0.95)),
            "gap_max": _t(gaps[worst]),
            "slowest": slowest | self._late(before, place),
        }

    def _late(self, before: int, place: int) -> JsonDict:
        """The gap between a late token and the one before it, by the places of their steps."""
        return {"step": int(self.number[place]), "cause": self._cause_of_gap(before, place)}

    def _cause_of_gap(self, before: int, place: int) -> str:
        """The cause of the gap between the tokens of the steps at `before` and `place`."""
        record = self.records[place]
        if place - before > 1:
            return "preempted"
        if record["compiled"]:
            return "compile"
        if self.with_prompts()[place]:
            return "prefill of others"
        return "host gap" if record["gap_s"] > record["device_s"] else "long step"

    def shared(self) -> JsonDict:
        """Rows of other sequences in its steps, and padding rows."""
        records = self.records[self.seated()]
        own_rows = sum(chunk.count for chunk in self.request.chunks)
        prompt_rows = int((records["prefill"] + records["recomputed"]).sum())
        return {
            "steps": len(records),
            **_others(records["seats_busy"].astype(np.int64) - 1),
            "padding_share": _padding_share(records),
            "compiles": int(records["compiled"].sum()),
            "prefill_rows_of_others": max(0, prompt_rows - own_rows),
        }

    def causes(self) -> list[JsonDict]:
        """Seconds of its time by cause, the largest first; they add up to what it has taken so far.

        queue, preemption: waiting for a first seat, and again after losing it, with what had to be
        computed again. compile: steps that compiled a program. prefill: its own prompt.
        shared_prefill: what steps with prompt rows of others took longer than steps without, while
        it decoded. host_gap: the device had nothing to do. decode: the rest. None for one that was
        refused.
        """
        request = self.request
        if request.refused:
            return []
        seconds = _seconds_by_cause(request, self, self.now).items()
        entries = [_cause(code, value, request) for code, value in seconds if value > _LEAST_S]
        return sorted(entries, key=lambda cause: -cause["seconds"])


def _others(counts: np.ndarray) -> JsonDict:
    """Numbers of other sequences in its steps, summarised."""
    if not len(counts):
        return {"mean": None, "max": None}
    return {"mean": round(float(counts.mean()), 2), "max": int(counts.max())}


def _padding_share(records: np.ndarray) -> float | None:
    rows = int(records["bucket_tokens"].sum())
    return round(int(records["padding"].sum()) / rows, 4) if rows else None


#: Causes in words.
_WORDS = {
    "queue": "waited to board",
    "preemption": "lost its seat for lack of KV pages ({request.preemptions} times), "
    "waited again and was computed again",
    "compile": "shared steps that had to compile a program first",
    "prefill": "its prompt of {request.n_prompt} tokens was read",
    "shared_prefill": "steps took longer because they also read prompts of others",
    "decode": "its {request.n_output} tokens were generated, one a step",
    "host_gap": "the device waited for the host before a step",
}
#: Shorter times, in seconds, are left out.
_LEAST_S = 5e-5


def _cause(code: str, seconds: float, request: RequestRecord) -> JsonDict:
    message = _WORDS[code].format(request=request)
    return {"code": code, "seconds": _t(seconds), "message": message}


def _seconds_by_cause(request: RequestRecord, steps: Steps, now: float) -> dict[str, float]:
    end = request.finished if request.finished is not None else now
    boarded = request.stays[0].start if request.stays else end
    seconds = {"queue": boarded - request.arrival, **_seconds_of_steps(request, steps)}
    seconds["preemption"] += _waits_after_preemption(request, end)
    seconds["decode"] = max(0.0, end - request.arrival - sum(seconds.values()))
    return seconds


def _seconds_of_steps(request: RequestRecord, steps: Steps) -> dict[str, float]:
    """Seconds by cause, of the steps in which it had a seat."""
    spans = steps.spans
    kinds = _kinds_of_steps(request, steps)
    alone, mixed = kinds["alone"], kinds["mixed"]
    usual = float(np.median(spans[alone])) if np.any(alone) else 0.0
    longer = float(np.maximum(0.0, spans[mixed] - usual).sum()) if usual else 0.0
    gaps = np.minimum(steps.records["gap_s"].astype(np.float64), spans)
    return {
        "preemption": float(spans[kinds["again"]].sum()),
        "compile": float(spans[kinds["compiled"]].sum()),
        "prefill": float(spans[kinds["own_prompt"]].sum()),
        "shared_prefill": longer,
        "host_gap": float(gaps[alone].sum()),
    }


def _kinds_of_steps(request: RequestRecord, steps: Steps) -> dict[str, np.ndarray]:
    """bool[steps] by kind. again: repeated work after a preemption; alone, mixed: decode steps
    without and with prompts of others.
    """
    prompt_end, stay_end = _ends_of_first_stay(request)
    seated, mixed = steps.seated(), steps.with_prompts()
    compiled = seated & (steps.records["compiled"] > 0)
    again = seated & ~steps.bringing() & (steps.number > stay_end)
    own_prompt = seated & ~compiled & ~again & (steps.number <= prompt_end)
    decoding = seated & ~compiled & ~again & ~own_prompt
    kinds = {"compiled": compiled, "again": again, "own_prompt": own_prompt}
    return kinds | {"alone": decoding & ~mixed, "mixed": decoding & mixed}


def _ends_of_first_stay(request: RequestRecord) -> tuple[int, int]:
    """The steps that brought its first token, and that was the last of its first stay."""
    if not request.stays:
        return _NEVER, _NEVER
    stay = request.stays[0]
    return _known_step(stay.first_step), _known_step(stay.last_step)


def _known_step(step: int) -> int:
    return step if step >= 0 else _NEVER


def _waits_after_preemption(request: RequestRecord, end: float) -> float:
    """Seconds without a seat after preemptions."""
    ends = [stay.end for stay in request.stays]
    starts = [stay.start for stay in request.stays[1:]]
    if _lost_its_seat(request):
        starts.append(end)
    return sum(start - left for left, start in zip(ends, starts, strict=False) if left is not None)


def _last_step(stay: Stay, newest: int) -> int:
    return stay.last_step if stay.end is not None else newest

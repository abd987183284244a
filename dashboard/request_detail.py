"""Requests as the page lists them, and one request's whole story: why it took as long as it did."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any, SupportsFloat

import numpy as np

from jitney.engine.telemetry.history import History
from jitney.engine.telemetry.request_record import PromptChunk, RequestRecord, Stay

STATES = ("all", "open", "waiting", "prefill", "decode", "finished")
#: Most output token times in one story.
MAX_TIMES = 4096


def row(request: RequestRecord) -> dict[str, Any]:
    """What the table shows of a sequence; times on the server's monotonic clock, seconds."""
    return {
        "request": request.request_id,
        "index": request.index,
        "state": request.state,
        "seat": request.seat,
        "n_prompt": request.n_prompt,
        "n_output": request.n_output,
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "arrival": _t(request.arrival),
        "seated": _t(request.boarded),
        "first_token": _t(request.first_token),
        "finished": _t(request.finished),
        "finish": request.finish,
        "code": request.code,
        "queued_s": _t(request.queue_s),
        "ttft_s": _t(request.ttft_s),
        "e2e_s": _t(request.e2e_s),
        "preemptions": request.preemptions,
        "cached_tokens": request.cached_tokens,
    }


def listing(history: History, state: str, limit: int, cursor: int, now: float) -> dict[str, Any]:
    """At most `limit` sequences, the newest first, of those before number `cursor`; next: the
    cursor to go on with.
    """
    wanted = {"all": lambda request: True, "open": lambda request: request.finished is None}.get(
        state, lambda request: request.state == state
    )
    found = list(
        islice(
            (
                request
                for request in history.newest()
                if request.number < cursor and wanted(request)
            ),
            limit + 1,
        )
    )
    return {
        "t": _t(now),
        "requests": [row(request) for request in found[:limit]],
        "next": found[limit - 1].number if len(found) > limit else None,
    }


def story(history: History, request: RequestRecord, now: float) -> dict[str, Any]:
    """The row, and the phases, chunks, tokens, company and causes of a sequence (see `causes`)."""
    steps = Steps(history, request, now)
    return row(request) | {
        "phases": phases(request, now),
        "chunks": [steps.chunk(chunk) for chunk in request.chunks],
        "cadence": steps.cadence(),
        "shared": steps.shared(),
        "why": causes(request, steps, now),
    }


def phases(request: RequestRecord, now: float) -> list[dict[str, Any]]:
    """queue, prefill and decode in order, again after each preemption; `to` is null for the one
    that goes on.
    """
    found, since = [], request.arrival
    for stay in request.stays:
        found.append(_phase("queue", -1, since, stay.start, -1, -1))
        until = stay.first_token if stay.first_token is not None else stay.end
        last = stay.first_step if stay.first_token is not None else stay.last_step
        found.append(_phase("prefill", stay.seat, stay.start, until, stay.step, last))
        if stay.first_token is not None and (stay.end is None or stay.last_step > stay.first_step):
            found.append(
                _phase(
                    "decode",
                    stay.seat,
                    stay.first_token,
                    stay.end,
                    stay.first_step + 1,
                    stay.last_step,
                )
            )
        since = stay.end if stay.end is not None else now
    if not request.stays or (request.stay is None and request.stays[-1].how == "preempted"):
        found.append(_phase("queue", -1, since, request.finished, -1, -1))
    return found


def _phase(
    kind: str, seat: int, start: float, end: float | None, first: int, last: int
) -> dict[str, Any]:
    return {
        "kind": kind,
        "seat": seat,
        "from": _t(start),
        "to": _t(end),
        "step_from": first,
        "step_to": last,
        "steps": max(0, last - first + 1) if last >= 0 else 0,
    }


class Steps:
    """The steps that a sequence took part in, by their records, as far back as these are kept."""

    def __init__(self, history: History, request: RequestRecord, now: float):
        first = request.stays[0].step if request.stays else 2**62
        last = max(
            (_last_step(stay, history.records.last_step) for stay in request.stays), default=-1
        )
        # One more before the first: its end is when the first could begin.
        self.records, self.ready = history.records.steps(first - 2, last)
        self.request, self.now = request, now
        self.number = self.records["step"].astype(np.int64)
        self.began = np.r_[
            self.records["started"][:1], np.maximum(self.ready[:-1], self.records["started"][1:])
        ]

    def mask(self, low: int, high: int) -> np.ndarray:
        """bool[steps]: low <= number <= high."""
        return (self.number >= low) & (self.number <= high)

    def riding(self) -> np.ndarray:
        """bool[steps]: the sequence sat in a seat."""
        last = int(self.number[-1]) if len(self.number) else -1
        return self._any((stay.step, _last_step(stay, last)) for stay in self.request.stays)

    def bringing(self) -> np.ndarray:
        """bool[steps]: the step brought a token of this sequence."""
        last = int(self.number[-1]) if len(self.number) else -1
        return self._any(
            (stay.first_step, _last_step(stay, last))
            for stay in self.request.stays
            if stay.first_token is not None
        )

    def _any(self, spans: Any) -> np.ndarray:
        found = np.zeros(len(self.number), bool)
        for low, high in spans:
            found |= self.mask(low, high)
        return found

    def chunk(self, chunk: PromptChunk) -> dict[str, Any]:
        """A prompt chunk and the step it was part of; null where the step's record is not kept any
        more.
        """
        at = np.flatnonzero(self.number == chunk.step)
        told = {
            "step": chunk.step,
            "start": chunk.start,
            "count": chunk.count,
            "recomputed": chunk.recomputed,
        }
        if not len(at):
            return told | dict.fromkeys(
                ("from", "to", "sharers", "rows", "bucket", "padding", "compiled")
            )
        record = self.records[at[0]]
        return told | {
            "from": _t(self.began[at[0]]),
            "to": _t(self.ready[at[0]]),
            "sharers": max(0, int(record["seats_busy"]) - 1),
            "rows": int(record["bucket_tokens"] - record["padding"]),
            "bucket": int(record["bucket_tokens"]),
            "padding": int(record["padding"]),
            "compiled": int(record["compiled"]),
        }

    def cadence(self) -> dict[str, Any]:
        """When each output token came (the newest MAX_TIMES), and the gaps between them."""
        bringing = np.flatnonzero(self.bringing())[: self.request.n_output]
        times = self.ready[bringing]
        told: dict[str, Any] = {
            "t": np.round(times[-MAX_TIMES:], 4).tolist(),
            "gap_p50": None,
            "gap_p95": None,
            "gap_max": None,
            "slowest": None,
        }
        if len(times) < 2:
            return told
        gaps = np.diff(times)
        worst = int(np.argmax(gaps))
        at = bringing[worst + 1]
        return told | {
            "gap_p50": _t(np.quantile(gaps, 0.5)),
            "gap_p95": _t(np.quantile(gaps, 0.95)),
            "gap_max": _t(gaps[worst]),
            "slowest": {
                "t": _t(times[worst + 1]),
                "gap": _t(gaps[worst]),
                "step": int(self.number[at]),
                "why": self._why_slow(at, bringing[worst]),
            },
        }

    def _why_slow(self, at: int, before: int) -> str:
        record = self.records[at]
        if at - before > 1:
            return "preempted"
        if record["compiled"]:
            return "compile"
        if record["prefill"] + record["recomputed"] > 0:
            return "prefill of others"
        return "host gap" if record["gap_s"] > record["device_s"] else "long step"

    def shared(self) -> dict[str, Any]:
        """The company: who else had rows in its steps, and how many rows were padding."""
        mine = self.records[self.riding()]
        busy, rows = mine["seats_busy"].astype(np.int64), int(mine["bucket_tokens"].sum())
        own = sum(chunk.count for chunk in self.request.chunks)
        return {
            "steps": len(mine),
            "mean": round(float(busy.mean()) - 1, 2) if len(mine) else None,
            "max": int(busy.max()) - 1 if len(mine) else None,
            "padding_share": round(int(mine["padding"].sum()) / rows, 4) if rows else None,
            "compiles": int(mine["compiled"].sum()),
            "prefill_rows_of_others": max(
                0, int((mine["prefill"] + mine["recomputed"]).sum()) - own
            ),
        }


def causes(request: RequestRecord, steps: Steps, now: float) -> list[dict[str, Any]]:
    """Seconds of its time by cause, the largest first; they add up to what it has taken so far.

    queue, preemption: waiting for a first seat, and again after losing it, with what had to be
    computed again. compile: steps that compiled a program. prefill: its own prompt. shared_prefill:
    what steps with prompt rows of others took longer than steps without, while it decoded.
    host_gap: the device had nothing to do. decode: the rest.
    """
    end = request.finished if request.finished is not None else now
    spans = np.maximum(0.0, steps.ready - steps.began) if len(steps.ready) else np.zeros(0)
    riding, bringing = steps.riding(), steps.bringing()
    first = request.stays[0] if request.stays else None
    compiled = riding & (steps.records["compiled"] > 0)
    again = (
        riding
        & ~bringing
        & (steps.number > (first.last_step if first and first.last_step >= 0 else 2**62))
    )
    reading = (
        riding
        & ~compiled
        & ~again
        & (steps.number <= (first.first_step if first and first.first_step >= 0 else 2**62))
    )
    writing = riding & ~compiled & ~again & ~reading
    mixed = writing & (steps.records["prefill"] + steps.records["recomputed"] > 0)
    usual = float(np.median(spans[writing & ~mixed])) if np.any(writing & ~mixed) else 0.0
    gaps = steps.records["gap_s"].astype(np.float64)
    waits = [later.start - (stay.end or later.start) for stay, later in pairwise(request.stays)]
    if request.stays and request.stay is None and request.stays[-1].how == "preempted":
        waits.append(end - (request.stays[-1].end or end))
    seconds = {
        "queue": (first.start if first else end) - request.arrival,
        "preemption": sum(waits) + float(spans[again].sum()),
        "compile": float(spans[compiled].sum()),
        "prefill": float(spans[reading].sum()),
        "shared_prefill": float(np.maximum(0.0, spans[mixed] - usual).sum()) if usual else 0.0,
        "host_gap": float(np.minimum(gaps, spans)[writing & ~mixed].sum()),
    }
    seconds["decode"] = max(0.0, end - request.arrival - sum(seconds.values()))
    told = [
        {"code": code, "seconds": _t(value), "msg": WORDS[code].format(request=request)}
        for code, value in seconds.items()
        if value > 5e-5
    ]
    return sorted(told, key=lambda cause: -cause["seconds"])


WORDS = {
    "queue": "waited to board",
    "preemption": "lost its seat for lack of KV pages ({request.preemptions} times), "
    "waited again and was computed again",
    "compile": "shared steps that had to compile a program first",
    "prefill": "its prompt of {request.n_prompt} tokens was read",
    "shared_prefill": "steps took longer because they also read prompts of others",
    "decode": "its {request.n_output} tokens were generated, one a step",
    "host_gap": "the device waited for the host before a step",
}


def _last_step(stay: Stay, newest: int) -> int:
    return stay.last_step if stay.end is not None else newest


def _t(value: SupportsFloat | None) -> float | None:
    return None if value is None else round(float(value), 4)

"""One replica of a fleet, fast enough for thousands: the scheduler's rules over counts, and one
entry for each request instead of one for each row.

Between two changes (a prompt to compute, somebody who comes or ends) all steps are alike but for
the contexts, which grow by one: they are taken in one leap. Steps with prompt rows are planned one
by one, with the scheduler's own budget for them. The host is one step ahead, as it is in the
engine. What is left out: preemption (a request boards when the pages last to everybody's end), the
scatter of single steps, orders other than first come, first served.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from typing import NamedTuple

from jitney.engine.core import Passing, StepWork
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.fleet_steps import StepCosts

_NEVER = math.inf


@dataclass(slots=True, eq=False)
class FleetRequest:
    """One request on its way through a fleet. Times in seconds, NaN until they are known."""

    number: int
    at: float
    n_prompt: int
    n_output: int
    #: As in `workload.Arrival`.
    conversation: int = 0
    n_shared: int = 0
    #: When its first and last token were handed out; written by the replica.
    first: float = math.nan
    end: float = math.nan
    #: Prompt tokens that were found in a cache, by the replica that computed it last.
    n_cached: int = 0
    #: Tokens that a core which died had generated: the next one computes them as rows of a prompt.
    n_done: int = 0
    #: How often it was given to a replica again.
    repeats: int = 0

    @property
    def n_known(self) -> int:
        """Tokens to compute before the next one is generated."""
        return self.n_prompt + self.n_done

    @property
    def n_left(self) -> int:
        """Tokens to generate."""
        return self.n_output - self.n_done

    @property
    def n_longest(self) -> int:
        """KV positions at its end."""
        return self.n_prompt + self.n_output


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that has a seat and is not computed yet."""

    request: FleetRequest
    #: Tokens that are computed, or were found.
    start: int

    @property
    def n_left(self) -> int:
        return self.request.n_known - self.start


class _Stream(NamedTuple):
    """A sequence that decodes."""

    #: The plan in which its seat is free again.
    leaves_at: int
    #: Order among those that leave together.
    number: int
    request: FleetRequest


@dataclass(slots=True)
class _Draft:
    """The prompt rows of a step while it is planned."""

    decoding: int
    tokens_left: int
    rows: int
    prompt: int = 0
    pairs: int = 0
    chunks: int = 0
    finished: list[FleetRequest] = field(default_factory=list[FleetRequest])


@dataclass(slots=True)
class _PrefixCache:
    """Beginnings of prompts that stayed behind, by conversation; the one used last goes last."""

    kept: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    tokens: int = 0
    #: The longest beginning that all conversations share and that is here.
    shared: int = 0

    def take(self, request: FleetRequest) -> int:
        """Tokens found; the conversation's are somebody's own from here on."""
        found = self.count(request)
        self.tokens -= self.kept.pop(request.conversation, 0)
        return found

    def count(self, request: FleetRequest) -> int:
        """Tokens that `take` would find."""
        if not request.conversation:
            return 0
        return max(self.kept.get(request.conversation, 0), min(self.shared, request.n_shared))

    def put(self, request: FleetRequest, room: int) -> None:
        """Keep a prompt, and let go of others until all fit the room (tokens)."""
        if request.conversation:
            self.shared = max(self.shared, request.n_shared)
            self.tokens += request.n_prompt - self.kept.pop(request.conversation, 0)
            self.kept[request.conversation] = request.n_prompt
        self.fit(room)

    def fit(self, room: int) -> None:
        while self.tokens > room and self.kept:
            self.tokens -= self.kept.popitem(last=False)[1]

    def clear(self) -> None:
        self.kept.clear()
        self.tokens = self.shared = 0


class ReplicaModel:
    """A replica, advanced to whatever time somebody looks at it.

    Time moves by `advance`, which must have been called with the time of whatever follows.
    """

    def __init__(self, engine: EngineShape, costs: StepCosts, *, prefix_cache: bool = False):
        self.engine = engine
        self.costs = costs
        self._seats = engine.limits.max_seats
        self._page = engine.page_size
        self._capacity = (engine.pages - 1) * engine.page_size  # one page is trash
        self._waiting: deque[FleetRequest] = deque()
        self._prompts: list[_Prompt] = []
        self._streams: list[_Stream] = []
        # KV positions that the streams attend to in the next plan, and those that are promised to
        # everybody who has a seat.
        self._keys = 0
        self._promised = 0
        # By the start of their contexts less the plan, negative: the longest context.
        self._longest: list[tuple[int, int]] = []
        self._plans = 0
        # When the host plans next, and the device has done what was launched.
        self._plan_at = 0.0
        self._device_free = 0.0
        self._in_flight = False
        # Who was turned away for lack of pages, until somebody leaves.
        self._turned_away: FleetRequest | None = None
        self._cache = _PrefixCache() if prefix_cache else None
        self._finished: list[FleetRequest] = []
        self._passing = Passing(costs.token_budget)
        #: Prompt tokens and all tokens of those who wait.
        self.waiting_prompt = 0
        self.waiting_work = 0
        #: Seconds in which a step ran, and seat-seconds.
        self.busy_s = 0.0
        self.seated_s = 0.0

    @property
    def n_seated(self) -> int:
        return len(self._streams) + len(self._prompts)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_open(self) -> int:
        """Requests that have not got their last token."""
        return self.n_seated + len(self._waiting)

    def take_finished(self) -> list[FleetRequest]:
        """Who has got the last token since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def offer(self, request: FleetRequest, now: float) -> None:
        """Let a request wait for a seat."""
        if not self.n_open:
            self._plan_at = max(now, self._device_free)
        self._wait(request)

    def _wait(self, request: FleetRequest) -> None:
        self._waiting.append(request)
        self.waiting_prompt += request.n_known
        self.waiting_work += request.n_longest

    def refuses(self, request: FleetRequest, wait_s: float) -> bool:
        """Whether the engine would answer 429, by the bounds of its settings. wait_s: as
        `predicted_wait` says."""
        limits = self.engine.limits
        if not self.n_open:
            return False
        if 0 < limits.max_predicted_wait_s < wait_s:
            return True
        if len(self._waiting) < self._seats - self.n_seated:
            return False
        beyond = len(self._waiting) + 1 - (self._seats - self.n_seated)
        if beyond > limits.max_waiting_requests:
            return True
        return bool(self._waiting) and (
            self.waiting_work + request.n_longest > limits.max_waiting_tokens
        )

    def predicted_wait(self) -> float:
        """Seconds until a request that comes now should board, as `PredictedWait` has them."""
        ahead, prompts = len(self._waiting), len(self._prompts)
        rows = self.waiting_prompt + sum([prompt.n_left for prompt in self._prompts])
        mean = rows // max(1, ahead + prompts)
        open_seats = self._seats - self.n_seated
        wanting = prompts + min(ahead + 1, max(1, open_seats))
        decoding = len(self._streams)
        most = max(1, self.costs.prompt_rows(decoding, mean // 2, wanting, mean, mean))
        prompt_steps = rows // most
        most = min(most, self.costs.token_budget - decoding)
        work = StepWork(decoding, most, self._keys, 0, most * mean // 2)
        prompt_s = self.costs.mixed_seconds(work, min(decoding + 1, self._seats))
        seated = min(self._seats, max(1, self.n_seated + ahead))
        decode_s = self.costs.decode_seconds(seated, self._keys, self._longest_context())
        more_steps = max(0.0, self._seat_steps(ahead) - prompt_steps)
        return prompt_steps * prompt_s + more_steps * decode_s

    def _seat_steps(self, ahead: int) -> float:
        """As `PredictedWait._seat_steps`."""
        wanted = ahead + 1 - (self._seats - self.n_seated)
        if wanted <= 0:
            return 0.0
        if wanted <= self.n_seated:
            return self._rests(wanted)[-1]
        left = sum(self._rests(self.n_seated))
        mean = (self.waiting_work - self.waiting_prompt) / max(1, ahead)
        return max(1.0, (left + mean * (ahead - (self._seats - 1) / 2)) / self._seats)

    def _rests(self, count: int) -> list[int]:
        """The shortest rests of those who sit, in tokens, ascending."""
        rests = [stream.leaves_at - self._plans for stream in self._streams]
        rests += [prompt.request.n_left for prompt in self._prompts]
        return nsmallest(count, rests)

    def advance(self, until: float) -> None:
        """Let all steps begin that are planned before `until`."""
        while self._plan_at < until and self._plan(until):
            pass

    def finish(self) -> None:
        """Let everybody get to the end."""
        self.advance(_NEVER)

    def stop(self, now: float) -> list[FleetRequest]:
        """The device is lost: nobody has a seat, and nothing is cached any more. -> all who were
        open, in the order in which they came."""
        self._leave()
        for stream in self._streams:
            request = stream.request
            request.n_done = request.n_output - max(1, stream.leaves_at - self._plans)
        requests = [stream.request for stream in self._streams]
        requests += [prompt.request for prompt in self._prompts]
        requests += self._waiting
        requests.sort(key=lambda request: request.number)
        self._streams.clear()
        self._prompts.clear()
        self._waiting.clear()
        self._longest.clear()
        self._keys = self._promised = self.waiting_prompt = self.waiting_work = 0
        self._plan_at = self._device_free = now
        self._in_flight = False
        self._turned_away = None
        if self._cache is not None:
            self._cache.clear()
        return requests

    def resume(self, requests: list[FleetRequest], at: float) -> None:
        """Go on with these, as the next core does with those of the one that died."""
        for request in requests:
            self._wait(request)
        self._plan_at = self._device_free = at

    def _plan(self, until: float) -> bool:
        """One step with prompt rows, or several without; False if there is nobody."""
        self._leave()
        draft = self._draft_prompts() if self._prompts or self._waiting else None
        if draft is not None and draft.prompt:
            self._take_step(draft)
            return True
        if self._streams:
            self._leap(until)
            return True
        self._in_flight = False
        return False

    def _leave(self) -> None:
        """The seats of those whose last token is on its way are free."""
        streams, now = self._streams, self._plans
        while streams and streams[0].leaves_at <= now:
            request = heappop(streams).request
            request.end = max(self._device_free, self._plan_at) + self.costs.host.after
            self._keys -= request.n_longest
            self._promised -= self._positions(request)
            self._turned_away = None
            self._finished.append(request)
            if self._cache is not None:
                self._cache.put(request, self._capacity - self._live)

    @property
    def _live(self) -> int:
        """KV positions of those who have a seat."""
        return self._keys + sum(prompt.request.n_known for prompt in self._prompts)

    def _positions(self, request: FleetRequest) -> int:
        """Of the pages that it has at its end."""
        return -(-request.n_longest // self._page) * self._page

    def _first_rows(self) -> tuple[int, int]:
        """Rows that the first prompt has left, and had: of those who have a seat, or else who
        wait.
        """
        if self._prompts:
            first = self._prompts[0]
            return first.n_left, first.request.n_known - first.request.n_cached
        waiting = self._waiting[0].n_known
        return waiting, waiting

    def _draft_prompts(self) -> _Draft:
        """Prompt rows as the scheduler plans them: those who have a seat, then those who board."""
        decoding, prompts = len(self._streams), self._prompts
        seatable = min(len(self._waiting), self._seats - decoding - len(prompts))
        start = prompts[0].start if prompts else 0
        most = self.costs.token_budget - decoding
        rows_first = self._rows_first()
        passes = self._next_to_pass(prompts, self._passing.longest(rows_first)) is not None
        if wanting := len(prompts) + seatable:
            rest, whole = (1, 1) if passes else self._first_rows()
            most = min(most, self.costs.prompt_rows(decoding, start, wanting, rest, whole))
        draft = _Draft(decoding, most, decoding)
        if passes:
            going_on = self._draft_passing(draft, rows_first)
            seatable = min(len(self._waiting), self._seats - decoding - len(self._prompts))
        else:
            going_on = list(prompts)
        if self._expects_short(going_on):
            draft.tokens_left = min(draft.tokens_left, self.costs.brief_rows(decoding))
        for at, prompt in enumerate(going_on):
            if not draft.tokens_left:
                break
            self._add_chunk(prompt, draft, at + 1 == len(going_on) and not seatable)
        self._board(draft, seatable)
        if rows_first > draft.prompt:
            self._passing.save(draft.prompt)
        return draft

    def _rows_first(self) -> int:
        """As `Scheduler._rows_first`."""
        rows = sum([prompt.n_left for prompt in self._prompts])
        return rows + (self._wanted(self._waiting[0]) if self._waiting else 0)

    def _expects_short(self, prompts: list[_Prompt]) -> bool:
        """As `Scheduler._expects_short`."""
        head = self._waiting[0] if self._waiting else None
        if self.n_seated >= self._seats or (head and head is self._turned_away):
            return False
        rows = [prompt.request.n_known - prompt.request.n_cached for prompt in prompts]
        longest = max([*rows, self._wanted(head) if head else 0])
        return self._passing.expects(longest, self._plan_at)

    def _draft_passing(self, draft: _Draft, rows_first: int) -> list[_Prompt]:
        """Rows of short prompts that pass longer ones, as the scheduler plans them. -> the prompts
        that did not pass."""
        going_on, passed = list(self._prompts), 0
        while True:
            longest = min(self._passing.longest(rows_first) - passed, draft.tokens_left)
            chosen = self._next_to_pass(going_on, longest)
            if isinstance(chosen, _Prompt):
                going_on.remove(chosen)
            elif chosen is not None and self._pages_last(chosen):
                chosen = self._seat(chosen)
            else:
                break
            rows = draft.prompt
            self._add_chunk(chosen, draft, False)
            passed += draft.prompt - rows
        if passed:
            draft.tokens_left = self._passing.spend(passed, draft.tokens_left)
        return going_on

    def _next_to_pass(self, prompts: list[_Prompt], longest: int) -> _Prompt | FleetRequest | None:
        """As `Scheduler._next_to_pass`."""
        if longest <= 0:
            return None
        seated = min(prompts[1:], key=_n_left, default=None)
        if seated is not None and seated.n_left <= longest:
            return seated
        waiting = self._waiting
        if not waiting or waiting[0] is self._turned_away or self.n_seated >= self._seats:
            return None
        shortest = min(waiting, key=self._size)
        if self._wanted(shortest) > longest or (shortest is waiting[0] and not prompts):
            return None
        return shortest

    def _wanted(self, request: FleetRequest) -> int:
        """Prompt rows that are not found in the cache now."""
        return request.n_known - (self._cache.count(request) if self._cache else 0)

    def _size(self, request: FleetRequest) -> int:
        """The order of magnitude of its prompt rows."""
        return self._wanted(request).bit_length()

    def _seat(self, request: FleetRequest) -> _Prompt:
        """A waiting request boards."""
        self._waiting.remove(request)
        self.waiting_prompt -= request.n_known
        self.waiting_work -= request.n_longest
        prompt = _Prompt(request, self._found(request))
        self._passing.board(prompt.n_left, self._plan_at)
        self._promised += self._positions(request)
        self._prompts.append(prompt)
        return prompt

    def _board(self, draft: _Draft, seatable: int) -> None:
        while seatable > 0 and draft.tokens_left:
            request = self._waiting[0]
            if not self._pages_last(request):
                return
            seatable -= 1
            self._add_chunk(self._seat(request), draft, not seatable)

    def _found(self, request: FleetRequest) -> int:
        """Tokens of the prompt that need not be computed; the last one must be."""
        if self._cache is None:
            return 0
        found = min(self._cache.take(request), request.n_prompt - 1)
        found -= found % self._page
        self._cache.fit(self._capacity - self._live - request.n_known)
        request.n_cached = found
        return found

    def _add_chunk(self, prompt: _Prompt, draft: _Draft, is_last: bool) -> None:
        """The next rows of a prompt. is_last: no other can use the rows that it leaves."""
        count = min(prompt.n_left, draft.tokens_left)
        if is_last:
            sequences = draft.decoding + draft.chunks + 1
            worth = self.costs.thrifty(draft.rows, count, draft.decoding, sequences)
            count = min(count, worth)
        draft.pairs += count * prompt.start + count * (count + 1) // 2
        draft.prompt += count
        draft.rows += count
        draft.tokens_left -= count
        draft.chunks += 1
        prompt.start += count
        if not prompt.n_left:
            draft.finished.append(prompt.request)

    def _pages_last(self, request: FleetRequest) -> bool:
        """Whether pages suffice to everybody's end if this one boards too."""
        needed = self._positions(request)
        if self._promised + needed <= self._capacity or not self.n_seated:
            return True
        if self._turned_away is request:
            return False
        if self._peak(request) <= self._capacity:
            return True
        self._turned_away = request
        return False

    def _peak(self, newcomer: FleetRequest) -> float:
        """The most positions that are ever held at a time if the newcomer boards now and nobody
        after it."""
        riders = [(s.leaves_at - self._plans, s.request.n_longest) for s in self._streams]
        riders += [(p.request.n_left, p.request.n_longest) for p in self._prompts]
        riders.append((newcomer.n_left, newcomer.n_longest))
        riders.sort(reverse=True)
        peak = held = slack = 0.0
        for there, (rest, longest) in enumerate(riders, 1):
            # At the end of this one: those who end later lack as much as they go on.
            held += longest
            slack += rest
            peak = max(peak, held - slack + there * (rest + self._page / 2))
        return peak

    def _take_step(self, draft: _Draft) -> None:
        """Launch a step with prompt rows."""
        work = StepWork(
            decode=draft.decoding,
            prompt=draft.prompt,
            keys=self._keys,
            longest=self._longest_context(),
            pairs=draft.pairs,
        )
        sequences = draft.decoding + draft.chunks
        seconds = self.costs.mixed_seconds(work, sequences)
        handed_out = self._launch(seconds, sequences)
        self._keys += draft.decoding
        self._plans += 1
        for request in draft.finished:
            self._start_decoding(request, handed_out)
        if draft.finished:
            self._prompts = [prompt for prompt in self._prompts if prompt.n_left]
        self._count(seconds, 1)

    def _start_decoding(self, request: FleetRequest, first: float) -> None:
        """Its first token comes with the step just launched, and each plan brings one more."""
        if math.isnan(request.first):
            request.first = first
        leaves_at = self._plans - 1 + request.n_left
        heappush(self._streams, _Stream(leaves_at, request.number, request))
        heappush(self._longest, (self._plans - request.n_known, leaves_at))
        self._keys += request.n_known + 1

    def _launch(self, seconds: float, rows: int) -> float:
        """-> when the tokens of this step are handed out."""
        host = self.costs.host
        before = host.before + host.before_per_row * rows
        after = host.after + host.after_per_row * rows if self._in_flight else 0.0
        launched = self._plan_at + before
        ready = max(launched, self._device_free) + seconds
        self._plan_at = max(launched, self._device_free if self._in_flight else 0.0) + after
        self._device_free = ready
        self._in_flight = True
        return max(ready, self._plan_at + before) + after

    def _leap(self, until: float) -> None:
        """Steps in which all streams decode and nobody else: until somebody's seat is free, or
        until `until`."""
        decoding, longest = len(self._streams), self._longest_context()
        most = self._streams[0].leaves_at - self._plans
        first = self.costs.decode_seconds(decoding, self._keys, longest)
        self._launch(first, decoding)
        taken, total = 1, first
        if most > 1 and self._plan_at < until:
            taken, total = self._go_on(decoding, longest, most, first, until)
        self._keys += taken * decoding
        self._plans += taken
        self._count(total / taken, taken)

    def _go_on(
        self, decoding: int, longest: int, most: int, first: float, until: float
    ) -> tuple[int, float]:
        """The steps of a leap after its first. -> (steps, device seconds) with the first."""
        more = most - 1
        last = self.costs.decode_seconds(decoding, self._keys + more * decoding, longest + more)
        host = self.costs.host
        before = host.before + host.before_per_row * decoding
        after = host.after + host.after_per_row * decoding
        growth = (last - first) / more
        begin = max(first + growth, before + after)
        if until < _NEVER:
            more = min(more, _steps_within(until - self._plan_at, begin, growth))
        last = first + growth * more
        total = more * (first + growth + last) / 2
        planned = self._plan_at + (more - 1) * (before + after) + before
        self._device_free = max(self._device_free + total, planned + last)
        self._plan_at = max(self._device_free - last, planned) + after
        return 1 + more, first + total

    def _longest_context(self) -> int:
        """The most positions that a stream attends to in the next step; 0 without any."""
        contexts = self._longest
        while contexts and contexts[0][1] <= self._plans:
            heappop(contexts)
        return self._plans - contexts[0][0] + 1 if contexts else 0

    def _count(self, seconds: float, steps: int) -> None:
        """So many steps of so many seconds were taken."""
        self.busy_s += steps * seconds
        self.seated_s += steps * seconds * self.n_seated


def _n_left(prompt: _Prompt) -> int:
    return prompt.n_left


def _steps_within(seconds: float, first: float, growth: float) -> int:
    """The steps that begin in so many seconds, at least one, if each takes `growth` longer than the
    one before it."""
    steps = seconds / first
    steps = seconds / (first + growth * steps / 2)
    return max(1, math.ceil(steps))

"""A fake device of numpy arrays, for tests of the host side: it computes tokens only from the
contents of its pages.

Every row writes its token and position into a flat page array, and a sampled row reads its whole
context back through the page table. A wrong page table, a page reused too early or a wrong seat
therefore changes the tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from jitney.engine.common.outputs import SequenceOutput, TokenLogprobs
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.plan import REJECTED, MaskedRow, Plan, StepResult, StepWork
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.scheduler.sequence import HeldSlots
from jitney.engine.core.scheduler.state_slots import StateTables

VOCAB, EOS = 40, 0


class FakeClock:
    """A clock that advances only when a test sets it, and by `tick` at every reading."""

    def __init__(self, tick: float = 0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def next_token(history: list[int], seed: int) -> int:
    """The fake model's next token; every token of the history affects it."""
    return zlib.crc32(np.asarray([*history, seed % 1000], np.int32).tobytes()) % VOCAB


def allowed_token(history: list[int], seed: int, allowed: Sequence[int]) -> int:
    """The fake model's choice among some tokens."""
    mark = zlib.crc32(np.asarray([*history, seed % 1000], np.int32).tobytes())
    return allowed[mark % len(allowed)]


def score(history: list[int], token: int) -> TokenLogprobs:
    """The fake model's log-probabilities of `token` after `history`: chosen, and five
    alternatives.
    """
    mark = (
        zlib.crc32(np.asarray([*history, token], np.int32).tobytes()) % 1000 / 128
    )  # exact in float32
    return TokenLogprobs(
        -mark, [(token + i) % VOCAB for i in range(5)], [-mark - i for i in range(5)]
    )


def solo(request: EngineRequest, seed: int, most: int, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """Tokens of one sequence served alone, by definition: no pages, no batching."""
    params, tokens = request.sampling, list(request.prompt)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    for _ in range(most if params.max_tokens is None else params.max_tokens):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in ends:
            break
    return tokens[len(request.prompt) :]


@dataclass
class Rows:
    """The contents of a real batch for one chunk: copies, so that later changes of the sequence
    have no effect.
    """

    request_id: str
    seat: int
    start: int
    tokens: list[int]  # -1: on the device; -1 - n: the n-th draft there
    pages: list[int]
    #: Pages of each further cache group, which has a window.
    windows: list[list[int]]
    #: Slots of recurrent layers; None: the model has no recurrent layers.
    slots: HeldSlots | None
    sample: bool
    score_start: int
    targets: list[int]  # the prompt tokens that the scored rows are scored against
    draft: int = 0
    #: Whether its token is chosen after the step.
    masked: bool = False


class StepFailed(Exception):
    """Raised by a fake device when a test makes a step fail."""


class FakeRunner:
    """Runs plans in order of launch. poisoned: ids of requests with non-finite logits; spoiled:
    (request id, position) of rows without logits that are not finite.
    """

    #: Number of tokens drafted for each seat; two of three are right.
    drafted = 0
    #: Tokens among which it drafts after a token that was chosen under a mask.
    drafted_from: tuple[int, ...] = ()
    #: Number of positions that a row sees; 0: all before it.
    window = 0
    #: Pages of further cache groups, by window.
    windows: Mapping[int, int] = MappingProxyType({})
    #: Slots of recurrent state beyond one per seat (None: the model has no recurrent layers), and
    #: pages between checkpoints.
    checkpoints: int | None = None
    every = 0

    def __init__(self, n_pages: int, page_size: int, seats: int):
        self.page_size, self.compiles = page_size, 0
        self.n_tokens = n_pages * page_size
        self.tokens = np.full(self.n_tokens, -1)
        self.positions = np.full(self.n_tokens, -1)
        self.last_token, self.seeds = [-1] * seats, [0] * seats
        self.accepted, self.drafts = [0] * seats, [[0] * self.drafted] * seats
        self.poisoned: set[str] = set()
        self.spoiled: set[tuple[str, int]] = set()
        self.rows_run = 0
        self._launched: list[StepResult] = []
        # The newest step, if segments of it are not launched: its result, rows and plan. It
        # computes all its rows when the last segment is launched.
        self._cut: tuple[StepResult, list[Rows], Plan] | None = None
        #: Number of steps that ran between two segments of another.
        self.n_between = 0
        # The history that determines the token of each logit row of the last launched step.
        self._histories: list[list[int]] = []

    def batch(self, plan: Plan) -> tuple[list[Rows], dict[int, int], Plan]:
        assert [chunk.decode for chunk in plan.chunks] == sorted(
            (c.decode for c in plan.chunks), reverse=True
        )
        assert plan.work == StepWork.of(plan.chunks)
        assert plan.rows <= plan.bucket.tokens and len(plan.chunks) <= plan.bucket.seats
        assert sum(chunk.logit_rows for chunk in plan.chunks) <= plan.bucket.seats
        seats = [chunk.seq.seat for chunk in plan.chunks if not chunk.draft]
        assert len(set(seats)) == len(seats) and min(seats) >= 0
        rows = []
        for chunk in plan.chunks:
            seq = chunk.seq
            tokens = seq.tokens[chunk.start : chunk.end]
            rows.append(
                Rows(
                    seq.request.id,
                    seq.seat,
                    chunk.start,
                    tokens or [-1 - chunk.draft],
                    list(seq.pages),
                    [list(held.pages) for held in seq.windows],
                    deepcopy(seq.state),
                    chunk.sample,
                    chunk.score_start,
                    seq.tokens[chunk.score_start + 1 : chunk.score_start + 1 + chunk.scored],
                    chunk.draft,
                    any([masked.chunk is chunk for masked in plan.masked]),
                )
            )
            assert not chunk.scored or chunk.start <= chunk.score_start <= chunk.end - chunk.scored
            assert len(rows[-1].tokens) == chunk.count and (tokens or chunk.decode)
        return rows, {seq.seat: seq.seed for seq in plan.boarded}, plan

    def launch(self, batch: tuple[list[Rows], dict[int, int], Plan]) -> StepResult:
        self.n_between += self._cut is not None
        result, rows, plan = self._opened(batch)
        self._compute(result, rows, plan)
        return result

    def start(self, batch: tuple[list[Rows], dict[int, int], Plan]) -> StepResult:
        assert self._cut is None, "a step between two segments is whole"
        if batch[2].masked:
            return self.launch(batch)
        self._cut = self._opened(batch)
        return self._cut[0]

    def _opened(
        self, batch: tuple[list[Rows], dict[int, int], Plan]
    ) -> tuple[StepResult, list[Rows], Plan]:
        """An empty result of a step, its rows and its plan."""
        rows, seeds, plan = batch
        for seat, seed in seeds.items():
            self.seeds[seat] = seed
        result = StepResult([])
        self._launched.append(result)
        return result, rows, plan

    def feed(self, launched: StepResult) -> bool:
        return self._cut is not None and launched is self._cut[0]

    has_paused = feed

    def finish(self, launched: StepResult) -> None:
        if self._cut is not None and launched is self._cut[0]:
            cut, self._cut = self._cut, None
            self._compute(*cut)

    def _compute(self, result: StepResult, rows: list[Rows], plan: Plan) -> None:
        before = (
            self.tokens.copy(),
            self.positions.copy(),
        )  # no row may need what another sequence writes in this step
        for chunk in rows:
            chunk.start += self.accepted[chunk.seat] if chunk.tokens[0] < 0 else 0
            recent = [self.last_token[chunk.seat], *self.drafts[chunk.seat]]
            chunk.tokens = [recent[-1 - token] if token < 0 else token for token in chunk.tokens]
        self._write(rows)
        tokens: list[int] = []
        entries: list[TokenLogprobs] = []
        scores: list[TokenLogprobs] = []
        broken: list[bool] = []
        guessed: list[bool] = []
        drafts: dict[int, list[int]] = {}
        self._histories = []
        history: list[int] = []
        token = accepted = 0
        for chunk in rows:
            accepted = not chunk.draft or (accepted and chunk.tokens == [token])
            if not chunk.draft:
                history = self._read(chunk, *before)
            history = history + chunk.tokens
            poisoned = chunk.request_id in self.poisoned
            broken.append(
                any(
                    (chunk.request_id, chunk.start + i) in self.spoiled
                    for i in range(len(chunk.tokens))
                )
            )
            for i, target in enumerate(chunk.targets, chunk.score_start + 1):
                scores.append(score(history[:i], target))
            if chunk.sample:
                token = next_token(history[-self.window :], self.seeds[chunk.seat])
                if chunk.masked:
                    tokens.append(-1 if poisoned else token)
                elif accepted:
                    self.last_token[chunk.seat] = token
                    self.accepted[chunk.seat] = chunk.draft
                    drafts[chunk.seat] = self._guess([*history, token], self.seeds[chunk.seat])
                    tokens.append(-1 if poisoned else token)
                else:
                    tokens.append(REJECTED)
                expected = [*self.drafts[chunk.seat], -1][chunk.draft]
                guessed.append(bool(accepted) and expected == token)
                entries.append(score(history, token))
                self._histories.append(history)
        result.tokens = tokens
        result.logprobs = None if plan.greedy_only else entries
        result.prompt_logprobs = scores or None
        result.broken = broken if any(broken) else None
        result.guessed = guessed if self.drafted else None
        for seat, own in drafts.items():
            self.drafts[seat] = own
        self.rows_run += plan.bucket.tokens

    def _guess(self, history: list[int], seed: int, allowed: Sequence[int] = ()) -> list[int]:
        """Drafts of the next tokens; allowed: choose among these tokens, if any."""
        guesses: list[int] = []
        for _ in range(self.drafted):
            visible = [*history, *guesses][-self.window :]
            token = allowed_token(visible, seed, allowed) if allowed else next_token(visible, seed)
            wrong = zlib.crc32(np.asarray([len(history), token], np.int32).tobytes()) % 3 == 0
            guesses.append((token + wrong) % VOCAB)
        return guesses

    def learn_drafts(self, launched: StepResult) -> None:
        pass

    def choose(self, launched: StepResult, rows: list[MaskedRow], masks: np.ndarray) -> None:
        assert launched is self._launched[-1], "tokens are chosen behind the newest step"
        chosen: dict[int, int] = {}
        before = {seat: [*own, -1] for seat, own in enumerate(self.drafts)}
        for masked, mask in zip(rows, masks, strict=True):
            seat, draft = masked.seat, masked.chunk.draft
            history, seed = self._histories[masked.row], self.seeds[seat]
            if draft and chosen.get(seat) != history[-1]:
                launched.tokens[masked.row] = REJECTED
                chosen.pop(seat, None)
                continue
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            token = allowed_token(history, seed, np.flatnonzero(bits).tolist())
            chosen[seat] = self.last_token[seat] = token
            self.accepted[seat] = draft
            if launched.tokens[masked.row] >= 0:
                launched.tokens[masked.row] = token
            if launched.logprobs is not None:
                launched.logprobs[masked.row] = score(history, token)
            if launched.guessed is not None:
                launched.guessed[masked.row] = before[seat][draft] == token
                self.drafts[seat] = self._guess([*history, token], seed, self.drafted_from)
                launched.drafts[masked.row] = self.drafts[seat]

    def is_done(self, launched: StepResult) -> bool:
        return True

    def fetch(self, launched: StepResult) -> StepResult:
        self.finish(launched)
        first = self._launched[0]
        if self._cut is not None and first is self._cut[0]:
            first = self._launched[1]
        assert first is launched, "steps are fetched in order, each once"
        self._launched = [step for step in self._launched if step is not launched]
        return launched

    def restore(self, error: Exception) -> None:
        """Clear all pages, so that reading them gives wrong tokens."""
        if not isinstance(error, (StepFailed, InterruptedError)):
            raise error  # a broken rule of the fake device
        self.tokens[:] = self.positions[:] = -1
        self.last_token = [-1] * len(self.last_token)
        self._launched.clear()
        self._cut = None

    def sleep(self, alive: Callable[[], None]) -> int:
        """Clear all pages."""
        alive()
        freed = self.tokens.nbytes + self.positions.nbytes
        self.tokens = self.positions = np.zeros(0, np.int64)
        return freed

    def wake(self, alive: Callable[[], None]) -> None:
        alive()
        self.tokens = np.full(self.n_tokens, -1)
        self.positions = np.full(self.n_tokens, -1)
        self.last_token = [-1] * len(self.last_token)

    def _flat(self, chunk: Rows, position: int) -> int:
        return chunk.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _write(self, rows: list[Rows]) -> None:
        written = set()
        for chunk in rows:
            for position, token in enumerate(chunk.tokens, chunk.start):
                flat = self._flat(chunk, position)
                assert flat >= self.page_size, "the trash page belongs to nobody"
                assert flat not in written, "two rows of a step write to one place"
                written.add(flat)
                self.tokens[flat], self.positions[flat] = token, position

    def _read(self, chunk: Rows, tokens: np.ndarray, positions: np.ndarray) -> list[int]:
        first = max(0, chunk.start - self.window + 1) if self.window else 0
        flats = [self._flat(chunk, position) for position in range(first, chunk.start)]
        expected = list(range(first, chunk.start))
        assert positions[flats].tolist() == expected, (
            "a page holds other positions than its owner's"
        )
        return tokens[flats].tolist()


def make_core(
    *,
    seats: int = 4,
    pages: int = 33,
    page_size: int = 4,
    budget: int = 16,
    context: int = 64,
    retain: bool = True,
    share_outputs: bool = True,
    max_requests: int = 1000,
    max_tokens: int = 100_000,
    eos: tuple[int, ...] = (EOS,),
    clock: FakeClock | None = None,
    device: type[FakeRunner] = FakeRunner,
    token_sizes: tuple[int, ...] = (),
    segments: int = 1,
    **limits: Any,
) -> EngineCore:
    """A core on a fake device; `pages` counts the trash page; token_sizes: rows of mixed buckets,
    empty: the default ones; segments: of the largest step, on a core that plans late if there are
    several; limits: further fields of SchedulerLimits.
    """
    clock = clock or FakeClock()
    held_to = SchedulerLimits(seats, context, max_requests, max_tokens, **limits)
    state = None
    if device.checkpoints is not None:
        slots = seats + device.checkpoints * retain
        state = StateTables(PagePool(slots + 1, page_size), seats, device.every)
    shares = state is None or retain
    buckets = Buckets.of(max_seats=seats, token_budget=budget, token_sizes=token_sizes)
    buckets = replace(buckets, most_segments=segments)
    scheduler = Scheduler(
        held_to,
        buckets.with_drafts(held_to.max_drafts) if held_to.max_drafts else buckets,
        PageTables(
            PagePool(pages, page_size, retain=retain, share_outputs=share_outputs, shares=shares),
            device.window,
            {window: PagePool(n, page_size, retain=retain) for window, n in device.windows.items()},
            state,
        ),
        clock,
        eos,
        VOCAB,
    )
    runner = device(pages, page_size, seats)
    return EngineCore(scheduler, runner, Ledger(), clock, plans_late=segments > 1)


def make_request(
    id: str,
    prompt: list[int],
    *,
    arrival: float = 0.0,
    deadline: float | None = None,
    priority: int = 0,
    tenant: str = "",
    salt: str = "",
    user: str = "",
    background: bool = False,
    **sampling,
) -> EngineRequest:
    """A request; greedy with seed 0 by default."""
    params = SamplingParams(**({"temperature": 0.0, "seed": 0, "max_tokens": 8} | sampling))
    return EngineRequest(
        id=id,
        prompt=prompt,
        sampling=params,
        arrival=arrival,
        deadline=deadline,
        priority=priority,
        tenant=tenant,
        cache_salt=salt,
        user=user,
        background=background,
    )


def device_of(core: EngineCore) -> FakeRunner:
    """The core's fake device."""
    assert isinstance(core.runner, FakeRunner)
    return core.runner


def code_of(output: SequenceOutput) -> str | None:
    """The output's error code, if it has an error."""
    return output.error.code if output.error else None


def tokens_of(outputs: list[SequenceOutput], request_id: str, index: int = 0) -> list[int]:
    """All tokens of one sequence, in order of output."""
    return [
        token
        for out in outputs
        if (out.request_id, out.index) == (request_id, index)
        for token in out.tokens
    ]


def ends_of(outputs: list[SequenceOutput]) -> dict[tuple[str, int], SequenceOutput]:
    """Terminal output of each sequence; fails if one has two."""
    ends: dict[tuple[str, int], SequenceOutput] = {}
    for output in outputs:
        if output.finish is not None:
            assert (output.request_id, output.index) not in ends, "two terminal outputs"
            ends[output.request_id, output.index] = output
    return ends


def watch(core: EngineCore) -> list[Plan]:
    """A list that collects every plan of the core when it is made."""
    plans, batch = [], core.runner.batch

    def watched(plan: Plan):
        plans.append(plan)
        return batch(plan)

    core.runner.batch = watched
    return plans


def picture(plan: Plan) -> list[tuple[str, int, int, str]]:
    """(request, start, end, kind) of each chunk."""
    return [
        (chunk.seq.request.id, chunk.start, chunk.end, "decode" if chunk.decode else "prefill")
        for chunk in plan.chunks
    ]


def boarding_order(plans: list[Plan]) -> list[str]:
    """Request ids in the order in which they took seats."""
    return [seq.request.id for plan in plans for seq in plan.boarded]

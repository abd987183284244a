"""One sequence and its life: waiting, prefilling, decoding, preempted (waiting again), finished."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from jitney.engine.common.outputs import FinishReason, TokenLogprobs
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.lengths import RequestClasses

#: (class, number of the request, index of the sequence); the class is a number too, see
#: `engine.core.scheduler.policies._ORDERS`.
type _Rank = tuple[float, int, int]


class Matcher(Protocol):
    """Where a sequence stands in its grammar (`engine.core.grammar.matchers`)."""

    def take(self, tokens: list[int], start: int, *, last: bool = False) -> None:
        """Go on to the end of a sequence's tokens, whose output begins at `start`. last: no token
        follows; whether the text is whole is then asked at once.
        """
        ...

    @property
    def complete(self) -> bool:
        """The text is whole and nothing may follow it."""
        ...

    @property
    def late(self) -> bool:
        """Its next mask is not computed yet: steps go on without the sequence."""
        ...

    @property
    def checks_drafts(self) -> bool:
        """Masks behind drafts are computed soon enough for a step."""
        ...


class OwnPages(NamedTuple):
    """Pages that only the sequence itself may find again.

    Where a decode step computes a row, its keys and values differ in the last bits from what a
    prompt step computes; other prompts must not find them where answers are not to depend on
    earlier requests.
    """

    #: Positions that all prompts may find: those of this prompt.
    start: int
    #: Names the sequence, bytes that no other one has.
    owner: bytes

    @classmethod
    def of(cls, n_prompt: int, number: int, index: int) -> OwnPages:
        """Pages of the index-th sequence of a request, by the request's number."""
        return cls(n_prompt, struct.pack("<qi", number, index))


@dataclass(slots=True)
class WindowPages:
    """The pages of a sequence in a cache group whose layers have a window: taken when their rows
    are planned, given back behind the window. See the fields of `Sequence` for the first group.
    """

    pages: list[int]
    dropped: int
    published: int
    #: Page ranges [first, end) that a prompt which branches off at `end` would read: worth more
    #: than others once they are dropped.
    branches: list[tuple[int, int]]


@dataclass(slots=True)
class HeldSlots:
    """The slots of a seated sequence's recurrent state; numbers from 1, 0: none."""

    #: What is its alone, and what the next step with a row of it reads and writes.
    own: int
    reads: int
    writes: int
    #: Pages behind which other prompts, too, are likely to differ from its own.
    branch: int
    #: Pages before the last checkpoint of its prefix.
    saved: int
    #: (pages, slot) of checkpoints within the rows of the next step.
    saves: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    #: Slots that are held until the rows from position `at` on are launched.
    passing: list[int] = field(default_factory=list[int])
    at: int = 0
    #: The state behind the last full page, while it decodes, and how many pages that are.
    kept: int = 0
    kept_pages: int = 0

    def slots(self) -> list[int]:
        """Every slot that it holds, one for each reference."""
        return [self.own, self.kept, *self.passing]

    def written(self) -> set[int]:
        """Slots that the next step writes."""
        return {self.own, self.writes, *[slot for _, slot in self.saves]}


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence on the host; the scheduler alone writes it, the batch builder reads it."""

    request: EngineRequest
    #: Of the request's n sequences.
    index: int
    #: Resolved, int64.
    seed: int
    #: Prompt ids, then every output id the host knows.
    tokens: list[int]
    #: Output tokens at most.
    max_tokens: int
    #: -1 while not seated.
    seat: int = -1
    #: Physical pages of the first cache group in order; 0 for those dropped.
    pages: list[int] = field(default_factory=list[int])
    #: Those of the other groups, while it is seated.
    windows: tuple[WindowPages, ...] = ()
    #: Of a model with recurrent layers, while it is seated.
    state: HeldSlots | None = None
    #: Positions whose KV is computed once all launched steps are done.
    scheduled: int = 0
    #: Sampled tokens that launched steps will bring: 0 or 1 between steps, up to 2 while a step is
    #: launched before the one before is read.
    in_flight: int = 0
    #: Drafts that launched steps check (`engine.core.scheduler.speculation`): the next row may be
    #: so many positions behind `scheduled`.
    drafting: int = 0
    #: Under a grammar: the drafts behind the newest token, as the device has them.
    drafts: list[int] = field(default_factory=list[int])
    #: Drafts that the next step may check; of decoding sequences, written before each plan.
    lookahead: int = 0
    #: The share of its recent tokens that were drafted right.
    right_drafts: float = 0.0
    #: Highest `scheduled` that a preemption undid; rows below it are recomputed ones.
    computed_high: int = 0
    #: Prompt tokens whose KV was found in pages.
    cached_tokens: int = 0
    #: Why it has ended; None while it goes on.
    finish: FinishReason | None = None
    #: Seconds: when it took a seat for the first time, and when its first token was known.
    boarded_at: float | None = None
    first_token_at: float | None = None
    #: How often it lost its seat.
    preemptions: int = 0
    #: When it took its seat the last time (seconds), and with how many known tokens.
    sat_at: float = 0.0
    sat_with: int = 0
    #: When it lost its seat the last time, seconds.
    unseated_at: float = 0.0
    #: Lower is served first and preempted last.
    rank: _Rank = (0.0, 0, 0)
    #: Output tokens it was expected to generate when it came; admission writes it.
    expected: int = 0
    #: Rows that its known tokens needed when it last entered a queue, less those found in pages.
    wanted_rows: int = 0
    #: See SamplingParams.greedy_only.
    greedy_only: bool = True
    #: Tokens that end it.
    stop_ids: frozenset[int] = frozenset()
    #: Output tokens that are counted in the lengths of answers.
    counted: int = 0
    #: Pages, from the first on, that others had computed when it boarded.
    shared: int = 0
    #: Pages, from the first on, that lie behind the model's window and were given back.
    dropped: int = 0
    #: Pages it holds at once if it gets as long as it may; written when it boards.
    most_pages: int = 0
    #: Its pages may serve others, or itself after a preemption.
    shares: bool = True
    #: There is a prefix cache, so that later requests may find them.
    retains: bool = True
    #: Hash chain of its full pages: where it begins (`page_keys.keys_of` writes it), and one key
    #: for each page so far.
    root: bytes = b""
    #: None: all its pages may serve others.
    own_pages: OwnPages | None = None
    keys: list[bytes] = field(default_factory=list[bytes])
    #: Own pages offered to the prefix index.
    published: int = 0
    #: Prompt positions whose logits a launched step brings for prompt_logprobs, and what they
    #: brought; a text's first token has none.
    scored: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    #: Of a pooled prompt: the sum of its rows so far, float64 [E].
    pooled: np.ndarray | None = None
    #: None: any text.
    matcher: Matcher | None = None
    #: Of the request, at hand for each token.
    request_id: str = field(init=False)
    logprobs: int | None = field(init=False)
    background: bool = field(init=False)
    n_prompt: int = field(init=False)
    #: Tokens, prompt included, at which it ends by length.
    limit: int = field(init=False)
    #: The classes by whose answers the length of its own is predicted.
    kind: RequestClasses = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.id
        self.logprobs = self.request.sampling.logprobs
        self.background = self.request.background
        self.n_prompt = len(self.request.prompt)
        self.limit = self.n_prompt + self.max_tokens
        max_tokens = self.request.sampling.max_tokens
        self.kind = RequestClasses.of(self.request.account, self.n_prompt, max_tokens)

    @property
    def n_output(self) -> int:
        """Output tokens the host knows."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_fresh(self) -> int:
        """Prompt tokens that were not found in pages."""
        return self.n_prompt - self.cached_tokens

    @property
    def n_left(self) -> int:
        """Tokens the host knows whose rows are not scheduled."""
        return len(self.tokens) - self.scheduled

    @property
    def must_score(self) -> bool:
        """True while prompt positions must still be computed for their log-probabilities, found in
        pages or not.
        """
        return self.request.sampling.prompt_logprobs is not None and self.scored < self.n_prompt - 1

    @property
    def n_pages(self) -> int:
        """Pages it holds."""
        return len(self.pages) - self.dropped

    @property
    def seated(self) -> bool:
        return self.seat >= 0

    def forget_launched(self) -> None:
        """Forget launched steps, whose results do not come."""
        self.in_flight = self.drafting = 0
        # The rows that count as computed before are those of the tokens that are known.
        self.computed_high = min(self.computed_high, len(self.tokens) - 1)
        if self.first_token_at is None:
            # Its siblings may have had the same list; from now on each scores the rest for itself.
            self.prompt_logprobs = list(self.prompt_logprobs)
            self.scored = len(self.prompt_logprobs) - 1

    @property
    def key(self) -> tuple[str, int]:
        return self.request.id, self.index

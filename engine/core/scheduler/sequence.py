"""The state of one sequence, from waiting to prefilling, decoding, preempted (which waits again)
and finished.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from jitney.engine.common.lengths import RequestClasses
from jitney.engine.common.outputs import FinishReason, TokenLogprobs
from jitney.engine.common.requests import EngineRequest

#: (class, number of the request, index of the sequence). The class is a number, see
#: `engine.core.scheduler.policies._ORDERS`.
type _Rank = tuple[float, int, int]


class Matcher(Protocol):
    """The position of a sequence in its grammar (`engine.core.grammar.matchers`)."""

    def take(self, tokens: list[int], start: int, *, last: bool = False) -> None:
        """Advance to the end of a sequence's tokens, whose output begins at `start`. last: no token
        follows, and the caller reads `complete` next.
        """
        ...

    @property
    def complete(self) -> bool:
        """Whether the text is complete and no token may follow it."""
        ...

    @property
    def late(self) -> bool:
        """Whether the next mask is not computed yet: steps go on without the sequence."""
        ...

    @property
    def checks_drafts(self) -> bool:
        """Whether masks for the positions after drafts are computed fast enough for a step."""
        ...


class OwnPages(NamedTuple):
    """Pages that only the sequence itself may find again.

    A row's keys and values from a decode step differ in the last bits from those of a prompt step.
    Where answers must not depend on earlier requests, other prompts must not find such rows.
    """

    #: First position that only this sequence may find: the length of its prompt.
    start: int
    #: Unique name of the sequence.
    owner: bytes

    @classmethod
    def of(cls, n_prompt: int, number: int, index: int) -> OwnPages:
        """The own pages of the index-th sequence of request `number`."""
        return cls(n_prompt, struct.pack("<qi", number, index))


@dataclass(slots=True)
class WindowPages:
    """The pages of a sequence in a cache group whose layers have a window: taken when their rows
    are planned, given back behind the window. See the fields of `Sequence` for the first group.
    """

    pages: list[int]
    dropped: int
    published: int
    #: Page ranges [first, end) that a prompt which branches off at `end` would read; these pages
    #: are evicted later than others once they are dropped.
    branches: list[tuple[int, int]]


@dataclass(slots=True)
class HeldSlots:
    """The slots of a seated sequence's recurrent state. Slots are numbered from 1; 0: no slot."""

    #: Slot that belongs to this sequence alone, and the slots that its next step reads and writes.
    own: int
    reads: int
    writes: int
    #: Number of pages after which other prompts are likely to differ from this one.
    branch: int
    #: Number of pages before the last checkpoint of its prefix.
    saved: int
    #: (pages, slot) of each checkpoint within the rows of the next step.
    saves: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    #: Slots that are held until the rows from position `at` on are launched.
    passing: list[int] = field(default_factory=list[int])
    at: int = 0
    #: Slot with the state after the last full page while it decodes, and the number of pages.
    kept: int = 0
    kept_pages: int = 0

    def slots(self) -> list[int]:
        """All held slots, one entry for each reference."""
        return [self.own, self.kept, *self.passing]

    def written(self) -> set[int]:
        """Slots that the next step writes."""
        return {self.own, self.writes, *[slot for _, slot in self.saves]}


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence on the host; only the scheduler writes it, the batch builder reads it."""

    request: EngineRequest
    #: Index among the request's n sequences.
    index: int
    #: Sampling seed, int64; drawn at random if the request has none.
    seed: int
    #: Prompt ids, then every output id the host knows.
    tokens: list[int]
    #: The most output tokens.
    max_tokens: int
    #: Seat number; -1 while not seated.
    seat: int = -1
    #: Physical pages of the first cache group in order; 0 for dropped pages.
    pages: list[int] = field(default_factory=list[int])
    #: Pages of the other cache groups, while it is seated.
    windows: tuple[WindowPages, ...] = ()
    #: Slots of recurrent layers, while it is seated; None for a model without such layers.
    state: HeldSlots | None = None
    #: Number of positions whose KV is computed once all launched steps are done.
    scheduled: int = 0
    #: Number of sampled tokens that launched steps will return: 0 or 1 between steps, up to 2 while
    #: a step is launched and the result of the one before it is not read yet.
    in_flight: int = 0
    #: Number of drafts that launched steps check (`engine.core.scheduler.speculation`): the next
    #: row may be up to this many positions after `scheduled`.
    drafting: int = 0
    #: With a grammar: draft token ids after the newest token, the same as on the device.
    drafts: list[int] = field(default_factory=list[int])
    #: Number of drafts that the next step may check; set before each plan while it decodes.
    lookahead: int = 0
    #: Share of its recent tokens that were drafted right.
    right_drafts: float = 0.0
    #: Highest `scheduled` that a preemption undid; rows below it count as recomputed.
    computed_high: int = 0
    #: Number of prompt tokens whose KV was found in pages.
    cached_tokens: int = 0
    #: Reason for its end; None while it is open.
    finish: FinishReason | None = None
    #: Clock seconds at which it first took a seat, and at which its first token was known.
    boarded_at: float | None = None
    first_token_at: float | None = None
    #: Number of times that it lost its seat.
    preemptions: int = 0
    #: Clock seconds at which it last took a seat, and the number of tokens known then.
    sat_at: float = 0.0
    sat_with: int = 0
    #: Clock seconds at which it last lost its seat.
    unseated_at: float = 0.0
    #: Whether its prompt passes longer ones (`Passing`), also in the steps after its first one.
    passes: bool = False
    #: Order of service: a lower rank is served first and preempted last.
    rank: _Rank = (0.0, 0, 0)
    #: Output tokens that it was expected to generate on arrival; `SequenceFactory` writes it.
    expected: int = 0
    #: Rows that its known tokens needed when it last entered a queue, less those found in pages.
    wanted_rows: int = 0
    #: See SamplingParams.greedy_only.
    greedy_only: bool = True
    #: Tokens that end it.
    stop_ids: frozenset[int] = frozenset()
    #: Number of output tokens already counted in the estimate of answer lengths.
    counted: int = 0
    #: Number of leading pages that other sequences had computed when it boarded.
    shared: int = 0
    #: Number of leading pages that lie behind the model's window and were given back.
    dropped: int = 0
    #: The most pages it can hold at once, at its full length; written when it boards.
    most_pages: int = 0
    #: Whether its pages may serve other sequences, or itself after a preemption.
    shares: bool = True
    #: Whether there is a prefix cache, so that later requests may find its pages.
    retains: bool = True
    #: Start of the hash chain over its full pages (`page_keys.keys_of` writes it); `keys` has one
    #: key for each full page so far.
    root: bytes = b""
    #: Pages that only it may find; None: all its pages may serve others.
    own_pages: OwnPages | None = None
    keys: list[bytes] = field(default_factory=list[bytes])
    #: Number of its leading pages that are in the prefix index.
    published: int = 0
    #: Number of prompt positions scored for prompt_logprobs by launched steps, and the results so
    #: far; the first token of a text has no log-probability.
    scored: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    #: Sum of a pooled prompt's hidden states so far, float64 [E].
    pooled: np.ndarray | None = None
    #: Position in its grammar; None: any text is allowed.
    matcher: Matcher | None = None
    #: Fields of the request, copied here because they are read for each token.
    request_id: str = field(init=False)
    logprobs: int | None = field(init=False)
    background: bool = field(init=False)
    n_prompt: int = field(init=False)
    #: Number of tokens, prompt included, at which it ends by length.
    limit: int = field(init=False)
    #: Request classes from whose answers its own length is predicted.
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
        """Number of output tokens the host knows."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_fresh(self) -> int:
        """Number of prompt tokens that were not found in pages."""
        return self.n_prompt - self.cached_tokens

    @property
    def n_left(self) -> int:
        """Number of known tokens whose rows are not scheduled."""
        return len(self.tokens) - self.scheduled

    @property
    def must_score(self) -> bool:
        """Whether prompt positions must still be computed for their log-probabilities, even if
        their KV is found in pages.
        """
        return self.request.sampling.prompt_logprobs is not None and self.scored < self.n_prompt - 1

    @property
    def n_pages(self) -> int:
        """Number of pages it holds in the first cache group."""
        return len(self.pages) - self.dropped

    @property
    def seated(self) -> bool:
        return self.seat >= 0

    def forget_launched(self) -> None:
        """Forget launched steps, whose results are lost."""
        self.in_flight = self.drafting = 0
        # Only rows of known tokens count as computed before.
        self.computed_high = min(self.computed_high, len(self.tokens) - 1)
        if self.first_token_at is None:
            # Siblings may share the list; from now on each scores the rest for itself.
            self.prompt_logprobs = list(self.prompt_logprobs)
            self.scored = len(self.prompt_logprobs) - 1

    @property
    def key(self) -> tuple[str, int]:
        return self.request.id, self.index

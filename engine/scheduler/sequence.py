"""One sequence and its life: waiting, prefilling, decoding, preempted (waiting again), finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from jitney.engine.scheduler.estimates import Kind, kind_of
from jitney.engine.types import EngineRequest, FinishReason, TokenLogprobs

#: (class, number of the request, index of the sequence); the class is a number too, see
#: `engine.scheduler.policies.Order`.
type Rank = tuple[float, int, int]


class Hot:
    """What every step reads or writes of a sequence.

    The slots of a base class lie before those of its children: here in two or three lines of the
    host's caches instead of five.
    """

    __slots__ = (
        "computed_high",
        "finish",
        "first_token_at",
        "in_flight",
        "index",
        "limit",
        "logprobs",
        "plain",
        "request_id",
        "scheduled",
        "seat",
        "stop_ids",
        "tokens",
    )


@dataclass(slots=True, eq=False)
class Sequence(Hot):
    """Host-side state of one sequence; written by the scheduler alone, read by the batch builder.

    tokens: prompt ids, then every output id the host knows. scheduled: positions whose KV is
    computed once all launched steps are done. in_flight: sampled tokens that launched steps will
    bring (0 or 1 between steps, up to 2 while a step is launched before the one before is read).
    computed_high: highest `scheduled` that a preemption undid; rows below it that are computed
    again are "recomputed". seat: -1 while not seated. pages: physical pages in order, all layers.
    seed: resolved, int64. sat_at, sat_with: when it took its seat the last time, and with how many
    known tokens. unseated_at: when it lost its seat to a lack of pages. rank: (class, number,
    index), lower is served first and preempted last. expected: output tokens it was expected to
    generate when it came (admission). plain: see SamplingParams.plain. request_id, logprobs,
    n_prompt: copies from the request, which `commit` would else fetch from memory for each token.
    limit: tokens, prompt included, at which it ends by length. stop_ids: tokens that end it. kind:
    the classes whose answers tell how long its own will be. passed: the bucket of lengths that it
    was last counted in (`engine.scheduler.estimates`). shared: pages, from the first on, that
    others had computed when it boarded. dropped: pages, from the first on, that lie behind the
    model's window and were given back; 0 in `pages`. most_pages: that it holds at once if it gets
    as long as it may; set when it boards. shares: its pages may serve others, or itself after a
    preemption. root, keys: hash chain of its full pages. published: own pages offered to the prefix
    index. scored: prompt positions whose logits a launched step brings for prompt_logprobs.
    """

    request: EngineRequest
    index: int
    seed: int
    tokens: list[int]
    max_tokens: int
    seat: int = -1
    pages: list[int] = field(default_factory=list)
    scheduled: int = 0
    in_flight: int = 0
    computed_high: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    boarded_at: float | None = None
    first_token_at: float | None = None
    preemptions: int = 0
    sat_at: float = 0.0
    sat_with: int = 0
    unseated_at: float = 0.0
    rank: Rank = (0.0, 0, 0)
    expected: int = 0
    plain: bool = True
    stop_ids: frozenset[int] = frozenset()
    passed: int = 0
    shared: int = 0
    dropped: int = 0
    most_pages: int = 0
    shares: bool = True
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    scored: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    request_id: str = field(init=False)
    logprobs: int | None = field(init=False)
    n_prompt: int = field(init=False)
    limit: int = field(init=False)
    kind: Kind = field(init=False)

    def __post_init__(self) -> None:
        self.request_id, self.logprobs = self.request.id, self.request.sampling.logprobs
        self.n_prompt = len(self.request.prompt)
        self.limit = self.n_prompt + self.max_tokens
        self.kind = kind_of(self.request.account, self.n_prompt, self.request.sampling.max_tokens)

    @property
    def n_output(self) -> int:
        """Output tokens the host knows."""
        return len(self.tokens) - self.n_prompt

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

    @property
    def key(self) -> tuple[str, int]:
        return self.request.id, self.index

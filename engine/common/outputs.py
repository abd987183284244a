"""Outputs of the engine for a sequence: tokens, log-probabilities, finish reason."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from jitney.engine.common.errors import ErrorInfo

#: Why a sequence ended. "stop": end-of-sequence, a stop token or a stop string. "length":
#: max_tokens or the context. "abort": the client left or cancelled. "deadline": its deadline
#: passed. "error": see SequenceOutput.error.
type FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log) of one position: the chosen token and the likeliest ones."""

    #: Of the chosen token.
    logprob: float
    #: Alternatives, as many as requested, the likeliest first.
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a prompt's tokens, in columns: decoding 8,000 objects with 20
    alternatives each would block the event loop for over 20 ms.
    """

    #: Leading tokens without values: the first one.
    n_unknown: int
    #: Alternatives of each other token.
    width: int
    #: float64[n] of the tokens, int32[n * width] and float64[n * width] of the alternatives, in
    #: native byte order.
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """Pack entries of equal width, one per token; leading ones may be None."""
        scored = [entry for entry in entries if entry is not None]
        logprobs = array("d", [entry.logprob for entry in scored])
        top_ids, top_logprobs = array("i"), array("d")
        for entry in scored:
            top_ids.extend(entry.top_ids)
            top_logprobs.extend(entry.top_logprobs)
        width = len(scored[0].top_ids) if scored else 0
        if len(top_ids) != width * len(scored) or len(top_logprobs) != len(top_ids):
            raise ValueError("the tokens of a prompt have different numbers of alternatives")
        return cls(
            len(entries) - len(scored),
            width,
            logprobs.tobytes(),
            top_ids.tobytes(),
            top_logprobs.tobytes(),
        )

    def __len__(self) -> int:
        return self.n_unknown + len(self.logprobs) // array("d").itemsize

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        """Unpack one entry per token."""
        yield from [None] * self.n_unknown
        logprobs = array("d", self.logprobs)
        top_ids = array("i", self.top_ids)
        top_logprobs = array("d", self.top_logprobs)
        for index, logprob in enumerate(logprobs):
            part = slice(index * self.width, (index + 1) * self.width)
            yield TokenLogprobs(logprob, top_ids[part].tolist(), top_logprobs[part].tolist())


class SequenceOutput(msgspec.Struct, omit_defaults=True):
    """New tokens of one sequence, or its end, or both; exactly one output has `finish` set."""

    request_id: str
    #: Number of the sequence among the request's n.
    index: int
    tokens: list[int] = []
    #: One entry per new token, if requested.
    logprobs: list[TokenLogprobs] | None = None
    #: Once, with the first token; entry i is for prompt token i, None for i = 0.
    prompt_logprobs: PromptLogprobs | None = None
    #: None while the sequence runs.
    finish: FinishReason | None = None
    #: The token that ended the sequence (also in `tokens`), if one did.
    stop_token: int | None = None
    #: The error that ended the sequence, if any.
    error: ErrorInfo | None = None
    #: Prompt tokens whose KV came from the prefix cache.
    cached_tokens: int = 0
    #: New tokens that followed right drafts.
    accepted: int = 0
    #: Drafts behind them that were wrong.
    rejected: int = 0
    #: Seconds until boarding, once known.
    queued_s: float | None = None
    #: Seconds from boarding to the first token, once known.
    prefill_s: float | None = None
    #: With `finish`, if requested: the prompt's vector of length 1, or with classify its logits;
    #: float32 in native byte order.
    embedding: bytes | None = None

    @property
    def error_code(self) -> str:
        """The error's code; "" without an error."""
        return "" if self.error is None else self.error.code

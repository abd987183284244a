"""Grammars for the core's loop: requests wait until theirs is compiled, and steps get masks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLTokenizer

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.messages import GrammarWork
from jitney.engine.common.outputs import FinishReason
from jitney.engine.common.requests import EngineRequest, Grammar, SamplingParams
from jitney.engine.core.grammar.matchers import GrammarMatcher, Matchers, TokenConstraint
from jitney.engine.core.scheduler.plan import Chunk, MaskedRow, Plan
from jitney.engine.core.scheduler.sequence import Sequence

#: Seconds between two looks at a grammar that somebody waits for.
_LOOK_S = 0.001


@dataclass(slots=True)
class _Waiting:
    """A request whose grammar is being compiled."""

    request: EngineRequest
    grammar: Grammar
    #: Sequences of it that were ended meanwhile, and why.
    ended: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return len(self.ended) >= self.request.sampling.n


class _Verdict(NamedTuple):
    """What came of a request that waited."""

    request: EngineRequest
    #: Makes a matcher for each of its sequences; None: the grammar cannot be used, or all of them
    #: were ended.
    new_matcher: Callable[[], GrammarMatcher] | None
    #: Why it cannot be used; None: it can, or its sequences have ended.
    error: ErrorInfo | None
    #: Sequences that were ended meanwhile, and why.
    ended: dict[int, FinishReason]


class _Ending(NamedTuple):
    """A sequence that has come to its end just before its next token."""

    seq: Sequence
    reason: FinishReason
    #: None unless the reason is error.
    error: ErrorInfo | None = None


class _Masks(NamedTuple):
    """The masks of a step."""

    rows: list[MaskedRow]
    #: int32 [rows, ceil(V / 32)].
    masks: np.ndarray
    endings: list[_Ending]
    #: Whose mask is not known yet.
    late: list[Chunk]


class GrammarManager:
    """Grammars as the core's loop sees them."""

    def __init__(self, matchers: Matchers):
        self._matchers = matchers
        self._waiting: list[_Waiting] = []

    @classmethod
    def open(cls, tokenizer: str, vocab_size: int, end_ids: Iterable[int]) -> GrammarManager:
        """Of one model; see `_token_trie`."""
        return cls(Matchers(_token_trie(tokenizer, vocab_size, end_ids)))

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def waiting_adapters(self) -> set[int]:
        """Numbers of the adapters that waiting requests ask for."""
        return {entry.request.adapter for entry in self._waiting}

    def check(self, grammar: Grammar) -> None:
        """Wait until a grammar is compiled. Raises RequestError if it cannot be used."""
        self._matchers.begin(grammar)
        while self._matchers.maker(grammar) is None:
            time.sleep(_LOOK_S)

    def enter(self, request: EngineRequest, grammar: Grammar) -> None:
        """A request comes; `leave` says when it may go on."""
        self._matchers.begin(grammar)
        self._waiting.append(_Waiting(request, grammar))

    def leave(self) -> list[_Verdict]:
        """Those whose grammars are compiled, or cannot be, in the order in which they came."""
        if not self._waiting:
            return []
        verdicts: list[_Verdict] = []
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            verdict = self._verdict(entry)
            if verdict is None:
                self._waiting.append(entry)
            else:
                verdicts.append(verdict)
        return verdicts

    def _verdict(self, entry: _Waiting) -> _Verdict | None:
        """What came of a request, None while it waits."""
        if entry.is_over:
            return _Verdict(entry.request, None, None, entry.ended)
        try:
            new_matcher = self._matchers.maker(entry.grammar)
        except RequestError as error:
            return _Verdict(entry.request, None, error.info, entry.ended)
        if new_matcher is None:
            return None
        return _Verdict(entry.request, new_matcher, None, entry.ended)

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """Note that a request (index None) or one of its sequences is ended, if it waits here."""
        for entry in self._waiting:
            if entry.request.id == request_id:
                indices = range(entry.request.sampling.n) if index is None else (index,)
                for number in indices:
                    entry.ended.setdefault(number, reason)

    def masks(self, plan: Plan) -> _Masks:
        """The masks of a plan's rows, except of ended sequences and where masks take long."""
        open_rows = [row for row in plan.masked if row.chunk.seq.finish is None]
        self._begin([row.chunk.seq for row in open_rows])
        masks = self._matchers.masks(len(open_rows))
        found = _Masks([], masks, [], [])
        for row in open_rows:
            seq = row.chunk.seq
            if _matcher_of(seq).late:
                found.late.append(row.chunk)
                continue
            ending = self._fill(seq, masks, len(found.rows))
            if ending is None:
                found.rows.append(row)
            else:
                found.endings.append(ending)
        return found._replace(masks=masks[: len(found.rows)])

    def _begin(self, sequences: list[Sequence]) -> None:
        """Have the masks of their next tokens computed, and wait for them a little."""
        awaited = False
        for seq in sequences:
            matcher = _matcher_of(seq)
            matcher.take(seq.tokens, seq.n_prompt)
            awaited |= matcher.begin()
        if awaited:
            self._matchers.wait()

    def _fill(self, seq: Sequence, masks: np.ndarray, row: int) -> _Ending | None:
        """Write the mask of a sequence's next token, or say why it gets none."""
        may_end = not seq.request.sampling.ignore_eos
        may_end = may_end and seq.n_output + 1 >= seq.request.sampling.min_tokens
        try:
            if self._matchers.fill(_matcher_of(seq), masks, row, may_end=may_end):
                return None
        except RequestError as error:
            return _Ending(seq, "error", error.info)
        return _Ending(seq, "stop")

    def constrained(
        self, params: SamplingParams, new_inner: Callable[[], Any] | None
    ) -> Callable[[], TokenConstraint]:
        """A maker of matchers for a request with token rules. new_inner: makes those of its
        grammar.
        """
        rules = self._matchers.rules(params)
        if new_inner is None:
            return lambda: TokenConstraint(rules, None)
        return lambda: TokenConstraint(rules, new_inner())

    def take_work(self) -> GrammarWork | None:
        """See `Matchers.take_work`."""
        return self._matchers.take_work()


def _matcher_of(seq: Sequence) -> GrammarMatcher | TokenConstraint:
    assert isinstance(seq.matcher, (GrammarMatcher, TokenConstraint))  # made here
    return seq.matcher


def _token_trie(tokenizer: str, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """The tokens by their bytes. Takes half a second, and the interpreter, for 50,000 tokens.

    tokenizer: the `tokenizers` library's JSON. vocab_size: of the model, perhaps more than the
    tokenizer's. end_ids: tokens that end a text. Raises ValueError if llguidance cannot read it.
    """
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_ids) or [0])

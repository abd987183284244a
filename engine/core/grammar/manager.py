"""Grammars in the core's loop: requests wait until theirs is compiled, and steps get masks."""

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

#: Seconds between two checks of a grammar's compilation.
_POLL_S = 0.001


@dataclass(slots=True)
class _Waiting:
    """A request whose grammar is being compiled."""

    request: EngineRequest
    grammar: Grammar
    #: Sequences that were ended meanwhile -> reason.
    ended: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return len(self.ended) >= self.request.sampling.n


class _Verdict(NamedTuple):
    """The result of a request's wait."""

    request: EngineRequest
    #: Makes a matcher for each sequence; None: the grammar cannot be used, or all sequences ended.
    new_matcher: Callable[[], GrammarMatcher] | None
    #: Why the grammar cannot be used, if so.
    error: ErrorInfo | None
    #: Sequences that were ended meanwhile -> reason.
    ended: dict[int, FinishReason]


class _Ending(NamedTuple):
    """A sequence that ends without its next token."""

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
    #: Chunks whose tokens do not count: their masks are not computed yet, or they read a draft that
    #: the grammar forbids.
    left_out: list[Chunk]


class GrammarManager:
    """The core loop's interface to grammars."""

    def __init__(self, matchers: Matchers):
        self._matchers = matchers
        self._waiting: list[_Waiting] = []

    @classmethod
    def open(cls, tokenizer: str, vocab_size: int, end_ids: Iterable[int]) -> GrammarManager:
        """The grammars of a model; see `_token_trie`."""
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
            time.sleep(_POLL_S)

    def enter(self, request: EngineRequest, grammar: Grammar) -> None:
        """Let a request wait for its grammar; `leave` returns it."""
        self._matchers.begin(grammar)
        self._waiting.append(_Waiting(request, grammar))

    def leave(self) -> list[_Verdict]:
        """The requests whose grammars are compiled or refused, in order of arrival."""
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
        """The result of a request; None while it waits."""
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
        """End a waiting request (index None) or one of its sequences."""
        for entry in self._waiting:
            if entry.request.id == request_id:
                indices = range(entry.request.sampling.n) if index is None else (index,)
                for number in indices:
                    entry.ended.setdefault(number, reason)

    def masks(self, plan: Plan) -> _Masks:
        """The masks of a plan's rows, without those of ended sequences, late masks, and drafts that
        grammars forbid.
        """
        open_rows = [row for row in plan.masked if row.chunk.seq.finish is None]
        self._begin([row.chunk for row in open_rows])
        masks = self._matchers.masks(len(open_rows))
        result = _Masks([], masks, [], [])
        cut = set[Sequence]()
        for row in open_rows:
            seq, drafts = row.chunk.seq, row.chunk.draft
            matcher = _matcher_of(seq)
            if seq in cut or matcher.late or drafts > matcher.n_behind:
                cut.add(seq)  # with the drafts behind
                result.left_out.append(row.chunk)
                continue
            ending = self._fill(seq, masks, len(result.rows), drafts)
            if ending is None:
                result.rows.append(row)
                continue
            cut.add(seq)
            if drafts:
                result.left_out.append(row.chunk)
            else:
                result.endings.append(ending)
        return result._replace(masks=masks[: len(result.rows)])

    def _begin(self, chunks: list[Chunk]) -> None:
        """Start computing the masks of the next tokens, and of those behind drafts, and wait for
        them a little.
        """
        widths = {chunk.seq: chunk.draft for chunk in chunks}  # its last draft stands last
        awaited = False
        for seq, width in widths.items():
            matcher = _matcher_of(seq)
            matcher.take(seq.tokens, seq.n_prompt)
            awaited |= matcher.begin(seq.drafts[:width])
        if awaited:
            self._matchers.wait()

    def _fill(self, seq: Sequence, masks: np.ndarray, row: int, drafts: int) -> _Ending | None:
        """Write the mask of a sequence's next token, or of the one behind so many drafts; returns
        its ending if it gets no token.
        """
        params, matcher = seq.request.sampling, _matcher_of(seq)
        may_end = not params.ignore_eos and seq.n_output + drafts + 1 >= params.min_tokens
        try:
            if self._matchers.fill(matcher, masks, row, may_end=may_end, drafts=drafts):
                return None
        except RequestError as error:
            return _Ending(seq, "error", error.info)
        return _Ending(seq, "stop")

    def constrained(
        self, params: SamplingParams, new_inner: Callable[[], Any] | None
    ) -> Callable[[], TokenConstraint]:
        """A factory of matchers for a request with token rules; new_inner: its grammar's."""
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
    """llguidance's trie of the tokens. For 50,000 tokens it takes half a second with Python's lock.

    tokenizer: JSON of the `tokenizers` library. vocab_size: the model's, maybe larger than the
    tokenizer's. end_ids: tokens that end a text. Raises ValueError if llguidance cannot read it.
    """
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_ids) or [0])

"""Grammars in the core's loop: requests wait until theirs is compiled, and steps get masks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLTokenizer

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.messages import GrammarWork
from jitney.engine.common.outputs import FinishReason
from jitney.engine.common.requests import EngineRequest, Grammar, SamplingParams
from jitney.engine.core.grammar.matchers import GrammarMatcher, Matchers, TokenConstraint
from jitney.engine.core.held_request import HeldRequest
from jitney.engine.core.scheduler.plan import Chunk, MaskedRow, Plan
from jitney.engine.core.scheduler.sequence import Sequence

#: Seconds between two checks of a grammar's compilation.
_POLL_S = 0.001


class _Verdict(NamedTuple):
    """The result of a request's wait."""

    entry: HeldRequest
    #: Makes a matcher for each sequence; None: the grammar cannot be used, or all sequences ended.
    new_matcher: Callable[[], GrammarMatcher] | None = None
    #: Why the grammar cannot be used, if so.
    error: ErrorInfo | None = None


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
        #: Requests whose grammars are being compiled.
        self.waiting: list[HeldRequest] = []

    @classmethod
    def open(cls, tokenizer: str, vocab_size: int, end_ids: Iterable[int]) -> GrammarManager:
        """The grammars of a model; see `_token_trie`."""
        return cls(Matchers(_token_trie(tokenizer, vocab_size, end_ids)))

    @property
    def waiting_adapters(self) -> set[int]:
        """Numbers of the adapters that waiting requests ask for."""
        return {entry.request.adapter for entry in self.waiting}

    def check(self, grammar: Grammar) -> None:
        """Wait until a grammar is compiled. Raises RequestError if it cannot be used."""
        self._matchers.begin(grammar)
        while self._matchers.maker(grammar) is None:
            time.sleep(_POLL_S)

    def enter(self, request: EngineRequest) -> None:
        """Let a request wait for its grammar; `leave` returns it."""
        self._matchers.begin(_grammar_of(request))
        self.waiting.append(HeldRequest(request))

    def leave(self) -> list[_Verdict]:
        """The requests whose grammars are compiled or refused, in order of arrival."""
        verdicts: list[_Verdict] = []
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            verdict = self._verdict(entry)
            if verdict is None:
                self.waiting.append(entry)
            else:
                verdicts.append(verdict)
        return verdicts

    def _verdict(self, entry: HeldRequest) -> _Verdict | None:
        """The result of a request; None while it waits."""
        if entry.is_over:
            return _Verdict(entry)
        try:
            new_matcher = self._matchers.maker(_grammar_of(entry.request))
        except RequestError as error:
            return _Verdict(entry, error=error.info)
        return None if new_matcher is None else _Verdict(entry, new_matcher)

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


def _grammar_of(request: EngineRequest) -> Grammar:
    assert request.sampling.grammar is not None  # others do not wait
    return request.sampling.grammar


def _matcher_of(seq: Sequence) -> GrammarMatcher | TokenConstraint:
    assert isinstance(seq.matcher, (GrammarMatcher, TokenConstraint))  # made here
    return seq.matcher


def _token_trie(tokenizer: str, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """llguidance's trie of the tokens. For 50,000 tokens it takes half a second with Python's lock.

    tokenizer: JSON of the `tokenizers` library. vocab_size: the model's, maybe larger than the
    tokenizer's. end_ids: tokens that end a text. Raises ValueError if llguidance cannot read it.
    """
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_ids) or [0])

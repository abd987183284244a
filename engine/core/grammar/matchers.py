"""Grammar matchers of sequences, and the masks of allowed tokens.

Threads compile grammars and compute masks beside the steps; llguidance releases Python's lock. A
sequence whose mask is late is left out of steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jitney.engine.common.errors import RequestError
from jitney.engine.common.lru import LruCache
from jitney.engine.common.messages import GrammarWork
from jitney.engine.common.replaceable_threads import ReplaceableThreads
from jitney.engine.common.requests import Grammar, SamplingParams
from jitney.engine.core.grammar.compiling import first_mask, new_matcher
from jitney.engine.core.grammar.embedding import writes_json
from jitney.engine.core.grammar.numbers import NumberEnds
from jitney.engine.core.grammar.refusals import NO_TOKEN
from jitney.engine.core.scheduler.plan import mask_words

_log = logging.getLogger("jitney.core")

#: Time limit of compiling a grammar, in seconds.
_TIMEOUT_S = 2.0
#: Seconds that a step waits for its masks; sequences without one are left out of the step.
_STEP_S = 0.02
#: A step does not wait for a sequence's mask if the last one took more CPU seconds than this.
_SLOW_S = 0.002
#: The next token, or an answer's last one, is consumed in the calling thread (see `advance`) if the
#: last mask took at most this many CPU seconds.
_IN_PLACE_S, _LAST_IN_PLACE_S = 0.0003, 0.005
#: The masks behind drafts are computed if the last mask took at most this many CPU seconds: a step
#: waits for all of them.
_DRAFTED_S = 0.0005
#: CPU seconds for the masks of a request, and additional ones per token.
_REQUEST_S, _TOKEN_S = 1.0, 0.01
#: Bytes of the cache of compiled grammars; estimated bytes of a grammar, and per character of its
#: text (a schema of 20 fields: 0.1 MB).
_MOST_BYTES = 64 << 20
_BYTES_EACH = 50_000
_BYTES_A_CHARACTER = 50

_NO_DRAFTS: list[int] = []


class _MaskThreads:
    """The threads that compute masks, and their work."""

    def __init__(self, trie: LLTokenizer):
        self.trie = trie
        self.words = mask_words(trie.vocab_size)
        #: For masks that steps wait for, and for others.
        self.quick = ReplaceableThreads("masks")
        self.slow = ReplaceableThreads("slow masks")
        #: Guards `work`.
        self.lock = threading.Lock()
        self.work = GrammarWork()

    def count(self, seconds: float) -> None:
        """Count a mask."""
        with self.lock:
            self.work.masks += 1
            self.work.mask_s += seconds

    def advance(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """`LLMatcher.consume_tokens` without Python's lock, which llguidance releases only for
        several matchers at once: the second one is a dummy.
        """
        executor, idle = LLExecutor(1), LLMatcher(self.trie, "", log_level=0)
        return all(
            [executor.consume_token_par([(matcher, token), (idle, token)])[0] for token in tokens]
        )


@dataclass(eq=False, slots=True)
class _Allowance:
    """CPU time left for the masks of a request, all sequences together."""

    left_s: float = _REQUEST_S

    def spend(self, seconds: float, tokens: int) -> None:
        """Subtract the time of a mask after `tokens` new tokens. Raises RequestError if none is
        left.
        """
        self.left_s = min(_REQUEST_S, self.left_s + _TOKEN_S * tokens) - seconds
        if self.left_s < 0:
            raise RequestError(
                "computing the tokens that the grammar allows takes too long: it is too ambiguous",
                code="grammar_too_complex",
            )


@dataclass(eq=False, slots=True)
class GrammarMatcher:
    """The state of a sequence in its grammar (`engine.core.scheduler.sequence.Matcher`).

    While a mask is computed, a worker thread owns `_inner`.
    """

    _inner: LLMatcher
    _threads: _MaskThreads
    _allowance: _Allowance
    #: Ends long numbers; None: the grammar allows no JSON.
    _number_ends: NumberEnds | None = None
    #: The mask of the next token, int32 [ceil(V / 32)]; None: not computed.
    _mask: np.ndarray | None = None
    #: The mask is queued or being computed.
    _pending: bool = False
    #: The mask has been used.
    _used: bool = False
    #: CPU seconds of the last mask.
    _mask_s: float = 0.0
    #: Why there will be no more masks.
    _error: RequestError | None = None
    #: Number of output tokens so far; the last of them, which `_inner` has not consumed.
    _n_accepted: int = 0
    _fresh: list[int] = field(default_factory=list[int])
    #: The number at the end of the answer.
    _tail: bytes = b""
    #: Drafts of the next tokens, and the masks behind those of them that the grammar allows.
    _drafts: list[int] = field(default_factory=list[int])
    _behind: list[np.ndarray] = field(default_factory=list[np.ndarray])

    @property
    def complete(self) -> bool:
        """True if no token may follow; False while the mask is pending."""
        return not self._pending and self._inner.is_stopped() and not self._inner.is_error()

    @property
    def may_end(self) -> bool:
        """True if the text may end here."""
        return self._inner.is_accepting()

    @property
    def late(self) -> bool:
        """True if a step should not wait for the mask."""
        return self._pending or (self._is_slow and self._used)

    @property
    def checks_drafts(self) -> bool:
        """True if a step may wait for the masks behind drafts."""
        return self._mask_s <= _DRAFTED_S

    @property
    def n_behind(self) -> int:
        """The number of drafts with a mask behind them."""
        return len(self._behind)

    @property
    def _is_slow(self) -> bool:
        return self._mask_s > _SLOW_S

    def take(self, tokens: list[int], start: int, *, last: bool = False) -> None:
        fresh = tokens[start + self._n_accepted :]
        if self._pending or not fresh:
            return
        self._n_accepted += len(fresh)
        self._fresh += fresh
        self._mask = None
        if self._is_slow and not last:
            self.begin()
        elif len(self._fresh) == 1 and self._mask_s <= (_LAST_IN_PLACE_S if last else _IN_PLACE_S):
            # Consuming a token takes no longer than the last mask, which tried all tokens.
            self._consumed(self._inner.consume_tokens(self._fresh))

    def begin(self, drafts: list[int] = _NO_DRAFTS) -> bool:
        """Start computing the mask unless it is known, and those behind drafts of the next tokens;
        True if a step may wait for them.
        """
        self._used = False  # the step that used it may have failed
        if self._pending or self._error is not None:
            return False
        self._drafts, self._behind = _NO_DRAFTS if self._is_slow else drafts, []
        if self._mask is not None and not self._drafts:
            return False
        self._pending = True
        worker = self._threads.slow if self._is_slow else self._threads.quick
        worker.put(self._compute)
        return worker is self._threads.quick

    def fill(self, masks: np.ndarray, row: int, drafts: int = 0) -> None:
        """Write the allowed tokens to a row of int32 [n, ceil(V / 32)]: the next ones, or those
        behind so many drafts, `n_behind` at most. Raises RequestError.
        """
        if self._mask is None:
            self._compute()
        if self._error is not None:
            raise self._error
        masks[row] = self._behind[drafts - 1] if drafts else self._mask
        self._used = True
        if self._number_ends is None:
            return
        tail = self._number_ends.after(self._tail, self._drafts[:drafts])
        if tail:
            self._number_ends.apply(tail, masks[row])

    def _compute(self) -> None:
        """Consume the fresh tokens, and compute the masks of the next one and behind drafts."""
        tokens, started = len(self._fresh), time.thread_time()
        try:
            if self._fresh:
                self._consumed(self._threads.advance(self._inner, self._fresh))
            if self._error is not None:
                raise self._error
            if self._mask is None:
                mask = self._mask_of(self._inner)
                if mask is None:
                    raise _stopped(self._inner)
                seconds = time.thread_time() - started
                self._threads.count(seconds)
                self._mask_s = seconds
                self._allowance.spend(seconds, tokens)
                self._mask = mask
            if self._drafts:
                self._look_ahead()
        except RequestError as error:
            self._error = error
        except BaseException:  # a Rust panic; the thread must continue
            _log.exception("a grammar's mask could not be computed")
            self._error = _too_complex()
        self._pending = False

    def _mask_of(self, matcher: LLMatcher) -> np.ndarray | None:
        """The mask of a matcher's next token; None if it exceeds a limit."""
        mask = np.empty((1, self._threads.words), np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        return None if matcher.is_error() else mask[0]

    def _look_ahead(self) -> None:
        """Compute the masks behind the drafts, up to one that the grammar forbids or that ends the
        text. A copy consumes them: a matcher that a draft leads beyond a limit never recovers.
        """
        ahead = self._inner.deep_copy()
        for draft in self._drafts:
            started = time.thread_time()
            if ahead.try_consume_tokens([draft]) != 1 or ahead.is_stopped():
                return
            mask = self._mask_of(ahead)
            if mask is None:
                return
            self._behind.append(mask)
            self._threads.count(time.thread_time() - started)

    def _consumed(self, is_allowed: bool) -> None:
        """Update the state after `_inner` has consumed the fresh tokens, if they are allowed."""
        if not is_allowed:
            self._error = _stopped(self._inner)
        if self._number_ends is not None:
            self._tail = self._number_ends.after(self._tail, self._fresh)
        self._fresh = []


def _stopped(matcher: LLMatcher) -> RequestError:
    """The error of a matcher that exceeded a limit or has no token left."""
    reason = " ".join(matcher.get_error().split())[:200]
    _log.warning("a grammar's matcher stopped: %s", reason)
    return _dead_end() if reason.startswith(NO_TOKEN) else _too_complex()


def _too_complex() -> RequestError:
    return RequestError(
        "the grammar became too complex while generating this answer", code="grammar_too_complex"
    )


def _dead_end() -> RequestError:
    return RequestError("no allowed token continues the grammar")


class _TokenRules:
    """A request's token rules: `allowed_token_ids` without tokens that complete `bad_words`."""

    def __init__(self, params: SamplingParams, vocab_size: int):
        allowed = np.zeros(32 * mask_words(vocab_size), bool)
        if params.allowed_token_ids:
            allowed[list(params.allowed_token_ids)] = True
        else:
            allowed[:vocab_size] = True
        #: uint32 [ceil(V / 32)]: allowed tokens, apart from words of several tokens.
        self.base = np.packbits(allowed, bitorder="little").view(np.uint32)
        #: Banned words of several tokens, by the last token but one.
        self.by_token: dict[int, list[tuple[int, ...]]] = {}
        for banned in params.banned_sequences:
            if len(banned) == 1:
                _clear(self.base, banned[0])
            else:
                self.by_token.setdefault(banned[-2], []).append(banned)
        #: Number of last output tokens that the rules need.
        self.memory = max([len(banned) - 1 for banned in params.banned_sequences], default=0)


@dataclass(eq=False, slots=True)
class TokenConstraint:
    """A sequence's token rules and grammar (`engine.core.scheduler.sequence.Matcher`)."""

    _rules: _TokenRules
    #: None: no grammar.
    _inner: GrammarMatcher | None
    #: The last output tokens, and drafts of the next ones.
    _tail: tuple[int, ...] = ()
    _drafts: list[int] = field(default_factory=list[int])

    @property
    def complete(self) -> bool:
        return self._inner is not None and self._inner.complete

    @property
    def may_end(self) -> bool:
        """See `GrammarMatcher.may_end`."""
        return self._inner is None or self._inner.may_end

    @property
    def late(self) -> bool:
        """See `GrammarMatcher.late`."""
        return self._inner is not None and self._inner.late

    @property
    def checks_drafts(self) -> bool:
        """See `GrammarMatcher.checks_drafts`."""
        return self._inner is None or self._inner.checks_drafts

    @property
    def n_behind(self) -> int:
        """See `GrammarMatcher.n_behind`."""
        return len(self._drafts) if self._inner is None else self._inner.n_behind

    def begin(self, drafts: list[int] = _NO_DRAFTS) -> bool:
        """See `GrammarMatcher.begin`."""
        self._drafts = drafts
        return self._inner is not None and self._inner.begin(drafts)

    def take(self, tokens: list[int], start: int, *, last: bool = False) -> None:
        if self._inner is not None:
            self._inner.take(tokens, start, last=last)
        self._tail = tuple(tokens[max(start, len(tokens) - self._rules.memory) :])

    def fill(self, masks: np.ndarray, row: int, drafts: int = 0) -> None:
        """See `GrammarMatcher.fill`."""
        allowed = self._rules.base.copy()
        tail = (*self._tail, *self._drafts[:drafts])
        for banned in self._rules.by_token.get(tail[-1] if tail else -1, ()):
            if tail[1 - len(banned) :] == banned[:-1]:
                _clear(allowed, banned[-1])
        if self._inner is None:
            masks[row] = allowed.view(np.int32)
        else:
            self._inner.fill(masks, row, drafts)
            masks[row] &= allowed.view(np.int32)


class _Compiled(NamedTuple):
    """A compiled grammar."""

    #: At the beginning of a text.
    matcher: LLMatcher
    #: Mask of the first token, int32 [ceil(V / 32)].
    mask: np.ndarray
    #: CPU seconds of the mask.
    mask_s: float


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that is queued or being compiled."""

    grammar: Grammar
    #: Time of queueing.
    since: float
    #: It timed out, and its thread is abandoned.
    given_up: bool = False
    #: A thread compiles it.
    running: bool = False


class Matchers:
    """The compiled grammars of an engine. clock: seconds."""

    def __init__(self, trie: LLTokenizer, clock: Callable[[], float] = time.monotonic):
        self._trie = trie
        self._clock = clock
        self._threads = _MaskThreads(trie)
        #: Made with the first grammar of JSON.
        self._number_ends: NumberEnds | None = None
        #: All tokens but those that end a text.
        self._no_ends = _mask_without(trie.eos_tokens, self._threads.words)
        self._compiling = ReplaceableThreads("grammars")
        # The fields below are guarded by the lock; the compiling thread writes them too.
        self._lock = self._threads.lock
        self._compiled: LruCache[Grammar, _Compiled | RequestError] = LruCache(
            _MOST_BYTES, _bytes_of
        )
        self._jobs: dict[Grammar, _Job] = {}

    def begin(self, grammar: Grammar) -> None:
        """Start compiling a grammar, unless it is compiled or queued."""
        with self._lock:
            if grammar in self._compiled or grammar in self._jobs:
                return
            job = self._jobs[grammar] = _Job(grammar, self._clock())
        self._compiling.put(partial(self._compile, job))

    def maker(self, grammar: Grammar) -> Callable[[], GrammarMatcher] | None:
        """A factory of the grammar's matchers; None while it is compiled. Raises RequestError if
        the grammar cannot be used.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            job = self._jobs.get(grammar)
            if compiled is None and job is not None and self._clock() - job.since > _TIMEOUT_S:
                self._give_up(job)
                raise RequestError(
                    f"compiling the grammar took longer than {_TIMEOUT_S:g} s",
                    code="grammar_too_complex",
                )
        if isinstance(compiled, RequestError):
            raise compiled
        if compiled is not None:
            return self._maker(compiled, self._number_ends if writes_json(grammar) else None)
        if job is None:  # the cache has dropped it meanwhile
            self.begin(grammar)
        return None

    def _maker(self, compiled: _Compiled, ends: NumberEnds | None) -> Callable[[], GrammarMatcher]:
        """A factory of the matchers of one request."""
        allowance = _Allowance()
        return lambda: GrammarMatcher(
            compiled.matcher.deep_copy(),
            self._threads,
            allowance,
            ends,
            _mask=compiled.mask,
            _mask_s=compiled.mask_s,
        )

    def rules(self, params: SamplingParams) -> _TokenRules:
        """The token rules of a request, shared by its sequences."""
        return _TokenRules(params, self._trie.vocab_size)

    def masks(self, rows: int) -> np.ndarray:
        """An empty array for masks, int32 [rows, ceil(V / 32)]."""
        return np.zeros((rows, self._threads.words), np.int32)

    def wait(self) -> None:
        """Wait for masks that a step needs, up to `_STEP_S`."""
        self._threads.quick.wait(_STEP_S)

    def fill(
        self,
        matcher: GrammarMatcher | TokenConstraint,
        masks: np.ndarray,
        row: int,
        *,
        may_end: bool,
        drafts: int = 0,
    ) -> bool:
        """Write a matcher's mask of the next token, or of the one behind so many drafts; False if
        no token may follow.

        may_end: the text may end here. Raises RequestError if the grammar exceeds a limit, or no
        allowed token continues it.
        """
        matcher.fill(masks, row, drafts)
        if not may_end:
            masks[row] &= self._no_ends
        if matcher.complete:
            return False
        if masks[row].any():
            return True
        if not (drafts or matcher.may_end):
            raise _dead_end()
        return False

    def take_work(self) -> GrammarWork | None:
        """The work since the last call; None if there was none."""
        with self._lock:
            work = self._threads.work
            if not (work.masks or work.compiled):
                return None
            self._threads.work = GrammarWork()
            work.cached = len(self._compiled)
        return work

    def _give_up(self, job: _Job) -> None:
        """Drop a job that timed out. Called under the lock."""
        job.given_up = True
        del self._jobs[job.grammar]
        if job.running:
            self._compiling.leave()

    def _compile(self, job: _Job) -> None:
        with self._lock:
            if job.given_up:
                return
            job.running = True
        started = self._clock()
        result = self._result(job.grammar)
        with self._lock:
            if job.given_up:
                return
            del self._jobs[job.grammar]
            self._threads.work.compiled += 1
            self._threads.work.compile_s += self._clock() - started
            self._compiled.put(job.grammar, result)

    def _result(self, grammar: Grammar) -> _Compiled | RequestError:
        try:
            if self._number_ends is None and writes_json(grammar):
                self._number_ends = NumberEnds(self._trie)
            matcher, started = new_matcher(grammar, self._trie), time.thread_time()
            mask = first_mask(matcher)[: self._threads.words]
        except RequestError as error:
            return error
        except BaseException:  # a Rust panic; the thread must continue
            _log.exception("a grammar could not be compiled")
            return RequestError("the grammar could not be compiled", code="grammar_too_complex")
        return _Compiled(matcher, mask, time.thread_time() - started)


def _bytes_of(grammar: Grammar) -> int:
    return _BYTES_EACH + _BYTES_A_CHARACTER * len(grammar.text)


def _mask_without(tokens: Iterable[int], words: int) -> np.ndarray:
    """A mask, int32 [words], of all tokens but these."""
    mask = np.full(words, -1, np.int32)
    for token in tokens:
        _clear(mask.view(np.uint32), token)
    return mask


def _clear(mask: np.ndarray, token: int) -> None:
    """Remove a token from a mask, uint32 [ceil(V / 32)]."""
    mask[token // 32] &= ~np.uint32(1 << (token % 32))

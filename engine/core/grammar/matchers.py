"""Where each sequence stands in its grammar, and which tokens may come next: the core's half.

Grammars are compiled, and masks computed, on threads beside the steps: llguidance releases the
interpreter. A sequence whose mask is late sits steps out.
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

#: Seconds after which a grammar that is being compiled is given up.
_TIMEOUT_S = 2.0
#: Seconds that a step waits for its masks. Whoever has none by then sits the step out.
_STEP_S = 0.02
#: Processor seconds of a mask from which on the sequence's next one is not waited for at all.
_SLOW_S = 0.002
#: Processor seconds of a mask up to which the next token is taken in place, see `advance`; and the
#: last token of an answer.
_IN_PLACE_S, _LAST_IN_PLACE_S = 0.0003, 0.005
#: Processor seconds that the masks of a request may take, and more of them for each token.
_REQUEST_S, _TOKEN_S = 1.0, 0.01
#: Compiled grammars kept, in bytes: what one takes beside its text, and how much its text counts
#: (a schema of 20 fields: 0.1 MB).
_MOST_BYTES = 64 << 20
_BYTES_EACH = 50_000
_BYTES_A_CHARACTER = 50


@dataclass(slots=True)
class _Work:
    """Sums since the last report; see `messages.GrammarWork`."""

    masks: int = 0
    mask_s: float = 0.0
    compiled: int = 0
    compile_s: float = 0.0


class _MaskThreads:
    """The threads that compute masks, and what they have taken."""

    def __init__(self, trie: LLTokenizer):
        self.trie = trie
        self.words = mask_words(trie.vocab_size)
        #: For masks that a step waits for, and for those that none waits for.
        self.quick = ReplaceableThreads("masks")
        self.slow = ReplaceableThreads("slow masks")
        #: Guards `work`.
        self.lock = threading.Lock()
        self.work = _Work()

    def count(self, seconds: float) -> None:
        """A mask took so long."""
        with self.lock:
            self.work.masks += 1
            self.work.mask_s += seconds

    def advance(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """`LLMatcher.consume_tokens` without holding the interpreter, which llguidance releases
        only for several matchers at once; the second one here does nothing.
        """
        executor, idle = LLExecutor(1), LLMatcher(self.trie, "", log_level=0)
        return all(
            [executor.consume_token_par([(matcher, token), (idle, token)])[0] for token in tokens]
        )


@dataclass(eq=False, slots=True)
class _Allowance:
    """Processor time that the masks of a request, of all its sequences, may still take."""

    left_s: float = _REQUEST_S

    def spend(self, seconds: float, tokens: int) -> None:
        """A mask after so many more tokens took so long. Raises RequestError if nothing is left."""
        self.left_s = min(_REQUEST_S, self.left_s + _TOKEN_S * tokens) - seconds
        if self.left_s < 0:
            raise RequestError(
                "it takes too long to find out which tokens the grammar allows next: there are too "
                "many ways to read one text by it",
                code="grammar_too_complex",
            )


@dataclass(eq=False, slots=True)
class GrammarMatcher:
    """Where one sequence stands in its grammar (`engine.core.scheduler.sequence.Matcher`).

    While its mask is computed, a worker thread owns `_inner`.
    """

    _inner: LLMatcher
    _threads: _MaskThreads
    _allowance: _Allowance
    #: What ends long numbers; None: the grammar writes no JSON.
    _number_ends: NumberEnds | None = None
    #: The mask of the next token, int32 [ceil(V / 32)]; None: it is not known.
    _mask: np.ndarray | None = None
    #: Its mask is being computed, or waits for that.
    _pending: bool = False
    #: The mask that is known has been used.
    _used: bool = False
    #: Processor seconds that the last mask took.
    _mask_s: float = 0.0
    #: Why there is no mask, and will be none.
    _error: RequestError | None = None
    #: Output tokens that were taken, and the last ones of them, which `_inner` has not gone past.
    _taken: int = 0
    _fresh: list[int] = field(default_factory=list[int])
    #: The number that the answer ends with.
    _tail: bytes = b""

    @property
    def complete(self) -> bool:
        """Nothing may follow; False while that is being found out."""
        return not self._pending and self._inner.is_stopped() and not self._inner.is_error()

    @property
    def may_end(self) -> bool:
        """What has been said is all that the grammar asks for."""
        return self._inner.is_accepting()

    @property
    def late(self) -> bool:
        """A step should not count on its mask."""
        return self._pending or (self._is_slow and self._used)

    @property
    def _is_slow(self) -> bool:
        return self._mask_s > _SLOW_S

    def take(self, tokens: list[int], start: int, *, last: bool = False) -> None:
        fresh = tokens[start + self._taken :]
        if self._pending or not fresh:
            return
        self._taken += len(fresh)
        self._fresh += fresh
        self._mask = None
        if self._is_slow and not last:
            self.begin()
        elif len(self._fresh) == 1 and self._mask_s <= (_LAST_IN_PLACE_S if last else _IN_PLACE_S):
            # It takes no longer than the last mask, which has tried each token.
            self._go_on(self._inner.consume_tokens(self._fresh))

    def begin(self) -> bool:
        """Have the mask computed, unless it is known; True if a step may wait for it."""
        self._used = False  # a step may have failed after it was
        if self._pending or self._mask is not None or self._error is not None:
            return False
        self._pending = True
        worker = self._threads.slow if self._is_slow else self._threads.quick
        worker.put(self._find)
        return worker is self._threads.quick

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Write the allowed tokens to a row of int32 [n, ceil(V / 32)]. Raises RequestError."""
        if self._mask is None:
            self._find()
        if self._error is not None:
            raise self._error
        masks[row] = self._mask
        self._used = True
        if self._tail and self._number_ends is not None:
            self._number_ends.apply(self._tail, masks[row])

    def _find(self) -> None:
        """Go past the tokens that were taken, and compute the mask of the next one."""
        tokens, started = len(self._fresh), time.thread_time()
        try:
            if self._fresh:
                self._go_on(self._threads.advance(self._inner, self._fresh))
            if self._error is not None:
                raise self._error
            mask = np.empty((1, self._threads.words), np.int32)
            fill_next_token_bitmask(self._inner, mask, 0)
            if self._inner.is_error():
                raise _stopped(self._inner)
            seconds = time.thread_time() - started
            self._threads.count(seconds)
            self._mask_s = seconds
            self._allowance.spend(seconds, tokens)
            self._mask = mask[0]
        except RequestError as error:
            self._error = error
        except BaseException:  # a panic of the library's; the thread must go on
            _log.exception("a grammar's mask could not be computed")
            self._error = _too_complex()
        self._pending = False

    def _go_on(self, is_allowed: bool) -> None:
        """`_inner` has gone past the fresh tokens, if they are allowed."""
        if not is_allowed:
            self._error = _stopped(self._inner)
        if self._number_ends is not None:
            self._tail = self._number_ends.after(self._tail, self._fresh)
        self._fresh = []


def _stopped(matcher: LLMatcher) -> RequestError:
    """A matcher cannot go on: a limit was met, or there is nothing to go on with."""
    reason = " ".join(matcher.get_error().split())[:200]
    _log.warning("a grammar's matcher cannot go on: %s", reason)
    return _dead_end() if reason.startswith(NO_TOKEN) else _too_complex()


def _too_complex() -> RequestError:
    return RequestError(
        "the grammar became too complex to go on with this answer", code="grammar_too_complex"
    )


def _dead_end() -> RequestError:
    return RequestError("none of the tokens that may be chosen goes on with the grammar")


class _TokenRules:
    """The tokens that a request's sequences may choose from beside its grammar: those it allows
    (`allowed_token_ids`), without those that complete a word it bans (`bad_words`).
    """

    def __init__(self, params: SamplingParams, vocab_size: int):
        may_come = np.zeros(32 * mask_words(vocab_size), bool)
        if params.allowed_token_ids:
            may_come[list(params.allowed_token_ids)] = True
        else:
            may_come[:vocab_size] = True
        #: uint32 [ceil(V / 32)]: tokens that may ever come.
        self.base = np.packbits(may_come, bitorder="little").view(np.uint32)
        #: Banned words of several tokens, by the last token before the one that completes them.
        self.by_token: dict[int, list[tuple[int, ...]]] = {}
        for banned in params.banned_sequences:
            if len(banned) == 1:
                _clear(self.base, banned[0])
            else:
                self.by_token.setdefault(banned[-2], []).append(banned)
        #: Output tokens that have to be remembered.
        self.memory = max([len(banned) - 1 for banned in params.banned_sequences], default=0)


@dataclass(eq=False, slots=True)
class TokenConstraint:
    """Where one sequence stands (`engine.core.scheduler.sequence.Matcher`)."""

    _rules: _TokenRules
    #: Of its grammar; None: it has none.
    _inner: GrammarMatcher | None
    #: The last output tokens.
    _tail: tuple[int, ...] = ()

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

    def begin(self) -> bool:
        """See `GrammarMatcher.begin`."""
        return self._inner is not None and self._inner.begin()

    def take(self, tokens: list[int], start: int, *, last: bool = False) -> None:
        if self._inner is not None:
            self._inner.take(tokens, start, last=last)
        self._tail = tuple(tokens[max(start, len(tokens) - self._rules.memory) :])

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Write which tokens may come next into a row of int32 [n, words]."""
        allowed = self._rules.base.copy()
        for banned in self._rules.by_token.get(self._tail[-1] if self._tail else -1, ()):
            if self._tail[1 - len(banned) :] == banned[:-1]:
                _clear(allowed, banned[-1])
        if self._inner is None:
            masks[row] = allowed.view(np.int32)
        else:
            self._inner.fill(masks, row)
            masks[row] &= allowed.view(np.int32)


class _Compiled(NamedTuple):
    """A grammar that can be used."""

    #: At the beginning of a text.
    matcher: LLMatcher
    #: Of the first token, int32 [ceil(V / 32)].
    mask: np.ndarray
    #: Processor seconds that it took.
    mask_s: float


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that waits for its thread, or is being compiled."""

    grammar: Grammar
    #: When it was begun.
    since: float
    #: Nobody waits for it any more, nor for the thread that has it.
    given_up: bool = False
    #: A thread has it.
    running: bool = False


class Matchers:
    """The grammars of one engine. clock: seconds."""

    def __init__(self, trie: LLTokenizer, clock: Callable[[], float] = time.monotonic):
        self._trie = trie
        self._clock = clock
        self._threads = _MaskThreads(trie)
        #: Made with the first grammar of JSON.
        self._number_ends: NumberEnds | None = None
        #: Keeps all but the tokens that end a text.
        self._no_ends = _mask_without(trie.eos_tokens, self._threads.words)
        self._compiling = ReplaceableThreads("grammars")
        # All below: under the lock, since the compiling thread writes it too.
        self._lock = self._threads.lock
        self._kept: LruCache[Grammar, _Compiled | RequestError] = LruCache(_MOST_BYTES, _bytes_of)
        self._jobs: dict[Grammar, _Job] = {}

    def begin(self, grammar: Grammar) -> None:
        """Have a grammar compiled, unless it is."""
        with self._lock:
            if grammar in self._kept or grammar in self._jobs:
                return
            job = self._jobs[grammar] = _Job(grammar, self._clock())
        self._compiling.put(partial(self._compile, job))

    def maker(self, grammar: Grammar) -> Callable[[], GrammarMatcher] | None:
        """A maker of matchers of a grammar that was begun; None while it is compiled. Raises
        RequestError if it cannot be used.
        """
        with self._lock:
            found = self._kept.get(grammar)
            job = self._jobs.get(grammar)
            if found is None and job is not None and self._clock() - job.since > _TIMEOUT_S:
                self._give_up(job)
                raise RequestError(
                    f"compiling the grammar took longer than {_TIMEOUT_S:g} s",
                    code="grammar_too_complex",
                )
        if isinstance(found, RequestError):
            raise found
        if found is not None:
            return self._maker(found, self._number_ends if writes_json(grammar) else None)
        if job is None:  # it has made room for others meanwhile
            self.begin(grammar)
        return None

    def _maker(self, found: _Compiled, ends: NumberEnds | None) -> Callable[[], GrammarMatcher]:
        """What makes the matchers of one request."""
        allowance = _Allowance()
        return lambda: GrammarMatcher(
            found.matcher.deep_copy(),
            self._threads,
            allowance,
            ends,
            _mask=found.mask,
            _mask_s=found.mask_s,
        )

    def rules(self, params: SamplingParams) -> _TokenRules:
        """What all sequences of a request share of its rules about tokens."""
        return _TokenRules(params, self._trie.vocab_size)

    def masks(self, rows: int) -> np.ndarray:
        """Room for the masks of so many rows, int32 [rows, ceil(V / 32)]."""
        return np.zeros((rows, self._threads.words), np.int32)

    def wait(self) -> None:
        """Wait for the masks that were begun, as long as a step does."""
        self._threads.quick.wait(_STEP_S)

    def fill(
        self,
        matcher: GrammarMatcher | TokenConstraint,
        masks: np.ndarray,
        row: int,
        *,
        may_end: bool,
    ) -> bool:
        """Write a matcher's mask; False if nothing may come next. may_end: the text may end here.
        Raises RequestError if the grammar takes too much, or no token that may be chosen goes on
        with it.
        """
        matcher.fill(masks, row)
        if not may_end:
            masks[row] &= self._no_ends
        if matcher.complete:
            return False
        if masks[row].any():
            return True
        if not matcher.may_end:
            raise _dead_end()
        return False

    def take_work(self) -> GrammarWork | None:
        """What there was to do since the last call; None if nothing was."""
        with self._lock:
            work = self._threads.work
            if not (work.masks or work.compiled):
                return None
            self._threads.work = _Work()
            kept = len(self._kept)
        return GrammarWork(
            masks=work.masks,
            mask_s=work.mask_s,
            compiled=work.compiled,
            compile_s=work.compile_s,
            kept=kept,
        )

    def _give_up(self, job: _Job) -> None:
        """Nobody waits for a job any more. Called under the lock."""
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
            self._kept.put(job.grammar, result)

    def _result(self, grammar: Grammar) -> _Compiled | RequestError:
        try:
            if self._number_ends is None and writes_json(grammar):
                self._number_ends = NumberEnds(self._trie)
            matcher, started = new_matcher(grammar, self._trie), time.thread_time()
            mask = first_mask(matcher)[: self._threads.words]
        except RequestError as error:
            return error
        except BaseException:  # a panic of the library's; the thread must go on
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
    """Take a token out of a mask, uint32 [ceil(V / 32)]."""
    mask[token // 32] &= ~np.uint32(1 << (token % 32))

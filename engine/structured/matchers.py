"""Where each sequence stands in its grammar, and which tokens may come next: the core's half.

Grammars are compiled on a thread, beside the steps, and kept. llguidance leaves the interpreter to
others while it compiles and while it computes a mask.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jitney.engine.errors import RequestError
from jitney.engine.lru import LruCache
from jitney.engine.messages import GrammarWork
from jitney.engine.scheduler.plan import mask_words
from jitney.engine.structured.compiling import new_matcher
from jitney.engine.structured.embedding import writes_json
from jitney.engine.structured.numbers import NumberEnds
from jitney.engine.types import Grammar, SamplingParams

_log = logging.getLogger("jitney.core")

#: Seconds after which a grammar that is being compiled is given up, and most threads lost so.
_TIMEOUT_S = 2.0
_MOST_LOST = 4
#: Compiled grammars kept, in bytes: what one takes beside its text, and how much its text counts
#: (a schema of 20 fields: 0.1 MB).
_MOST_BYTES = 64 << 20
_BYTES_EACH = 50_000
_BYTES_A_CHARACTER = 50


@dataclass(eq=False, slots=True)
class GrammarMatcher:
    """Where one sequence stands in its grammar (`engine.scheduler.sequence.Matcher`)."""

    _inner: LLMatcher
    #: What ends long numbers; None: the grammar writes no JSON.
    _number_ends: NumberEnds | None = None
    #: Output tokens that it has gone past.
    _taken: int = 0
    #: The number that the answer ends with.
    _tail: bytes = b""

    @property
    def complete(self) -> bool:
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def may_end(self) -> bool:
        """What has been said is all that the grammar asks for."""
        return self._inner.is_accepting()

    def take(self, tokens: list[int], start: int) -> None:
        fresh = tokens[start + self._taken :]
        if fresh and not self._inner.consume_tokens(fresh):
            raise _too_complex(self._inner)
        self._taken += len(fresh)
        if self._number_ends is not None:
            self._tail = self._number_ends.after(self._tail, fresh)

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Write which tokens may come next into a row of int32 [n, ceil(V / 32)]. Raises
        RequestError if that takes too much.
        """
        fill_next_token_bitmask(self._inner, masks, row)
        if self._inner.is_error():
            raise _too_complex(self._inner)
        if self._tail and self._number_ends is not None:
            self._number_ends.apply(self._tail, masks[row])


def _too_complex(matcher: LLMatcher) -> RequestError:
    """A matcher cannot go on: a limit was met."""
    reason = " ".join(matcher.get_error().split())[:200]
    _log.warning("a grammar's matcher cannot go on: %s", reason)
    return RequestError(
        "the grammar became too complex to go on with this answer", code="grammar_too_complex"
    )


class _TokenRules:
    """What the sequences of one request share: which tokens they may choose from, whatever its
    grammar says. Those it allows (`allowed_token_ids`), without those that would complete a word
    it bans (`bad_words`).
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
class RuledMatcher:
    """Where one sequence stands (`engine.scheduler.sequence.Matcher`)."""

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

    def take(self, tokens: list[int], start: int) -> None:
        if self._inner is not None:
            self._inner.take(tokens, start)
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


@dataclass(slots=True)
class _Work:
    """Sums since the last report; see `messages.GrammarWork`."""

    masks: int = 0
    mask_s: float = 0.0
    compiled: int = 0
    compile_s: float = 0.0


class Matchers:
    """The grammars of one engine. clock: seconds."""

    def __init__(self, trie: LLTokenizer, clock: Callable[[], float] = time.monotonic):
        self._trie = trie
        self._clock = clock
        self._words = mask_words(trie.vocab_size)
        #: Made with the first grammar of JSON.
        self._number_ends: NumberEnds | None = None
        #: Keeps all but the tokens that end a text.
        self._no_ends = _mask_without(trie.eos_tokens, self._words)
        # All below: under the lock, since the compiling thread writes it too.
        self._lock = threading.Lock()
        self._kept: LruCache[Grammar, LLMatcher | RequestError] = LruCache(_MOST_BYTES, _bytes_of)
        self._jobs: dict[Grammar, _Job] = {}
        self._waiting: SimpleQueue[_Job] = SimpleQueue()
        self._lost = 0
        self._work = _Work()
        self._start_thread()

    def begin(self, grammar: Grammar) -> None:
        """Have a grammar compiled, unless it is."""
        with self._lock:
            if grammar in self._kept or grammar in self._jobs:
                return
            job = self._jobs[grammar] = _Job(grammar, self._clock())
        self._waiting.put(job)

    def maker(self, grammar: Grammar) -> Callable[[], GrammarMatcher] | None:
        """What makes matchers of a grammar that was begun, each at the beginning of a text; None
        while it is being compiled. Raises RequestError if it cannot be used.
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
            ends = self._number_ends if writes_json(grammar) else None
            return lambda: GrammarMatcher(found.deep_copy(), ends)
        if job is None:  # it has made room for others meanwhile
            self.begin(grammar)
        return None

    def rules(self, params: SamplingParams) -> _TokenRules:
        """What all sequences of a request share of its rules about tokens."""
        return _TokenRules(params, self._trie.vocab_size)

    def masks(self, rows: int) -> np.ndarray:
        """Room for the masks of so many rows, int32 [rows, ceil(V / 32)]."""
        return np.zeros((rows, self._words), np.int32)

    def fill(
        self, matcher: GrammarMatcher | RuledMatcher, masks: np.ndarray, row: int, *, may_end: bool
    ) -> bool:
        """Write a matcher's mask; False if there is nothing that may come next. may_end: the text
        may end here, if the grammar allows it. Raises RequestError if the grammar takes too much,
        or asks for more and no token that may be chosen goes on with it.
        """
        matcher.fill(masks, row)
        if not may_end:
            masks[row] &= self._no_ends
        if matcher.complete:
            return False
        if masks[row].any():
            return True
        if not matcher.may_end:
            raise RequestError("none of the tokens that may be chosen goes on with the grammar")
        return False

    def count_masks(self, masks: int, seconds: float) -> None:
        """So many masks took so long."""
        self._work.masks += masks
        self._work.mask_s += seconds

    def take_work(self) -> GrammarWork | None:
        """What there was to do since the last call; None if nothing was."""
        with self._lock:
            work = self._work
            if not (work.masks or work.compiled):
                return None
            self._work = _Work()
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
        if job.running and self._lost < _MOST_LOST:
            self._lost += 1
            self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._compile_all, name="grammars", daemon=True).start()

    def _compile_all(self) -> None:
        """A thread's life: compile, until its place was given to another."""
        while True:
            job = self._waiting.get()
            with self._lock:
                job.running = not job.given_up
            if job.running:
                self._compile(job)
            if job.given_up and job.running:
                with self._lock:
                    self._lost -= 1
                return

    def _compile(self, job: _Job) -> None:
        started = self._clock()
        result = self._result(job.grammar)
        with self._lock:
            if job.given_up:
                return
            del self._jobs[job.grammar]
            self._work.compiled += 1
            self._work.compile_s += self._clock() - started
            self._kept.put(job.grammar, result)

    def _result(self, grammar: Grammar) -> LLMatcher | RequestError:
        try:
            if self._number_ends is None and writes_json(grammar):
                self._number_ends = NumberEnds(self._trie)
            matcher = new_matcher(grammar, self._trie)
            matcher.compute_bitmask()  # what the lexer finds out now, copies know
        except RequestError as error:
            return error
        except BaseException:  # a panic of the library's; the thread must go on
            _log.exception("a grammar could not be compiled")
            return RequestError("the grammar could not be compiled", code="grammar_too_complex")
        return matcher


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

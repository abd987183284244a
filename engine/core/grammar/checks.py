"""Checks of grammars in child processes, which are killed if a grammar does not compile; cached."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.lru import LruCache
from jitney.engine.common.requests import Grammar, JsonDict
from jitney.engine.common.worker_pool import WorkerPool
from jitney.engine.core.grammar.grammar import schema_grammar
from jitney.engine.core.grammar.setup import Checked, CheckedGrammar, CheckerSetup
from jitney.engine.core.grammar.terms import Terms

_MODULE = "jitney.engine.core.grammar.worker"
#: Seconds that checking a grammar may take.
_TIMEOUT_S = 2.0
#: Size of the cache of results in characters, and the charge per entry.
_MOST_CHARS = 8 << 20
_CHARS_EACH = 500
#: Most schemas of one grammar that may time out; each gets the time of a whole grammar.
_MOST_ENDLESS = 2
_ENDED = ErrorInfo(
    "grammar_too_complex", "compiling the grammar takes too much memory, or ended its process"
)


class Grammars:
    """Checks grammars for a model in processes of 27 MB, started with the first grammar."""

    def __init__(
        self, special_tokens: tuple[str, ...], vocab_size: int, timeout_s: float = _TIMEOUT_S
    ):
        setup = CheckerSetup(special_tokens, vocab_size)
        self._workers = WorkerPool("compiles grammars", _MODULE, setup, Checked, timeout_s)
        self._results: LruCache[Grammar, Checked] = LruCache(
            _MOST_CHARS, lambda grammar: _CHARS_EACH + len(grammar.text)
        )
        #: Checks under way; requests for the same grammar share one.
        self._checks: dict[Grammar, asyncio.Task[Checked]] = {}
        too_long = f"compiling the grammar took longer than {timeout_s:g} s"
        #: Errors of unfinished checks: a timeout, or a process that ended.
        self._unfinished = (ErrorInfo("grammar_too_complex", too_long), _ENDED)

    async def close(self) -> None:
        await self._workers.close()

    async def checked(self, grammar: Grammar, param: str) -> CheckedGrammar:
        """The usable grammar. Raises RequestError, blamed on `param` or on a tool."""
        result = self._results.get(grammar)
        if result is None:
            # The check goes on if the client leaves: other requests may wait for it.
            result = await asyncio.shield(self._checks.get(grammar) or self._begin(grammar))
        return result.usable(param)

    def _begin(self, grammar: Grammar) -> asyncio.Task[Checked]:
        task = self._checks[grammar] = asyncio.create_task(self._check(grammar))
        task.add_done_callback(_seen)
        return task

    async def _check(self, grammar: Grammar) -> Checked:
        try:
            result = await self._answer(grammar)
            if result.error in self._unfinished:
                result = await self._without_endless(grammar, result)
        finally:
            del self._checks[grammar]
        self._results.put(grammar, result)
        return result

    async def _answer(self, grammar: Grammar) -> Checked:
        """Check a grammar in a process; one that does not finish is an error."""
        try:
            return await self._workers.ask(grammar)
        except TimeoutError:
            return Checked(None, self._unfinished[0])
        except EOFError:
            return Checked(None, self._unfinished[1])

    async def _without_endless(self, grammar: Grammar, result: Checked) -> Checked:
        """Check again without lax schemas that time out alone; `result` if there are none or
        many.
        """
        # Imported only here: no other grammar needs these rules in the server.
        from jitney.engine.core.grammar.embedding import schemas, with_schemas
        from jitney.engine.core.grammar.enforcement import Enforced, bare

        endless: list[JsonDict] = []
        for schema in schemas(grammar):
            if Terms.split(schema)[0].strict:
                continue
            alone = await self._answer(schema_grammar(schema))
            if alone.error in self._unfinished:
                endless.append(schema)
            if len(endless) > _MOST_ENDLESS:
                return result
        if not endless:
            return result
        lighter, left_out = with_schemas(
            grammar, lambda schema: bare(schema) if schema in endless else Enforced(schema, [])
        )
        result = await self._answer(lighter)
        return replace(result, unenforced=(*left_out, *result.unenforced))


def checked_here(
    special_tokens: tuple[str, ...], vocab_size: int, grammar: Grammar, param: str
) -> CheckedGrammar:
    """Check a grammar in this thread, as `Grammars.checked` does. Raises RequestError."""
    from jitney.engine.core.grammar.worker import Checker

    return Checker(CheckerSetup(special_tokens, vocab_size)).check(grammar).usable(param)


def _seen(check: asyncio.Task[Checked]) -> None:
    if not check.cancelled():
        check.exception()  # the request may have ended: retrieve it here

"""Grammars checked by a process that can be ended (`structured.worker`), so that one whose
compiling does not end costs its own request and nobody else's; and what came of them, kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict

from jitney.engine.errors import ErrorInfo, RequestError
from jitney.engine.process.children import ask_worker, end_child, start_child
from jitney.engine.structured.setup import Checked, CheckerSetup
from jitney.engine.types import Grammar

#: Seconds that checking a grammar may take, and starting the process beside other work.
_TIMEOUT_S = 2.0
_START_S = 60.0
#: Seconds that a grammar waits for those before it.
_WAIT_S = 20.0
#: What is kept of grammars that were checked: characters of their texts, and what one counts beside
#: its own.
_MOST_CHARS = 8 << 20
_CHARS_EACH = 500
_TOO_LONG = ErrorInfo(
    "grammar_too_complex", f"compiling the grammar took longer than {_TIMEOUT_S:g} s"
)
_ENDED = ErrorInfo("grammar_too_complex", "the grammar takes too much memory to compile")


class Grammars:
    """Says of the grammars of one model whether they can be used."""

    def __init__(self, setup: CheckerSetup):
        self._setup = setup
        self._kept: OrderedDict[Grammar, Checked] = OrderedDict()
        self._chars = 0
        #: Held while the process checks a grammar.
        self._turn = asyncio.Lock()
        #: Started for the first grammar.
        self._process: asyncio.subprocess.Process | None = None
        self._checks: set[asyncio.Task[Checked]] = set()
        self._closed = False

    async def close(self) -> None:
        """End the process, whatever it does."""
        self._closed = True
        await self._end()
        if self._checks:
            await asyncio.wait(self._checks)

    async def checked(self, grammar: Grammar, param: str) -> Grammar:
        """The grammar as the engine takes it. Raises RequestError, blamed on `param`, for one that
        cannot be used.
        """
        kept = self._kept.get(grammar)
        if kept is None:
            # It goes on when the client leaves: what the process does must be seen to.
            task = asyncio.create_task(self._check(grammar))
            self._checks.add(task)
            task.add_done_callback(self._over)
            kept = await asyncio.shield(task)
        else:
            self._kept.move_to_end(grammar)
        if kept.grammar is None:
            raise refusal(kept.error, param)
        return kept.grammar

    def _over(self, task: asyncio.Task[Checked]) -> None:
        self._checks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to ask for it

    async def _check(self, grammar: Grammar) -> Checked:
        try:
            await asyncio.wait_for(self._turn.acquire(), _WAIT_S)
        except TimeoutError:
            raise RequestError("too many grammars wait to be compiled", code="busy") from None
        try:
            found = self._kept.get(grammar) or await self._attempt(grammar)
        finally:
            self._turn.release()
        self._keep(grammar, found)
        return found

    async def _attempt(self, grammar: Grammar) -> Checked:
        """A process that ended while it was idle is replaced, and so, once, is one that ends over
        this grammar.
        """
        for _ in range(2):
            process = await self._ready()
            try:
                return await asyncio.wait_for(ask_worker(process, grammar, Checked), _TIMEOUT_S)
            except TimeoutError:
                await self._end()
                return Checked(None, _TOO_LONG)
            except (ConnectionError, EOFError):
                await self._end()
        return Checked(None, _ENDED)

    async def _ready(self) -> asyncio.subprocess.Process:
        """The process, started if none runs. Raises RequestError."""
        process = self._process
        if process is not None and process.returncode is None:
            return process
        try:
            process = self._process = await start_child("jitney.engine.structured.worker")
            await asyncio.wait_for(ask_worker(process, self._setup, Checked), _START_S)
        except (OSError, TimeoutError, EOFError) as error:
            await self._end()
            raise RequestError(
                "the process that compiles grammars does not start", code="busy"
            ) from error
        if self._closed:
            await self._end()
            raise RequestError("the server is shutting down", code="draining")
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                await end_child(process)

    def _keep(self, grammar: Grammar, found: Checked) -> None:
        if grammar in self._kept:
            return
        self._kept[grammar] = found
        self._chars += _CHARS_EACH + len(grammar.text)
        while self._chars > _MOST_CHARS and len(self._kept) > 1:
            oldest, _ = self._kept.popitem(last=False)
            self._chars -= _CHARS_EACH + len(oldest.text)


def check_here(setup: CheckerSetup, grammar: Grammar, param: str) -> Grammar:
    """As `Grammars.checked`, in this thread. Raises RequestError."""
    from jitney.engine.structured.worker import Checker

    found = Checker(setup).check(grammar)
    if found.grammar is None:
        raise refusal(found.error, param)
    return found.grammar


def refusal(error: ErrorInfo | None, param: str) -> RequestError:
    """Why a grammar cannot be used, blamed on the field that it came in."""
    if error is None:
        return RequestError("the grammar cannot be used", param=param)
    return RequestError(error.message, code=error.code, param=param)

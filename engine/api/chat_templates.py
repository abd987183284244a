"""Chats rendered to prompts by processes that can be ended (`text.template_worker`), so that a
template that never ends costs its own request and nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jitney.engine.errors import RequestError
from jitney.engine.process.children import ask_worker, end_child, start_child
from jitney.engine.text.template_worker import Chat, Rendered, TemplateSource

_log = logging.getLogger("jitney.api")

#: Processes, of 57 MB each. A chat of six messages takes 0.11 ms there and back (0.03 ms where it
#: is rendered here; AMD Zen 5), so one is enough; the second is for those who come while the first
#: is held up by a chat that does not end.
_WORKERS = 2
#: Seconds that a process may take to start, beside other work.
_START_S = 60.0
#: Seconds that a chat waits for a process before it is refused.
_WAIT_S = 20.0


class ChatTemplates:
    """Renders the chats of one model. timeout_s: the longest that a template may take."""

    def __init__(self, source: TemplateSource, timeout_s: float):
        self._source = source
        self._timeout_s = timeout_s
        self._places = [_Place() for _ in range(_WORKERS)]
        #: Places that render nothing at the moment.
        self._free: asyncio.Queue[_Place] = asyncio.Queue()
        for place in self._places:
            self._free.put_nowait(place)
        #: Work that goes on when the client it was for has left, and is never cancelled: a process
        #: in the middle of a chat is of no use to others, and asyncio may wait for ever for one
        #: whose start was cancelled.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes, so that the first chat need not wait. One that cannot be started is
        tried again by the chat that needs it.
        """
        starts = [self._go_on(self._ready(place)) for place in self._places]
        await asyncio.wait(starts)
        for start in starts:
            if isinstance(start.exception(), OSError):
                _log.error("the chat template's process cannot be started: %s", start.exception())

    async def close(self) -> None:
        """End all processes, whatever they do."""
        self._closed = True
        for place in self._places:
            await place.end()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def render(
        self,
        messages: Sequence[dict[str, Any]],
        most_chars: int,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text. variables: what else the template is given. Raises RequestError for
        messages that the template refuses, that keep it too long, or that make more than most_chars
        characters.
        """
        try:
            place = await asyncio.wait_for(self._free.get(), _WAIT_S)
        except TimeoutError:
            raise RequestError("too many chats wait for the chat template", code="busy") from None
        chat = Chat(list(messages), most_chars, 2 * self._timeout_s, dict(variables))
        rendered = await asyncio.shield(self._go_on(self._render_in(place, chat)))
        if rendered.too_long:
            raise RequestError(
                f"the chat template makes {rendered.too_long} characters of the messages; at most "
                f"{most_chars} are tokenised here",
                code="context_length_exceeded",
                param="messages",
            )
        if rendered.refusal:
            raise _refused(rendered.refusal)
        return rendered.text

    def _go_on[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to ask for it

    async def _render_in(self, place: _Place, chat: Chat) -> Rendered:
        """Render, and give the place back; if its process had to be ended, with a new one."""
        try:
            return await self._attempt(place, chat)
        except TimeoutError:
            await place.end()
            raise RequestError(
                f"the chat template took longer than {self._timeout_s:g} s with these messages",
                param="messages",
            ) from None
        finally:
            if place.runs:
                self._free.put_nowait(place)
            else:
                self._go_on(self._renew(place))

    async def _attempt(self, place: _Place, chat: Chat) -> Rendered:
        """A process that ended while it was idle is replaced, and so, once, is one that ends over
        this chat. Raises TimeoutError.
        """
        for _ in range(2):
            process = await self._ready(place)
            with contextlib.suppress(ConnectionError, EOFError):
                return await asyncio.wait_for(ask_worker(process, chat, Rendered), self._timeout_s)
            await place.end()
        raise _refused("its process ended over them, twice")

    async def _renew(self, place: _Place) -> None:
        """A new process for a place that lost its own; the place is free once it runs."""
        try:
            await self._ready(place)
        except OSError:
            if not self._closed:
                _log.exception("the chat template's process cannot be started")
        self._free.put_nowait(place)

    async def _ready(self, place: _Place) -> asyncio.subprocess.Process:
        """The place's process, started if it has none that runs. Raises OSError."""
        if place.process is None or not place.runs:
            place.process = await start_child("jitney.engine.text.template_worker")
            if self._closed:
                await place.end()
                raise RequestError("the server is shutting down", code="draining")
            await _load(place.process, self._source)
        return place.process


@dataclass(slots=True, eq=False)
class _Place:
    """Where a process is, or will be again."""

    process: asyncio.subprocess.Process | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def end(self) -> None:
        if self.process is not None:
            await end_child(self.process)
        self.process = None


def _refused(reason: str) -> RequestError:
    return RequestError(f"the chat template refused the messages: {reason}", param="messages")


async def _load(process: asyncio.subprocess.Process, source: TemplateSource) -> None:
    """Have the process load the template. Raises OSError."""
    try:
        await asyncio.wait_for(ask_worker(process, source, Rendered), _START_S)
    except (TimeoutError, EOFError) as error:
        await end_child(process)
        raise OSError("the chat template's process did not start") from error

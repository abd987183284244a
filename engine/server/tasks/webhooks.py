"""Sends the end of a batch or of a job to a URL, signed as in Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks), which OpenAI's clients check too. Only
addresses that the operator allows (`webhook_targets`) get any, and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import random
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.tasks.database import StoreUnavailable
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.records import Batch, Job, Task
from jitney.engine.server.tasks.store import TaskStore
from jitney.engine.server.tasks.webhook_targets import is_allowed

_log = logging.getLogger("jitney.api")

#: Seconds before each further try; after the last one it is given up.
_PAUSES_S = (5, 30, 120, 600, 3600, 3 * 3600, 6 * 3600)
#: Seconds before another try if nothing could be sent at all, because of a full disk perhaps.
_AGAIN_S = 10.0
#: Seconds that one try may take, from the connection to the status and headers of the answer.
_TIMEOUT_S = 10.0
#: Messages that are sent at once, and those of one key to one receiver.
_AT_ONCE, _OF_LANE = 64, 4
#: From so many bytes on a message is long, and of what long ones hold in memory at once.
_LONG_BYTES, _LONG_BYTES_AT_ONCE = 1 << 16, 32 << 20
_SECRET_PREFIX = "whsec_"
#: The kinds of tasks whose end is told, each with the longest column of what is told.
_KINDS = ((Batch, "metadata"), (Job, "answer"))


@dataclass(frozen=True, slots=True)
class _Message:
    """The end of a task that is due to be sent."""

    kind: type[Batch | Job]
    #: Of the task.
    id: str
    #: Key and receiving server.
    lane: tuple[str, str]
    #: Bytes of the longest thing in it.
    size: int


class _Sending(dict[str, _Message]):
    """The messages being sent, by their tasks' ids. Each key has a lane to each receiver, so that
    one that does not answer delays no other; long messages wait for long ones only.
    """

    def add(self, message: _Message) -> bool:
        """One more, if it is none of them and there is room for it and in its lane."""
        in_lane = sum(message.lane == other.lane for other in self.values())
        if self.is_full or message.id in self or in_lane >= _OF_LANE:
            return False
        sizes = [other.size for other in self.values() if other.size > _LONG_BYTES]
        if message.size > _LONG_BYTES and sum(sizes) >= _LONG_BYTES_AT_ONCE:
            return False
        self[message.id] = message
        return True

    @property
    def is_full(self) -> bool:
        return len(self) >= _AT_ONCE


def _next_at(store: TaskStore, now: float) -> float | None:
    """When the next message is due after now; None if none is."""
    query = "SELECT MIN(told_at) FROM {} WHERE told_at > ?"
    times = [store.value(query.format(kind.TABLE), now) for kind, _ in _KINDS]
    return min((time for time in times if time is not None), default=None)


def _due(store: TaskStore, now: float, sending: _Sending) -> list[_Message]:
    """The messages that are to be sent by now and for which there is room: they are added."""
    chosen: list[_Message] = []
    for kind, longest in _KINDS:
        query = f"""SELECT id, owner, webhook_url, IFNULL(LENGTH({longest}), 0) FROM {kind.TABLE}
            WHERE told_at <= ? ORDER BY told_at"""
        for id, owner, url, size in store.db.execute(query, (now,)):
            if sending.is_full:
                break
            message = _Message(kind, id, (owner, urlsplit(url).netloc.lower()), size)
            if sending.add(message):
                chosen.append(message)
    return chosen


def _tried(store: TaskStore, message: _Message, again_at: float | None) -> None:
    """A message was sent, or is to be sent again then."""
    query = f"UPDATE {message.kind.TABLE} SET attempts = attempts + 1, told_at = ? WHERE id = ?"
    store.db.execute(query, (again_at, message.id))


def _event(task: Task) -> JsonDict:
    """The message that tells of a task's end; its id is the same at every try."""
    kind, _, rest = task.id.partition("_")
    return {
        "object": "event",
        "id": f"evt_{rest}",
        "type": f"{kind}.{task.status}",
        "created_at": task.times[task.status],
        "data": task.event_data(),
    }


def _signed(secret: str, id: str, sent_at: int, body: bytes) -> dict[str, str]:
    """The headers of a message."""
    key = secret.encode()
    if secret.startswith(_SECRET_PREFIX):
        key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    content = f"{id}.{sent_at}.".encode() + body
    digest = hmac.new(key, content, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(sent_at),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }


class Webhooks:
    """Sends what is due, again and again if need be, also after a restart."""

    def __init__(self, keeper: StoreKeeper, context: ServerContext):
        self._keeper = keeper
        #: Has the URLs and the secret, which may change while it serves.
        self._context = context
        #: Something is due, or there is room for it.
        self._changed = asyncio.Event()
        self._sending = _Sending()

    def wake(self) -> None:
        """A task may be over."""
        self._changed.set()

    async def run(self) -> None:
        """Send until it is cancelled."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                try:
                    await self._begin_due(client, tasks)
                except StoreUnavailable:
                    await asyncio.sleep(_AGAIN_S)
                except Exception:
                    _log.exception("ends could not be told; it is tried again")
                    await asyncio.sleep(_AGAIN_S)

    async def _begin_due(self, client: httpx.AsyncClient, tasks: asyncio.TaskGroup) -> None:
        """Send what is due and has room, and wait for a change."""
        self._changed.clear()
        now = time.time()
        # The thread of the store has a copy: messages end while it chooses.
        for message in await self._keeper.do(_due, now, _Sending(self._sending)):
            self._sending[message.id] = message
            tasks.create_task(self._deliver(client, message))
        next_at = await self._keeper.do(_next_at, now)
        pause = None if next_at is None else max(0.0, next_at - time.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()

    async def _deliver(self, client: httpx.AsyncClient, message: _Message) -> None:
        """One try, and what comes of it. Never raises."""
        try:
            task: Task | None = await self._keeper.do(TaskStore.find, message.kind, message.id)
            if task is not None:
                await self._try(client, message, task)
        except Exception:
            _log.exception("the end of %s could not be told; it is tried again", message.id)
            await asyncio.sleep(_AGAIN_S)
        finally:
            del self._sending[message.id]
            self._changed.set()

    async def _try(self, client: httpx.AsyncClient, message: _Message, task: Task) -> None:
        problem = await self._send(client, task)
        again_at = None
        if problem and task.attempts < len(_PAUSES_S):
            again_at = time.time() + _PAUSES_S[task.attempts] * random.uniform(1.0, 1.1)
        if problem:
            self._context.trouble("webhook", problem)
            _log.warning(
                "the end of %s could not be told (%s); %s",
                message.id,
                problem,
                "it is tried again" if again_at else "it is given up",
            )
        await self._keeper.do(_tried, message, again_at)

    async def _send(self, client: httpx.AsyncClient, task: Task) -> str:
        """One try; why it failed."""
        url, event = task.webhook_url, _event(task)
        settings = self._context.settings
        secret = settings.webhook_secret
        if not secret or not is_allowed(url, settings.server.webhook_prefixes):
            return "its URL is not allowed any more"
        body = orjson.dumps(event)
        headers = _signed(secret, event["id"], int(time.time()), body)
        try:
            # What is answered is not read.
            async with (
                asyncio.timeout(_TIMEOUT_S),
                client.stream("POST", url, content=body, headers=headers) as response,
            ):
                return "" if response.is_success else f"status {response.status_code}"
        except TimeoutError:
            return f"no answer within {_TIMEOUT_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return type(error).__name__

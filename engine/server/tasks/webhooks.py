"""Webhook messages about ended batches and jobs, signed as in Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks), which OpenAI's clients can verify. They
are sent only to URLs that the operator allows (`webhook_targets`); redirects are not followed.
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

from jitney.engine.common.database import StoreUnavailable
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.records import Batch, Job, Task
from jitney.engine.server.tasks.store import TaskStore
from jitney.engine.server.tasks.webhook_targets import is_allowed

_log = logging.getLogger("jitney.api")

#: Seconds before each further attempt; after the last one the message is dropped.
_PAUSES_S = (5, 30, 120, 600, 3600, 3 * 3600, 6 * 3600)
#: Seconds before another attempt after an error of the store, such as a full disk.
_AGAIN_S = 10.0
#: Seconds for one attempt, from connecting to the headers of the answer.
_TIMEOUT_S = 10.0
#: Most concurrent messages in all, and of one key to one receiver.
_AT_ONCE, _OF_LANE = 64, 4
#: Least bytes of a long message, and most bytes of concurrent long messages.
_LONG_BYTES, _LONG_BYTES_AT_ONCE = 1 << 16, 32 << 20
_SECRET_PREFIX = "whsec_"
#: Kinds of tasks with webhooks, and the largest column of their messages.
_KINDS = ((Batch, "metadata"), (Job, "answer"))


@dataclass(frozen=True, slots=True)
class _Message:
    """A message about a task's end that is due."""

    kind: type[Batch | Job]
    #: Of the task.
    id: str
    #: Key and receiving server.
    lane: tuple[str, str]
    #: Bytes of its largest column.
    size: int


class _Sending(dict[str, _Message]):
    """The messages being sent, by task id. Each pair of key and receiver has its own limit, so that
    a receiver that does not answer delays no others; long messages wait only for long ones.
    """

    def add(self, message: _Message) -> bool:
        """Add a message if it is not being sent and the limits allow it; returns whether it was
        added.
        """
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
    """Time at which the next message is due; None if there is none."""
    query = "SELECT MIN(told_at) FROM {} WHERE told_at > ?"
    times = [store.value(query.format(kind.TABLE), now) for kind, _ in _KINDS]
    return min((time for time in times if time is not None), default=None)


def _due(store: TaskStore, now: float, sending: _Sending) -> list[_Message]:
    """Add the due messages for which there is room to `sending`; returns them."""
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
    """Record an attempt. again_at: time of the next one, if it failed."""
    query = f"UPDATE {message.kind.TABLE} SET attempts = attempts + 1, told_at = ? WHERE id = ?"
    store.db.execute(query, (again_at, message.id))


def _event(task: Task) -> JsonDict:
    """The message about a task's end; its id is the same in every attempt."""
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
    """Sends due messages with retries, also after a restart."""

    def __init__(self, keeper: StoreKeeper, context: ServerContext):
        self._keeper = keeper
        #: The settings with URLs and secret, which may change at any time.
        self._context = context
        #: Set when a message may be due, or there is room for one.
        self._changed = asyncio.Event()
        self._sending = _Sending()

    def wake(self) -> None:
        """Look for due messages: a task may have ended."""
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
                    _log.exception("webhook messages could not be sent; retrying")
                    await asyncio.sleep(_AGAIN_S)

    async def _begin_due(self, client: httpx.AsyncClient, tasks: asyncio.TaskGroup) -> None:
        """Start sending due messages within the limits, then wait for a change."""
        self._changed.clear()
        now = time.time()
        # A copy for the store's thread, since messages end meanwhile.
        for message in await self._keeper.do(_due, now, _Sending(self._sending)):
            self._sending[message.id] = message
            tasks.create_task(self._deliver(client, message))
        next_at = await self._keeper.do(_next_at, now)
        pause = None if next_at is None else max(0.0, next_at - time.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()

    async def _deliver(self, client: httpx.AsyncClient, message: _Message) -> None:
        """Send a message once and record the result. Never raises."""
        try:
            task: Task | None = await self._keeper.do(TaskStore.find, message.kind, message.id)
            if task is not None:
                await self._try(client, message, task)
        except Exception:
            _log.exception("the webhook message about %s could not be sent; retrying", message.id)
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
                "the webhook message about %s could not be sent (%s); %s",
                message.id,
                problem,
                "it is tried again" if again_at else "it is given up",
            )
        await self._keeper.do(_tried, message, again_at)

    async def _send(self, client: httpx.AsyncClient, task: Task) -> str:
        """Send a message once; returns the reason of a failure."""
        url, event = task.webhook_url, _event(task)
        settings = self._context.settings
        secret = settings.webhook_secret
        if not secret or not is_allowed(url, settings.server.webhook_prefixes):
            return "its URL is not allowed any more"
        body = orjson.dumps(event)
        headers = _signed(secret, event["id"], int(time.time()), body)
        try:
            # The body of the answer is not read.
            async with (
                asyncio.timeout(_TIMEOUT_S),
                client.stream("POST", url, content=body, headers=headers) as response,
            ):
                return "" if response.is_success else f"status {response.status_code}"
        except TimeoutError:
            return f"no answer within {_TIMEOUT_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return type(error).__name__

"""Telling the end of a batch or of a job to a URL, signed: which ends are due, as rows of a table
of the store, and how they are sent.

The form of the message and of the signature is that of Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks), which OpenAI's clients check too. Nothing
is sent to an address that the operator has not allowed, and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import random
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import orjson

from jitney.engine.api.batches.rows import while_short
from jitney.engine.api.batches.store import BatchStore, StoreUnavailable
from jitney.engine.errors import RequestError
from jitney.engine.types import JsonDict

if TYPE_CHECKING:
    from jitney.engine.api.batches.keeper import StoreKeeper

_log = logging.getLogger("jitney.api")

#: Seconds before each further try; after the last one it is given up.
_PAUSES_S = (5, 30, 120, 600, 3600, 3 * 3600, 6 * 3600)
#: Seconds before another try if we could not send anything at all, a full disk perhaps.
_AGAIN_S = 10.0
#: Seconds that the other side has for an answer.
_TIMEOUT_S = 10.0
#: Messages that are sent at once.
_AT_ONCE = 32
_SECRET_PREFIX = "whsec_"
_DOTS = re.compile(r"(?:\.|%2e){1,2}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Event:
    """What is told."""

    #: The same at every try, so that the other side knows it again.
    id: str
    #: Such as "batch.completed".
    type: str
    #: Seconds since 1970.
    created_at: int
    data: JsonDict

    @classmethod
    def of_end(cls, id: str, status: str, times: dict[str, int], more: JsonDict) -> _Event:
        """The end of a batch or of a job.

        id: "batch_..." or "job_...", and the event's own begins with "evt_".
        times: when each state was reached.
        more: what is told beside the id.
        """
        kind, _, rest = id.partition("_")
        return cls(f"evt_{rest}", f"{kind}.{status}", times[status], {"id": id} | more)

    def text(self) -> bytes:
        return orjson.dumps(
            {
                "object": "event",
                "id": self.id,
                "type": self.type,
                "created_at": self.created_at,
                "data": self.data,
            }
        )


@dataclass(frozen=True, slots=True)
class _Delivery:
    """An event that has to be told to a URL."""

    #: Of the row.
    id: str
    url: str
    event: _Event
    #: How often it was tried already.
    attempts: int


class Deliveries:
    """The rows of one table that have a `told_at`: when the next try is due. Every method blocks,
    and runs on the store's thread.
    """

    def __init__(
        self,
        table: str,
        more_of: Callable[[sqlite3.Row], JsonDict] | None = None,
        long_column: str = "metadata",
    ):
        """more_of: what is told of a row that is over, beside its id. long_column: the longest of
        what is told.
        """
        self._table = table
        self._more_of = more_of
        self._long_column = long_column

    def next_at(self, store: BatchStore) -> float | None:
        """When the next one is due; None if none is."""
        [at] = store.db.execute(f"SELECT MIN(told_at) FROM {self._table}").fetchone()
        return at

    def due(self, store: BatchStore, now: float, limit: int) -> list[_Delivery]:
        """Those that are to be told by now, at most so many, and fewer where they are long."""
        query = f"SELECT * FROM {self._table} WHERE told_at <= ? ORDER BY told_at LIMIT ?"
        rows = store.db.execute(query, (now, limit))
        return [self._delivery(row) for row in while_short(rows, self._long_column)]

    def _delivery(self, row: sqlite3.Row) -> _Delivery:
        more = {} if self._more_of is None else self._more_of(row)
        event = _Event.of_end(row["id"], row["status"], orjson.loads(row["times"]), more)
        return _Delivery(row["id"], row["webhook_url"], event, row["attempts"])

    def tried(self, store: BatchStore, id: str, again_at: float | None) -> None:
        """An event was told, or is to be told again then."""
        query = f"UPDATE {self._table} SET attempts = attempts + 1, told_at = ? WHERE id = ?"
        store.db.execute(query, (again_at, id))


def _is_allowed(url: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a URL lies under one of the prefixes: the same scheme, host and port, and a path that
    begins with theirs, whole segments.
    """
    if not url.isascii() or any(char <= " " or char == "\\" for char in url):
        return False
    try:
        parts = urlsplit(url)
        place = parts.scheme, parts.hostname, parts.port
    except ValueError:
        return False
    if parts.username is not None or parts.password is not None or parts.fragment:
        return False
    if any(_DOTS.fullmatch(segment) for segment in parts.path.split("/")):
        return False
    for prefix in prefixes:
        allowed = urlsplit(prefix)
        if place == (allowed.scheme, allowed.hostname, allowed.port) and _lies_under(
            parts.path, allowed.path
        ):
            return True
    return False


def check_webhook_url(prefixes: tuple[str, ...], url: str, param: str) -> None:
    """Raise RequestError, blaming the field `param`, for a URL that is not allowed."""
    if url and not _is_allowed(url, prefixes):
        raise RequestError("this server sends nothing to that URL (webhook_prefixes)", param=param)


def _lies_under(path: str, folder: str) -> bool:
    folder = folder.removesuffix("/")
    return path == folder or path.startswith(folder + "/")


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

    def __init__(
        self,
        keeper: StoreKeeper,
        prefixes: tuple[str, ...],
        secret: str,
        queues: Sequence[Deliveries],
    ):
        self._keeper = keeper
        self._prefixes = prefixes
        self._secret = secret
        self._queues = queues
        self._ended = asyncio.Event()

    def wake(self) -> None:
        """Something is over."""
        self._ended.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            while True:
                try:
                    await self._deliver_due(client)
                except StoreUnavailable:
                    await asyncio.sleep(_AGAIN_S)
                except Exception:
                    _log.exception("ends could not be told; it is tried again")
                    await asyncio.sleep(_AGAIN_S)

    async def _deliver_due(self, client: httpx.AsyncClient) -> None:
        """What is due, and then wait for more."""
        self._ended.clear()
        delivered = 0
        for queue in self._queues:
            due = await self._keeper.do(queue.due, time.time(), _AT_ONCE)
            await asyncio.gather(*(self._deliver(client, queue, each) for each in due))
            delivered += len(due)
        if not delivered:
            await self._sleep()

    async def _sleep(self) -> None:
        """Until the next one is due, or something has ended."""
        times = [await self._keeper.do(queue.next_at) for queue in self._queues]
        known = [at for at in times if at is not None]
        pause = max(0.0, min(known) - time.time()) if known else None
        try:
            async with asyncio.timeout(pause):
                await self._ended.wait()
        except TimeoutError:
            pass

    async def _deliver(
        self, client: httpx.AsyncClient, queue: Deliveries, delivery: _Delivery
    ) -> None:
        problem = await self._send(client, delivery)
        again_at = None
        if problem and delivery.attempts < len(_PAUSES_S):
            pause = _PAUSES_S[delivery.attempts]
            again_at = time.time() + pause * random.uniform(1.0, 1.1)
        if problem:
            _log.warning(
                "the end of %s could not be told (%s); %s",
                delivery.id,
                problem,
                "it is tried again" if again_at else "it is given up",
            )
        await self._keeper.do(queue.tried, delivery.id, again_at)

    async def _send(self, client: httpx.AsyncClient, delivery: _Delivery) -> str:
        """One try; why it failed."""
        url, body = delivery.url, delivery.event.text()
        if not self._secret or not _is_allowed(url, self._prefixes):
            return "its URL is not allowed any more"
        headers = _signed(self._secret, delivery.event.id, int(time.time()), body)
        try:
            # What is answered is not read.
            async with client.stream("POST", url, content=body, headers=headers) as response:
                return "" if response.is_success else f"status {response.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return type(error).__name__

"""Telling the end of a batch or of a job to a URL, signed: which ends are due, as rows of a table
of the store, and how they are sent.

The form of the message and of the signature is that of Standard Webhooks
(https://github.com/standard-webhooks/standard-webhooks), which OpenAI's clients check too. Nothing
is sent to an address that the operator has not allowed, and no redirect is followed. Each message
is sent by itself and has a deadline: a receiver that answers slowly delays no other one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import random
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

import httpx
import orjson

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.tasks.batches.store import BatchStore, StoreUnavailable

if TYPE_CHECKING:
    from jitney.engine.server.http.settings import ServerSettings
    from jitney.engine.server.tasks.batches.keeper import StoreKeeper

_log = logging.getLogger("jitney.api")

#: Seconds before each further try; after the last one it is given up.
_PAUSES_S = (5, 30, 120, 600, 3600, 3 * 3600, 6 * 3600)
#: Seconds before another try if we could not send anything at all, a full disk perhaps.
_AGAIN_S = 10.0
#: Seconds that one try may take, from the connection to the status and headers of the answer.
_TIMEOUT_S = 10.0
#: Messages that are sent at once, and those of one key to one receiver.
_AT_ONCE, _OF_LANE = 64, 4
#: From so many bytes on a message is long, and of what long ones hold in memory at once.
_LONG_BYTES, _LONG_BYTES_AT_ONCE = 1 << 16, 32 << 20
_SECRET_PREFIX = "whsec_"
#: Segments of a path that are no names.
_DOTS = {".", ".."}
#: Times that a path may be percent-encoded.
_MOST_ENCODINGS = 5


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


#: A key, and the server that its messages go to.
type _Lane = tuple[str, str]


class _Sent(NamedTuple):
    """A message that is being sent."""

    lane: _Lane
    #: Bytes of the longest thing in it.
    size: int


@dataclass(slots=True)
class _UnderWay:
    """The messages that are being sent. Each key has a lane to each receiver, so that one that does
    not answer keeps nobody else's waiting; long messages wait for other long ones only.
    """

    #: By the id of its row.
    sent: dict[str, _Sent] = field(default_factory=dict[str, _Sent])

    def take(self, id: str, message: _Sent) -> bool:
        """One more, if it is none of them and there is room for it and in its lane."""
        of_lane = sum(message.lane == other.lane for other in self.sent.values())
        if self.is_full or id in self.sent or of_lane >= _OF_LANE:
            return False
        if message.size > _LONG_BYTES and self._long_bytes >= _LONG_BYTES_AT_ONCE:
            return False
        self.sent[id] = message
        return True

    @property
    def is_full(self) -> bool:
        return len(self.sent) >= _AT_ONCE

    @property
    def _long_bytes(self) -> int:
        return sum(each.size for each in self.sent.values() if each.size > _LONG_BYTES)


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

    def next_at(self, store: BatchStore, now: float) -> float | None:
        """When the next one is due after now; None if none is."""
        query = f"SELECT MIN(told_at) FROM {self._table} WHERE told_at > ?"
        [at] = store.db.execute(query, (now,)).fetchone()
        return at

    def due(self, store: BatchStore, now: float, under_way: _UnderWay) -> list[_Delivery]:
        """Those that are to be told by now and for which there is room: they are under way."""
        query = f"SELECT id, owner, webhook_url, LENGTH({self._long_column}) FROM {self._table}"
        chosen: list[str] = []
        rows = store.db.execute(query + " WHERE told_at <= ? ORDER BY told_at", (now,))
        for id, owner, url, size in rows:
            if under_way.is_full:
                break
            lane = (owner, urlsplit(url).netloc.lower())
            if under_way.take(id, _Sent(lane, size or 0)):
                chosen.append(id)
        query = f"SELECT * FROM {self._table} WHERE id = ?"
        return [self._delivery(store.db.execute(query, (id,)).fetchone()) for id in chosen]

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
    target = _Target.of(url)
    allowed = [_Target.of(prefix) for prefix in prefixes]
    return target is not None and any(each and target.lies_under(each) for each in allowed)


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a message goes, read as the HTTP client reads it: names in lower case, the scheme's own
    port left out, dot segments taken away.
    """

    #: Scheme, host and port.
    server: tuple[str, bytes, int | None]
    #: As it is sent, and with nothing encoded any more.
    raw_path: str
    path: str

    @classmethod
    def of(cls, text: str) -> _Target | None:
        """None for what is no URL, names a user, or may be read in two ways."""
        if not text.isascii() or any(char <= " " or char in "\\\x7f" for char in text):
            return None
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            return None
        raw_path = url.raw_path.partition(b"?")[0].decode()
        path = _decoded(raw_path)
        if path is None or url.userinfo or url.fragment:
            return None
        return cls((url.scheme, url.raw_host, url.port), raw_path, path)

    def lies_under(self, folder: _Target) -> bool:
        """Whichever way the receiver reads the path: decoded or as it is."""
        return (
            self.server == folder.server
            and _lies_under(self.raw_path, folder.raw_path)
            and _lies_under(self.path, folder.path)
        )


def _decoded(path: str) -> str | None:
    """A path without percent-encoding, however often it was encoded; None for one that leads
    somewhere else by any of the ways in which servers read dots, backslashes and parameters.
    """
    for _ in range(_MOST_ENCODINGS):
        try:
            decoded = unicodedata.normalize("NFKC", unquote(path, errors="strict"))
        except UnicodeDecodeError:
            return None
        if decoded == path:
            break
        path = decoded
    else:
        return None
    names = [segment.partition(";")[0].strip() for segment in path.replace("\\", "/").split("/")]
    if _DOTS & set(names) or not path.isprintable():
        return None
    return path


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
        settings: Callable[[], ServerSettings],
        queues: Sequence[Deliveries],
    ):
        self._keeper = keeper
        #: As they count now: the URLs that are told, and the secret that messages are signed with.
        self._settings = settings
        self._queues = queues
        #: Something is due, or there is room for it.
        self._changed = asyncio.Event()
        self._under_way = _UnderWay()

    def wake(self) -> None:
        """Something is over."""
        self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled."""
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
        times: list[float] = []
        for queue in self._queues:
            before = dict(self._under_way.sent)
            chosen = _UnderWay(before)
            for delivery in await self._keeper.do(queue.due, now, chosen):
                self._under_way.sent[delivery.id] = chosen.sent[delivery.id]
                tasks.create_task(self._deliver(client, queue, delivery))
            next_at = await self._keeper.do(queue.next_at, now)
            times += [] if next_at is None else [next_at]
        pause = max(0.0, min(times) - time.time()) if times else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._changed.wait()

    async def _deliver(
        self, client: httpx.AsyncClient, queue: Deliveries, delivery: _Delivery
    ) -> None:
        """One try, and what comes of it. Never raises."""
        try:
            await self._try(client, queue, delivery)
        except Exception:
            _log.exception("the end of %s could not be told; it is tried again", delivery.id)
            await asyncio.sleep(_AGAIN_S)
        finally:
            del self._under_way.sent[delivery.id]
            self._changed.set()

    async def _try(self, client: httpx.AsyncClient, queue: Deliveries, delivery: _Delivery) -> None:
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
        settings = self._settings()
        secret = settings.webhook_secret
        if not secret or not _is_allowed(url, settings.server.webhook_prefixes):
            return "its URL is not allowed any more"
        headers = _signed(secret, delivery.event.id, int(time.time()), body)
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

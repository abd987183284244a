"""Reading settings of a running server again, on SIGHUP and on POST /admin/reload."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.common.key_file import read_key_file
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.terminal import hang_up
from jitney.engine.config import ServerSection
from jitney.engine.server.http.listen import AcceptedKeys, check_tls, load_certificate

if TYPE_CHECKING:
    from jitney.engine.server.http.access import ApiKeys
    from jitney.engine.server.http.connections import Connections
    from jitney.engine.server.http.reload import AdapterNews, FileNews, KeyNews, ReloadAnswer
    from jitney.engine.server.http.server_context import ServerContext

_log = logging.getLogger("jitney")

_WEBHOOK_SECRET = "webhook_secret_file"
#: Settings of [server] that are read anew for each request or message.
_READ_AT_USE = frozenset(
    {
        "key_max_concurrent",
        "key_tokens_per_minute",
        "key_files",
        "key_file_bytes",
        "key_batches",
        "key_jobs",
        _WEBHOOK_SECRET,
    }
)
#: Settings of [server] that a running server can change.
_LIVE = _READ_AT_USE | {
    "api_key_file",
    "api_keys",
    "admin_key_file",
    "admin_keys",
    "ssl_certfile",
    "ssl_keyfile",
}


async def _no_adapters() -> AdapterNews:
    from jitney.engine.server.http.reload import AdapterNews

    return AdapterNews()


@dataclass(frozen=True, slots=True)
class FreshSettings:
    """A configuration that was read again and is sound."""

    server: ServerSection
    #: Settings that differ from those of the start and take effect only at the next start.
    needs_restart: list[str]
    #: Result for the key for requests to engines, and a function that applies it.
    engine_key: FileNews = "none"
    use_engine_key: Callable[[], None] = lambda: None
    #: Loads the adapters. If it raises JitneyError (naming one), nothing has changed.
    take_adapters: Callable[[], Awaitable[AdapterNews]] = _no_adapters

    @classmethod
    def of(
        cls,
        server: ServerSection,
        before: Mapping[str, object],
        fresh: Mapping[str, object],
        *live: str,
        engine_key: FileNews = "none",
        use_engine_key: Callable[[], None] = lambda: None,
        take_adapters: Callable[[], Awaitable[AdapterNews]] = _no_adapters,
    ) -> FreshSettings:
        """The settings read now. before, fresh: all values at the start and now, by name. live:
        settings that do not need a restart, beside `_LIVE`.
        """
        names = before.keys() - _LIVE - set(live)
        changed = sorted(name for name in names if fresh[name] != before[name])
        return cls(server, changed, engine_key, use_engine_key, take_adapters)


@dataclass(eq=False)
class Reloader:
    """Reads a running server's files again. A removed key's requests and connections end, its jobs
    and batches are cancelled; what it stored stays.
    """

    #: The configuration at the start.
    server: ServerSection
    #: Reads the configuration; blocks. Raises ConfigError.
    read: Callable[[], FreshSettings]
    keys: ApiKeys
    connections: Connections
    #: The server behind the endpoint.
    host: ServerContext
    #: TLS of the listening socket; None: it speaks none.
    tls: Callable[[], ssl.SSLContext | None]
    #: Called with the settings in effect that can change, by name, and the administrators' keys.
    on_taken: Callable[[JsonDict, tuple[str, ...]], None] | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Digest of the certificate files in use.
    _certificate: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._certificate = _certificate_digest(self.server)

    async def __call__(self) -> ReloadAnswer:
        """Reload. If it raises JitneyError (naming file and field), nothing has changed."""
        from jitney.engine.server.http.reload import ReloadAnswer

        async with self._turn:
            fresh = await asyncio.to_thread(self.read)
            accepted = await asyncio.to_thread(self._checked, fresh.server)
            secret_file = fresh.server.webhook_secret_file
            secret = await asyncio.to_thread(read_key_file, secret_file, _WEBHOOK_SECRET)
            adapters = await fresh.take_adapters()
            certificate = await asyncio.to_thread(self._take_certificate, fresh.server)
            fresh.use_engine_key()
            keys = await self._take_keys(accepted)
            settings = self._take_settings(fresh.server, secret)
            if self.on_taken is not None:
                live = {name: getattr(fresh.server, name) for name in _LIVE}
                self.on_taken(live, accepted.admins)
        answer = ReloadAnswer(
            keys=keys,
            certificate=certificate,
            engine_key=fresh.engine_key,
            adapters=adapters,
            settings=settings,
            needs_restart=_needs_restart(fresh, adapters),
        )
        _log.info("read again: %s", _in_words(answer))
        return answer

    def _checked(self, server: ServerSection) -> AcceptedKeys:
        """The keys of the new settings, after checking all files. Raises ConfigError. Blocks."""
        check_tls(server)
        if bool(server.ssl_certfile) != (self.tls() is not None):
            raise ConfigError("ssl_certfile: a server begins or stops to speak TLS at a start only")
        accepted = AcceptedKeys.of(server)
        if self.keys.needed and not (accepted.users or accepted.admins):
            raise ConfigError(
                "api_key_file, api_keys, admin_key_file, admin_keys: no key is left, and without "
                "any every client would be an administrator; leave one, or start the server anew"
            )
        if not self.keys.needed and (accepted.users or accepted.admins):
            raise ConfigError(
                "api_key_file, api_keys, admin_key_file, admin_keys: this server was started "
                "without keys, and takes its first one at a start only"
            )
        return accepted

    def _take_certificate(self, server: ServerSection) -> FileNews:
        """Load the certificate files for new handshakes. Blocks."""
        context = self.tls()
        if context is None:
            return "none"
        digest = _certificate_digest(server)
        if digest == self._certificate:
            return "unchanged"
        load_certificate(context, server)
        self._certificate = digest
        return "replaced"

    def _take_settings(self, fresh: ServerSection, secret: str) -> list[str]:
        """Apply changed settings; returns their names. secret: the webhook secret."""
        before, server = self.host.settings, self.host.settings.server
        now = {name: getattr(fresh, name) for name in _READ_AT_USE}
        changed = {name for name, value in now.items() if value != getattr(server, name)}
        if secret != before.webhook_secret:
            changed.add(_WEBHOOK_SECRET)
        self.host.settings = replace(
            before, server=server.model_copy(update=now), webhook_secret=secret
        )
        self.host.quotas.limit(fresh.key_max_concurrent, fresh.key_tokens_per_minute)
        return sorted(changed)

    async def _take_keys(self, accepted: AcceptedKeys) -> KeyNews:
        from jitney.engine.common.key_file import digest_key
        from jitney.engine.server.http.reload import KeyNews

        changes = self.keys.replace(
            [digest_key(key) for key in accepted.users],
            [digest_key(key) for key in accepted.admins],
        )
        lost = changes.removed | changes.demoted
        self.connections.close_of(lost)
        requests_ended = self.keys.revoke(lost)
        jobs, batches = await self._cancelled(changes.removed)
        return KeyNews(
            added=len(changes.added),
            removed=len(changes.removed),
            changed=len(changes.demoted | changes.promoted),
            requests_ended=requests_ended,
            jobs_cancelled=jobs,
            batches_cancelled=batches,
        )

    async def _cancelled(self, removed: Collection[str]) -> tuple[int, int]:
        """(jobs, batches) cancelled of removed keys; an unreachable store is only logged."""
        try:
            assert self.host.internal_requests is not None  # the application has made them
            return await self.host.internal_requests.cancel_of(removed)
        except JitneyError as error:
            _log.error("jobs and batches of removed keys were not cancelled: %s", error)
            return 0, 0

    def listen(self, stop: Callable[[int], None]) -> None:
        """Reload on SIGHUP. stop: called instead if the terminal is gone, which sends it too."""
        tasks: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = asyncio.create_task(self.aloud())
            tasks.add(task)  # the loop itself does not hold it
            task.add_done_callback(tasks.discard)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, hang_up(stop=stop, reload=reload))

    async def aloud(self) -> None:
        """Reload and log the outcome."""
        try:
            await self()
        except JitneyError as error:
            _log.error("NOTHING WAS READ AGAIN, and all is as it was: %s", error)


def _certificate_digest(server: ServerSection) -> bytes:
    """Digest of certificate and key; of empty bytes if they cannot be read."""
    digest = hashlib.sha256()
    for name in (server.ssl_certfile, server.ssl_keyfile):
        try:
            content = Path(name).read_bytes() if name else b""
        except OSError:
            content = b""
        digest.update(len(content).to_bytes(8) + content)
    return digest.digest()


def _needs_restart(fresh: FreshSettings, adapters: AdapterNews) -> list[str]:
    """Names of settings that need a restart; `adapters` also if only their files changed."""
    names = {*fresh.needs_restart}
    if adapters.needs_restart:
        names.add("adapters")
    return sorted(names)


def _in_words(answer: ReloadAnswer) -> str:
    """One line for the log."""
    keys = answer.keys
    words = [
        f"keys: {keys.added} added, {keys.removed} removed, {keys.changed} changed",
        f"{keys.requests_ended} requests ended, {keys.jobs_cancelled} jobs and "
        f"{keys.batches_cancelled} batches cancelled",
        f"certificate: {answer.certificate}",
    ]
    if answer.engine_key != "none":
        words.append(f"engine key: {answer.engine_key}")
    for change, names in asdict(answer.adapters).items():
        if names:
            words.append(f"adapters {change.replace('_', ' ')}: {', '.join(names)}")
    if answer.settings:
        words.append(f"from now on: {', '.join(answer.settings)}")
    if answer.needs_restart:
        words.append(f"at the next start only: {', '.join(answer.needs_restart)}")
    return "; ".join(words)

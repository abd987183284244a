"""Compares the arms of a rollout every few seconds, and saves the rollout to disk."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.tasks import beside
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.rollout.candidate import ModelWithCandidate
from jitney.engine.fleet.rollout.comparison import ARMS

_log = logging.getLogger("jitney.fleet")

#: Seconds between two comparisons; timeout of a request for an engine's version, seconds.
_LOOK_S, _VERSION_S = 10.0, 5.0


@dataclass(slots=True)
class RolloutKeeper:
    """Runs the comparisons of one rollout while the fleet runs, asks its engines for the digests of
    their configurations, and saves the rollout to disk if there is a folder for it.
    """

    model: ModelWithCandidate
    client: httpx.AsyncClient
    #: Folder of the rollout's file; None: a restart of the fleet resets the rollout.
    folder: Path | None = None
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the saved rollout, and compare the arms regularly until the context is left."""
        await asyncio.to_thread(self.restore)
        self.model.keep = self.keep
        try:
            async with beside(self._look_on()):
                yield
        finally:
            await self.keep()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except Exception:
                _log.exception("rollout %s: a look failed", self.model.rollout.model)

    async def look(self) -> None:
        """Run one comparison: ask the engines for their digests, compare the arms, and save."""
        for arm in ARMS:
            replicas = [each for each in self.model.arm(arm).replicas if each.state == "ready"]
            digests = await asyncio.gather(*map(self._config_of, replicas))
            self.model.rollout.learn(arm, list(filter(None, digests)))
        self.model.rollout.look()
        await self.keep()

    async def _config_of(self, replica: Replica) -> str:
        """The digest of an engine's configuration; empty if the engine does not report one."""
        headers = {"authorization": f"Bearer {replica.key}"} if replica.key else {}
        try:
            answer = await self.client.get(
                replica.url + "/version", headers=headers, timeout=_VERSION_S
            )
            digest = answer.json()["config_digest"] if answer.status_code == 200 else ""
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""
        return digest if isinstance(digest, str) else ""

    @property
    def file(self) -> Path | None:
        """The file in which the rollout is saved; None without a folder."""
        if self.folder is None:
            return None
        return self.folder / f"rollout-{quote(self.model.rollout.model, safe='')}.json"

    async def keep(self) -> None:
        """Save the rollout to disk. A write error is logged."""
        if self.file is None:
            return
        async with self._writing:
            saved = self.model.rollout.saved()
            try:
                await asyncio.to_thread(_write, self.file, saved)
            except OSError as error:
                _log.warning("rollout %s cannot be kept: %s", self.model.rollout.model, error)

    def restore(self) -> None:
        """Continue from the file. The file of another candidate is ignored."""
        if self.file is None or not self.file.exists():
            return
        rollout = self.model.rollout
        try:
            goes_on = rollout.restore(orjson.loads(self.file.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("rollout %s begins anew: its file: %s", rollout.model, error)
            return
        how = f"goes on, {rollout.state}" if goes_on else "begins: the file is another's"
        _log.info("rollout %s: candidate %s %s", rollout.model, rollout.name, how)


def _write(file: Path, saved: JsonDict) -> None:
    part = file.with_suffix(".part")
    file.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(orjson.dumps(saved))
    os.replace(part, file)

"""Logs that a page keeps of its engine, with or without viewers: on disk, or in memory if there is
no folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Concatenate

from jitney.engine.common.database import Database, DatabaseKeeper, StoreUnavailable
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.tasks import beside
from jitney.engine.server import EngineClient, HttpError

_log = logging.getLogger("jitney.dashboard")


class LogKeeper[D: Database](DatabaseKeeper[D]):
    """The tables of a log. A folder without a name stands for memory."""

    #: The class of the tables.
    TABLES: type[D]

    def open_database(self) -> D:
        on_disk = self.folder / self.DATABASE
        return self.TABLES(on_disk if self.folder.name else Path(":memory:"))


class DiskLog[D: Database](ABC):
    """Records facts of an engine every `PAUSE_S` seconds while `at_work`. data_dir: of the server;
    None: the log ends with the server. Disk errors affect only the log, and are an incident.
    """

    #: Folder in data_dir.
    FOLDER: ClassVar[str]
    #: Seconds between two records.
    PAUSE_S: ClassVar[float]
    KEEPER: type[LogKeeper[D]]

    def __init__(self, client: EngineClient, data_dir: Path | None):
        self.client = client
        self._folder = None if data_dir is None else data_dir / self.FOLDER
        self._opening: asyncio.Task[LogKeeper[D]] | None = None

    @abstractmethod
    async def look(self, keeper: LogKeeper[D]) -> None:
        """Write all news since the last call; if that fails, the next call tries again. Raises
        StoreUnavailable.
        """

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Context in which the log is written."""
        self._opening = asyncio.create_task(self._open())
        try:
            async with beside(self._write()):
                yield
        finally:
            keeper = await self._opening
            with contextlib.suppress(StoreUnavailable):
                await self.look(keeper)  # the last news
            await keeper.close()
            self._opening = None

    @property
    def is_at_work(self) -> bool:
        return self._opening is not None

    async def ask[**P, T](
        self, function: Callable[Concatenate[D, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function with the tables on their thread. Raises StoreUnavailable while the disk
        fails, and HttpError 404 while nothing is written.
        """
        if self._opening is None:
            contents = self.KEEPER.CONTENTS
            raise HttpError(404, f"this page records no {contents}", code="not_found")
        keeper = await asyncio.shield(self._opening)
        return await keeper.do(function, *args, **kwargs)

    async def _open(self) -> LogKeeper[D]:
        trouble = self.client.history.incidents.trouble
        if self._folder is not None:
            try:
                return await self.KEEPER.open(self._folder, lambda text: trouble("store", text))
            except (ConfigError, OSError) as error:
                contents = self.KEEPER.CONTENTS
                _log.warning("%s are kept until the server ends only: %s", contents, error)
        return self.KEEPER(Path())

    async def _write(self) -> None:
        """Call `look` until cancelled, or until it fails, which is logged."""
        assert self._opening is not None
        try:
            keeper = await asyncio.shield(self._opening)
            while True:
                with contextlib.suppress(StoreUnavailable):  # already logged; tried again later
                    await self.look(keeper)
                await asyncio.sleep(self.PAUSE_S)
        except Exception:
            _log.exception("%s are not recorded any more", self.KEEPER.CONTENTS)

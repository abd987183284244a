"""`jitney batch`: answers a file of requests without a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.display import make_display
from jitney.engine.common.platforms import check_platform
from jitney.engine.common.tasks import until
from jitney.engine.common.terminal import progress_reporter, say
from jitney.engine.config import Command, Config, Flag, FlagGroup
from jitney.engine.server import Equipment

if TYPE_CHECKING:
    from jitney.engine.server import OfflineBatch, ProcessClient, Service

#: Lines in flight beyond the seats, which keep seats busy while answers are written.
_SPARE = 8
_FLAGS = (
    Flag("file", {"metavar": "FILE", "help": "file of requests, one per line"}),
    Flag.of("-o --out", "file to which answers are appended", metavar="OUT", required=True),
)
_COMMAND = Command(
    "batch",
    "Answer a file of requests (JSON Lines, as for /v1/batches) without a server. Run it again "
    "to continue where it stopped.",
    [FlagGroup(_FLAGS)],
    sections=("model", "engine", "sampling"),
    leave_out=Command.ONLY_SERVED,
    usage="jitney batch FILE -o OUT [MODEL] [FLAG ...]",
)


def run(arguments: Sequence[str]) -> int:
    """Answer the file; exit status 0 if every line got a 200, else 1."""
    from jitney.engine.server import OfflineBatch

    args = _COMMAND.parse(arguments)
    config = args.load_config()
    check_platform(config.engine.platform)
    # The default body limit depends on the model's context, which is unknown before it is loaded.
    most_bytes = config.server.body_limit or config.server.file_limit
    work = OfflineBatch(Path(args.file), Path(args.out), most_bytes)
    _answer_rest(config, work)
    counts = work.counts
    say(f"{counts.answered} lines answered in {args.out}, {counts.failed} of them with an error")
    return 1 if counts.failed else 0


def _answer_rest(config: Config, work: OfflineBatch) -> None:
    before = work.counts
    if before.answered:
        say(f"{before.answered} of {before.total} lines are answered already")
    if before.answered < before.total:
        asyncio.run(_answer_all(config, work))


async def _answer_all(config: Config, work: OfflineBatch) -> None:
    """Start an engine, answer, stop it. Raises EngineDead if the engine cannot be restarted."""
    display = make_display()
    equipment = Equipment(config, display)
    client = equipment.client
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        stack.callback(display.close)
        stack.push_async_callback(equipment.close)
        source = await equipment.find_model()
        service = _service(config, client, source.name)
        stack.callback(service.close)
        _, info = await equipment.equip(service, source)
        display.close()
        running = _run(work, service, info.sizes.seats + _SPARE)
        if await until(client.until("dead"), running):
            await client.wait_ready()  # raises the reason


def _service(config: Config, client: ProcessClient, model_name: str) -> Service:
    """The service behind the routes, without a server."""
    from jitney.engine.config import ServerSection
    from jitney.engine.server import ServerSettings, create_app

    settings = ServerSettings(server=ServerSection(body_limit=config.server.body_limit))
    return create_app(client, None, settings, model_name).state.service


async def _run(work: OfflineBatch, service: Service, in_flight: int) -> None:
    report = progress_reporter("lines")
    await work.run(service, in_flight, lambda counts: report(counts.answered, counts.total))

"""`jitney batch`: a file of requests, answered without a server."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.cli.display import Display, make_display
from jitney.engine.cli.flags import Parser, add_settings, config_from, say
from jitney.engine.config.platforms import check_platform
from jitney.engine.config.schema import Config
from jitney.engine.errors import EngineDead

if TYPE_CHECKING:
    from jitney.engine.api.batches.offline import Counts, OfflineRun
    from jitney.engine.api.service import Service
    from jitney.engine.process.supervisor import ProcessClient

#: Seconds between two lines of progress.
_TELL_S = 10.0
#: Lines in flight beyond the seats, so that none is empty while an answer is written.
_SPARE = 8


def run(arguments: Sequence[str]) -> int:
    """Exit status: 0 if every line was answered with a 200, else 1."""
    from jitney.engine.api.batches.offline import OfflineRun, lines_of

    args = _parse(arguments)
    config = config_from(args)
    check_platform(config.engine.platform)
    path = Path(args.file)
    work = OfflineRun(path, lines_of(path, config.server.body_limit), Path(args.out))
    before = work.counts
    if before.answered:
        say(f"{before.answered} of {before.total} lines are answered already")
    if before.answered < before.total:
        asyncio.run(_answer_all(config, work))
    failed = work.counts.failed
    say(f"{work.counts.answered} lines answered in {args.out}, {failed} of them with an error")
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "batch",
        "Answer a file of requests (JSON Lines, as for /v1/batches) without a server. Run it again "
        "to go on where it stopped.",
    )
    parser.usage = "jitney batch FILE -o OUT [MODEL] [FLAG ...]"
    parser.add_argument("file", metavar="FILE", help="the requests, one a line")
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="file that the answers are added to"
    )
    add_settings(parser, ("model", "engine", "sampling"))
    return parser.parse(arguments)


async def _answer_all(config: Config, work: OfflineRun) -> None:
    """Start an engine, answer, stop it. Raises EngineDead if it is lost for good."""
    from jitney.engine.process.supervisor import ProcessClient

    display = make_display()
    client = ProcessClient(config, on_progress=display.progress)
    service: Service | None = None
    try:
        service = await _service(config, client, display)
        info = await client.wait_ready()
        display.close()
        answering = asyncio.create_task(_run(work, service, info.seats + _SPARE))
        dead = asyncio.create_task(client.until("dead"))
        await asyncio.wait((answering, dead), return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if not answering.done():
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            await client.wait_ready()  # raises the reason
            raise EngineDead("the engine is gone")
        answering.result()
    finally:
        display.close()
        await client.close()
        if service is not None:
            await _close(service)


async def _service(config: Config, client: ProcessClient, display: Display) -> Service:
    """What the routes need, and no server. Raises ModelError."""
    from jitney.engine.api.app import create_app
    from jitney.engine.api.chat_templates import ChatTemplates
    from jitney.engine.api.settings import ServerSettings
    from jitney.engine.cli.serve import find_model
    from jitney.engine.text.tokenizer import load_tokenizer

    source = await asyncio.to_thread(find_model, config, display)
    await client.start()
    tokenizer = await asyncio.to_thread(load_tokenizer, source, config.model.chat_template)
    settings = ServerSettings(body_limit=config.server.body_limit)
    service = create_app(client, tokenizer, settings, source.name).state.service
    if tokenizer.template_source is not None:
        service.chat_templates = ChatTemplates(
            tokenizer.template_source, config.server.template_timeout_s
        )
        await service.chat_templates.start()
    return service


async def _close(service: Service) -> None:
    if service.chat_templates is not None:
        await service.chat_templates.close()
    service.close()


async def _run(work: OfflineRun, service: Service, in_flight: int) -> None:
    from jitney.engine.api.batches.execution import LineExecutor
    from jitney.engine.api.routes import ROUTES
    from jitney.engine.api.routing import RouteTable

    executor = LineExecutor(service, RouteTable(ROUTES), background=False)
    told_at = time.monotonic()

    def tell(counts: Counts) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _TELL_S:
            told_at = time.monotonic()
            say(f"{counts.answered} of {counts.total} lines")

    await work.run(executor, in_flight, tell)

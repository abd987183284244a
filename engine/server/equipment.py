"""Assembles the parts of `jitney serve`: model, engine, tokenizer, helper processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.child_process import child_environ, end_child, start_child
from jitney.engine.common.display import Display
from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.messages import Progress
from jitney.engine.config import Config
from jitney.engine.core import check_fits

if TYPE_CHECKING:
    from jitney.engine.common.engine_info import EngineInfo
    from jitney.engine.core import ChatTemplates, Grammars, ModelSource, Tokenizer
    from jitney.engine.server.http.reload import AdapterNews
    from jitney.engine.server.http.service import Service


#: The module that tries a tokenizer, and its limits: CPU seconds, memory, seconds.
_TRIAL = "jitney.engine.core.text.tokenizer_trial"
_TRIAL_CPU_S, _TRIAL_GIB, _TRIAL_S = 20, 4, 180.0


class Equipment:
    """Fetches a model's files, starts its engine, and prepares a service to answer requests."""

    def __init__(self, config: Config, display: Display):
        from jitney.engine.server.process.process_client import ProcessClient

        self.config = config
        #: The engine's process.
        self.client = ProcessClient(config, on_progress=display.progress)
        self.display = display
        #: Renders chats, once the model's template is known.
        self.chat_templates: ChatTemplates | None = None
        #: Checks grammars, once the engine is ready.
        self.grammars: Grammars | None = None

    async def find_model(self) -> ModelSource:
        """The model's files, fetched if need be. Raises ModelError, ConfigError."""
        source = await _in_thread(self._find_model)
        check_fits(self.config, source.config)
        names = self.config.server.served_model_name or (source.name,)
        _check_adapter_names(self.config, names)
        return source

    def _find_model(self) -> ModelSource:
        from jitney.engine.core import ModelSource

        def report(stage: str, done: int, total: int, detail: str) -> None:
            self.display.progress(Progress(stage, done, total, detail))

        source = ModelSource.of(self.config, report)
        ModelSource.draft_of(self.config, source.config, report)  # fetch it for the engine
        return source

    async def equip(self, service: Service, source: ModelSource) -> tuple[Tokenizer, EngineInfo]:
        """Prepare the service and wait until the engine is ready. Raises JitneyError."""
        await self.client.start()
        await _try_tokenizer(source)
        tokenizer = await _in_thread(lambda: self._load_tokenizer(source))
        service.text.chat_templates = await self._start_chat_templates(tokenizer)
        await _in_thread(lambda: service.turns.learn_format(tokenizer))
        await service.turns.learn_abilities(tokenizer)
        service.tokenizer = tokenizer
        if source.config.encoder is None:  # an encoder generates no text
            self.client.learn(await _in_thread(lambda: tokenizer.json))
        info = await self.client.wait_ready()
        service.text.grammars = self.grammars = _new_grammars(tokenizer, info)
        return tokenizer, info

    async def take_adapters(self, service: Service, config: Config) -> AdapterNews:
        """Make the engine serve the adapters of `config`. While it is not ready, unchanged ones
        need nothing: it has read them or will.
        """
        from jitney.engine.server.http.reload import AdapterNews

        adapters, before = config.model.adapters, self.client.config.model.adapters
        if adapters == before and (not adapters or self.client.state != "ready"):
            return AdapterNews()
        _check_adapter_names(config, service.model_names)
        done = await self.client.set_adapters(adapters)
        return AdapterNews(done.added, done.removed, done.replaced, done.needs_restart)

    def _load_tokenizer(self, source: ModelSource) -> Tokenizer:
        from jitney.engine.core import Tokenizer

        return Tokenizer.load(source, self.config.model.chat_template)

    async def _start_chat_templates(self, tokenizer: Tokenizer) -> ChatTemplates | None:
        """Start the renderers of chats; None for a model without a template."""
        from jitney.engine.core import ChatTemplates

        source = tokenizer.template_source
        if source is None:
            return None
        self.chat_templates = ChatTemplates(source, self.config.server.template_timeout_s)
        await self.chat_templates.start()
        return self.chat_templates

    async def close(self) -> None:
        for pool in filter(None, (self.chat_templates, self.grammars)):
            await pool.close()


def _check_adapter_names(config: Config, names: Iterable[str]) -> None:
    """Raise ConfigError for an adapter with one of the model's names."""
    for name in names:
        if name in config.model.adapter_folders:
            raise ConfigError(f"adapters: {name!r} is what the model itself is called")


async def _try_tokenizer(source: ModelSource) -> None:
    """Try a tokenizer in a child process, within limits: 2 s of CPU. Raises ModelError."""
    if source.kind == "tiny":
        return
    # The stacks of many threads would count as memory.
    environ = child_environ() | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    nowhere = asyncio.subprocess.DEVNULL
    limits = str(_TRIAL_CPU_S), str(_TRIAL_GIB)
    process = await start_child(
        _TRIAL, source.path, *limits, stdout=nowhere, stderr=nowhere, env=environ
    )
    try:
        status = await asyncio.wait_for(process.wait(), _TRIAL_S)
    except TimeoutError:
        status = None
    finally:
        await end_child(process)
    if status != 0:
        file = Path(source.path, "tokenizer.json") if source.kind == "hf" else source.path
        raise ModelError(
            f"{file}: the tokenizer cannot be used. Reading it and using it once takes more than "
            f"{_TRIAL_CPU_S} s of processor time or {_TRIAL_GIB} GiB of memory, or ends the "
            "process that does it; replace the file by the model's original"
        )


def _new_grammars(tokenizer: Tokenizer, info: EngineInfo) -> Grammars:
    from jitney.engine.core import Grammars

    return Grammars(tokenizer.special_names, info.model.vocab_size)


async def _in_thread[T](work: Callable[[], T]) -> T:
    """Run blocking work, such as a download, on a thread that the program's end does not await."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # cannot be cancelled any more

    def body() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return await asyncio.wrap_future(future)

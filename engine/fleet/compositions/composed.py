"""All models of a fleet by name: composed models, and models that engines serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import Section
from jitney.engine.fleet.compositions.answering import Answering, ModelAnswer, ModelStream
from jitney.engine.fleet.compositions.cascade import Cascade, CascadeSettings
from jitney.engine.fleet.compositions.ensemble import Ensemble, EnsembleSettings
from jitney.engine.fleet.compositions.pipeline import Pipeline, PipelineSettings
from jitney.engine.fleet.request import ProxiedRequest

#: Kind of composed model -> the class of its settings in fleet.toml.
COMPOSED_KINDS: dict[str, type[Section]] = {
    "cascade": CascadeSettings,
    "ensemble": EnsembleSettings,
    "pipeline": PipelineSettings,
}
#: Fields of a stage that a model card does not show: templates and texts.
_HIDDEN_FIELDS = {
    "prompt",
    "system",
    "scored",
    "candidates",
    "fields",
    "query",
    "documents",
    "file",
    "prefix",
}
_HIDDEN = {"stages": {"__all__": _HIDDEN_FIELDS}}


type _Settings = CascadeSettings | EnsembleSettings | PipelineSettings


def _composed_of(models: Mapping[str, Any]) -> dict[str, _Settings]:
    kinds = (CascadeSettings, EnsembleSettings, PipelineSettings)
    return {name: each for name, each in models.items() if isinstance(each, kinds)}


def _check_no_cycle(composed: Mapping[str, _Settings], path: list[str]) -> None:
    settings = composed.get(path[-1])
    for part in settings.parts if settings else ():
        if part in path:
            shown = " -> ".join([*path[path.index(part) :], part])
            raise ConfigError(f"[models.{part}] is made of itself: {shown}; break the circle")
        _check_no_cycle(composed, [*path, part])


def _made(settings: _Settings, models: Answering, folder: Path) -> Cascade | Ensemble | Pipeline:
    """Build a composed model. folder: base of its file paths. Raises ConfigError."""
    match settings:
        case CascadeSettings():
            return Cascade(settings, models)
        case EnsembleSettings():
            return Ensemble(settings, models)
        case PipelineSettings():
            return Pipeline(settings, models, folder)


class ComposedModels:
    """`Answering` for every name of a fleet; models that are not composed go to `engines`."""

    def __init__(self, models: Mapping[str, Any], engines: Answering, folder: Path = Path()):
        """models: see `check`. folder: base of the settings' file paths. Raises ConfigError."""
        self.check(models)
        self._engines = engines
        self._settings = _composed_of(models)
        self._models = {name: _made(each, self, folder) for name, each in self._settings.items()}

    @staticmethod
    def check(models: Mapping[str, Any]) -> None:
        """Raise ConfigError, one line, for parts that do not exist and for models that contain
        themselves.

        models: settings by name, including models that engines serve.
        """
        composed = _composed_of(models)
        served = [name for name in models if name not in composed]
        for name, settings in composed.items():
            for part in settings.parts:
                if part not in served and part not in composed:
                    model_names = ", ".join([*served, *composed])
                    raise ConfigError(
                        f"[models.{name}] is made of {part!r}, which is no model of this fleet; "
                        f"there are: {model_names}"
                    )
            for part in settings.scoring:
                if part not in served:
                    raise ConfigError(
                        f"[models.{name}] scores or embeds texts by {part!r}, which is made of "
                        "models; name one that engines serve"
                    )
        for name in composed:
            _check_no_cycle(composed, [name])

    async def start(self) -> None:
        """Start the processes of the pipelines."""
        await asyncio.gather(*(pipeline.start() for pipeline in self._pipelines))

    async def close(self) -> None:
        """Stop the processes of the pipelines."""
        await asyncio.gather(*(pipeline.close() for pipeline in self._pipelines))

    @property
    def _pipelines(self) -> list[Pipeline]:
        """The pipelines, the only composed models with processes of their own."""
        return [model for model in self._models.values() if isinstance(model, Pipeline)]

    def ready(self, name: str, is_ready: Callable[[str], bool]) -> bool:
        """Whether a model can answer now. is_ready: answers this for models that engines serve."""
        settings = self._settings.get(name)
        if settings is None:
            return is_ready(name)

        def ready(part: str) -> bool:
            return self.ready(part, is_ready)

        match settings:
            case CascadeSettings():
                return ready(settings.large)  # the large model answers if the small one fails
            case EnsembleSettings():
                return any(map(ready, settings.models)) and all(map(ready, settings.scoring))
        return all(map(ready, settings.parts))

    def own_fields(self, name: str) -> set[str]:
        """Fields of a request that a model or a part of it reads in addition to the route's."""
        settings = self._settings.get(name)
        if settings is None:
            return set()
        of_parts = map(self.own_fields, settings.parts)
        own = settings.own_fields if isinstance(settings, PipelineSettings) else set[str]()
        return own.union(*of_parts)

    def made_of(self, name: str) -> JsonDict:
        """A model's parts, as /v1/models shows them."""
        return self._settings[name].model_dump(exclude=_HIDDEN, exclude_none=True)

    async def answer(self, request: ProxiedRequest) -> ModelAnswer:
        """Answer by the named model. Raises HttpError, RequestError."""
        model = self._models.get(request.model)
        return await (self._engines if model is None else model).answer(request)

    def stream(self, request: ProxiedRequest) -> AbstractAsyncContextManager[ModelStream]:
        """The named model's stream. Raises HttpError, RequestError when the context is entered."""
        model = self._models.get(request.model)
        return (self._engines if model is None else model).stream(request)

    async def seats(self, model: str) -> int | None:
        composed = self._models.get(model)
        return await (self._engines.seats(model) if composed is None else composed.seats())

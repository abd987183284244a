"""Where `jitney config` reads settings: files here, running servers elsewhere."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import httpx
import msgspec

from jitney.engine.checkpoints.sources import ModelSource
from jitney.engine.cli.sizes import ServerSizes
from jitney.engine.config.digest import ConfigReport, configuration_digest
from jitney.engine.config.layers import Layered
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError, JitneyError, ModelError

_TIMEOUT_S = 10.0
#: What a status means to who asked.
_REFUSALS = {
    401: "an API key is needed: set JITNEY_ENGINE_KEY, or give --key-file",
    403: "an administrator's key is needed",
    404: "it does not tell its settings; is this a Jitney engine of this version?",
}


class _Untold(JitneyError):
    """A server does not tell its settings."""


def settings_here(file: str | None) -> ConfigReport:
    """What a server that is started here with this file is set to: file, environment, and the sizes
    that an earlier start measured.
    """
    return _report(ServerSizes(Layered.load(file, os.environ)).as_served())


def settings_of(place: str, key: str) -> ConfigReport:
    """Of a file alone, or of the server at a URL. key: an administrator's, empty if it needs none.
    Raises ConfigError and Untold.
    """
    if "://" in place:
        return _asked(place, key)
    return _report(Layered.load(place))


def digest_here(config: Config) -> str:
    """The digest of an engine with this configuration; empty where the model or an adapter is not
    here, so that nobody knows what it is.
    """
    try:
        source = ModelSource.local(config.model.id)
    except ModelError:
        return ""
    adapters = config.model.adapter_folders
    if source is None or not all(
        Path(folder).expanduser().is_dir() for folder in adapters.values()
    ):
        return ""
    identity = source.identity(adapters)
    return configuration_digest(config, model=identity, version=version("jitney"))


def _report(layered: Layered) -> ConfigReport:
    digest = digest_here(layered.config)
    return ConfigReport.of(layered, version=version("jitney"), config_digest=digest)


def _asked(url: str, key: str) -> ConfigReport:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = url.rstrip("/") + "/config"
    try:
        answer = httpx.get(address, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
    except httpx.HTTPError as error:
        raise _Untold(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    if answer.status_code != 200:
        why = _REFUSALS.get(answer.status_code, f"it answers {answer.status_code}")
        raise _Untold(f"{url}: {why}")
    return _read(url, answer.content)


def _read(url: str, answer: bytes) -> ConfigReport:
    try:
        return msgspec.json.decode(answer, type=ConfigReport)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _Untold(f"{url}: {_REFUSALS[404]}") from None

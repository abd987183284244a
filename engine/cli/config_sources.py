"""Where `jitney config` reads settings: files here, running servers elsewhere."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import msgspec

from jitney.engine.cli.asking import Refused, ask
from jitney.engine.common.errors import ModelError
from jitney.engine.config import Config, ConfigReport, ResolvedConfig, configuration_digest
from jitney.engine.core import ModelSource
from jitney.engine.lab import ServerSizes

_NOT_TOLD = "it does not tell its settings; is this a Jitney engine of this version?"


def settings_here(file: str | None) -> ConfigReport:
    """What a server that is started here with this file is set to: file, environment, and the sizes
    that an earlier start measured.
    """
    return _report(ServerSizes(ResolvedConfig.load(file, os.environ)).as_served())


def settings_of(place: str, key: str) -> ConfigReport:
    """Of a file alone, or of the server at a URL. key: an administrator's, empty if it needs none.
    Raises ConfigError and Refused.
    """
    if "://" in place:
        return _asked(place, key)
    return _report(ResolvedConfig.load(place))


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


def _report(resolved: ResolvedConfig) -> ConfigReport:
    digest = digest_here(resolved.config)
    return ConfigReport.of(resolved, version=version("jitney"), config_digest=digest)


def _asked(url: str, key: str) -> ConfigReport:
    try:
        return msgspec.json.decode(ask(url, "/config", key, {404: _NOT_TOLD}), type=ConfigReport)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Refused(f"{url}: {_NOT_TOLD}") from None

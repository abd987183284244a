"""One name for a running configuration: the digest of all that decides its answers and its speed.
Jax-free.

Two engines with the same digest answer alike and as fast, on machines that are alike; two with
different ones may not. Where an engine listens, who may reach it, where it keeps files and what it
tells of itself is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from jitney.engine.config.layers import Setting, settings
from jitney.engine.config.schema import Config
from jitney.engine.types import JsonDict

#: Characters of a digest that are enough for people to tell configurations apart.
_SHORT = 12
#: Settings, by flat name, that are no part of a digest.
_LEFT_OUT = frozenset(
    (
        # the model's identity stands for them
        "model",
        "revision",
        "adapters",
        # which of a machine's devices, which of several hosts, and what only the start has from
        "device",
        "coordinator",
        "host_id",
        "compilation_cache",
        # the sizes that were chosen count, not by whom
        "measured_sizes",
        # where it listens, and who may reach it
        "host",
        "port",
        "api_key_file",
        "api_keys",
        "admin_key_file",
        "admin_keys",
        "insecure",
        "allowed_hosts",
        "ssl_certfile",
        "ssl_keyfile",
        "root_path",
        "trusted_proxies",
        "cors_origins",
        "served_model_name",
        # what it keeps for clients, and whom it tells
        "data_dir",
        "file_limit",
        "key_files",
        "key_file_bytes",
        "key_batches",
        "key_jobs",
        "batch_lines",
        "webhook_prefixes",
        "webhook_secret_file",
        "responses_kept",
        "responses_bytes",
        "responses_ttl_s",
        # what it tells of itself
        "metrics_compat",
        "dashboard_show_text",
        "log_level",
        "record",
        # when it comes and goes
        "keep_alive_s",
        "drain_s",
        "heartbeat_s",
        "start_timeout_s",
        "max_restarts",
    )
)
#: Settings that may name a file: what stands in it counts, not where it lies. And what they say
#: where they name none.
_FILES = ("chat_template", "generation_config")
_NO_FILE = ("", "auto", "none")


def is_counted(setting: Setting) -> bool:
    """True for settings that are part of a digest."""
    return setting.name not in _LEFT_OUT


def configuration_digest(config: Config, *, model: str, version: str) -> str:
    """SHA-256, 64 hexadecimal digits. model: the model's identity
    (`jitney.engine.checkpoints.identity`). version: of Jitney.
    """
    facts = {"jitney": version, "model": model, "settings": _counted(config)}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def short(digest: str) -> str:
    """As people read it; empty where there is none."""
    return digest[:_SHORT]


def _counted(config: Config) -> JsonDict:
    """Values by flat name."""
    return {
        setting.name: _identity(setting, getattr(getattr(config, setting.section), setting.key))
        for setting in settings().values()
        if is_counted(setting)
    }


def _identity(setting: Setting, value: object) -> object:
    """The value, or of one that names a file what stands in it."""
    if setting.name not in _FILES or value in _NO_FILE:
        return value
    file = Path(str(value)).expanduser()
    if not file.is_file():
        return value
    return hashlib.sha256(file.read_bytes()).hexdigest()

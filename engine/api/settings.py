"""What the HTTP side may do, decided before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

#: Open without a key: an orchestrator's probes carry none, and they say nothing about requests.
PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and keys of the HTTP generation endpoint. Sizes are bytes, times seconds.

    api_keys: `digest_key` of each accepted key; empty means no key is asked for. public_paths:
    exact paths that need none; public_prefixes: paths below these look after keys themselves (the
    page has its own sign-in). hosts: accepted Host names (without port), None for any.
    max_chars_per_token times the context length is the longest text that is tokenised at all.
    header_wait_s: how long a stream's status line waits for the engine's first word.
    request_timeout_s: the deadline of a request that names none, and the longest it may name; 0 for
    no limit. stall_s: an engine that shows no sign of life for so long is not ready.
    key_max_concurrent, key_tokens_per_minute: open requests, and prompt and output tokens, of one
    key (all who need none count as one); 0 for no limit.
    """

    api_keys: tuple[str, ...] = ()
    public_paths: frozenset[str] = PROBES
    public_prefixes: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    body_limit: int = 1 << 20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 10.0
    max_depth: int = 64
    max_messages: int = 4096
    max_choices: int = 128
    max_chars_per_token: int = 8
    tokenize_threads: int = 2
    tokenize_timeout_s: float = 10.0
    request_timeout_s: float = 0.0
    header_wait_s: float = 10.0
    keep_alive_s: float = 15.0
    stall_s: float = 30.0
    key_max_concurrent: int = 0
    key_tokens_per_minute: int = 0
    metrics_compat: Literal["", "vllm"] = ""


def digest_key(key: str) -> str:
    """The form in which a key is kept and compared: SHA-256, hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()

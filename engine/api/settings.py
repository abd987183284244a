"""What the HTTP side may do, decided before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and keys of the HTTP generation endpoint. Sizes are bytes, times seconds."""

    #: `digest_key` of each accepted key, of users and of administrators (`access.Role`); where both
    #: are empty no key is asked for, and everybody is an administrator.
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    #: Of routes outside the table: exact paths that need no key, and beginnings of paths that look
    #: after keys themselves (the page has its own sign-in).
    public_paths: frozenset[str] = frozenset()
    public_prefixes: tuple[str, ...] = ()
    #: Accepted Host names, lower case, without port; None for any.
    allowed_hosts: tuple[str, ...] | None = None
    #: Origins ("https://example.org") whose pages may send requests here; "*": all.
    cors_origins: tuple[str, ...] = ()
    #: How the model's calls and thoughts are read, by the names of
    #: `engine.conversation.formats`.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    #: What requests may call the model, the first one in answers; empty: its own name.
    served_model_names: tuple[str, ...] = ()
    body_limit: int = 1 << 20
    #: How long the head and the body of a request may take to arrive.
    header_timeout_s: float = 10.0
    body_timeout_s: float = 10.0
    #: How long a client may take to read what is written to it.
    write_timeout_s: float = 30.0
    max_connections: int = 1024
    tokenize_timeout_s: float = 10.0
    #: Deadline of a request that names none, and the longest it may name; 0 for no limit.
    request_timeout_s: float = 0.0
    #: How long a stream's status line waits for the engine's first output: the engine refuses a
    #: request within a step, and that should be a status. Who waits longer gets a sign of life.
    header_wait_s: float = 1.0
    #: Time without output after which a stream sends a comment.
    keep_alive_s: float = 15.0
    #: An engine without a sign of life for so long is not ready.
    stall_s: float = 30.0
    #: Open sequences, and prompt and output tokens a minute, of one key (all who need none count as
    #: one); 0 for no limit.
    key_max_concurrent: int = 0
    key_tokens_per_minute: int = 0
    #: Where files and batches are kept; None: nowhere.
    data_dir: Path | None = None
    #: Bytes of one file; files and their bytes, and batches under way, of one key; lines of a
    #: batch.
    file_limit: int = 200 << 20
    key_files: int = 1000
    key_file_bytes: int = 4 << 30
    key_batches: int = 100
    #: Jobs under way, of one key.
    key_jobs: int = 2000
    batch_lines: int = 50_000
    #: Beginnings of URLs that the end of a batch may be told to, and what such messages are signed
    #: with.
    webhook_prefixes: tuple[str, ...] = ()
    webhook_secret: str = ""
    #: Responses that are kept, the bytes of all, and seconds that one is.
    responses_kept: int = 1000
    responses_bytes: int = 64 << 20
    responses_ttl_s: float = 86_400.0
    #: "vllm": metrics under vLLM's names too.
    metrics_compat: Literal["", "vllm"] = ""


def digest_key(key: str) -> str:
    """The form in which a key is kept and compared: SHA-256, hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()

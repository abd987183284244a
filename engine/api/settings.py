"""What the HTTP side may do, decided before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jitney.engine.config.schema import ServerSection

#: Says what most of the numbers are where nobody says otherwise.
_SECTION = ServerSection()


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
    body_limit: int = _SECTION.body_limit
    #: How long the head and the body of a request may take to arrive.
    header_timeout_s: float = 10.0
    body_timeout_s: float = 10.0
    #: How long a client may take to read what is written to it.
    write_timeout_s: float = _SECTION.write_timeout_s
    max_connections: int = _SECTION.max_connections
    tokenize_timeout_s: float = 10.0
    #: Deadline of a request that names none, and the longest it may name; 0 for no limit.
    request_timeout_s: float = _SECTION.request_timeout_s
    #: How long a stream's status line waits for the engine's first output: the engine refuses a
    #: request within a step, and that should be a status. Who waits longer gets a sign of life.
    header_wait_s: float = 1.0
    #: Time without output after which a stream sends a comment.
    keep_alive_s: float = 15.0
    #: An engine without a sign of life for so long is not ready.
    stall_s: float = 30.0
    #: Open sequences, and prompt and output tokens a minute, of one key (all who need none count as
    #: one); 0 for no limit.
    key_max_concurrent: int = _SECTION.key_max_concurrent
    key_tokens_per_minute: int = _SECTION.key_tokens_per_minute
    #: Where files and batches are kept; None: nowhere.
    data_dir: Path | None = None
    #: Bytes of one file; files and their bytes, and batches under way, of one key; lines of a
    #: batch.
    file_limit: int = _SECTION.file_limit
    key_files: int = _SECTION.key_files
    key_file_bytes: int = _SECTION.key_file_bytes
    key_batches: int = _SECTION.key_batches
    #: Jobs under way, of one key.
    key_jobs: int = _SECTION.key_jobs
    batch_lines: int = _SECTION.batch_lines
    #: Beginnings of URLs that the end of a batch may be told to, and what such messages are signed
    #: with.
    webhook_prefixes: tuple[str, ...] = ()
    webhook_secret: str = ""
    #: Responses that are kept, the bytes of all, and seconds that one is.
    responses_kept: int = _SECTION.responses_kept
    responses_bytes: int = _SECTION.responses_bytes
    responses_ttl_s: float = _SECTION.responses_ttl_s
    #: "vllm": metrics under vLLM's names too.
    metrics_compat: Literal["", "vllm"] = ""


def digest_key(key: str) -> str:
    """The form in which a key is kept and compared: SHA-256, hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()

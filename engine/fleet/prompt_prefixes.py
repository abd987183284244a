"""Prefixes of prompts, by which requests with a common prefix go to the replica with its pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import dropwhile
from typing import Any

import orjson

from jitney.engine.common.requests import JsonObject
from jitney.engine.fleet.request import ProxiedRequest

#: Fields that may hold the prompt, depending on the route: the first one that a body has counts.
_PROMPTS = ("messages", "prompt", "input", "input_prefix", "content", "query", "text_1", "queries")
#: Roles of messages that all conversations may share.
_SYSTEM = ("system", "developer")
#: Most prefixes of a prompt, and most characters of the longest; later text makes no difference.
_MOST_PREFIXES, _MOST_CHARS = 512, 1 << 20


def prefix_key(request: ProxiedRequest, chars: int) -> bytes:
    """The tenant and the start of the prompt, or the client's name for the conversation
    (`prompt_cache_key`, the header x-session-id).

    chars: characters of a prompt, or of the first message after the system messages. System
    messages and tools count in full, so that the text after them distinguishes conversations that
    share them.
    """
    fields = request.fields
    named = fields.get("prompt_cache_key") or request.header(b"x-session-id")
    if named:
        return request.tenant + str(named).encode()
    salt = str(fields.get("cache_salt") or "")
    shared = "\0".join([request.adapter, salt, *_start(fields, chars)])
    return request.tenant + shared.encode(errors="replace")


def prompt_prefixes(request: ProxiedRequest, chars: int) -> list[bytes]:
    """The prefixes of a prompt, the shortest first: `prefix_key`, then a digest after each message
    that follows the system messages, or after every `chars` characters of a text. A conversation's
    next turn has all of them and more.
    """
    key = prefix_key(request, chars)
    prefixes, digest, counted = [key], blake2b(key, digest_size=16), 0
    for part in _parts(request.fields, chars):
        counted += len(part)
        if counted > _MOST_CHARS or len(prefixes) > _MOST_PREFIXES:
            break
        digest.update(len(part).to_bytes(8))
        digest.update(part)
        prefixes.append(digest.digest())
    return prefixes


def _parts(fields: JsonObject, chars: int) -> Iterator[bytes]:
    """The complete parts of the prompt; a text's last, incomplete part is left out, since it may be
    longer in the next turn.
    """
    prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), "")
    if isinstance(prompt, list) and any(isinstance(item, dict) for item in prompt):
        yield from map(orjson.dumps, dropwhile(_is_system, prompt))
        return
    if not isinstance(prompt, str | list):
        return
    for end in range(chars, len(prompt) + 1, chars):
        yield _text(prompt[end - chars : end]).encode(errors="replace")


def _is_system(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in _SYSTEM


def _start(fields: JsonObject, chars: int) -> Iterator[str]:
    for name in ("system", "instructions", "tools"):
        if fields.get(name):
            yield _text(fields[name])
    prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), None)
    if not isinstance(prompt, list):
        yield _text(prompt)[:chars] if prompt else ""
    elif any(isinstance(item, dict) for item in prompt):
        yield from _first_messages(prompt, chars)
    else:
        yield _text(prompt[:chars])[:chars]


def _first_messages(messages: Sequence[Any], chars: int) -> Iterator[str]:
    """The system messages, and the start of the first other message."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        if not _is_system(message):
            yield _text(content)[:chars]
            return
        yield _text(content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()

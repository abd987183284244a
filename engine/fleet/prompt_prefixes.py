"""Prefixes of prompts: requests with a common one should find each other's pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import dropwhile
from typing import Any

import orjson

from jitney.engine.common.requests import JsonObject
from jitney.engine.fleet.request import ProxiedRequest

#: Fields that hold the prompt, by the route's form: the first that a body has counts.
_PROMPTS = ("messages", "prompt", "input", "input_prefix", "content", "query", "text_1", "queries")
#: Roles whose messages all conversations may share.
_SYSTEM = ("system", "developer")
#: Most prefixes of a prompt, and most characters of the longest; what follows is not told apart.
_MOST_PREFIXES, _MOST_CHARS = 512, 1 << 20


def prefix_key(request: ProxiedRequest, chars: int) -> bytes:
    """The tenant and the start of the prompt, or the client's name for the conversation
    (`prompt_cache_key`, the header x-session-id).

    chars: of a prompt, or of the first message that is not the system's. System messages and tools
    count whole, so that conversations that share them are told apart by what comes next.
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
    behind the system's, or after every `chars` characters of a text. A conversation's next turn has
    all of them and more.
    """
    key = prefix_key(request, chars)
    found, digest, counted = [key], blake2b(key, digest_size=16), 0
    for part in _parts(request.fields, chars):
        counted += len(part)
        if counted > _MOST_CHARS or len(found) > _MOST_PREFIXES:
            break
        digest.update(len(part).to_bytes(8))
        digest.update(part)
        found.append(digest.digest())
    return found


def _parts(fields: JsonObject, chars: int) -> Iterator[bytes]:
    """Whole parts of the prompt: the last one of a text may be longer in the next turn."""
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
    """The system's messages, and the start of the first other one."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        if not _is_system(message):
            yield _text(content)[:chars]
            return
        yield _text(content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()

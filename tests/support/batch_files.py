"""Helpers for tests of files and batches: write files of requests, wait for batches."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from openai import OpenAI
from openai.types import Batch

from jitney.engine.server.tasks import records

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


def client_of(url: str, key: str = "none") -> OpenAI:
    """A client of the server at this address."""
    return OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """One request of a batch."""
    fields: dict[str, Any] = {"model": "m"}
    match url:
        case "/v1/embeddings":
            fields["input"] = custom_id
        case "/v1/chat/completions":
            fields |= {"max_tokens": 4, "messages": [{"role": "user", "content": custom_id}]}
        case _:
            fields |= {"max_tokens": 4, "prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields | body}


def batch_of(id: str) -> records.Batch:
    """The stored record of a new batch of "me"."""
    return records.Batch(
        id, "me", CHATS, {}, "", 1, 1 << 40, input_file_id="file-1", completion_window="24h"
    )


def jsonl(lines: list[Any]) -> bytes:
    """The lines as JSON Lines; lines that are bytes are not encoded."""
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    return b"\n".join(texts) + b"\n"


def begin(client: OpenAI, lines: list[Any], **settings: Any) -> Batch:
    """Upload the lines and begin a batch."""
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    options: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h"} | settings
    return client.batches.create(input_file_id=file.id, **options)


def ended(client: OpenAI, id: str, seconds: float = 30.0) -> Batch:
    """Wait for the batch to end and return it."""
    deadline = time.monotonic() + seconds
    while True:
        batch = client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        assert time.monotonic() < deadline, f"it is still {batch.status}"
        time.sleep(0.02)


def answers(client: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a batch's file by custom_id; asserts that each id occurs once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each for each in lines}
    assert len(by_id) == len(lines), "a line is answered twice"
    return by_id

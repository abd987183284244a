"""Tries every operation of a fleet's endpoint with one key to get at what belongs to another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from api_fakes import until
from batch_files import CHATS, jsonl, line
from fleet_engines import CHAT

#: In all that the first key asks, and that scripted engines answer it.
MARK = "of-alpha"
OVER = {"completed", "failed"}


@dataclass
class Things:
    """Everything that a key has made at a fleet."""

    http: httpx.Client
    #: Whether the fleet stores files, batches and jobs.
    has_store: bool = True
    #: By the names of path parameters.
    ids: dict[str, str] = field(default_factory=dict)
    #: Of the response's message.
    item_id: str = ""

    #: Paths of their lists.
    LISTS = ("/v1/files", "/v1/batches", "/v1/jobs")

    def make(self) -> None:
        """Make one of each, and wait for those that take time."""
        body = {"model": "m", "input": f"prompt {MARK}", "max_output_tokens": 16}
        response = self._post("/v1/responses", body)
        self.ids["response_id"] = response["id"]
        self.item_id = response["output"][0]["id"]
        if self.has_store:
            self._make_tasks()

    def texts(self) -> str:
        """All of it as its owner reads it."""
        response = f"/v1/responses/{self.ids['response_id']}"
        paths = [response, f"{response}/input_items"]
        if self.has_store:
            paths += [
                f"/v1/files/{self.ids['file_id']}/content",
                f"/v1/batches/{self.ids['batch_id']}",
                f"/v1/jobs/{self.ids['job_id']}",
                *self.LISTS,
            ]
        replies = [self.http.get(path) for path in paths]
        assert {reply.status_code for reply in replies} == {200}
        return "\n".join(reply.text for reply in replies)

    def _make_tasks(self) -> None:
        file = self.http.post(
            "/v1/files",
            files={"file": (f"{MARK}.jsonl", jsonl([line(f"line-{MARK}", CHATS)]))},
            data={"purpose": "batch"},
        ).json()
        self.ids["file_id"] = file["id"]
        batch = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
        self.ids["batch_id"] = self._post("/v1/batches", batch)["id"]
        self.ids["job_id"] = self._post("/v1/jobs", job())["id"]
        until(lambda: {self._status("batches"), self._status("jobs")} <= OVER)

    def _status(self, kind: str) -> str:
        id = self.ids[{"batches": "batch_id", "jobs": "job_id"}[kind]]
        return self.http.get(f"/v1/{kind}/{id}").json()["status"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.http.post(path, json=body, headers={"idempotency-key": "same"})
        assert reply.status_code < 300, reply.text
        return reply.json()


def job() -> dict[str, Any]:
    messages = [{"role": "user", "content": f"job {MARK}"}]
    return {"endpoint": CHATS, "body": CHAT | {"messages": messages}}


class _OnLoop(httpx.BaseTransport):
    """Sends the requests of another thread through a client of this loop's."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http, self._loop = http, asyncio.get_running_loop()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._http.send(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def thread_client(http: httpx.AsyncClient, key: str) -> httpx.Client:
    """A client of the same endpoint with another key, for another thread."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(transport=_OnLoop(http), base_url=http.base_url, headers=headers)


def check_apart(things: Things, other: httpx.Client) -> int:
    """Try all operations with another key: it learns, changes and continues nothing of these
    things. Returns the number of operations.
    """
    before = things.texts()
    assert MARK in before
    listed = _operations(other)
    for method, path in listed:
        for attempt in _attempts(things, method, path):
            reply = other.request(**attempt)
            assert MARK not in reply.text, (method, path)
            if "_id}" in path or "previous_response_id" in str(attempt):
                stored = things.has_store or "response" in path
                assert reply.status_code == (404 if stored else 503), (method, path, reply.text)
    assert things.texts() == before, "nothing is gone, cancelled or added"
    return len(listed)


def _bodies(things: Things) -> dict[str, list[dict[str, Any]]]:
    """By path: what another key sends there to get at these things."""
    by_item = [{"type": "item_reference", "id": things.item_id}]
    earlier = things.ids["response_id"]
    file = things.ids.get("file_id", "file-none")
    batch = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
    return {
        "/v1/responses": [
            {"model": "m", "input": "on", "previous_response_id": earlier},
            {"model": "m", "input": by_item},
        ],
        "/v1/batches": [batch],
        "/v1/jobs": [{"endpoint": CHATS, "body": CHAT}],
    }


def _operations(http: httpx.Client) -> list[tuple[str, str]]:
    """(method, path) of every operation that the endpoint describes."""
    paths = http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, found in paths.items() for method in found]


def _attempts(things: Things, method: str, path: str) -> Iterator[dict[str, Any]]:
    """Requests of another key for one operation, as keyword arguments of httpx."""
    url = path.replace("{model}", "m")
    for name, id in things.ids.items():
        url = url.replace(f"{{{name}}}", id)
    if method == "GET":
        yield {"method": method, "url": url}
        yield {"method": method, "url": url, "params": {"after": things.ids.get("file_id", "")}}
        return
    usual: dict[str, Any] = CHAT | {"prompt": "on", "input": "on", "content": "on", "tokens": [1]}
    for body in _bodies(things).get(path, [usual]):
        headers = {"idempotency-key": "same"}
        yield {"method": method, "url": url, "json": body, "headers": headers}

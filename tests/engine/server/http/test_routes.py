"""A route is one line of the table: what it gets for it, and that the docs say the same."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from api_fakes import ByteTokenizer, FakeClient, call, run
from server_settings import server_settings
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jitney.engine.common.errors import RequestError
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.app import create_app
from jitney.engine.server.chat.openai.schema import ChatBody, CompletionBody
from jitney.engine.server.http.routes import ROUTES
from jitney.engine.server.http.routing import HttpRoute, Role, RouteTable
from jitney.engine.server.http.service import Service

KEY = {"authorization": "Bearer sekrit"}
DOCS = Path(__file__).parents[4] / "docs" / "http.md"


async def repeat(service: Service, request: Request) -> Response:
    """Answers with what it was sent."""
    body = await request.body()
    if body == b'"bad"':
        raise RequestError("say something else", param="body")
    return JSONResponse([request.path_params["name"], service.model_name, body.decode()])


MADE_UP = HttpRoute("POST /v1/made-up/{name}", repeat, "repeat a body", body_limit=20)


def app_with(*routes: HttpRoute, **settings):
    limits = server_settings(admin_keys=(digest_key("sekrit"),), **settings)
    return create_app(FakeClient(), ByteTokenizer(), limits, "m", routes=(*ROUTES, *routes))  # type: ignore[arg-type]


def test_a_line_of_the_table_is_served():
    reply = run(call(app_with(MADE_UP), "/v1/made-up/x", b'"hi"', headers=KEY))
    assert (reply.status, reply.json()) == (200, ["x", "m", '"hi"'])
    assert reply.headers["x-request-id"] and "openai-processing-ms" in reply.headers


def test_a_line_of_the_table_is_behind_the_key_unless_its_role_is_anybody():
    reply = run(call(app_with(MADE_UP), "/v1/made-up/x", b'"hi"'))
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    public = replace(MADE_UP, role=Role.ANYBODY)
    assert run(call(app_with(public), "/v1/made-up/x", b'"hi"')).status == 200


def test_a_line_of_the_table_has_the_error_form_and_its_own_body_limit():
    app = app_with(MADE_UP)
    reply = run(call(app, "/v1/made-up/x", b'"bad"', headers=KEY))
    assert (reply.status, reply.error["param"]) == (400, "body")
    assert reply.error["type"] == "invalid_request_error" and reply.headers["x-request-id"]
    reply = run(call(app, "/v1/made-up/x", b'"' + b"x" * 20 + b'"', headers=KEY))
    assert (reply.status, reply.error["message"]) == (413, "the body may have at most 20 bytes")


def test_a_line_of_the_table_is_counted_under_its_template():
    app = app_with(MADE_UP)
    for headers in (KEY, {}):
        run(call(app, "/v1/made-up/x", b'"hi"', headers=headers))
    text = run(call(app, "/metrics", method="GET", headers=KEY)).body.decode()
    for status in ("2xx", "4xx"):
        line = f'jitney_requests_total{{class="{status}",route="/v1/made-up/{{name}}"}} 1.0'
        assert line in text


def test_lines_that_share_a_path_each_take_their_method():
    async def read(service: Service, request: Request) -> Response:
        return JSONResponse("read")

    app = app_with(MADE_UP, HttpRoute(f"GET {MADE_UP.path}", read, "read"))
    assert run(call(app, "/v1/made-up/x", b"", method="GET", headers=KEY)).json() == "read"
    assert run(call(app, "/v1/made-up/x", b"1", headers=KEY)).json() == ["x", "m", "1"]
    reply = run(call(app, "/v1/made-up/x", b"", method="DELETE", headers=KEY))
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, POST")


async def test_a_line_that_generates_counts_against_its_key_and_ends_with_its_client():
    begun = asyncio.Event()

    async def wait(service: Service, request: Request) -> Response:
        begun.set()
        await asyncio.sleep(3600)
        return Response()

    waiting = HttpRoute("POST /v1/wait", wait, "wait", generates=True)
    app = app_with(waiting, key_max_concurrent=1)
    first = asyncio.create_task(call(app, "/v1/wait", b"1", headers=KEY, leave_after=1.0))
    await begun.wait()
    service = app.state.service
    second = await call(app, "/v1/wait", b"1", headers=KEY)
    drained = asyncio.create_task(service.drained())
    await asyncio.sleep(0)
    assert not drained.done(), "a drain waits for it"
    await first
    await asyncio.wait_for(drained, 30)
    second = second
    assert (second.status, second.error["code"]) == (429, "rate_limit")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/images/generations",
        "/v1/audio/speech",
        "/v1/moderations",
        "/v1/fine_tuning/jobs",
        "/v1/assistants",
        "/v1/messages-of-others",
    ],
)
def test_a_route_that_is_not_there_is_named_in_openais_form(path: str):
    reply = run(call(app_with(), path, b"{}", headers=KEY))
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert path in reply.error["message"] and reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "sekrit"}, 200),
        ({"x-api-key": "nope"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "nope"} | KEY, 200),
        ({"x-api-key": "sekrit", "authorization": "Bearer nope"}, 401),
        ({"x-api-key": "sekrit", "authorization": "Basic x"}, 401),
    ],
)
def test_a_key_may_come_as_anthropics_clients_send_it(headers: dict, status: int):
    assert run(call(app_with(), "/v1/models", method="GET", headers=headers)).status == status


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/livez", "/livez"),
        ("/livez/", None),
        ("/livez\n", None),
        ("//livez", None),
        ("/v1/models/a/b", "/v1/models/{model:path}"),
    ],
)
def test_a_path_is_matched_whole(path: str, template: str | None):
    route = RouteTable(ROUTES).find(path, "GET")
    assert (route.path if route else None) == template


def test_the_documentation_lists_every_route():
    lines = DOCS.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `/")]
    yes_no = {True: "yes", False: "no"}
    keys = {Role.ANYBODY: "no", Role.USER: "user", Role.ADMIN: "admin"}
    assert rows == [
        f"| `{route.path}` | {route.method} | {route.summary} "
        f"| {keys[route.role]} | {yes_no[route.generates]} |"
        for route in ROUTES
    ]


def test_the_documentation_lists_every_field_of_completions_and_chats():
    section = DOCS.read_text().split("## Fields of completions and chats")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert listed == CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()

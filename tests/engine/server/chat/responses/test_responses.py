"""/v1/responses against the openai client's own types: answers, streams, conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_fakes import FakeClient, Script, call, make_app, run, served
from client_models import parsed, typed_events
from families import FamilyTokenizer, family_app
from openai import DefaultHttpxClient, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.key_file import digest_key

PATH = "/v1/responses"
BODY = {"model": "m", "input": "ab"}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "get_weather", "parameters": PLACE, "strict": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'
THOUGHTS = "<think>\nHm.\n</think>\n\n"


def family(text: str, **script: Any) -> tuple[Any, FakeClient]:
    """A model that thinks and calls as Qwen 3 does, and says this."""
    return family_app("qwen3", text, **script)


def ask(app: Any, body: dict[str, Any] = BODY, **kw: Any) -> dict[str, Any]:
    reply = run(call(app, PATH, body, **kw))
    assert reply.status == 200, reply.body
    parsed(Response, reply.json())
    return reply.json()


def stream(app: Any, body: dict[str, Any] = BODY) -> list[dict[str, Any]]:
    reply = run(call(app, PATH, body | {"stream": True}))
    assert reply.status == 200 and reply.complete
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = typed_events(reply.body)
    for event in events:
        known = dict(event)
        if event["type"] == "response.function_call_arguments.done":
            # Required by the types of older clients (3.0), unknown to those of the newest (3.57).
            assert known.pop("name")
        parsed(ResponseStreamEvent, known)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def nameless(value: Any) -> Any:
    """Without what differs between two answers that say the same."""
    if isinstance(value, dict):
        named = ("id", "item_id", "created_at", "completed_at", "call_id")
        return {name: nameless(each) for name, each in value.items() if name not in named}
    return [nameless(each) for each in value] if isinstance(value, list) else value


def prompt(client: FakeClient) -> str:
    return bytes(client.requests[-1].prompt).decode()


def test_a_plain_response():
    client = FakeClient(Script(cached_tokens=7))
    body = ask(make_app(client), BODY | {"instructions": "be brief", "metadata": {"k": "v"}})
    assert body["id"].startswith("resp_") and body["status"] == "completed"
    [message] = body["output"]
    assert message["id"].startswith("msg_") and message["status"] == "completed"
    assert message["content"][0]["text"] == "Hello, wörld!"
    assert prompt(client) == "system: be brief\nuser: ab\nassistant: "
    assert body["usage"] == {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
        "output_tokens": 15,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 52,
    }
    assert (body["instructions"], body["metadata"]) == ("be brief", {"k": "v"})


def test_a_streamed_text_event_by_event():
    events = stream(make_app(FakeClient(Script("hé"))))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [e["delta"] for e in events if e["type"].endswith(".delta")] == ["h", "é"]
    assert events[0]["response"]["status"] == "in_progress" and not events[0]["response"]["output"]
    assert events[-1]["response"]["output"][0] == events[-2]["item"]
    assert {e["item_id"] for e in events if "item_id" in e} == {events[-2]["item"]["id"]}


def test_a_streamed_turn_of_thoughts_text_and_a_call():
    app, _ = family(THOUGHTS + "ok" + CALL)
    events = stream(app, BODY | {"tools": [TOOL]})
    names = [event["type"].removeprefix("response.") for event in events]
    once = [name for place, name in enumerate(names) if name != names[place - 1]]
    assert once == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    thoughts, message, function = events[-1]["response"]["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "ok"
    assert (function["name"], json.loads(function["arguments"])) == (
        "get_weather",
        {"city": "Paris é"},
    )
    assert [e["output_index"] for e in events if e["type"].endswith("item.done")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "extra"),
    [
        ("Hello", {}),
        ("", {}),
        (THOUGHTS + "ok", {}),
        (THOUGHTS + "ok" + CALL + CALL, {"tools": [TOOL]}),
        ("x" * 50, {"max_output_tokens": 5}),
        ("héllo", {"top_logprobs": 2}),
        ("x" * 40, {"include": ["message.output_text.logprobs"]}),
    ],
)
def test_a_stream_says_what_the_plain_answer_says(text: str, extra: dict[str, Any]):
    app, _ = family(text)
    plain = ask(app, BODY | extra)
    ended = stream(app, BODY | extra)[-1]["response"]
    assert nameless(ended) == nameless(plain)


def test_the_clients_stream_helper_comes_to_the_same():
    app, _ = family(THOUGHTS + "ok" + CALL)
    asked: dict[str, Any] = {"model": "m", "input": "hi", "tools": [TOOL]}
    with served(app) as (url, _):
        client = OpenAI(
            base_url=f"{url}/v1", api_key="k", http_client=DefaultHttpxClient(trust_env=False)
        )
        plain = client.responses.create(**asked)
        with client.responses.stream(**asked) as events:
            last = events.get_final_response()
        assert last.output_text == plain.output_text == "ok"
        assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
        again = client.responses.create(
            model="m",
            previous_response_id=plain.id,
            input=[{"type": "function_call_output", "call_id": "c", "output": "20"}],
            tools=[TOOL],  # type: ignore[list-item]
        )
        assert again.previous_response_id == plain.id
        assert client.responses.retrieve(plain.id).output_text == "ok"
        assert [item.type for item in client.responses.input_items.list(again.id)] == [
            "function_call_output"
        ]
        client.responses.delete(plain.id)
        with pytest.raises(NotFoundError):
            client.responses.retrieve(plain.id)


def test_a_text_that_is_cut_off_is_incomplete():
    body = ask(make_app(), BODY | {"max_output_tokens": 3})
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete" and "completed_at" not in body
    assert stream(make_app(), BODY | {"max_output_tokens": 3})[-1]["type"] == "response.incomplete"


def test_items_become_the_messages_that_they_are():
    app, client = family("ok")
    items = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    ask(app, BODY | {"input": items})
    text = FamilyTokenizer("qwen3").decode(client.requests[0].prompt, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        '<|im_start|>assistant\nb<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\ne<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_conversation_goes_on_from_a_response():
    client = FakeClient(Script("yes"))
    app = make_app(client)
    first = ask(app, BODY | {"instructions": "old"})
    follow = {"model": "m", "input": "cd", "previous_response_id": first["id"]}
    second = ask(app, follow | {"instructions": "new"})
    said = "user: ab\nassistant: yes\nuser: cd\nassistant: "
    assert prompt(client) == "system: new\n" + said
    third = stream(app, follow | {"input": "ef", "previous_response_id": second["id"]})
    assert prompt(client) == said + "yes\nuser: ef\nassistant: "
    ended = third[-1]["response"]
    ask(app, follow | {"input": "gh", "previous_response_id": ended["id"]})
    assert prompt(client).endswith("user: ef\nassistant: yes\nuser: gh\nassistant: ")
    run(call(app, f"{PATH}/{first['id']}", method="DELETE"))
    ask(app, follow | {"previous_response_id": second["id"]})
    assert prompt(client).startswith(said), "what others go on from is still there"


def test_an_item_may_be_referred_to():
    client = FakeClient(Script("yes"))
    app = make_app(client)
    first = ask(app)
    said = first["output"][0]["id"]
    ask(app, BODY | {"input": [{"type": "item_reference", "id": said}, *_user("cd")]})
    assert prompt(client) == "assistant: yes\nuser: cd\nassistant: "
    reply = run(call(app, PATH, BODY | {"input": [*_user("a"), {"id": "msg_nope"}]}))
    assert (reply.status, reply.error["param"]) == (400, "input[1].id")


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_kept_unless_it_is_not_to_be(streamed: bool):
    app = make_app()
    for store in (None, True, False):
        body = BODY | {"store": store, "top_logprobs": 1}
        answer = stream(app, body)[-1]["response"] if streamed else ask(app, body)
        reply = run(call(app, f"{PATH}/{answer['id']}", method="GET"))
        assert reply.status == (404 if store is False else 200)
        if store is not False:
            parsed(Response, reply.json())
            assert answer["output"][0]["content"][0]["logprobs"]
            answer["output"][0]["content"][0]["logprobs"] = []
            assert reply.json() == answer


def test_nobody_sees_the_responses_of_another_key():
    app = make_app(api_keys=(digest_key("a"), digest_key("b")), admin_keys=(digest_key("c"),))
    keys = {name: {"authorization": f"Bearer {name}"} for name in "abc"}
    id = ask(app, headers=keys["a"])["id"]
    for name, status in (("a", 200), ("b", 404), ("c", 404)):
        reply = run(call(app, f"{PATH}/{id}", method="GET", headers=keys[name]))
        assert reply.status == status
        follow = BODY | {"previous_response_id": id}
        reply = run(call(app, PATH, follow, headers=keys[name]))
        assert reply.status == status
        assert status == 200 or reply.error["param"] == "previous_response_id"
        for path, method in ((f"{PATH}/{id}/input_items", "GET"), (f"{PATH}/{id}/cancel", "POST")):
            reply = run(call(app, path, b"", method=method, headers=keys[name]))
            assert reply.status == (status if method == "GET" or status == 404 else 400)
    assert run(call(app, f"{PATH}/{id}", method="DELETE", headers=keys["b"])).status == 404
    assert run(call(app, f"{PATH}/{id}", method="DELETE", headers=keys["a"])).json() == {
        "id": id,
        "object": "response",
        "deleted": True,
    }


def test_input_items_page_by_page():
    app = make_app()
    items = [*_user("a"), *_user("b"), *_user("c")]
    id = ask(app, BODY | {"input": items})["id"]

    def listed(query: str) -> dict[str, Any]:
        reply = run(call(app, f"{PATH}/{id}/input_items", method="GET", query=query))
        assert reply.status == 200, reply.body
        parsed(ResponseItemList, reply.json())
        return reply.json()

    def texts(page: dict[str, Any]) -> list[str]:
        return [item["content"][0]["text"] for item in page["data"]]

    everything = listed("")
    assert texts(everything) == ["c", "b", "a"] and not everything["has_more"]
    first = listed("order=asc&limit=2")
    assert texts(first) == ["a", "b"] and first["has_more"]
    assert (first["first_id"], first["last_id"]) == tuple(item["id"] for item in first["data"])
    rest = listed(f"order=asc&limit=2&after={first['last_id']}")
    assert texts(rest) == ["c"] and not rest["has_more"]
    for query, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=nope", "after"),
        ("include[]=nope", "include"),
    ):
        reply = run(call(app, f"{PATH}/{id}/input_items", method="GET", query=query))
        assert (reply.status, reply.error["param"]) == (400, param)


def test_what_fails_in_a_stream_is_a_failed_response():
    app = make_app(FakeClient(Script("abcdef", fail_after=2)))
    events = stream(app)
    failed = events[-1]["response"]
    assert events[-1]["type"] == "response.failed" and failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "the engine stopped"}
    kept = run(call(app, f"{PATH}/{failed['id']}", method="GET"))
    assert kept.json()["status"] == "failed"
    error = ErrorInfo("queue_full", "too many", retry_after=2.0)
    reply = run(call(make_app(FakeClient(Script(error=error))), PATH, BODY | {"stream": True}))
    assert (reply.status, reply.headers["retry-after"]) == (429, "2")


def test_a_client_that_leaves_ends_its_response():
    client = FakeClient(Script("x" * 200, delay_s=0.01))
    app = make_app(client)
    reply = run(call(app, PATH, BODY | {"stream": True}, leave_on_chunk=5))
    assert client.aborts and not client.open
    id = typed_events(b"".join(reply.chunks[:2]))[0]["response"]["id"]
    assert run(call(app, f"{PATH}/{id}", method="GET")).status == 404


def test_a_cancel_says_what_can_be_cancelled():
    app = make_app()
    id = ask(app)["id"]
    reply = run(call(app, f"{PATH}/{id}/cancel", b""))
    assert reply.status == 400 and "background" in reply.error["message"]


def test_a_tool_that_is_chosen_is_the_only_one():
    app, client = family(CALL)
    clock = TOOL | {"name": "clock"}
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    body = BODY | {"tools": [TOOL, clock], "tool_choice": allowed}
    answer = ask(app, body)
    text = FamilyTokenizer("qwen3").decode(client.requests[0].prompt, skip_special_tokens=False)
    assert "get_weather" in text and "clock" not in text
    assert answer["tool_choice"] == allowed and len(answer["tools"]) == 2
    answer = ask(app, body | {"tool_choice": "none"})
    assert [item["type"] for item in answer["output"]] == ["message"]


PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits files"}
FS: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__fs",
    "description": "Files",
    "tools": [TOOL | {"name": "read"}, PATCH | {"name": "write"}],
}


def written_call(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def family_prompt(client: FakeClient) -> str:
    ids = client.requests[-1].prompt
    return FamilyTokenizer("qwen3").decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("called", "shown"),
    [
        (
            written_call("patch", {"input": 'a\n"é" \\ 😀'}),
            {"type": "custom_tool_call", "name": "patch", "input": 'a\n"é" \\ 😀'},
        ),
        (
            written_call("mcp__fs__read", {"city": "x"}),
            {
                "type": "function_call",
                "name": "read",
                "namespace": "mcp__fs",
                "arguments": '{"city": "x"}',
            },
        ),
        (
            written_call("mcp__fs__write", {"input": ""}),
            {"type": "custom_tool_call", "name": "write", "namespace": "mcp__fs", "input": ""},
        ),
        (
            written_call("get_weather", {"input": "x"}),
            {"type": "function_call", "name": "get_weather", "arguments": '{"input": "x"}'},
        ),
    ],
)
@pytest.mark.parametrize("chunk", [1, 9])
def test_calls_are_told_in_the_clients_words(called: str, shown: dict[str, Any], chunk: int):
    app, client = family("ok" + called, chunk=chunk)
    asked = BODY | {"tools": [PATCH, FS, TOOL]}
    body = ask(app, asked)
    item = body["output"][1]
    assert {name: item[name] for name in item if name not in ("id", "call_id", "status")} == shown
    for name in ("patch", "mcp__fs__read", "mcp__fs__write", "get_weather"):
        assert f'"{name}"' in family_prompt(client)
    assert body["tools"] == [PATCH, FS, TOOL]
    events = stream(app, asked)
    assert nameless(events[-1]["response"]) == nameless(body)
    begins = "custom_tool_call_input" if "input" in shown else "function_call_arguments"
    deltas = [e["delta"] for e in events if e["type"] == f"response.{begins}.delta"]
    text = shown.get("input", shown.get("arguments"))
    assert "".join(deltas) == text
    [done] = [e for e in events if e["type"] == f"response.{begins}.done"]
    assert done.get("input", done.get("arguments")) == text
    # What the client sends back is read as the model wrote it.
    follow = [item, {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "0"}]
    ask(app, asked | {"input": [*_user("a"), *follow]})
    calls, results = family_prompt(client).split("<|im_start|>tool\n")
    name = json.loads(called[12:-13])["name"]
    assert f'"name": "{name}", "arguments": {{' in calls and results.startswith("0<|im_end|>")


def test_a_custom_tool_is_chosen_and_held_to_its_form():
    form = {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    app, client = family(written_call("patch", {"input": "ab"}))
    chosen = {"tools": [TOOL, PATCH | {"format": form}], "tool_choice": {"type": "custom"}}
    chosen["tool_choice"] |= {"name": "patch"}  # type: ignore[operator]
    reply = run(call(app, PATH, BODY | chosen))
    assert reply.status == 200 and reply.json()["output"][0]["input"] == "ab"
    grammar = client.requests[0].sampling.grammar
    assert grammar is not None and "^(?:[ab]+)$" in grammar.text
    assert "x-unenforced-schema" not in reply.headers
    for choice, form_, told in (
        ("auto", form, "tools[1].format"),
        ("required", lark, "tools[1].format"),
        ("auto", {"type": "text"}, None),
    ):
        tools = [TOOL, PATCH | {"format": form_}]
        reply = run(call(app, PATH, BODY | {"tools": tools, "tool_choice": choice}))
        assert reply.status == 200 and reply.headers.get("x-unenforced-schema") == told
        assert reply.json()["tools"] == tools
    assert "[ab]+" in FamilyTokenizer("qwen3").decode(client.requests[0].prompt)


def test_tools_of_a_providers_servers_are_left_out():
    app, client = family("ok")
    tools = [
        TOOL,
        {"type": "web_search"},
        FS | {"tools": [{"type": "made_up"}]},
        {"type": "mcp", "server_label": "x", "server_url": "http://x"},
        TOOL | {"name": "program", "allowed_callers": ["programmatic"]},
        TOOL | {"name": "late", "defer_loading": True},
    ]
    reply = run(call(app, PATH, BODY | {"tools": tools, "tool_choice": "auto"}))
    assert reply.headers["x-ignored-params"] == (
        "tools[1], tools[2].tools[0], tools[3], tools[4], tools[5].defer_loading"
    )
    parsed(Response, reply.json())
    prompt = family_prompt(client)
    assert '"get_weather"' in prompt and '"late"' in prompt and '"program"' not in prompt
    allowed = {"type": "allowed_tools", "mode": "auto"}
    names: list[dict[str, Any]] = [{"type": "web_search"}, {"type": "function", "name": "late"}]
    ask(app, BODY | {"tools": tools, "tool_choice": allowed | {"tools": names}})
    assert '"get_weather"' not in family_prompt(client) and '"late"' in family_prompt(client)
    for choice in (
        {"type": "web_search"},
        {"type": "function", "name": "program"},
        allowed | {"tools": names[:1]},
    ):
        reply = run(call(app, PATH, BODY | {"tools": tools, "tool_choice": choice}))
        assert reply.status == 400 and reply.error["param"].startswith("tool_choice")
    only = {"tools": tools[1:2], "tool_choice": "auto", "parallel_tool_calls": False}
    assert ask(app, BODY | only)["tools"] == []


def test_names_of_namespaces_and_functions_must_differ():
    app, _ = family("ok")
    twice = [TOOL | {"name": "mcp__fs__read"}, FS]
    reply = run(call(app, PATH, BODY | {"tools": twice}))
    assert (reply.status, reply.error["param"]) == (400, "tools")
    many = FS | {"tools": [TOOL | {"name": f"f{number}"} for number in range(100)]}
    reply = run(call(app, PATH, BODY | {"tools": [many, many | {"name": "b"}]}))
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_a_probe_with_nothing_to_answer_is_answered():
    client = FakeClient(Script("yes"))
    app = make_app(client)
    first = ask(app, BODY | {"input": [], "max_output_tokens": 1, "instructions": "be"})
    assert prompt(client) == "system: be\nuser: \nassistant: "
    ask(app, BODY | {"input": [], "previous_response_id": first["id"]})
    assert prompt(client) == "assistant: y\nassistant: "


def test_items_of_providers_are_read_or_left_out_with_a_word():
    app, client = family("ok")
    shell = {"type": "local_shell_call", "call_id": "s1", "status": "completed", "id": "lsh_1"}
    items: list[dict[str, Any]] = [
        *_user("a"),
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA", "id": "rs_1"},
        {"type": "item_reference", "id": "rs_0"},
        {"type": "web_search_call", "id": "ws_1", "status": "failed", "action": {}},
        shell | {"action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "call_id": "s1", "output": "b.txt"},
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                {"type": "input_file", "file_data": "data:text/plain;base64,aGk="},
            ],
        },
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
    ]
    reply = run(call(app, PATH, BODY | {"input": items}))
    assert reply.status == 200, reply.body
    warned = reply.headers["x-jitney-warnings"].split(", ")
    assert [warning.split(":")[0] for warning in warned] == [
        f"input[{place}]" for place in (1, 2, 3, 6, 7, 8, 9)
    ]
    assert all(kind in warned[place] for place, kind in ((2, "web_search_call"), (5, "image")))
    text = family_prompt(client)
    assert '"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}' in text
    assert "tool\nb.txt" in text and "\nhi<|im_end|>" in text and "AAAA" not in text
    kept = run(call(app, f"{PATH}/{reply.json()['id']}/input_items", method="GET")).json()["data"]
    assert {item["type"] for item in kept} >= {"web_search_call", "compaction"}
    assert len({item["id"] for item in kept}) == len(kept) and "lsh_1" not in str(kept)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reasoning": {"effort": "medium", "summary": "auto"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "none", "summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"text": {"verbosity": "medium"}, "truncation": "disabled", "store": False}, None),
        ({"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}, None),
    ],
)
def test_hints_are_told_where_they_are_not_followed(fields: dict[str, Any], told: str | None):
    reply = run(call(make_app(), PATH, BODY | fields))
    assert reply.status == 200 and reply.headers.get("x-ignored-params") == told
    parsed(Response, reply.json())


def test_tokens_are_counted_as_they_would_be_read():
    app, client = family("ok")
    with served(app) as (url, _):
        openai = OpenAI(
            base_url=f"{url}/v1", api_key="k", http_client=DefaultHttpxClient(trust_env=False)
        )
        asked: Any = {
            "input": "hi",
            "instructions": "be",
            "tools": [TOOL, FS],
            "reasoning": {"effort": "none"},
            "text": {"verbosity": "medium"},
            "truncation": "disabled",
        }
        counted = openai.responses.input_tokens.count(model="m", **asked)
        first = openai.responses.create(model="m", **asked)
        assert first.usage is not None and first.usage.input_tokens == counted.input_tokens
        assert counted.object == "response.input_tokens" and len(client.requests) == 1
        follow: Any = {"previous_response_id": first.id, "input": "more"}
        more = openai.responses.input_tokens.count(model="m", **follow)
        second = openai.responses.create(model="m", **follow)
        assert second.usage is not None and second.usage.input_tokens == more.input_tokens
    for fields, param in (({"conversation": "c"}, "conversation"), ({"input": 5}, "input")):
        reply = run(call(app, f"{PATH}/input_tokens", BODY | fields))
        assert (reply.status, reply.error["param"]) == (400, param)

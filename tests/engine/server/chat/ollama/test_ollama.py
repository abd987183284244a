"""Ollama's routes, asked by its own client where that can ask it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from api_fakes import ByteTokenizer, FakeClient, Reply, Script, call, make_app, run, served
from families import family_app

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.key_file import digest_key
from jitney.engine.core.text.fill_in import FillIn

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "Weather?"}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLS = (
    "<think>\nHm.\n</think>\n\nYes."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


class FillingTokenizer(ByteTokenizer):
    fill_in = FillIn(250, 251, 252, (253,), None)


def ask(path: str, body: Any, client: FakeClient | None = None, **kw: Any) -> Reply:
    return run(call(make_app(client or FakeClient()), path, body, **kw))


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.decode().removesuffix("\n").split("\n")]


@pytest.fixture(scope="module")
def scripted() -> FakeClient:
    return FakeClient(Script(text="hé, wörld"))


@pytest.fixture(scope="module")
def url(scripted: FakeClient) -> Iterator[str]:
    with served(make_app(scripted)) as (url, _):
        yield url


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url, trust_env=False)


def test_a_chat_with_the_official_client(client: ollama.Client):
    whole = client.chat("m", [USER], options={"num_predict": 4})
    assert (whole.message.role, whole.message.content) == ("assistant", "hé,")
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 4)
    assert whole.prompt_eval_count == len(b"user: Weather?\nassistant: ")
    parts = list(client.chat("m", [USER], options={"num_predict": 4}, stream=True))
    assert "".join([part.message.content or "" for part in parts]) == "hé,"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.done_reason, last.eval_count) == ("length", 4)
    assert last.prompt_eval_count == whole.prompt_eval_count


def test_a_stream_is_what_is_sent_unless_it_is_refused():
    assert len(lines(ask(CHAT, {"messages": [USER]}))) > 2
    whole = ask(CHAT, {"messages": [USER], "stream": False})
    assert whole.headers["content-type"] == "application/json"
    for body in ({"prompt": "a", "stream": False}, {"prompt": "a", "raw": True, "stream": False}):
        assert ask(GENERATE, body).json()["done"]


def test_what_is_measured_adds_up():
    client = FakeClient(Script(text="abcd", delay_s=0.02, first_delay_s=0.03))
    answer = ask(CHAT, {"messages": [USER], "stream": False}, client).json()
    assert answer["load_duration"] == 10_000_000  # as the fake engine says
    steps = answer["eval_count"] - 1
    assert answer["eval_duration"] >= 0.9 * steps * 20e6
    assert answer["total_duration"] >= answer["eval_duration"] + 45e6


def test_logprobs(client: ollama.Client):
    whole = client.chat("m", [USER], logprobs=True, top_logprobs=2)
    parts = list(client.chat("m", [USER], logprobs=True, top_logprobs=2, stream=True))
    assert whole.logprobs and len(whole.logprobs) == whole.eval_count
    assert whole.logprobs[0].logprob == -ord("h") / 1000
    assert [each.token for each in whole.logprobs[0].top_logprobs or ()] == ["A", "B"]
    streamed = [entry for part in parts for entry in part.logprobs or ()]
    assert streamed == list(whole.logprobs)
    assert client.generate("m", "a", raw=True, logprobs=True).logprobs
    assert client.chat("m", [USER]).logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_content_and_calls(stream: bool):
    app, _ = family_app("qwen3", CALLS)
    body = {"messages": [USER], "tools": [WEATHER, CLOCK], "stream": stream}
    reply = run(call(app, CHAT, body))
    parts = [ollama.ChatResponse(**each) for each in lines(reply)] if stream else []
    if not stream:
        parts = [ollama.ChatResponse(**reply.json())]
    messages = [part.message for part in parts]
    assert "".join([each.thinking or "" for each in messages]).strip() == "Hm."
    assert "".join([each.content or "" for each in messages]).strip() == "Yes."
    calls = [made.function for each in messages for made in each.tool_calls or ()]
    assert [(made.name, made.arguments) for made in calls] == [
        ("get_weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert parts[-1].done_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_has_the_arguments_so_far(stream: bool):
    app, _ = family_app("qwen3", CALLS)
    cut = len(CALLS[: CALLS.index("Rome") + 2])
    body = {"messages": [USER], "tools": [WEATHER], "options": {"num_predict": cut}}
    reply = run(call(app, CHAT, body | {"stream": stream}))
    said = lines(reply) if stream else [reply.json()]
    calls = [made for each in said for made in each["message"].get("tool_calls", ())]
    assert [made["function"]["name"] for made in calls] == ["get_weather"]
    assert said[-1]["done_reason"] == "length"


def test_a_conversation_with_calls_without_ids():
    """Results find their calls by the function's name, else by the order."""

    def made(name: str, **arguments: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": arguments}}

    messages = [
        USER,
        {
            "role": "assistant",
            "thinking": "Hm.",
            "tool_calls": [made("clock"), made("get_weather")],
        },
        {"role": "tool", "tool_name": "get_weather", "content": "hot"},
        {"role": "tool", "tool_name": "clock", "content": "noon"},
        {"role": "assistant", "content": "", "tool_calls": [made("clock", zone=1)]},
        {"role": "tool", "content": "one"},
    ]
    app, _ = family_app("hermes", "ok")
    shown: list[list[dict[str, Any]]] = []
    tokenizer = app.state.service.tokenizer
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda given, **kw: shown.append(given) or render(given, **kw)
    reply = run(call(app, CHAT, {"messages": messages, "tools": [WEATHER, CLOCK]}))
    assert reply.status == 200, reply.body
    given = shown[-1]  # behind those that show what the template accepts
    ids = [made["id"] for each in given for made in each.get("tool_calls", ())]
    assert len(set(ids)) == 3
    results = {each["content"]: each["tool_call_id"] for each in given if each["role"] == "tool"}
    assert results == {"noon": ids[0], "hot": ids[1], "one": ids[2]}
    assert given[1]["reasoning_content"] == "Hm."


def test_options_become_sampling_parameters():
    client = FakeClient()
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 3,
        "stop": ["x", "y"],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repeat_penalty": 1.5,
    }
    assert ask(CHAT, {"messages": [USER], "options": options}, client).status == 200
    sampling = client.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 5)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 0.25, 3)
    assert sampling.stop == ("x", "y") and sampling.repetition_penalty == 1.5
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)


@pytest.mark.parametrize("most", [None, -1, -2, 0, 100_000])
def test_without_a_bound_an_answer_goes_to_the_end_of_the_context(most: int | None):
    client = FakeClient()
    ask(GENERATE, {"prompt": "abc", "raw": True, "options": {"num_predict": most}}, client)
    assert client.requests[0].sampling.max_tokens == 256 - 3


def test_options_that_turn_others_off():
    client = FakeClient()
    options = {"repeat_penalty": 1.5, "repeat_last_n": 0, "seed": -1}
    reply = ask(CHAT, {"messages": [USER], "options": options}, client)
    sampling = client.requests[0].sampling
    assert (sampling.repetition_penalty, sampling.seed) == (1.0, None)
    assert "x-ignored-params" not in reply.headers


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"keep_alive": -1}, "keep_alive"),
        ({"options": {"num_gpu": 1, "mirostat": 0}}, "options.num_gpu, options.mirostat"),
        ({"options": {"num_ctx": 8}}, "options.num_ctx"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": -1}}, None),
        ({"think": True}, "think"),
        ({"think": False}, None),
        ({"keep_alive": None, "options": None, "format": None, "tools": None}, None),
        ({"format": ""}, None),
    ],
    ids=str,
)
def test_what_changes_nothing_is_listed(fields: dict[str, Any], ignored: str | None):
    reply = ask(CHAT, {"messages": [USER]} | fields)
    assert reply.status == 200, reply.body
    assert reply.headers.get("x-ignored-params") == ignored


def test_a_longer_context_than_there_is_warns():
    reply = ask(CHAT, {"messages": [USER], "options": {"num_ctx": 32768}})
    assert reply.status == 200 and "32768" in reply.headers["x-jitney-warnings"]


@pytest.mark.parametrize(
    ("think", "shown"), [(True, True), ("low", True), ("high", True), (False, False)]
)
def test_whether_it_thinks_is_said_to_the_template(think: bool | str, shown: bool):
    app, _ = family_app("qwen3", "ok")
    told: list[Any] = []
    render = app.state.service.tokenizer.apply_chat_template

    def apply(given: Any, **variables: Any) -> str:
        told.append(variables.get("enable_thinking"))
        return render(given, **variables)

    app.state.service.tokenizer.apply_chat_template = apply
    assert run(call(app, CHAT, {"messages": [USER], "think": think})).status == 200
    assert run(call(app, GENERATE, {"prompt": "a", "think": think})).status == 200
    asked = [each for each in told if each is not None]
    assert asked[-2:] == [shown, shown]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_the_format_is_a_grammar(path: str):
    body = {"messages": [USER]} if path == CHAT else {"prompt": "a"}
    client = FakeClient(Script(text="{}"))
    assert ask(path, body | {"format": "json"}, client).status == 200
    grammar = client.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_object"
    assert ask(path, body | {"format": PLACE}, client).status == 200
    grammar = client.requests[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text)["properties"] == PLACE["properties"]
    wrong = ask(path, body | {"format": {"type": "made-up"}}, client)
    assert wrong.status == 400 and "format" in wrong.json()["error"]


def test_filling_in_the_middle():
    client = FakeClient(Script("mid"))
    app = make_app(client, tokenizer=FillingTokenizer())
    reply = run(call(app, GENERATE, {"prompt": "ab", "suffix": "yz", "stream": False}))
    assert reply.json()["response"] == "mid"
    assert client.requests[0].prompt == [250, *b"ab", 251, *b"yz", 252]
    refused = ask(GENERATE, {"prompt": "ab", "suffix": "yz"})
    assert refused.status == 400 and "suffix" in refused.json()["error"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_nothing_to_answer_loads_the_model(path: str, client: ollama.Client):
    engine = FakeClient()
    empty: dict[str, Any] = {"messages": []} if path == CHAT else {"prompt": ""}
    for body in ({}, empty, {"keep_alive": 0}):
        answer = ask(path, body, engine).json()
        assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "load", "m")
    assert not engine.requests
    assert [part.done_reason for part in client.chat("m", [], stream=True)] == ["load"]
    assert [part.done_reason for part in client.generate("m", stream=True)] == ["load"]


def test_vectors(client: ollama.Client):
    answer = client.embed("m:latest", ["a", "bcd"])
    assert answer.embeddings == [[1.0, 1.0], [1.0, 3.0]] and answer.prompt_eval_count == 4
    assert client.embed("m", "ab").embeddings == [[1.0, 2.0]]
    assert client.embeddings("m", "abc").embedding == [1.0, 3.0]
    long = "a" * 5000
    assert client.embed("m", long).embeddings == [[1.0, 255.0]]
    with pytest.raises(ollama.ResponseError) as refused:
        client.embed("m", long, truncate=False)
    assert refused.value.status_code == 400
    for path, body in (("/api/embed", {"input": "a"}), ("/api/embeddings", {"prompt": "a"})):
        off = ask(path, body, FakeClient(embedding_pooling="off"))
        assert off.status == 400 and "--embedding-pooling" in off.json()["error"]


def test_models_with_the_official_client(client: ollama.Client):
    assert [each.model for each in client.list().models] == ["m"]
    assert [each.context_length for each in client.ps().models] == [256]
    told = client.show("m:latest")
    assert set(told.capabilities or ()) == {"completion", "tools", "embedding"}


def test_a_model_is_described():
    """By the names that clients look for: VS Code and others read the context's length so."""
    engine = FakeClient(
        architecture="Qwen3MoeForCausalLM",
        parameters=30_500_000_000,
        weight_bytes=1 << 34,
        sampling_defaults={"temperature": 0.5},
        platform="gpu",
        weights="int4",
        adapters=("fr",),
    )
    told = ask("/api/show", {"model": "m"}, engine).json()
    assert told["model_info"]["general.architecture"] == "qwen3moe"
    assert told["model_info"]["qwen3moe.context_length"] == 256
    assert told["parameters"] == "temperature 0.5"
    assert told["details"]["parameter_size"] == "30.5B"
    assert told["details"]["quantization_level"] == "int4"
    assert ask("/api/show", {"name": "fr:latest"}, engine).json()["details"]["parent_model"] == "m"
    [first, second] = ask("/api/tags", b"", engine, method="GET").json()["models"]
    assert first["size"] == 1 << 34 and second["details"]["parent_model"] == "m"
    running = ask("/api/ps", b"", engine, method="GET").json()
    assert running["models"][0]["size_vram"] == 1 << 34
    engine.state = "sleeping"
    assert ask("/api/ps", b"", engine, method="GET").json() == {"models": []}


@pytest.mark.parametrize(("pooling", "can"), [("cls", ["embedding"]), ("classify", [])])
def test_an_encoder_writes_nothing(pooling: str, can: list[str]):
    engine = FakeClient(encoder=True, embedding_pooling=pooling)
    told = ask("/api/show", {"model": "m"}, engine).json()
    assert told["capabilities"] == can
    refused = ask(CHAT, {"messages": [USER]}, engine)
    assert refused.status == 400 and "writes no text" in refused.json()["error"]


def test_a_model_that_thinks_says_so():
    app, _ = family_app("qwen3", "ok")
    told = run(call(app, "/api/show", {"model": "m"})).json()
    assert {"thinking", "tools"} <= set(told["capabilities"])


def test_before_the_model_is_loaded_it_is_listed():
    engine = FakeClient()
    engine.info = None
    engine.state = "loading"
    told = ask("/api/tags", b"", engine, method="GET").json()
    assert told["models"][0]["name"] == "m"
    refused = ask("/api/show", {"model": "m"}, engine)
    assert refused.status == 503 and "loading" in refused.json()["error"]


def test_the_version_is_of_ollama(client: ollama.Client):
    told = ask("/api/version", b"", method="GET").json()
    assert tuple(map(int, told["version"].split("."))) >= (0, 6, 4)  # VS Code wants no older one


@pytest.mark.parametrize("stream", [False, True])
def test_names_may_have_the_usual_tag(stream: bool):
    engine = FakeClient(adapters=("fr",))
    for name, number in (("m", 0), ("m:latest", 0), ("fr", 1), ("fr:latest", 1)):
        reply = ask(CHAT, {"model": name, "messages": [USER], "stream": stream}, engine)
        said = lines(reply) if stream else [reply.json()]
        assert {each["model"] for each in said} == {name}
        assert engine.requests[-1].adapter == number
    for name in ("m:7b", "x:latest", "m:latest:latest"):
        reply = ask(CHAT, {"model": name, "messages": [USER]}, engine)
        assert reply.status == 404 and set(reply.json()) == {"error"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": 5}, "messages"),
        (CHAT, {"messages": [{"role": "made-up", "content": ""}]}, "messages[0].role"),
        (CHAT, {"messages": [USER | {"images": ["aGk="]}]}, "images"),
        (CHAT, {"messages": [USER], "tools": [CLOCK, CLOCK]}, "tools"),
        (CHAT, {"messages": [USER], "tools": [{"type": "x"}]}, "tools[0]"),
        (CHAT, {"messages": [USER], "format": "xml"}, "format"),
        (CHAT, {"messages": [USER], "think": "often"}, "think"),
        (CHAT, {"messages": [USER], "options": 5}, "options"),
        (CHAT, {"messages": [USER], "options": {"top_p": 3}}, "options.top_p"),
        (CHAT, {"messages": [USER], "options": {"top_k": "5"}}, "options.top_k"),
        (CHAT, {"messages": [USER], "options": {"stop": 5}}, "options.stop"),
        (CHAT, {"messages": [USER], "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        (CHAT, {"messages": [USER | {"content": "a" * 300}]}, "messages"),
        (GENERATE, {"prompt": "a", "images": ["aGk="]}, "images"),
        (GENERATE, {"prompt": "a", "template": "x"}, "template"),
        (GENERATE, {"prompt": "a", "context": [1]}, "context"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "x"}, "system"),
        (GENERATE, {"prompt": "a" * 300}, "prompt"),
        (GENERATE, {"prompt": "a" * 300, "raw": True}, "prompt"),
        ("/api/embed", {"input": []}, "input"),
        ("/api/embed", {"input": [5]}, "input"),
        ("/api/embed", {"input": "a", "dimensions": 1}, "dimensions"),
        ("/api/embeddings", {"prompt": ""}, "prompt"),
        ("/api/show", {"model": 5}, "model"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_mistakes_are_named_in_ollamas_form(path: str, body: dict[str, Any], named: str):
    client = FakeClient()
    reply = ask(path, body, client)
    assert reply.status == 400 and set(reply.json()) == {"error"}, reply.body
    assert named in reply.json()["error"] and not client.requests


def test_errors_before_a_handler_have_the_form_too():
    for path, method, status in (
        ("/api/pull", "POST", 404),
        ("/api/chat", "GET", 405),
        ("/api/tags", "POST", 405),
    ):
        reply = ask(path, {}, method=method)
        assert reply.status == status and isinstance(reply.json()["error"], str)
    app = make_app(api_keys=(digest_key("k"),))
    reply = run(call(app, "/api/tags", method="GET"))
    assert reply.status == 401 and isinstance(reply.json()["error"], str)


def test_what_goes_wrong_in_a_stream_is_a_line():
    client = FakeClient(Script(text="abc", fail_after=2))
    said = lines(ask(CHAT, {"messages": [USER]}, client))
    assert "".join([each["message"]["content"] for each in said[:-1]]) == "ab"
    assert said[-1] == {"error": "the engine stopped"}
    refused = ask(
        CHAT, {"messages": [USER]}, FakeClient(Script(error=ErrorInfo("queue_full", "x")))
    )
    assert refused.status == 429 and "retry-after" in refused.headers


def test_a_stream_with_nothing_to_say_sends_lines_that_clients_can_read():
    """An empty line is no JSON, and would end the official client's stream."""
    app = make_app(
        FakeClient(Script(text="ab", first_delay_s=0.3)), comment_s=0.05, header_wait_s=0.05
    )
    with served(app) as (url, _):
        parts = list(ollama.Client(host=url, trust_env=False).chat("m", [USER], stream=True))
    assert "".join([part.message.content or "" for part in parts]) == "ab"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_body_of_any_type_is_read_unless_another_site_sent_it(kind: str):
    """Curl calls what it sends a form unless it is told otherwise, and Ollama's examples do not."""
    body = {"model": "m", "stream": False, "messages": [USER]}
    head = {"content-type": kind}
    assert ask(CHAT, body, headers=head).status == 200
    assert ask(CHAT, body, headers=head | {"content-encoding": "gzip"}).status == 415
    foreign = {"origin": "http://other.example", "sec-fetch-site": "cross-site"}
    assert ask(CHAT, body, headers=head | foreign).status == 403

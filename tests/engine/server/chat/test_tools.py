"""Tools and thoughts over HTTP: what the model is told, what it is read as, whole and streamed."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from api_fakes import FakeClient, call, make_app, run, served
from families import TEMPLATES, FamilyTokenizer, family_app
from openai import DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from parser_names import REASONING_NAMES, TOOL_NAMES

from jitney.engine.config.schema import _ReasoningParserName, _ToolParserName
from jitney.engine.server.chat.conversation.formats import TurnFormat

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather?"}
CHAT = {"model": "m", "messages": [USER]}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Now", "parameters": PLACE},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = CHAT | {"tools": [WEATHER, CLOCK]}
PARIS = '{"city": "Paris é"}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
CALLS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
#: What a model of each family writes to call get_weather for Paris.
WRITTEN = {
    "plain": HERMES,
    "hermes": HERMES,
    "qwen3": f"<think>\nHm.\n</think>\n\n{HERMES}",
    "llama3_json": f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]',
    "deepseek_v3": f"Hm.</think>{CALLS}function<｜tool▁sep｜>get_weather\n```json\n{PARIS}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"Hm.</think>{CALLS}get_weather<｜tool▁sep｜>{PARIS}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris é<|"|>}<tool_call|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis é\n</parameter>\n"
    "</function>\n</tool_call>",
    "gemma": "```tool_code\nget_weather(city='Paris é')\n```",
}


def ask(family: str, text: str, body: dict[str, Any] = TOOLS, **script: Any) -> dict[str, Any]:
    """The answer's only choice."""
    app, _ = family_app(family, text, **script)
    reply = run(call(app, CHATS, body))
    assert reply.status == 200, reply.body
    ChatCompletion.model_validate(reply.json())
    [choice] = reply.json()["choices"]
    return choice


def prompt_of(family: str, body: dict[str, Any]) -> str:
    """What the model reads."""
    app, client = family_app(family, "ok")
    reply = run(call(app, CHATS, body))
    assert reply.status == 200, reply.body
    return FamilyTokenizer(family).decode(client.requests[0].prompt, skip_special_tokens=False)


def streamed(app: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = run(call(app, CHATS, body | {"stream": True}))
    frames = reply.body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return chunks


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that a stream's chunks make."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(message["tool_calls"])
                    assert part["type"] == "function" and part["function"]["arguments"] == ""
                    message["tool_calls"].append({**part, "function": dict(part["function"])})
                else:
                    assert set(part) == {"index", "function"}
                    function = message["tool_calls"][part["index"]]["function"]
                    function["arguments"] += part["function"]["arguments"]
    return message | {"finish_reason": finish}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("chunk", [1, 7])
def test_every_family_calls_whole_and_streamed(family: str, chunk: int):
    whole = ask(family, WRITTEN[family], chunk=chunk)
    message = whole["message"]
    assert whole["finish_reason"] == "tool_calls"
    assert (message["role"], message["content"]) == ("assistant", None)
    [made] = message["tool_calls"]
    assert made["type"] == "function" and made["function"]["name"] == "get_weather"
    assert json.loads(made["function"]["arguments"]) == {"city": "Paris é"}
    thinks = family in ("qwen3", "harmony", "deepseek_v3", "deepseek_v31")
    thoughts = "Hm." if thinks else None
    assert message.get("reasoning_content") == message.get("reasoning") == thoughts
    stream = joined(streamed(family_app(family, WRITTEN[family], chunk=chunk)[0], TOOLS))
    assert stream["finish_reason"] == "tool_calls"
    assert (stream["content"], stream["reasoning_content"]) == ("", thoughts or "")
    assert [each["function"] for each in stream["tool_calls"]] == [made["function"]]


def test_without_tools_nothing_is_a_call():
    for body in (CHAT, TOOLS | {"tool_choice": "none"}):
        choice = ask("hermes", HERMES, body)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", HERMES)
        assert "tool_calls" not in choice["message"]


def test_special_tokens_are_seen_by_the_parser_and_by_nobody_else():
    text = "a<|im_end|>b[TOOL_CALLS]c"
    assert ask("mistral", text, CHAT)["message"]["content"] == "abc"
    assert ask("mistral", text, TOOLS)["message"]["content"] == "ab[TOOL_CALLS]c"


def test_tools_are_given_to_the_template():
    text = prompt_of("hermes", TOOLS)
    assert '"name": "get_weather"' in text and '"name": "clock"' in text
    assert "get_weather" not in prompt_of("hermes", TOOLS | {"tool_choice": "none"})
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert "get_weather" not in prompt_of("hermes", TOOLS | {"tool_choice": choice})


def history(arguments: str, id: str = "abcdefghi") -> dict[str, Any]:
    made = {"id": id, "type": "function", "function": {"name": "clock", "arguments": arguments}}
    return TOOLS | {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": id, "content": "noon"},
        ]
    }


def test_earlier_calls_are_as_the_templates_want_them():
    given = '{"zone": "CET"}'
    assert '"name": "clock", "arguments": {"zone": "CET"}' in prompt_of("hermes", history(given))
    assert '"parameters": {"zone": "CET"}' in prompt_of("llama3_json", history(given))
    assert '"arguments": {"zone": "CET"}' in prompt_of("mistral", history(given))
    assert f"clock\n```json\n{given}" in prompt_of("deepseek_v3", history(given))
    text = prompt_of("hermes", history("no JSON"))
    assert "no JSON" in text and '"arguments": {}' in text


def test_a_template_that_knows_no_tools_gets_them_in_words():
    text = prompt_of("plain", history('{"zone": 1}'))
    assert text.startswith("system: You can call these functions:\n<tools>\n{")
    assert '<tool_call>\n{"name": "clock", "arguments": {"zone": 1}}\n</tool_call>' in text
    assert "user: <tool_response>\nnoon\n</tool_response>\nassistant: " in text
    with_system = TOOLS | {"messages": [{"role": "system", "content": "Be brief."}, USER]}
    assert prompt_of("plain", with_system).startswith("system: Be brief.\n\nYou can call")


def test_a_call_that_is_cut_off_is_told_as_far_as_it_goes():
    choice = ask("hermes", HERMES, TOOLS | {"max_tokens": 60})
    assert choice["finish_reason"] == "length"
    [made] = choice["message"]["tool_calls"]
    assert PARIS.startswith(made["function"]["arguments"])


@pytest.mark.parametrize("max_tokens", [8, 24, 60])
def test_a_forced_call_that_is_cut_off_leaves_no_content(max_tokens: int):
    """Whether its name is written or not, on each route."""
    body = TOOLS | {"tool_choice": "required", "max_tokens": max_tokens}
    choice = ask("hermes", HERMES, body)
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert ("tool_calls" in choice["message"]) == (max_tokens == 60)
    stream = joined(streamed(family_app("hermes", HERMES)[0], body))
    assert stream["content"] == "" and bool(stream["tool_calls"]) == (max_tokens == 60)

    function = WEATHER["function"]
    asked = {"model": "m", "input": "Weather?", "max_output_tokens": max(16, max_tokens)}
    asked |= {"tools": [{"type": "function"} | function], "tool_choice": "required"}
    reply = run(call(family_app("hermes", HERMES)[0], "/v1/responses", asked))
    parts = [part for item in reply.json()["output"] for part in item.get("content", ())]
    assert "".join(part["text"] for part in parts) == ""

    tool = {"name": "get_weather", "input_schema": PLACE}
    asked = CHAT | {"max_tokens": max_tokens, "tools": [tool], "tool_choice": {"type": "any"}}
    reply = run(call(family_app("hermes", HERMES)[0], "/v1/messages", asked))
    assert {block["type"] for block in reply.json()["content"]} <= {"tool_use"}


@pytest.mark.parametrize("n_calls", [1, 2])
def test_one_call_is_enough_without_parallel_tool_calls(n_calls: int):
    body = TOOLS | {"parallel_tool_calls": n_calls > 1}
    app, client = family_app("hermes", f"{HERMES}\n{HERMES} and more")
    choice = run(call(app, CHATS, body)).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == n_calls
    assert choice["finish_reason"] == "tool_calls"
    assert [reason for *_, reason in client.aborts] == ["stop"] * (n_calls == 1)
    stream = joined(streamed(family_app("hermes", f"{HERMES}\n{HERMES} and more")[0], body))
    assert len(stream["tool_calls"]) == n_calls


def test_several_choices_are_told_apart():
    app, _ = family_app("hermes", HERMES)
    chunks = streamed(app, TOOLS | {"n": 2})
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert joined(mine)["tool_calls"][0]["function"]["name"] == "get_weather"


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("family", TEMPLATES)
def test_forced_calls_reach_the_engine_as_a_grammar(family: str, choice: Any):
    """And are read as they are forced."""
    app, client = family_app(family, WRITTEN[family])
    reply = run(call(app, CHATS, TOOLS | {"tool_choice": choice}))
    [made] = reply.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == json.loads(PARIS)
    grammar = client.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == "lark" and "get_weather" in grammar.text
    assert ("clock" in grammar.text) == (choice == "required")


def test_strict_tools_have_a_grammar_and_others_have_none():
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    for tools, held in (([WEATHER], False), ([strict], True)):
        app, client = family_app("hermes", "Hello.")
        assert run(call(app, CHATS, CHAT | {"tools": tools})).status == 200
        assert (client.requests[0].sampling.grammar is not None) == held


BAD_PROPERTY = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
NO_TYPE = {"type": "object", "properties": {"a": {"items": {"type": ["string", "any"]}}}}
BAD = {"type": "function", "function": {"name": "crooked", "parameters": BAD_PROPERTY}}


def test_a_strict_schema_that_cannot_be_enforced_is_named():
    """By its tool and the place in it, and not by a grammar that the client never wrote."""
    app, client = family_app("hermes", "x")
    reply = run(call(app, CHATS, CHAT | {"tools": [WEATHER, _strict(BAD)]}))
    assert reply.status == 400 and not client.requests
    assert reply.error["param"] == "tools[1].function.parameters"
    message = reply.error["message"]
    assert message.startswith('tools[1] "crooked": at #/properties/a: ')
    assert "start:" not in message and "call_" not in message


def test_a_type_that_does_not_exist_is_left_out_or_named():
    tool = {"type": "function", "function": {"name": "f", "parameters": NO_TYPE}}
    app, _ = family_app("hermes", "x")
    reply = run(call(app, CHATS, CHAT | {"tools": [tool], "tool_choice": "required"}))
    assert reply.headers["x-unenforced-schema"] == "f#/properties/a/items/type"
    reply = run(call(app, CHATS, CHAT | {"tools": [_strict(tool)]}))
    assert reply.status == 400 and '"any" is no type' in reply.error["message"]


FORMS = (
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "crooked"}}},
    {"response_format": {"type": "json_object"}},
)


@pytest.mark.parametrize("fields", FORMS)
def test_one_bad_tool_does_not_refuse_the_others(fields: dict[str, Any]):
    app, client = family_app("hermes", "x")
    tools = [WEATHER, BAD, _strict(CLOCK)]
    reply = run(call(app, CHATS, CHAT | {"tools": tools} | fields))
    assert reply.status == 200, reply.body
    assert reply.headers["x-unenforced-schema"] == "crooked#/properties/a/pattern"
    grammar = client.requests[0].sampling.grammar
    assert grammar is not None and "crooked" in grammar.text and '"pattern"' not in grammar.text


def test_what_is_left_out_is_told_before_a_stream():
    app, _ = family_app("hermes", HERMES)
    body = CHAT | {"tools": [WEATHER, BAD], "tool_choice": "required", "stream": True}
    reply = run(call(app, CHATS, body))
    assert reply.headers["x-unenforced-schema"] == "crooked#/properties/a/pattern"


@pytest.mark.parametrize(
    ("choice", "kind"), [("auto", "lark"), ("required", "lark"), ("none", "json_object")]
)
def test_tools_and_a_grammar_of_the_answer_go_together(choice: str, kind: str):
    app, client = family_app("hermes", "x")
    both = TOOLS | {"tool_choice": choice, "response_format": {"type": "json_object"}}
    assert run(call(app, CHATS, both)).status == 200
    grammar = client.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == kind


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    return tool | {"function": tool["function"] | {"strict": True}}


THINKING = "<think>\nTwo and two.\n</think>\n\nFour."


def test_thoughts_are_counted():
    app, _ = family_app("qwen3", THINKING)
    body = run(call(app, CHATS, CHAT)).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("\nTwo and two.\n")}


def test_a_thinking_budget_reaches_the_engine_as_a_grammar():
    for budget in (0, 20):
        app, client = family_app("qwen3", THINKING)
        reply = run(call(app, CHATS, CHAT | {"thinking_token_budget": budget}))
        assert reply.status == 200
        grammar = client.requests[0].sampling.grammar
        assert grammar is not None and f"[max_tokens={budget}]" in grammar.text


def test_thoughts_can_be_left_out():
    body = CHAT | {"include_reasoning": False}
    message = ask("qwen3", THINKING, body)["message"]
    assert message["content"] == "Four." and "reasoning_content" not in message
    chunks = streamed(family_app("qwen3", THINKING)[0], body)
    assert joined(chunks)["reasoning_content"] == "" and joined(chunks)["content"] == "Four."


def test_the_prompt_says_whether_the_model_thinks_already():
    """DeepSeek's template opens the thoughts, Qwen's closes them where they are switched off."""
    assert ask("deepseek_v3", "Hm.</think>So.", CHAT)["message"]["reasoning_content"] == "Hm."
    off = CHAT | {"chat_template_kwargs": {"enable_thinking": False}}
    message = ask("qwen3", "</think> is a tag", off)["message"]
    assert "reasoning_content" not in message


def test_effort_reaches_the_template():
    assert "Reasoning: high" in prompt_of("harmony", CHAT | {"reasoning_effort": "high"})
    assert "Reasoning: medium" in prompt_of("harmony", CHAT)
    assert prompt_of("qwen3", CHAT | {"reasoning_effort": "none"}).endswith("</think>\n\n")
    assert prompt_of("qwen3", CHAT | {"reasoning_effort": "low"}).endswith("assistant\n")
    prompt_of("hermes", CHAT | {"reasoning_effort": "none"})


def test_earlier_thoughts_reach_the_template():
    tokenizer = FamilyTokenizer("plain")
    tokenizer.chat_template = "{{ messages[-1].reasoning_content }}"
    for name in ("reasoning", "reasoning_content"):
        client = FakeClient()
        message = {"role": "assistant", "content": "a", name: "Hm"}
        reply = run(
            call(make_app(client, tokenizer=tokenizer), CHATS, CHAT | {"messages": [message]})
        )
        assert reply.status == 200 and bytes(client.requests[0].prompt) == b"Hm"


def schema(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools", {"tools": 5}),
        ("tools", {"tools": [5]}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [CLOCK] * 129}),
        ("tools", {"tools": [CLOCK, CLOCK]}),
        ("tools", {"tools": schema(type="nope")}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
        *(
            ("tools", {"tools": [{"type": "function", "function": {"name": name}}]})
            for name in ("", "a b", "a\nb", "x" * 129, 5, None)
        ),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "nope"}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": 5}),
        ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "web_search"}}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function"}}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": WEATHER | {"function": {"name": "f"}}}),
        ("parallel_tool_calls", {"tools": [CLOCK], "parallel_tool_calls": 1}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("function_call", {"function_call": "auto"}),
        ("reasoning_effort", {"reasoning_effort": "nope"}),
        ("include_reasoning", {"include_reasoning": 1}),
        *(
            ("thinking_token_budget", {"thinking_token_budget": value})
            for value in (-1, 2**31, "5", True, 1.5)
        ),
        *(
            ("chat_template_kwargs", {"chat_template_kwargs": value})
            for value in (
                5,
                [],
                {"messages": []},
                {"tools": []},
                {"chat_template": "x"},
                {"tokenize": True},
                {"add_generation_prompt": False},
                {"eos_token": "x"},
                {"__class__": 1},
                {"a b": 1},
                {"a": "x" * (1 << 14)},
                {f"a{number}": 1 for number in range(33)},
            )
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_fields_are_named(field: str, fields: dict[str, Any]):
    app, client = family_app("plain", "x")
    reply = run(call(app, CHATS, CHAT | fields))
    assert reply.status == 400 and not client.requests
    assert reply.error["param"].split(".")[0].split("[")[0] == field, reply.error
    assert len(reply.body) < 2000


def test_the_openai_client_reads_all_of_it():
    app, _ = family_app("qwen3", f"<think>Hm.</think>Wait. {HERMES}")
    with served(app) as (url, _):
        http = DefaultHttpxClient(trust_env=False)
        client: Any = OpenAI(base_url=f"{url}/v1", api_key="k", http_client=http)
        whole = client.chat.completions.create(**TOOLS).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == "Wait."
        assert whole.message.tool_calls and whole.message.tool_calls[0].type == "function"
        assert whole.message.tool_calls[0].function.arguments == PARIS
        with client.chat.completions.stream(**TOOLS) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.finish_reason == "tool_calls"
        [made] = final.message.tool_calls or []
        assert made.function.arguments == PARIS


def test_the_settings_know_every_name():
    assert set(get_args(_ToolParserName)) == set(TOOL_NAMES)
    assert set(get_args(_ReasoningParserName)) == set(REASONING_NAMES)


@pytest.mark.parametrize("family", TEMPLATES)
def test_families_are_known_by_their_templates(family: str):
    turns = TurnFormat.of(TEMPLATES[family])
    named = {"plain": "hermes", "qwen3": "hermes"}.get(family, family)
    assert turns.tools is not None and turns.tools.name == named
    assert turns.thinks == (family in ("qwen3", "harmony", "deepseek_v3", "deepseek_v31"))


def test_a_template_with_thoughts_and_calls_in_tags_is_known():
    """As Qwen3.5's: the prompt opens the thoughts."""
    turns = TurnFormat.of(TEMPLATES["qwen3_coder"] + "{% if enable_thinking %}<think>\n{% endif %}")
    assert turns.tools is not None and turns.tools.name == "qwen3_coder"
    assert turns.reasoning is not None and turns.reasoning.name == "qwen3"


PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Edits"}}


@pytest.mark.parametrize("chunk", [1, 6])
def test_a_custom_tool_gets_its_text(chunk: int):
    text = 'a\n"b" 😀'
    arguments = json.dumps({"input": text})
    written = f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>' + HERMES
    body = CHAT | {"tools": [PATCH, WEATHER, {"type": "web_search"}]}
    choice = ask("hermes", written, body, chunk=chunk)
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": text})
    assert second["function"] == {"name": "get_weather", "arguments": PARIS}
    app, client = family_app("hermes", written, chunk=chunk)
    reply = run(call(app, CHATS, body | {"stream": True}))
    assert reply.headers["x-ignored-params"] == "tools[2]"
    chunks = [json.loads(frame[6:]) for frame in reply.body.decode().split("\n\n")[:-2]]
    calls = [
        part
        for chunk_ in chunks
        for each in chunk_["choices"]
        for part in each["delta"].get("tool_calls", ())
        if part["index"] == 0
    ]
    assert (calls[0]["type"], calls[0]["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert "".join(part["custom"]["input"] for part in calls) == text
    # What comes back is read as the model wrote it.
    answer = {"role": "tool", "tool_call_id": first["id"], "content": "done"}
    history = [USER, choice["message"], answer, answer | {"tool_call_id": second["id"]}]
    run(call(app, CHATS, body | {"messages": history}))
    prompt = FamilyTokenizer("hermes").decode(client.requests[-1].prompt)
    assert '{"name": "patch", "arguments": {"input": "a\\n' in prompt


@pytest.mark.parametrize(
    ("choice", "syntax", "told"),
    [
        ({"type": "custom", "custom": {"name": "patch"}}, "regex", None),
        ("required", "regex", None),
        ("auto", "regex", "tools[0].custom.format"),
        ("required", "lark", "tools[0].custom.format"),
    ],
)
def test_the_form_of_a_custom_tool_is_kept_where_it_can_be(choice: Any, syntax: str, told: Any):
    grammar = {"syntax": syntax, "definition": "[ab]+"}
    form = {"type": "grammar", "grammar": grammar}
    tool = {"type": "custom", "custom": {"name": "patch", "format": form}}
    app, client = family_app("hermes", "x")
    reply = run(call(app, CHATS, CHAT | {"tools": [tool, CLOCK], "tool_choice": choice}))
    assert reply.status == 200 and reply.headers.get("x-unenforced-schema") == told
    wanted = client.requests[0].sampling.grammar
    assert (wanted is not None) == (choice != "auto")
    if wanted is not None:
        assert (syntax == "regex") == ("^(?:[ab]+)$" in wanted.text)

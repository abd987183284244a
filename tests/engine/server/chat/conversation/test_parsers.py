"""What families write, read in any pieces: thoughts, content and calls, and nothing lost."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_names import REASONING_NAMES, TOOL_NAMES

from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    AssistantMessage,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.server.chat.conversation.families import TOOL_FORMATS
from jitney.engine.server.chat.conversation.formats import _NONE, TurnFormat

NAMES = frozenset({"f", "get_weather"})
PARIS = '{"city": "Paris", "days": [1, 2], "more": {"a": "}\\"<"}}'
D = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
C = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEP = "<｜tool▁sep｜>"


@dataclass
class Case:
    tools: str
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    thinks: str = _NONE
    prompt: str = ""


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def v3(name: str, arguments: str) -> str:
    return f"{C[0]}function{SEP}{name}\n```json\n{arguments}\n```{C[1]}"


def coder(name: str, **arguments: str) -> str:
    said = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(said)}</function>\n</tool_call>"


def v31(name: str, arguments: str) -> str:
    return f"{C[0]}{name}{SEP}{arguments}{C[1]}"


WEATHER = f'{{"name": "get_weather", "arguments": {PARIS}}}'
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
ONE = [("get_weather", PARIS)]
TWO = [*ONE, ("f", "{}")]
F = [("f", "{}")]
A_IS_X = [("f", '{"a": "x"}')]
ANALYSIS = "<|channel|>analysis<|message|>hm <|x|><|end|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

CASES = [
    # hermes
    Case("hermes", hermes(WEATHER), calls=ONE),
    Case("hermes", f"Hi.\n{hermes(WEATHER)}\n{hermes('{"name": "f"}')}", "Hi.", TWO),
    Case(
        "hermes",
        f"{hermes('{"arguments": {"a": 1}, "id": [], "name": "g"}')} so",
        " so",
        [("g", '{"a": 1}')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>',
        calls=[("f", '{"a":1}')],
    ),
    Case("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', calls=[("f", "{}")]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', calls=[("f", '{"a": 1')]),
    Case(
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":1</tool_call> tail',
        " tail",
        [("f", '{"a":1')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":1}, oh</tool_call>',
        ", oh",
        [("f", '{"a":1}')],
    ),
    Case("hermes", f"<tool_call>no {hermes(WEATHER)}", "<tool_call>no", ONE),
    Case("hermes", "  2 <tool_calls> < 3\n", "  2 <tool_calls> < 3\n"),
    Case("hermes", '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>'),
    Case("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}'),
    Case("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum'),
    Case("hermes", "a <tool_call>[1]", "a <tool_call>[1]"),
    Case("hermes", "<tool", "<tool"),
    # Llama 3
    Case("llama3_json", LLAMA, calls=ONE),
    Case("llama3_json", f'{LLAMA}; {{"name": "f", "parameters": {{}}}}', calls=TWO),
    Case("llama3_json", f'{LLAMA}{{"name": "f", "parameters": {{}}}}\n', calls=TWO),
    Case("llama3_json", f'{LLAMA}\n\n{{"name": "f", "parameters": {{}}}};', calls=TWO),
    Case("llama3_json", f"I look.\n{LLAMA}\nDone.", "I look.\nDone.", ONE),
    Case("llama3_json", f"{LLAMA}; no\n{LLAMA}", "; no", [*ONE, *ONE]),
    Case("llama3_json", f'{LLAMA}\n{{"a": [1]}}', '\n{"a": [1]}', ONE),
    Case("llama3_json", f"<|python_tag|>{LLAMA}", calls=ONE),
    Case(
        "llama3_json",
        'Sure. <|python_tag|>{"type": "function", "name": "new", "parameters": {}}',
        "Sure.",
        [("new", "{}")],
    ),
    Case("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Case("llama3_json", ' {"name": "f", "age": 3}', ' {"name": "f", "age": 3}'),
    Case("llama3_json", '<|python_tag|>brave.call(q="a")', '<|python_tag|>brave.call(q="a")'),
    Case("llama3_json", f" See: {LLAMA}", f" See: {LLAMA}"),
    # Mistral
    Case("mistral", f'[TOOL_CALLS] [{WEATHER}, {{"name": "f", "arguments": {{}}}}]', calls=TWO),
    Case("mistral", f"[TOOL_CALLS]{WEATHER}", calls=ONE),
    Case("mistral", f"So:[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]f{{}}", "So:", TWO),
    Case("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{PARIS}", calls=ONE),
    Case("mistral_v11", "[TOOL_CALLS]f", "[TOOL_CALLS]f"),
    Case("mistral", "[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]"),
    Case("mistral", "[a][TOOL", "[a][TOOL"),
    # DeepSeek
    Case("deepseek_v3", f"{D[0]}{v3('get_weather', PARIS)}\n{v3('f', '{}')}{D[1]}", calls=TWO),
    Case("deepseek_v3", f"Well.{D[0]}{v3('f', '{"a":1}')}{D[1]}", "Well.", [("f", '{"a":1}')]),
    Case("deepseek_v31", f"{D[0]}{v31('get_weather', PARIS)}{v31('f', '{}')}{D[1]}", calls=TWO),
    Case("deepseek_v31", f"{C[0]}get weather", f"{C[0]}get weather"),
    # Gemma
    Case(
        "gemma",
        "Sure\n```tool_code\nprint(get_weather(city='a', n=[1, None]))\n```\n.",
        "Sure\n.",
        [("get_weather", '{"city": "a", "n": [1, null]}')],
    ),
    Case("gemma", "```tool_code\n[f(), f(a=-1)]\n```", calls=[("f", "{}"), ("f", '{"a": -1}')]),
    Case("gemma", "```tool_code\nf()", calls=[("f", "{}")]),
    Case("gemma", "```tool_code\nimport os\n```", "```tool_code\nimport os\n```"),
    Case("gemma", "```tool_code\ng(a=open('x'))\n```", "```tool_code\ng(a=open('x'))\n```"),
    Case("gemma", "```python\nf()\n```", "```python\nf()\n```"),
    Case(
        "functiongemma",
        '<start_function_call>call:f{a:<escape>x"<y<escape>,b:3,c:[true,<escape>q<escape>],'
        "d:{e:null,f:g h}}<end_function_call>",
        calls=[("f", '{"a": "x\\"<y", "b": 3, "c": [true, "q"], "d": {"e": null, "f": "g h"}}')],
    ),
    Case("gemma4", 'I <|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', "I", [("f", '{"a": "x"}')]),
    Case("gemma4", "<|tool_call>say:f{}", "<|tool_call>say:f{}"),
    # elements between tags
    Case("qwen3_coder", coder("f", a="x\ny", b="2"), calls=[("f", '{"a": "x\\ny", "b": 2}')]),
    Case(
        "qwen3_coder", f"Hi.\n{coder('f')}\n{coder('g')} so", "Hi. so", [("f", "{}"), ("g", "{}")]
    ),
    Case("qwen3_coder", "<function=f>\n</function>", calls=[("f", "{}")]),
    Case("qwen3_coder", coder("f") + "\n" + coder("f", a="x"), calls=[*F, *A_IS_X]),
    Case(
        "qwen3_coder",
        coder("f").removesuffix("</tool_call>") + coder("f", a="x").removeprefix("<tool_call>\n"),
        calls=[*F, *A_IS_X],
    ),
    Case("qwen3_coder", "use <function=g>\n</function>", "use <function=g>\n</function>"),
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n<function=get_weather>\n</function>\n</tool_call>",
        calls=[("f", "{}"), ("get_weather", "{}")],
    ),
    Case("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>.", ".", [("f", "{}")]),
    Case("qwen3_coder", "<tool_call>\n<function=f>\n<tool_call>\n<function=f>\n", calls=2 * F),
    Case("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a", calls=F),
    Case("qwen3_coder", "<tool_call>\n<function=f>\n oh</tool_call>", "oh", F),
    Case("qwen3_coder", "<tool_call>\n<function", "<tool_call>\n<function"),
    Case("qwen3_coder", "<tool_call>[1]", "<tool_call>[1]"),
    Case(
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>\n</function>\n"
        "</seed:tool_call>",
        calls=[("f", '{"a": "x"}')],
    ),
    Case(
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>[1]</arg_value>\n</tool_call>",
        calls=[("f", '{"a": "x", "b": [1]}')],
    ),
    Case(
        "glm47",
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call><tool_call>f</tool_call>",
        calls=[("f", '{"a": "x"}'), *F],
    ),
    Case(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n'
        '<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        calls=[("f", '{"a": "x"}'), *F],
    ),
    # JSON between markers
    Case(
        "solar_open",
        "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>"
        '{"a": "x"}<|tool_call:end|><|calls|>',
        calls=A_IS_X,
    ),
    Case("apriel", f"So <tool_calls>[{WEATHER}, {WEATHER}]</tool_calls>", "So", [*ONE, *ONE]),
    Case("minimax_m1", f"<tool_calls>\n{WEATHER}\n{WEATHER}\n</tool_calls>", calls=[*ONE, *ONE]),
    Case("nemotron_v2", f"<TOOLCALL>[{WEATHER}]</TOOLCALL>", calls=ONE),
    Case("granite", f"<|tool_call|>[{WEATHER}] ok", " ok", ONE),
    Case("gigachat3", f"<|function_call|>{WEATHER}", calls=ONE),
    Case(
        "cohere_command",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x"}}\n]'
        "<|END_ACTION|>",
        calls=A_IS_X,
    ),
    Case(
        "apertus", '<|tools_prefix|>[{"f": {}}, {"g": {}}]<|tools_suffix|>', calls=[*F, ("g", "{}")]
    ),
    Case(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>"
        '{"a": "x"}<|tool_call_end|><|tool_calls_section_end|>',
        calls=A_IS_X,
    ),
    Case(
        "functionary",
        '<function=f>{"a": "x"}</function><function=f>{}</function>',
        calls=[*A_IS_X, *F],
    ),
    Case(
        "lfm2",
        "<|tool_call_start|>[f(a='x\n y', b={\"c\": [true, null]})]<|tool_call_end|>.",
        ".",
        [("f", '{"a": "x\\n y", "b": {"c": [true, null]}}')],
    ),
    Case("lfm2", "<|tool_call_start|>[f(a='x'), f()]<|tool_call_end|>", calls=[*A_IS_X, *F]),
    # harmony
    Case(
        "harmony",
        f"{ANALYSIS}<|start|>assistant{TO_F}{PARIS}<|call|>",
        calls=[("f", PARIS)],
        reasoning="hm <|x|>",
        thinks="openai",
    ),
    Case(
        "harmony",
        f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Yes. <|return|>",
        "Yes. ",
        reasoning="hm <|x|>",
        thinks="openai",
    ),
    Case(
        "harmony",
        f" to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>{TO_F}{{}}",
        calls=[("f", "{}"), ("f", "{}")],
        thinks="openai",
    ),
    Case("harmony", "<|channel|>commentary<|message|>I will.<|end|>", "I will.", thinks="openai"),
    Case("harmony", "plain < text", "plain < text", thinks="openai"),
    Case("harmony", "<|channel|>" + "x" * 600, "<|channel|>" + "x" * 600, thinks="openai"),
    Case(
        "harmony", "<|channel|>analysis<|message|>cut <|en", reasoning="cut <|en", thinks="openai"
    ),
    # thoughts
    Case(
        "hermes",
        f"<think>\nhm </thin\n</think>\n\nYes. {hermes(WEATHER)}",
        "Yes.",
        ONE,
        "hm </thin",
        "qwen3",
    ),
    Case("hermes", "hm</think>ok", "ok", reasoning="hm", thinks="deepseek_r1", prompt="a<think>\n"),
    Case(
        "hermes",
        "<think>off</think>",
        "<think>off</think>",
        thinks="qwen3",
        prompt="<think>\n\n</think>\n\n",
    ),
    Case("hermes", " <thin air", " <thin air", thinks="qwen3"),
    Case("hermes", "<think> cut <", reasoning="cut <", thinks="qwen3"),
    Case("hermes", "<think></think>", thinks="qwen3"),
    # calls inside of thoughts
    Case("hermes", f"<think>\nSo.\n{hermes(WEATHER)}", "", ONE, "So.", "qwen3"),
    Case("hermes", f"<think>{hermes(WEATHER)}\n{hermes(WEATHER)}\n", "", 2 * ONE, "", "qwen3"),
    Case(
        "hermes", f"<think>a <tool_call> b\n{hermes(WEATHER)}", "", ONE, "a <tool_call> b", "qwen3"
    ),
    Case(
        "hermes",
        f"<think>{hermes(WEATHER)}, no",
        reasoning=f"{hermes(WEATHER)}, no",
        thinks="qwen3",
    ),
    Case(
        "hermes",
        f"<think>a\n{hermes(WEATHER)} b </think>\n{hermes(WEATHER)}",
        "",
        ONE,
        f"a\n{hermes(WEATHER)} b",
        "qwen3",
    ),
    Case("hermes", "<think>a <tool_call>", reasoning="a <tool_call>", thinks="qwen3"),
    Case(
        "qwen3_coder",
        f"x\n{coder('f', a='y')}",
        "",
        [("f", '{"a": "y"}')],
        "x",
        "qwen3",
        "<think>\n",
    ),
    Case(
        "mistral",
        f"[THINK]a[/THINK][TOOL_CALLS]f{PARIS}",
        calls=[("f", PARIS)],
        reasoning="a",
        thinks="mistral",
    ),
]


def parsed(case: Case, pieces: list[str]) -> list[AssistantEvent]:
    turns = TurnFormat.of("", case.tools, case.thinks)
    parser = turns.parser(case.prompt, NAMES, forced=False)
    events: list[AssistantEvent] = []
    for piece in pieces:
        events += parser.push(piece, [0])
    return events + parser.finish()


def joined(events: list[AssistantEvent]) -> list[tuple[Any, ...]]:
    """The events with neighbours of a kind joined and without the names of calls."""
    said: list[tuple[Any, ...]] = []
    for event in events:
        match event:
            case ToolCallStart(index, _, name):
                said.append(("call", index, name))
                continue
            case ToolCallArguments(index, text):
                key = ("arguments", index)
            case ContentDelta(text):
                key = ("content", 0)
            case ReasoningDelta(text):
                key = ("reasoning", 0)
        assert text
        if said and said[-1][:2] == key:
            said[-1] = (*key, f"{said[-1][2]}{text}")
        else:
            said.append((*key, text))
    return said


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tools}: {case.text[:40]}")
def test_families_are_read(case: Case):
    events = parsed(case, [case.text])
    message = AssistantMessage.of(events)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    assert (message.content, calls, message.reasoning) == (
        case.content,
        case.calls,
        case.reasoning,
    )
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == len(ids)
    whole = joined(events)
    assert joined(parsed(case, list(case.text))) == whole
    for place in range(0, len(case.text), 1 + len(case.text) // 300):
        assert joined(parsed(case, cut(case.text, [place]))) == whole


FRAGMENTS = sorted(
    {
        piece
        for format in TOOL_FORMATS
        for marker in format.markers
        for piece in (marker, marker[:-1], marker[: len(marker) // 2])
    }
    | {"```tool_code\n", "```", "<think>", "</think>", '{"name": "f", ', '"arguments": ', "f(a=1)"}
    | {PARIS, WEATHER, LLAMA, "{}", "{", "}", ",", ";", " ", "\n", "f", "call:f", "é😀", '"', "\\"}
)


@settings(deadline=None, max_examples=100)
@given(
    tools=st.sampled_from([format.name for format in TOOL_FORMATS]),
    thinks=st.sampled_from([_NONE, "qwen3"]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    places=st.lists(st.integers(0, 500), max_size=12),
)
def test_pieces_do_not_matter_whatever_is_written(tools, thinks, fragments, places):
    text = "".join(fragments)
    thinks = "openai" if tools == "harmony" else thinks
    case = Case(tools, text, thinks=thinks)
    events = parsed(case, [text])
    assert joined(parsed(case, cut(text, places))) == joined(events)
    message = AssistantMessage.of(events)
    reads_over_markers = tools.startswith("deepseek") or tools in (
        *("kimi_k2", "minimax_m2", "solar_open"),
    )
    if not message.tool_calls and thinks == _NONE and not reads_over_markers:
        assert message.content == text


def test_text_is_held_back_no_longer_than_needed():
    turns = TurnFormat.of("", "hermes", "qwen3")
    parser = turns.parser("", NAMES, forced=False)
    pieces = ["Hi", " <", "b>", " <tool", "_box>", "."]
    said = [joined(parser.push(piece, [0])) for piece in pieces]
    content = [[entry[2] for entry in one] for one in said]
    assert content == [["Hi"], [], [" <b>"], [], [" <tool_box>"], ["."]]


def test_arguments_come_while_they_are_written():
    parser = TurnFormat.of("", "hermes").parser("", NAMES, forced=False)
    parser.push('<tool_call>\n{"name": "f", "arguments": ', [0])
    first = parser.push('{"te', [0])
    assert isinstance(first[0], ToolCallStart) and first[1] == ToolCallArguments(0, '{"te')
    assert parser.push('xt": "a', [0]) == [ToolCallArguments(0, 'xt": "a')]


@pytest.mark.parametrize("thinks", ["qwen3", "openai"])
def test_thoughts_are_counted_by_token(thinks: str):
    """Markers that are one token, and such that are several."""
    if thinks == "openai":
        tokens = ["<|channel|>", "analysis", "<|message|>", "I ", "think", ".", "<|end|>"]
        tokens += ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "So", "."]
        expected = 3
    else:
        tokens = ["<think>", "\n", "I ", "th", "ink", "\n", "</", "think", ">", "\n\n", "So"]
        expected = 5
    parser = TurnFormat.of("", "hermes", thinks).parser("", NAMES, forced=False)
    for number, token in enumerate(tokens):
        parser.push(token, [number])
    parser.finish()
    assert parser.reasoning_tokens == expected


def test_mistrals_names_of_calls_are_as_its_templates_want_them():
    [start] = parsed(Case("mistral", "[TOOL_CALLS]f{}"), ["[TOOL_CALLS]f{}"])[:1]
    assert isinstance(start, ToolCallStart)
    assert len(start.id) == 9 and start.id.isalnum()


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_every_name_is_known(name: str):
    turns = TurnFormat.of("", name)
    assert (turns.tools is None) == (name == _NONE)


def test_names_of_both_kinds():
    assert {"hermes", "llama3_json", "mistral", "gemma", "openai", "deepseek_v3"} <= set(TOOL_NAMES)
    assert {"qwen3", "deepseek_r1", "openai_gptoss"} <= set(REASONING_NAMES)
    assert len(set(TOOL_NAMES)) == len(TOOL_NAMES)
    assert len(set(REASONING_NAMES)) == len(REASONING_NAMES)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(deadline=None, max_examples=50)
def test_any_arguments_come_through_unchanged(value):
    arguments = json.dumps({"a": value}, ensure_ascii=False)
    calls = {
        "hermes": hermes(f'{{"name": "f", "arguments": {arguments}}}'),
        "llama3_json": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{arguments}",
        "deepseek_v3": f"{D[0]}{v3('f', arguments)}{D[1]}",
        "deepseek_v31": f"{D[0]}{v31('f', arguments)}{D[1]}",
    }
    for tools, text in calls.items():
        message = AssistantMessage.of(parsed(Case(tools, text), [text]))
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", arguments)]
        assert message.content == ""

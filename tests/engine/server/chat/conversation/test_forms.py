"""One form per model: what its grammar forces, its reader reads, and the text that tells it of the
form shows the same.
"""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from jitney.engine.common.errors import RequestError
from jitney.engine.core.grammar.compiling import new_matcher
from jitney.engine.core.text.fast_tokenizers import _tiny_fast
from jitney.engine.server.chat.conversation.call_text import SyntaxText, TagText
from jitney.engine.server.chat.conversation.events import AssistantMessage, ToolCallArguments
from jitney.engine.server.chat.conversation.families import TOOL_FORMATS
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.grammars import Turn
from jitney.engine.server.chat.conversation.tools import Tool, ToolUse

BYTES = LLTokenizer("byte")
FORMS = [form.name for form in TOOL_FORMATS]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
EVERYTHING: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "label": {"type": ["string", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "Tree": {
            "type": "object",
            "properties": {
                "leaf": {"enum": ["a", "b"]},
                "inner": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}], "default": None},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        },
    },
    "properties": {
        "text": {"type": "string", "description": "any"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mode": {"enum": ["fast", "slow mode", 3, None, True]},
        "fixed": {"const": "yes"},
        "flag": {"type": "boolean"},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "many": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "names": {"type": "array", "items": {"type": "string"}},
        "point": {"$ref": "#/$defs/Point"},
        "tree": {"$ref": "#/$defs/Tree"},
        "either": {"oneOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
        "a-b": {"type": "integer"},
        "class": {"type": "null"},
        "free": {"type": "object"},
        "last": {"type": "string"},
    },
    "required": ["text", "flag", "tree", "last"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "place": PLACE,
    "everything": EVERYTHING,
    "nothing": None,
    "open": {"type": "object"},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}, "c": {"type": "string"}},
        "additionalProperties": False,
    },
    "any": {"type": "object", "properties": {"a": {}}, "required": ["a"]},
}
#: What models like to write, and what looks like the forms' own marks.
PIECES = [
    *("Paris", "\n", " ", "é😀", '"', "'", "\\", "\\n", "0", "12", "-1.5", "true", "null", "None"),
    *("{", "}", "[", "]", "(", ")", ",", ":", "=", "<", "</", "</parameter", "<parameter>", "a_"),
    *("</function", "<tool_call", "</arg_value", "```", "\n\n", "fast", "yes", "x", "label", "<|"),
]


def turn_format(form: str) -> TurnFormat:
    return TurnFormat.of("", form)


def use_of(*tools: Tool, most: int | None = 1) -> ToolUse:
    return ToolUse(tools, is_required=True, most_calls=most)


def matcher(turns: TurnFormat, use: ToolUse) -> LLMatcher:
    grammar = Turn(turns, "", {}).grammar(use, None)
    assert grammar is not None
    return new_matcher(grammar, BYTES)


def closings(form: str) -> list[str]:
    """Texts that lead to the end of a call."""
    ends = ['"', "]", "}", ")"]
    match turn_format(form).calls.text.arguments:
        case SyntaxText(syntax=syntax):
            ends.append(syntax.quote)
        case TagText(after_value=after_value):
            ends.append(after_value)  # a tag that ends the call is the end behind it
        case _:
            pass
    return ends


def allowed(inner: LLMatcher) -> list[int]:
    mask = inner.compute_bitmask()
    return [id for id in range(256) if mask[id // 8] >> (id % 8) & 1]


def written(inner: LLMatcher, random: Random, ends: list[str]) -> str:
    """A whole turn under a grammar: pieces at random, and when it is long what ends it."""
    data = bytearray()
    for step in range(4000):
        if inner.is_stopped() or (inner.is_accepting() and random.random() < 0.3):
            return data.decode()
        pieces = PIECES if step < 40 else [random.choice([*ends, "x", "1"])]
        piece = random.choice(pieces).encode()
        taken = piece[: inner.try_consume_tokens(list(piece))]
        if not taken:
            choice = allowed(inner)
            byte = random.choice([each for each in choice if each > 32] or choice)
            assert inner.consume_token(byte)
            taken = bytes([byte])
        data += taken
    raise AssertionError(bytes(data[-300:]))


def read(
    turns: TurnFormat,
    use: ToolUse,
    pieces: list[str],
    *,
    forced: bool = False,
    is_cut: bool = False,
) -> AssistantMessage:
    parser = turns.parser("", use.functions, forced=forced)
    events = [event for piece in pieces for event in parser.push(piece, [0])]
    return AssistantMessage.of([*events, *parser.finish(is_cut=is_cut)])


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("form", FORMS)
def test_what_a_grammar_forces_is_read_as_arguments_that_fit(form: str, schema: str):
    """With whatever the model would like to write."""
    turns = turn_format(form)
    use = use_of(Tool("get_weather", None, SCHEMAS[schema]), Tool("clock-2.now"))
    start = matcher(turns, use)
    names: set[str] = set()
    for seed in range(3):
        text = written(start.deep_copy(), Random(seed), closings(form))
        message = read(turns, use, [text])
        assert message.content == "", text
        [call] = message.tool_calls
        parameters = SCHEMAS[schema] if call.name == "get_weather" else None
        parameters = parameters or {"type": "object", "maxProperties": 0}
        value = json.loads(call.arguments)
        errors = [*Draft202012Validator(parameters).iter_errors(value)]
        assert not errors, (text, errors)
        names.add(call.name)
    assert names <= {"get_weather", "clock-2.now"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.sampled_from(PIECES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b c", "class", "x-y"]), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
TYPES: dict[str, st.SearchStrategy[Any]] = {
    "text": TEXTS,
    "number": st.integers(-99, 99) | st.floats(-9, 9),
    "flag": st.booleans(),
    "object": st.dictionaries(st.sampled_from(["a", "b c"]), VALUES, max_size=3),
    "array": st.lists(VALUES, max_size=3),
    "nullable": TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
}
KINDS = {
    "text": "string",
    "flag": "boolean",
    "nullable": ["string", "null"],
}
TYPED = Tool(
    "f",
    None,
    {"type": "object", "properties": {key: {"type": KINDS.get(key, key)} for key in TYPES}},
)


@settings(deadline=None, max_examples=80)
@given(
    form=st.sampled_from(FORMS),
    arguments=st.fixed_dictionaries({}, optional=TYPES),
    places=st.lists(st.integers(0, 400), max_size=6),
    thinks=st.booleans(),
)
def test_a_call_that_is_told_is_read_unchanged(
    form: str, arguments: dict[str, Any], places: list[int], thinks: bool
):
    """In any pieces, with whatever is in its strings, and within thoughts that never end."""
    turns = TurnFormat.of("", form, "qwen3" if thinks and form != "harmony" else "none")
    text = turns.call_text("f", json.dumps(arguments))
    before = "<think>so" if turns.reasoning is not None else ""
    if before and not turns.calls.text.has_marker:
        before += "</think>"
    edges = sorted({0, *(place % (len(text) + 1) for place in places), len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    message = read(turns, use_of(TYPED), [before, *pieces])
    [call] = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("f", arguments), text
    assert message.content == "" and message.reasoning == ("so" if before else "")


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_makes_as_many_calls_as_it_may(form: str):
    turns = turn_format(form)
    text = turns.calls.text
    one = f"{text.before_name}f{text.before_arguments}{text.arguments.written('{}')}{text.after}"
    for most in (1, 2, None):
        use = use_of(Tool("f"), most=most)
        limit = 1 if text.is_alone else most or 3
        for count in (1, 2, 3):
            turn = f"{text.first}{text.separator.join([one] * count)}{text.last}"
            inner = matcher(turns, use)
            n_taken = inner.try_consume_tokens(list(turn.encode()))
            assert (n_taken == len(turn.encode()) and inner.is_accepting()) == (count <= limit)


@pytest.mark.parametrize("form", ["gemma4", "gemma", "qwen3_coder"])
def test_keywords_that_a_form_cannot_express_are_named_or_refused(form: str):
    place = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
    for strict in (False, True):
        turn = Turn(turn_format(form), "", {})
        use = use_of(Tool("f", None, place, strict).at("tools[0]"))
        if strict:
            with pytest.raises(RequestError, match=r'tools\[0\] "f": at #/properties/a/pattern'):
                turn.grammar(use, None)
        else:
            assert turn.grammar(use, None) is not None
            assert turn.unenforced == ["f#/properties/a/pattern"]


@pytest.mark.parametrize("form", ["gemma4", "gemma", "qwen3_coder"])
def test_properties_that_can_have_no_value_are_left_out(form: str):
    properties = {
        "a": {"not": {}},
        "b": False,
        "c": {"type": "string", "format": "uri"},
        "d": {"enum": []},
    }
    turn = Turn(turn_format(form), "", {})
    tool = Tool("f", None, {"type": "object", "properties": properties}, strict=True)
    assert turn.grammar(use_of(tool), None) is not None
    inner = matcher(turn.format, use_of(tool))
    call = list(turn.format.call_text("f", '{"c": "x"}').encode())
    assert inner.try_consume_tokens(call) == len(call) and inner.is_accepting()


CODER_TEMPLATE = "{% if tools %}<tool_call>\n<function=name>\n<parameter=key>{% endif %}"
DISTILL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>x\n```json\n{}\n```"


def test_a_template_without_tools_is_told_the_form_that_it_shows():
    turns = TurnFormat.of(DISTILL)
    use = use_of(Tool("clock"))
    for said in (turns.tools_text(use), turns.call_text("clock", "{}")):
        assert "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" in said and "<tool_call>" not in said
    assert "clock" in turns.tools_text(use)
    start = matcher(turns, use)
    assert start.try_consume_tokens(list(turns.call_text("clock", "{}").encode())) > 0
    assert start.is_accepting()
    assert "<tool_call>" in TurnFormat.of("{{ messages }}").tools_text(use)


@pytest.mark.parametrize(
    ("written_value", "expected"),
    [
        ("a\nb", "a\nb"),
        ("\na\n", "\na\n"),
        ("</parameter>", "</parameter>"),
        ("<parameter=x>1</parameter></function>", "<parameter=x>1</parameter></function>"),
        ('{"a": 1}', '{"a": 1}'),
        ("if a < b:\n  </", "if a < b:\n  </"),
    ],
)
def test_strings_between_tags_are_verbatim(written_value: str, expected: str):
    turns = TurnFormat.of(CODER_TEMPLATE)
    text = turns.call_text("f", json.dumps({"text": written_value, "flag": True}))
    [call] = read(turns, use_of(TYPED), list(text)).tool_calls
    assert json.loads(call.arguments) == {"text": expected, "flag": True}


@pytest.mark.parametrize(
    "sloppy",
    [
        "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=flag>\ntrue\n</tool_call>",
        "<function=f>\n<parameter=text>a</parameter><parameter=flag>True</parameter></function>",
        "<tool_call><function=f><parameter=text>a</parameter>\n<parameter=flag>true\n</function>",
        "<tool_call>\n<function=f>\n<parameter=text>\na</parameter>\n<parameter=flag>\ntrue\n"
        "</parameter>\n",
        "<tool_call>\n<function=f>\n<parameter=flag>\ntrue\n</parameter>\n<parameter=text>\na",
    ],
)
def test_missing_tags_are_made_up_for(sloppy: str):
    turns = TurnFormat.of(CODER_TEMPLATE)
    message = read(turns, use_of(TYPED), list(sloppy))
    [call] = message.tool_calls
    assert json.loads(call.arguments) == {"text": "a", "flag": True}
    assert message.content == ""


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("flag", "False", False),
        ("nullable", "None", None),
        ("nullable", "null", None),
        ("nullable", "5", "5"),
        ("nullable", '"q"', '"q"'),
        ("number", "1e3", 1000),
        ("number", "many", "many"),
        ("array", "['a', None]", ["a", None]),
        ("object", "{'a': \"it's\"}", {"a": "it's"}),
        ("object", "{broken", "{broken"),
        ("text", "null", "null"),
        ("other", "[1]", [1]),
        ("other", "word", "word"),
    ],
)
def test_values_have_the_types_of_the_schema(key: str, text: str, expected: Any):
    turns = TurnFormat.of(CODER_TEMPLATE)
    written_call = (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    )
    [call] = read(turns, use_of(TYPED), [written_call]).tool_calls
    assert json.loads(call.arguments) == {key: expected}


def test_strings_come_while_they_are_written():
    parser = TurnFormat.of(CODER_TEMPLATE).parser("", use_of(TYPED).functions, forced=False)
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\nab", [0])
    assert parser.push("c <d>\n", [0]) == [ToolCallArguments(0, "c <d>")]
    assert parser.push("</para", [0]) == []


@pytest.mark.parametrize("form", ["qwen3_coder", "deepseek_v3", "minimax_m2", "hermes"])
def test_strict_calls_are_held_however_they_begin(form: str):
    """Nothing that is read as a call can be written in another way."""
    turns = turn_format(form)
    text = turns.calls.text
    tool = Tool("f", None, PLACE | {"required": ["days"]}, strict=True)
    grammar = Turn(turns, "", {}).grammar(ToolUse((tool,)), None)
    assert grammar is not None
    for opening in turns.calls.openings:
        if text.first.startswith(opening) or text.before_name.startswith(opening):
            continue
        inner = new_matcher(grammar, BYTES)
        written_text = list(f"So {opening}".encode())
        assert inner.try_consume_tokens(written_text) == len(written_text) - 1
    inner = new_matcher(grammar, BYTES)
    free = list(f"So {turns.call_text('f', '{"days": 1}')} and <more>".encode())
    assert inner.try_consume_tokens(free) == len(free) and inner.is_accepting()


@pytest.mark.parametrize("form", FORMS)
def test_a_template_that_shows_a_call_has_its_form(form: str):
    turns = turn_format(form)
    shown = f"{{{{ tools }}}}{turns.call_text('example_function_name', '{"KEY": "x"}')}"
    if form == "llama3_json":
        shown += "<|python_tag|>"
    found = TurnFormat.of(shown).tools
    assert found is not None and found.name == form


@pytest.mark.parametrize("form", FORMS)
def test_markers_may_be_tokens_of_their_own(form: str):
    turns = turn_format(form)
    fast = _tiny_fast()
    rust: Any = fast.rust
    marks = [each for each in turns.calls.markers if each.startswith("<") and each.endswith(">")]
    rust.add_special_tokens([AddedToken(text, special=True) for text in marks])
    ids = {text: rust.token_to_id(text) for text in marks}
    trie = LLTokenizer(rust.to_str(), eos_token=[rust.token_to_id("<|im_end|>")])
    tokens = rust.encode(
        turns.call_text("f", '{"text": "a <b\\n c", "flag": true}'), add_special_tokens=False
    ).ids
    for is_required in (True, False):
        tool = Tool("f", None, TYPED.parameters, strict=not is_required)
        grammar = Turn(turns, "", ids).grammar(ToolUse((tool,), is_required), None)
        assert grammar is not None
        inner = LLMatcher(trie, LLMatcher.grammar_from_lark(grammar.text))
        assert not inner.is_error(), inner.get_error()
        assert inner.try_consume_tokens(tokens) == len(tokens) and inner.is_accepting()


def test_schemas_that_are_too_large_are_not_enforced_whole():
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        deep = {"type": "object", "properties": {"a": deep}}
    pairs: dict[str, Any] = {"D30": {"type": "string"}}
    for number in range(30):
        part = {"allOf": [{"$ref": f"#/$defs/D{number + 1}"}, {"required": ["a"]}]}
        pairs[f"D{number}"] = {"type": "object", "properties": {"a": part, "b": part}}
    wide = {"type": "object", "$defs": pairs, "properties": {"a": {"$ref": "#/$defs/D0"}}}
    for schema in (deep, wide):
        turn = Turn(turn_format("gemma4"), "", {})
        assert turn.grammar(use_of(Tool("f", None, schema)), None) is not None
        assert turn.unenforced


@pytest.mark.parametrize("count", [1, 9])
def test_a_call_within_thoughts_is_not_counted_among_them(count: int):
    turns = TurnFormat.of("", "hermes", "qwen3")
    for end, expected in (("", 3), ("</think>", 5)):
        parser = turns.parser("<think>\n", {"f": None}, forced=False)
        call = turns.call_text("f", "{}")
        for piece in (*"ab\n", call[:count], call[count:], end):
            parser.push(piece, [0])
        parser.finish()
        assert parser.reasoning_tokens == expected

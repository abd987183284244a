"""Grammars that hold a model to its family's way to call tools, with arguments that fit the tools'
schemas. In llguidance's Lark, since JSON schemas stand among other text in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jitney.engine.conversation import harmony
from jitney.engine.conversation.formats import (
    CallText,
    ReasoningFormat,
    TurnFormat,
    is_closed,
    is_open,
)
from jitney.engine.conversation.tools import Tool, ToolUse
from jitney.engine.errors import RequestError
from jitney.engine.types import Grammar

#: Calls of a turn that is forced to call and may do so more than once.
_MOST_CALLS = 16
#: How the arguments are written. Without a bound a model can write blanks for ever.
_JSON_STYLE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]{0,33}"}
#: Any text, the blanks between two parts, and text that is no call of Llama's.
_TEXTS = r"""
ANY: /(.|\n)*/
BLANKS: /[ \n]{0,4}/
NO_CALL: /[ \n]*([^{ \n](.|\n)*)?/
"""
#: Keywords beside which an object cannot be closed without a look at what they say.
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf")
_OPENING += ("oneOf", "$ref", "not", "if", "dependentSchemas", "propertyNames", "minProperties")


def tool_grammar(
    turns: TurnFormat, use: ToolUse, prompt: str, special_ids: Mapping[str, int]
) -> Grammar | None:
    """What a turn that follows a prompt may be; None: anything. special_ids: token ids of
    texts that are special tokens, which no other tokens spell.

    Raises RequestError where a tool is strict and its calls have no form that could be held to a
    schema.
    """
    if not use.is_required and not any(tool.strict for tool in use.tools):
        return None
    text = turns.forced_tools.text
    if turns.tools is None or (turns.tools.text is None and not use.is_required):
        raise RequestError(
            "this model writes calls in a form that cannot be held to a schema unless tool_choice "
            "is required or names a function",
            code="unsupported_parameter",
            param="tools",
        )
    assert text is not None  # forced_tools has one
    lark = _Lark(special_ids)
    thoughts = _thoughts(lark, turns, prompt)
    return Grammar("lark", lark.written(f"{thoughts} {_answer(lark, turns, text, use)}"))


def behind_thoughts(
    turns: TurnFormat, grammar: Grammar, prompt: str, special_ids: Mapping[str, int]
) -> Grammar:
    """The grammar of a turn whose answer has a grammar, and which may begin with thoughts. Raises
    RequestError for a grammar that cannot stand behind other text.
    """
    lark = _Lark(special_ids)
    thoughts = _thoughts(lark, turns, prompt)
    if not thoughts:
        return grammar
    match grammar.kind:
        case "json_object":
            answer = _json_rule({"type": "object"})
        case "json_schema":
            answer = _json_rule(json.loads(grammar.text))
        case "choice":
            choices = [lark.literal(text) for text in json.loads(grammar.text)]
            answer = f"({' | '.join(choices)})"
        case _:
            raise RequestError(
                f"a {grammar.kind} grammar cannot follow this model's thoughts; switch them off, "
                "or use a JSON schema or a choice",
                code="unsupported_parameter",
                param="structured_outputs",
            )
    if turns.has_channels:
        answer = f"{lark.literal(f'{harmony.CHANNEL}final{harmony.MESSAGE}')} {answer}"
    return Grammar("lark", lark.written(f"{thoughts} {answer}"))


def _json_rule(schema: Any) -> str:
    """A schema that is true or false is no object, and has no place for the style."""
    styled = schema | {"x-guidance": _JSON_STYLE} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(styled, ensure_ascii=False)}"


def _answer(lark: _Lark, turns: TurnFormat, text: CallText, use: ToolUse) -> str:
    """What may come behind the thoughts."""
    if use.is_required:
        return lark.calls(text, use)
    if turns.has_channels:
        final = lark.literal(f"{harmony.CHANNEL}final{harmony.MESSAGE}")
        return f"({lark.calls(text, use)} | {final} ANY)"
    if not text.may_follow_text:
        return f"({lark.calls(text, use)} | NO_CALL)"
    assert turns.tools is not None
    head = text.first or text.before_name
    trigger = next(marker for marker in turns.tools.markers if head.startswith(marker))
    return f"({lark.up_to(trigger)} {lark.calls(text, use, trigger=trigger)})* ANY"


def _thoughts(lark: _Lark, turns: TurnFormat, prompt: str) -> str:
    """What may come before the answer."""
    if turns.has_channels:
        head = lark.literal(f"{harmony.CHANNEL}{harmony.THOUGHTS}{harmony.MESSAGE}")
        behind = lark.literal(f"{harmony.START}assistant")
        return f"({head} {lark.up_to(harmony.END)} {behind})?"
    reasoning: ReasoningFormat | None = turns.reasoning
    if reasoning is None or is_closed(prompt, reasoning):
        return ""
    rest = f"{lark.up_to(reasoning.end)} BLANKS"
    if is_open(prompt, reasoning):
        return rest
    return f"({lark.literal(reasoning.start)} {rest})?"


class _Lark:
    """A grammar in the making."""

    def __init__(self, special_ids: Mapping[str, int]):
        self._ids = special_ids
        self._rules: list[str] = []
        parts = [re.escape(text) for text in sorted(special_ids, key=len, reverse=True)]
        self._cut = re.compile(f"({'|'.join(parts)})") if parts else re.compile("(?!)")

    def literal(self, text: str) -> str:
        """Exactly this text."""
        parts: list[str] = []
        for part in self._cut.split(text):
            if part in self._ids:
                parts.append(f"<[{self._ids[part]}]>")
            elif part:
                parts.append(json.dumps(part, ensure_ascii=False))
        return " ".join(parts)

    def up_to(self, marker: str) -> str:
        """Any text, up to and with a marker."""
        if marker in self._ids:
            return f"ANY {self.literal(marker)}"
        name = f"up_to_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: ANY {json.dumps(marker, ensure_ascii=False)}")
        return name

    def calls(self, text: CallText, use: ToolUse, *, trigger: str = "") -> str:
        """The calls of a turn. trigger: what of the first one has been written already; behind it
        stands one call, unless they have something around them.
        """
        one = self._any_call(text, use, "" if text.first else trigger)
        more = ""
        is_many = use.most_calls != 1 and not text.is_alone
        if is_many and (text.first or not trigger):
            more = f"({self.literal(text.separator)} {one}){{0,{_MOST_CALLS - 1}}}"
        head = self.literal(text.first.removeprefix(trigger))
        return f"{head} {one} {more} {self.literal(text.last)}"

    def _any_call(self, text: CallText, use: ToolUse, trigger: str) -> str:
        names = [self._call(text, tool, trigger) for tool in use.tools]
        return f"({' | '.join(names)})"

    def _call(self, text: CallText, tool: Tool, trigger: str) -> str:
        name = f"call_{len(self._rules)}"
        before = text.before_name.removeprefix(trigger)
        head = self.literal(f"{before}{tool.name}{text.before_arguments}")
        arguments = _json_rule(_arguments_schema(tool))
        self._rules.append(f"{name}: {head} {arguments} {self.literal(text.after)}")
        return name

    def written(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, _TEXTS])


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """Of an object. A tool that says no parameters has none."""
    if tool.parameters is None:
        schema: dict[str, Any] = {"properties": {}, "additionalProperties": False}
    else:
        schema = _closed(tool.parameters)
    return {"type": "object"} | schema


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name, wherever that is plain to see: what fits
    it fits the client's own, and a model does not go on inventing more.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        if not any(keyword in schema for keyword in _OPENING):
            closed["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    return closed

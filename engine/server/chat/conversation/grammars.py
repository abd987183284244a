"""Grammars of a family's calls with arguments that fit the tools' schemas, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar, JsonDict, JsonValue
from jitney.engine.core import Terms
from jitney.engine.server.chat.conversation import harmony
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.lark import Lark
from jitney.engine.server.chat.conversation.tools import Tool, ToolUse

#: Most calls of a turn that must call and may call repeatedly.
_MOST_CALLS = 16
#: The schema of a tool without parameters.
_NO_ARGUMENTS: JsonDict = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to be generated."""

    format: TurnFormat
    #: The end of the text that it follows.
    prompt: str
    #: Token ids of markers that are special tokens.
    special_ids: Mapping[str, int]
    #: Most tokens of thoughts; None: unlimited.
    thinking_budget: int | None = None
    #: Keywords that the grammar does not enforce, as (function name, JSON pointer).
    unenforced: list[str] = field(default_factory=list[str])

    def grammar(self, use: ToolUse | None, answer: Grammar | None) -> Grammar | None:
        """The grammar of the turn, or None. answer: of its content. Raises RequestError."""
        _check_budget(self)
        if use is None and answer is None and self.thinking_budget is None:
            return None
        if use is not None and not use.is_required:
            is_strict = any(tool.strict for tool in use.tools)
            if answer is None and self.thinking_budget is None and not is_strict:
                return None
            _check_reading(self)
        lark = Lark(self.special_ids, json_rule)
        thoughts = _thoughts(lark, self)
        if use is None and answer is not None and not thoughts:
            return answer
        return Grammar("lark", lark.written(f"{thoughts} {_behind(lark, self, use, answer)}"))


def _check_budget(turn: Turn) -> None:
    """Raise RequestError for a thinking budget that cannot be enforced exactly."""
    if turn.thinking_budget is None:
        return
    if turn.format.thoughts_end not in turn.special_ids:
        raise RequestError(
            "this model does not think, or marks the end of its thoughts with no token of its own",
            code="unsupported_parameter",
            param="thinking_token_budget",
        )


def _check_reading(turn: Turn) -> None:
    """Raise RequestError if calls are read only where they are forced."""
    if turn.format.tools is None:
        raise RequestError(
            "this server reads calls only where they are forced (tool_call_parser none), so "
            "strict tools and response_format beside tools need tool_choice required or a function",
            code="unsupported_parameter",
            param="tools",
        )


def _behind(lark: Lark, turn: Turn, use: ToolUse | None, answer: Grammar | None) -> str:
    """The rule of the turn after the thoughts. Raises RequestError."""
    if use is not None and (answer is None or use.is_required):
        return _answer(lark, turn, use)
    said = _content(lark, turn, "ANY" if answer is None else _rule_of(lark, answer))
    return said if use is None else f"({_calls(lark, turn, use)} | {said})"


def _rule_of(lark: Lark, grammar: Grammar) -> str:
    """A grammar as a part of a turn's. Raises RequestError where it can be no part."""
    match grammar.kind:
        case "json_object":
            return json_rule({"type": "object"})
        case "json_schema":
            return json_rule(json.loads(grammar.text))
        case "choice":
            choices = [lark.literal(text) for text in json.loads(grammar.text)]
            return f"({' | '.join(choices)})"
        case _:
            raise RequestError(
                f"a {grammar.kind} grammar stands neither behind thoughts nor beside tools here; "
                "switch them off, or use a JSON schema or a choice",
                code="unsupported_parameter",
                param="structured_outputs",
            )


def _content(lark: Lark, turn: Turn, rule: str) -> str:
    """The rule of content, with the header that some formats need."""
    if not turn.format.has_channels:
        return rule
    return f"{lark.literal(f'{harmony.Mark.CHANNEL}final{harmony.Mark.MESSAGE}')} {rule}"


def _answer(lark: Lark, turn: Turn, use: ToolUse) -> str:
    """The rule of an answer that may or must call."""
    if use.is_required:
        return _calls(lark, turn, use)
    if turn.format.has_channels:
        return f"({_calls(lark, turn, use)} | {_content(lark, turn, 'ANY')})"
    form = turn.format.calls
    if not form.text.has_marker:
        return f"(NO_CALL | NO_CALL_LINES {_calls(lark, turn, use)})"
    head = form.text.first or form.text.before_name
    trigger = next(marker for marker in form.markers if head.startswith(marker))
    text = lark.without(marker for marker in form.openings if marker != trigger)
    call = f"{lark.up_to(trigger, text=text)} {_calls(lark, turn, use, trigger=trigger)}"
    return f"({call})* {text}"


def _thoughts(lark: Lark, turn: Turn) -> str:
    """The rule of the thoughts before the answer."""
    turns, budget = turn.format, turn.thinking_budget
    if turns.has_channels:
        head = lark.literal(
            f"{harmony.Mark.CHANNEL}{harmony.HarmonyReader.THOUGHTS}{harmony.Mark.MESSAGE}"
        )
        behind = lark.literal(f"{harmony.Mark.START}assistant")
        return f"({head} {lark.up_to(harmony.Mark.END, budget)} {behind})?"
    reasoning = turns.reasoning
    if reasoning is None or reasoning.is_closed(turn.prompt):
        return ""
    rest = f"{lark.up_to(reasoning.end, budget)} BLANKS"
    if reasoning.is_open(turn.prompt):
        return rest
    return f"({lark.literal(reasoning.start)} {rest})?"


def _calls(lark: Lark, turn: Turn, use: ToolUse, *, trigger: str = "") -> str:
    """The calls of a turn. trigger: written text of the first (one only, if nothing is around)."""
    text = turn.format.calls.text
    rules = [_call(lark, turn, tool, "" if text.first else trigger) for tool in use.tools]
    one = lark.rule(lark.one_of(rules))
    most = min(use.most_calls or _MOST_CALLS, _MOST_CALLS)
    if text.is_alone or (trigger and not text.first):
        most = 1
    more = f"({lark.literal(text.separator)} {one}){{0,{most - 1}}}" if most > 1 else ""
    head = lark.literal(text.first.removeprefix(trigger))
    return f"{head} {one} {more} {lark.literal(text.last)}"


def _call(lark: Lark, turn: Turn, tool: Tool, trigger: str) -> str:
    """One call of a tool. Raises RequestError if a strict schema cannot be enforced in full."""
    text = turn.format.calls.text
    before = text.before_name.removeprefix(trigger)
    head = lark.literal(f"{before}{tool.name}{text.before_arguments}")
    terms = Terms(tool.strict, closed=True, name=tool.name, param=tool.path)
    unenforced: list[str] = []
    try:
        schema = _arguments_schema(tool.parameters, terms)
        arguments = text.arguments.rule(lark, schema, unenforced)
    except RecursionError:
        unenforced.append("#")
        arguments = text.arguments.rule(lark, {"type": "object"}, [])
    if unenforced and tool.strict:
        raise terms.refusal(unenforced[0], "the form of this model's calls cannot enforce it")
    turn.unenforced.extend(map(terms.pointer, unenforced))
    return lark.rule(f"{head} {arguments} {lark.literal(text.after)}")


def json_rule(schema: JsonValue) -> str:
    """A part of a Lark grammar that matches JSON of a schema."""
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}  # llguidance requires an object
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _arguments_schema(parameters: JsonDict | None, terms: Terms) -> JsonDict:
    """The schema of a tool's arguments with terms. parameters: the client's schema, or None."""
    schema = {"type": "object"} | (_NO_ARGUMENTS if parameters is None else parameters)
    schema.pop("x-guidance", None)  # clients may not set llguidance's options
    return terms.with_schema(schema)

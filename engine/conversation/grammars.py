"""Grammars that hold a model to its family's way to call tools, with arguments that fit the tools'
schemas. In llguidance's Lark, since JSON schemas stand among other text in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jitney.engine.conversation import harmony
from jitney.engine.conversation.formats import CallText, TurnFormat
from jitney.engine.conversation.tools import Tool, ToolUse
from jitney.engine.errors import RequestError
from jitney.engine.structured.terms import Terms, arguments_rule, json_rule
from jitney.engine.types import Grammar

#: Calls of a turn that is forced to call and may do so more than once.
_MOST_CALLS = 16
#: Any text, the blanks between two parts, and text that is no call of Llama's.
_TEXTS = r"""
ANY: /(.|\n)*/
BLANKS: /[ \n]{0,4}/
NO_CALL: /[ \n]*([^{ \n](.|\n)*)?/
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is known of a turn before it is written."""

    format: TurnFormat
    #: The end of the text that it follows.
    prompt: str
    #: Token ids of markers that are tokens of their own: no others spell them.
    special_ids: Mapping[str, int]
    #: Tokens that it may think; None: as many as it likes.
    thinking_budget: int | None = None

    def grammar(self, use: ToolUse | None, answer: Grammar | None) -> Grammar | None:
        """What the whole turn may be; None: anything. use: what it may call. answer: what its
        content must be, if it says any. Raises RequestError.
        """
        _check_budget(self)
        if use is not None and answer is not None and not use.is_required:
            return _calls_or_answer(self, use, answer)
        if use is not None:
            return _tool_grammar(self, use)
        if answer is not None:
            return _behind_thoughts(self, answer)
        if self.thinking_budget is None:
            return None
        lark = _Lark(self.special_ids)
        thoughts = _thoughts(lark, self)
        return Grammar("lark", lark.written(f"{thoughts} {_content(lark, self, 'ANY')}"))


def _check_budget(turn: Turn) -> None:
    """Refuse a budget where it could not be kept to the token."""
    if turn.thinking_budget is None:
        return
    reasoning = turn.format.reasoning
    end = harmony.Mark.END if reasoning is None else reasoning.end
    if not turn.format.thinks or end not in turn.special_ids:
        raise RequestError(
            "this model does not think, or marks the end of its thoughts with no token of its own",
            code="unsupported_parameter",
            param="thinking_token_budget",
        )


def _tool_grammar(turn: Turn, use: ToolUse) -> Grammar | None:
    """What a turn that may or must call may be; None: anything.

    Raises RequestError where a tool is strict and its calls have no form that could be held to a
    schema.
    """
    turns = turn.format
    is_free = turn.thinking_budget is None and not any(tool.strict for tool in use.tools)
    if is_free and not use.is_required:
        return None
    if not use.is_required:
        _check_form(turns)
    text = turns.forced_tools.text
    assert text is not None  # forced_tools has one
    lark = _Lark(turn.special_ids)
    thoughts = _thoughts(lark, turn)
    return Grammar("lark", lark.written(f"{thoughts} {_answer(lark, turns, text, use)}"))


def _check_form(turns: TurnFormat) -> None:
    """Raise RequestError where calls that need not be made cannot be held to a schema."""
    if turns.tools is None or turns.tools.text is None:
        raise RequestError(
            "this model writes calls in a form that cannot be held to a schema unless tool_choice "
            "is required or names a function",
            code="unsupported_parameter",
            param="tools",
        )


def _calls_or_answer(turn: Turn, use: ToolUse, grammar: Grammar) -> Grammar:
    """A turn that calls, or else says what its grammar allows. Raises RequestError where one of
    them cannot be held to its form.
    """
    _check_form(turn.format)
    text = turn.format.forced_tools.text
    assert text is not None  # forced_tools has one
    lark = _Lark(turn.special_ids)
    thoughts = _thoughts(lark, turn)
    said = _content(lark, turn, _rule_of(lark, grammar))
    return Grammar("lark", lark.written(f"{thoughts} ({lark.calls(text, use)} | {said})"))


def _behind_thoughts(turn: Turn, grammar: Grammar) -> Grammar:
    """The grammar of a turn whose answer has a grammar, and which may begin with thoughts. Raises
    RequestError for a grammar that cannot stand behind other text.
    """
    lark = _Lark(turn.special_ids)
    thoughts = _thoughts(lark, turn)
    if not thoughts:
        return grammar
    said = _content(lark, turn, _rule_of(lark, grammar))
    return Grammar("lark", lark.written(f"{thoughts} {said}"))


def _rule_of(lark: _Lark, grammar: Grammar) -> str:
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


def _content(lark: _Lark, turn: Turn, rule: str) -> str:
    """A rule of what is said, with the header that it has in some formats."""
    if not turn.format.has_channels:
        return rule
    return f"{lark.literal(f'{harmony.Mark.CHANNEL}final{harmony.Mark.MESSAGE}')} {rule}"


def _answer(lark: _Lark, turns: TurnFormat, text: CallText, use: ToolUse) -> str:
    """What may come behind the thoughts."""
    if use.is_required:
        return lark.calls(text, use)
    if turns.has_channels:
        final = lark.literal(f"{harmony.Mark.CHANNEL}final{harmony.Mark.MESSAGE}")
        return f"({lark.calls(text, use)} | {final} ANY)"
    if not text.may_follow_text:
        return f"({lark.calls(text, use)} | NO_CALL)"
    assert turns.tools is not None
    head = text.first or text.before_name
    trigger = next(marker for marker in turns.tools.markers if head.startswith(marker))
    return f"({lark.up_to(trigger)} {lark.calls(text, use, trigger=trigger)})* ANY"


def _thoughts(lark: _Lark, turn: Turn) -> str:
    """What may come before the answer."""
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

    def up_to(self, marker: str, most_tokens: int | None = None) -> str:
        """Any text, up to and with a marker. most_tokens: of a text before a marker that is a
        token; then the marker is all that may come.
        """
        name = f"up_to_{len(self._rules)}"
        if marker in self._ids and most_tokens is None:
            return f"ANY {self.literal(marker)}"
        if marker in self._ids:
            self._rules.append(f"{name}[max_tokens={most_tokens}]: ANY")
            return f"{name} {self.literal(marker)}"
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
        terms = Terms(tool.strict, closed=True, name=tool.name, param=f"tools[{tool.number}]")
        arguments = arguments_rule(tool.parameters, terms)
        self._rules.append(f"{name}: {head} {arguments} {self.literal(text.after)}")
        return name

    def written(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, _TEXTS])

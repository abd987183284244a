"""The format of a model's turns, by its chat template: for prompts, parsers and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jinja2 import Environment, TemplateError, meta

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.conversation import harmony
from jitney.engine.server.chat.conversation.events import AssistantEvent, ContentDelta
from jitney.engine.server.chat.conversation.families import (
    HARMONY_NAMES,
    HERMES,
    REASONING_FORMATS,
    TOOL_FORMATS,
    Functions,
    ReasoningFormat,
    ToolFormat,
)
from jitney.engine.server.chat.conversation.harmony import HarmonyReader
from jitney.engine.server.chat.conversation.reading import CallReader, Reading, TextReader
from jitney.engine.server.chat.conversation.thoughts import AssistantParser, ThinkReader
from jitney.engine.server.chat.conversation.tools import ToolUse

_AUTO, _NONE = "auto", "none"
#: Variables of templates that turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols"])
#: Tags of templates for training, which jinja2 does not know.
_TRAINING_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """The form of the served model's turns."""

    #: None: calls are not looked for.
    tools: ToolFormat | None = None
    #: None: thoughts are not separated, or harmony's channels separate them.
    reasoning: ReasoningFormat | None = None
    has_channels: bool = False
    #: Variables that the chat template uses.
    variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str, tools: str = _AUTO, reasoning: str = _AUTO) -> TurnFormat:
        """The form for a chat template. tools, reasoning: names, or by the template's text."""
        channels = reasoning in HARMONY_NAMES
        if reasoning == _AUTO:
            channels = harmony.Mark.CHANNEL in template
        thoughts = None
        if not channels:
            thoughts = _reasoning_format(template, reasoning)
        return cls(
            tools=_tool_format(template, tools),
            reasoning=thoughts,
            has_channels=channels,
            variables=_template_variables(template),
        )

    @property
    def thinks(self) -> bool:
        return self.has_channels or self.reasoning is not None

    @property
    def thoughts_end(self) -> str | None:
        """The marker that ends the thoughts; None for a model that does not think."""
        if self.has_channels:
            return harmony.Mark.END
        return None if self.reasoning is None else self.reasoning.end

    def markers(self, *, with_calls: bool) -> tuple[str, ...]:
        """Texts that a parser needs even if they are special tokens."""
        if self.has_channels:
            return tuple(harmony.Mark)
        texts: tuple[str, ...] = ()
        if self.reasoning is not None:
            texts += (self.reasoning.start, self.reasoning.end)
        if with_calls:
            texts += self.calls.markers
        return texts

    @property
    def takes_effort(self) -> bool:
        """Whether the template has a variable for the reasoning effort."""
        return not self.variables.isdisjoint(("reasoning_effort", *_SWITCHES))

    def effort_variables(self, effort: str | None) -> JsonDict:
        """The template variables for a reasoning effort; empty where it has none."""
        if effort is None:
            return {}
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": "xhigh" if effort == "max" else effort}
        for switch in _SWITCHES:
            if switch in self.variables:
                return {switch: effort != "none"}
        return {}

    def parser(
        self, prompt: str, functions: Collection[str] | Functions, *, forced: bool
    ) -> AssistantParser:
        """The parser of a turn after a prompt text. functions: names, or name -> schema; empty:
        calls are content. forced: a grammar makes the model call, see `CallText`.
        """
        if not isinstance(functions, Mapping):
            functions = dict.fromkeys(functions)
        return AssistantParser(self._reader(prompt, functions, forced), is_forced=forced)

    def _reader(self, prompt: str, functions: Functions, forced: bool) -> TextReader:
        if self.has_channels:
            return HarmonyReader()

        def new_answer() -> TextReader:
            form = self.calls if forced else self.tools
            if not functions or form is None:
                return _ContentReader()
            return form.reader(form, functions)

        answer = new_answer()
        if self.reasoning is None or self.reasoning.is_closed(prompt):
            return answer
        markers: tuple[str, ...] = ()
        if isinstance(answer, CallReader) and not forced:
            markers = answer.opening_markers
        return ThinkReader(
            self.reasoning.start,
            self.reasoning.end,
            new_answer,
            markers,
            is_open=self.reasoning.is_open(prompt),
        )

    @property
    def calls(self) -> ToolFormat:
        """The form of calls that the prompt describes and the grammar forces."""
        return HERMES if self.tools is None else self.tools

    def tools_text(self, use: ToolUse) -> str:
        """A text that describes tools, for a model whose template does not show them."""
        lines = [json.dumps(tool.shown(), ensure_ascii=False) for tool in use.tools]
        listed = "\n".join(lines)
        example = self.call_text("NAME", '{"ARGUMENT": "VALUE"}')
        return (
            "You can call these functions:\n"
            f"<tools>\n{listed}\n</tools>\n"
            f"To call one, write its name and its arguments in this form:\n{example}"
        )

    def call_text(self, name: str, arguments: str) -> str:
        """A call as the model writes it. arguments: JSON text."""
        return self.calls.text.written(name, arguments)

    def result_text(self, content: str) -> str:
        """The result of a call, for a template without tool results."""
        return f"<tool_response>\n{content}\n</tool_response>"


class _ContentReader(TextReader):
    """All text is content."""

    def feed(self, text: str) -> list[AssistantEvent]:
        return [ContentDelta(text)] if text else []

    def read(self) -> Reading:
        yield from self.next_char()


def _template_variables(template: str) -> frozenset[str]:
    """Variables of a chat template; if jinja2 cannot parse it, all of its words."""
    try:
        parsed = _ENVIRONMENT.parse(_TRAINING_MARKS.sub("", template))
        return frozenset(meta.find_undeclared_variables(parsed))
    except TemplateError:
        return frozenset(_WORD.findall(template))


def _tool_format(template: str, name: str) -> ToolFormat | None:
    if name == _NONE:
        return None
    if name == _AUTO:
        return next((each for each in TOOL_FORMATS if each.is_signed(template)), HERMES)
    return _by_name(TOOL_FORMATS, name)


def _reasoning_format(template: str, name: str) -> ReasoningFormat | None:
    if name == _AUTO:
        for format in REASONING_FORMATS:
            if any(sign in template for sign in format.signs):
                return format
    return _by_name(REASONING_FORMATS, name)


def _by_name[F: (ToolFormat, ReasoningFormat)](formats: Iterable[F], name: str) -> F | None:
    return next((each for each in formats if name in (each.name, *each.aliases)), None)

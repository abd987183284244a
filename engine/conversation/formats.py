"""The families' ways to write thoughts and calls, as data, and how a model's is found.

Names are those of vLLM's parsers where it has one for the same form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jinja2 import Environment, TemplateError, meta

from jitney.engine.conversation import harmony
from jitney.engine.conversation.events import AssistantEvent, ContentDelta
from jitney.engine.conversation.harmony import HarmonyReader
from jitney.engine.conversation.python_calls import PythonCalls
from jitney.engine.conversation.reading import Reading, TextReader
from jitney.engine.conversation.thoughts import AssistantParser, ThinkReader
from jitney.engine.conversation.tool_calls import (
    BareCalls,
    BraceCalls,
    MistralCalls,
    NamedCalls,
    TaggedCalls,
)
from jitney.engine.errors import RequestError
from jitney.engine.types import JsonDict

#: Makes the reader of turns in which these functions may be called.
type _NewReader = Callable[[frozenset[str]], TextReader]


@dataclass(frozen=True, slots=True)
class CallText:
    """How calls are written, for a grammar that makes a model write them: first, call, separator,
    call ..., last; a call is before_name, NAME, before_arguments, ARGUMENTS, after.
    """

    before_name: str
    before_arguments: str
    after: str
    first: str = ""
    separator: str = ""
    last: str = ""
    #: Whether text before the first call is told from it by what it begins with; without it a call
    #: is the whole turn.
    may_follow_text: bool = True
    #: Whether a turn ends with its call.
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class _ToolFormat:
    """How a family calls tools."""

    name: str
    #: Other names of it.
    aliases: tuple[str, ...]
    new_reader: _NewReader
    #: How calls are forced; None: their arguments are not written as JSON, so that a schema cannot
    #: be forced on them, and forced calls are written as `_GENERIC` has it.
    text: CallText | None
    #: Special tokens that the reader must see.
    markers: tuple[str, ...] = ()
    #: What of a template's text shows that its model calls tools this way: one of these.
    signs: tuple[str, ...] = ()
    #: And what shows that it does not.
    unless: str = "\0"
    #: Whether templates want a call's arguments as an object, not as JSON text.
    wants_objects: bool = True


@dataclass(frozen=True, slots=True)
class _ReasoningFormat:
    """How a family writes what it thinks."""

    name: str
    aliases: tuple[str, ...]
    #: Before and after the thoughts, at the beginning of a turn.
    start: str
    end: str
    #: What a template must have for its model to think this way.
    signs: tuple[str, ...]

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of the thoughts."""
        return prompt.rstrip().endswith(self.start.rstrip())

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with the end of the thoughts, so that none follow."""
        return prompt.rstrip().endswith(self.end)


def _tagged(start: str, end: str) -> _NewReader:
    return lambda names: TaggedCalls(start, end)


_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALL_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_MARKERS = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _CALL_SEP)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_MARKERS = (_MISTRAL, "[ARGS]", "[CALL_ID]")
_PYTHON_TAG = "<|python_tag|>"

_HERMES_TEXT = CallText(
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    after="}\n</tool_call>",
    separator="\n",
)

#: In the order in which their signs are looked for.
_TOOL_FORMATS = (
    _ToolFormat(
        "harmony",
        ("openai", "gptoss"),
        lambda names: HarmonyReader(),
        CallText(
            before_name=f"{harmony.Mark.CHANNEL}commentary to={HarmonyReader.FUNCTIONS}",
            before_arguments=f" {harmony.Mark.CONSTRAIN}json{harmony.Mark.MESSAGE}",
            after="",
            is_alone=True,
        ),
        markers=tuple(harmony.Mark),
        signs=(harmony.Mark.CHANNEL,),
    ),
    _ToolFormat(
        "deepseek_v31",
        (),
        lambda names: NamedCalls(
            _CALL_BEGIN,
            _CALL_END,
            after_name=_CALL_SEP,
            around=(_CALLS_BEGIN, _CALLS_END),
        ),
        CallText(
            first=_CALLS_BEGIN,
            before_name=_CALL_BEGIN,
            before_arguments=_CALL_SEP,
            after=_CALL_END,
            last=_CALLS_END,
        ),
        markers=_DEEPSEEK_MARKERS,
        signs=(_CALL_BEGIN,),
        unless="```json",
        wants_objects=False,
    ),
    _ToolFormat(
        "deepseek_v3",
        ("deepseek_r1",),
        lambda names: NamedCalls(
            _CALL_BEGIN,
            _CALL_END,
            before_name=f"function{_CALL_SEP}",
            after_name="```json",
            before_end="```",
            around=(_CALLS_BEGIN, _CALLS_END),
        ),
        CallText(
            first=_CALLS_BEGIN,
            before_name=f"{_CALL_BEGIN}function{_CALL_SEP}",
            before_arguments="\n```json\n",
            after=f"\n```{_CALL_END}",
            separator="\n",
            last=_CALLS_END,
        ),
        markers=_DEEPSEEK_MARKERS,
        signs=(_CALL_BEGIN,),
        wants_objects=False,
    ),
    _ToolFormat(
        "mistral_named",
        ("mistral_v11",),
        lambda names: MistralCalls(_MISTRAL),
        CallText(before_name=_MISTRAL, before_arguments="[ARGS]", after=""),
        markers=_MISTRAL_MARKERS,
        signs=("[ARGS]",),
    ),
    _ToolFormat(
        "mistral",
        (),
        lambda names: MistralCalls(_MISTRAL),
        CallText(
            first=f"{_MISTRAL} [",
            before_name='{"name": "',
            before_arguments='", "arguments": ',
            after="}",
            separator=", ",
            last="]",
        ),
        markers=_MISTRAL_MARKERS,
        signs=(_MISTRAL,),
    ),
    _ToolFormat(
        "gemma4",
        (),
        lambda names: BraceCalls("<|tool_call>", '<|"|>', "<tool_call|>"),
        None,
        markers=("<|tool_call>", '<|"|>', "<tool_call|>"),
        signs=("<|tool_call>",),
    ),
    _ToolFormat(
        "functiongemma",
        (),
        lambda names: BraceCalls("<start_function_call>", "<escape>", "<end_function_call>"),
        None,
        markers=("<start_function_call>", "<escape>", "<end_function_call>"),
        signs=("<start_function_call>",),
    ),
    _ToolFormat(
        "hermes",
        ("qwen", "qwen25", "qwen3"),
        _tagged("<tool_call>", "</tool_call>"),
        _HERMES_TEXT,
        markers=("<tool_call>", "</tool_call>"),
        signs=("<tool_call>",),
    ),
    _ToolFormat(
        "llama3_json",
        ("llama3", "llama4_json"),
        lambda names: BareCalls(_PYTHON_TAG, names),
        CallText(
            before_name='{"name": "',
            before_arguments='", "parameters": ',
            after="}",
            separator="; ",
            may_follow_text=False,
        ),
        markers=(_PYTHON_TAG,),
        signs=(_PYTHON_TAG, '"parameters": dictionary of argument name'),
    ),
    _ToolFormat(
        "gemma",
        ("gemma3",),
        lambda names: PythonCalls("```tool_code", names),
        None,
        signs=("```tool_code",),
    ),
)
#: For models whose template knows no tools, told how by a text of ours.
_GENERIC = next(format for format in _TOOL_FORMATS if format.name == "hermes")

_REASONING_FORMATS = (
    _ReasoningFormat(
        "qwen3",
        ("deepseek_r1", "deepseek_v3", "deepseek_v31", "think"),
        "<think>",
        "</think>",
        ("</think>", "<think>"),
    ),
    _ReasoningFormat("mistral", ("magistral",), "[THINK]", "[/THINK]", ("[/THINK]",)),
    _ReasoningFormat("gemma4", (), "<|channel>thought\n", "<channel|>", ("<|channel>thought",)),
)
_HARMONY_NAMES = ("harmony", "openai", "openai_gptoss", "gptoss")

_AUTO, _NONE = "auto", "none"
#: Variables of templates that turn thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols"])
#: Marks of templates for training, which jinja2 does not know.
_TRAINING_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How the served model's turns are read."""

    #: None: calls are not looked for.
    tools: _ToolFormat | None = None
    #: None: thoughts are not told from the rest, or by harmony's channels.
    reasoning: _ReasoningFormat | None = None
    has_channels: bool = False
    #: What the chat template can be given.
    variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str, tools: str = _AUTO, reasoning: str = _AUTO) -> TurnFormat:
        """By a model's chat template. tools, reasoning: names; `AUTO` by the template's text."""
        channels = reasoning in _HARMONY_NAMES
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
    def template_has_tools(self) -> bool:
        """Whether the chat template shows tools to the model itself."""
        return "tools" in self.variables

    @property
    def thinks(self) -> bool:
        return self.has_channels or self.reasoning is not None

    def markers(self, *, with_calls: bool) -> tuple[str, ...]:
        """Texts that a parser must see even where they are special tokens."""
        if self.has_channels:
            return tuple(harmony.Mark)
        texts: tuple[str, ...] = ()
        if self.reasoning is not None:
            texts += (self.reasoning.start, self.reasoning.end)
        if self.tools is not None and with_calls:
            texts += self.tools.markers
        return texts

    @property
    def takes_effort(self) -> bool:
        """Whether the template can be told how long the model shall think."""
        return not self.variables.isdisjoint(("reasoning_effort", *_SWITCHES))

    def effort_variables(self, effort: str | None) -> JsonDict:
        """What tells the template how long the model shall think. Raises RequestError where nothing
        would.
        """
        if effort is None:
            return {}
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": effort}
        for switch in _SWITCHES:
            if switch in self.variables:
                return {switch: effort != "none"}
        if effort == "none" and not self.thinks:
            return {}
        raise RequestError(
            "this model cannot be told how long to think",
            code="unsupported_parameter",
            param="reasoning_effort",
        )

    def parser(self, prompt: str, names: frozenset[str], *, forced: bool) -> AssistantParser:
        """Of a turn that follows a prompt text. names: of the functions that may be called; empty:
        calls are content. forced: a grammar makes the model call, see `CallText`.
        """
        return AssistantParser(self._reader(prompt, names, forced))

    def _reader(self, prompt: str, names: frozenset[str], forced: bool) -> TextReader:
        if self.has_channels:
            return HarmonyReader()
        answer: TextReader = _ContentReader()
        if names:
            answer = self.forced_tools.new_reader(names) if forced else self._call_reader(names)
        if self.reasoning is None or self.reasoning.is_closed(prompt):
            return answer
        return ThinkReader(
            self.reasoning.start,
            self.reasoning.end,
            answer,
            is_open=self.reasoning.is_open(prompt),
        )

    def _call_reader(self, names: frozenset[str]) -> TextReader:
        return _ContentReader() if self.tools is None else self.tools.new_reader(names)

    @property
    def forced_tools(self) -> _ToolFormat:
        """The form in which calls can be forced."""
        if self.tools is None or self.tools.text is None:
            return _GENERIC
        return self.tools


class _ContentReader(TextReader):
    """All text is content."""

    def feed(self, text: str) -> list[AssistantEvent]:
        return [ContentDelta(text)] if text else []

    def read(self) -> Reading:
        yield from self.next_char()


def _template_variables(template: str) -> frozenset[str]:
    """What a chat template can be given; of one that jinja2 cannot read, all its words."""
    try:
        parsed = _ENVIRONMENT.parse(_TRAINING_MARKS.sub("", template))
        return frozenset(meta.find_undeclared_variables(parsed))
    except TemplateError:
        return frozenset(_WORD.findall(template))


def _tool_format(template: str, name: str) -> _ToolFormat | None:
    if name == _NONE:
        return None
    if name == _AUTO:
        for format in _TOOL_FORMATS:
            is_signed = any(sign in template for sign in format.signs)
            if is_signed and format.unless not in template:
                return format
        return _GENERIC
    return _by_name(_TOOL_FORMATS, name)


def _reasoning_format(template: str, name: str) -> _ReasoningFormat | None:
    if name == _AUTO:
        for format in _REASONING_FORMATS:
            if any(sign in template for sign in format.signs):
                return format
    return _by_name(_REASONING_FORMATS, name)


def _by_name[F: (_ToolFormat, _ReasoningFormat)](formats: Iterable[F], name: str) -> F | None:
    return next((each for each in formats if name in (each.name, *each.aliases)), None)

"""The model families' formats of calls and thoughts, as data, by vLLM's parser names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.conversation import harmony
from jitney.engine.server.chat.conversation.call_text import CallText, SyntaxText, TagText
from jitney.engine.server.chat.conversation.harmony import HarmonyReader
from jitney.engine.server.chat.conversation.python_calls import PythonCalls
from jitney.engine.server.chat.conversation.reading import CallReader, TextReader
from jitney.engine.server.chat.conversation.tag_calls import TagCalls
from jitney.engine.server.chat.conversation.tool_calls import (
    BareCalls,
    BraceCalls,
    JsonCalls,
    KeyedCalls,
    MistralCalls,
    NamedCalls,
)
from jitney.engine.server.chat.conversation.value_rules import ValueSyntax

#: The functions that a turn may call, with the schemas of their arguments.
type Functions = Mapping[str, JsonDict | None]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's form of tool calls."""

    name: str
    #: Makes the reader of a turn.
    reader: Callable[[ToolFormat, Functions], TextReader]
    #: How calls are written.
    text: CallText
    #: Texts the reader looks for; they stay in the text even if they are special tokens.
    markers: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    #: A template with one of these texts has this format. Empty: the first marker.
    signs: tuple[str, ...] = ()
    #: A template with one of these texts does not have it.
    unless: str = "\0"

    @property
    def openings(self) -> tuple[str, ...]:
        """Markers that begin a call."""
        reader = self.reader(self, {})
        return reader.opening_markers if isinstance(reader, CallReader) else ()

    def is_signed(self, template: str) -> bool:
        """Whether a template shows this form."""
        signs = self.signs or self.markers[:1]
        return any(sign in template for sign in signs) and self.unless not in template


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A family's form of thoughts."""

    name: str
    aliases: tuple[str, ...]
    #: Before and after the thoughts, at the beginning of a turn.
    start: str
    end: str
    #: A template with one of these texts has this format.
    signs: tuple[str, ...]

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of the thoughts."""
        return prompt.rstrip().endswith(self.start.rstrip())

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with the end of the thoughts, so that none follow."""
        return prompt.rstrip().endswith(self.end)


def _json_calls(form: ToolFormat, functions: Functions) -> TextReader:
    """JSON objects, or a list of them, between two markers."""
    return JsonCalls(*form.markers)


def _tag_calls(form: ToolFormat, functions: Functions) -> TextReader:
    """Calls whose arguments are elements between tags."""
    return TagCalls(form.text, functions)


def _brace_calls(form: ToolFormat, functions: Functions) -> TextReader:
    """Google's `call:name{key:value}` between two markers, with marks around strings."""
    return BraceCalls(*form.markers)


def _python_calls(form: ToolFormat, functions: Functions) -> TextReader:
    """Calls in Python between two markers."""
    return PythonCalls(*form.markers, names=functions)


def _mistral_calls(form: ToolFormat, functions: Functions) -> TextReader:
    return MistralCalls(form.markers[0])


def _json_text(first: str, separator: str, last: str) -> CallText:
    """Names and arguments in JSON objects."""
    return CallText(
        first=first,
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after="}",
        separator=separator,
        last=last,
    )


def _brace_text(start: str, quote: str, end: str) -> CallText:
    syntax = ValueSyntax(quote, has_bare_keys=True)
    return CallText(
        before_name=f"{start}call:",
        before_arguments="{",
        after=f"}}{end}",
        arguments=SyntaxText(syntax, ":"),
    )


_PYTHON = SyntaxText(
    ValueSyntax(
        quote="'",
        char=r"[^'\\\x00-\x1f\x7f]|\\['\\nrt]",
        escapes={"'": r"\'", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"},
        true="True",
        false="False",
        null="None",
        comma=", ",
        colon=": ",
    ),
    colon="=",
    odd=("**{", "}"),
)


_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALL_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_MARKERS = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _CALL_SEP)
_KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_SOLAR_CALLS = ("<|tool_calls|>", "<|calls|>")
_SOLAR_CALL = ("<|tool_call:begin|>", "<|tool_call:end|>")
_SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_MARKERS = (_MISTRAL, "[ARGS]", "[CALL_ID]")
_PYTHON_TAG = "<|python_tag|>"
_FENCE = "```"
_GEMMA4 = ("<|tool_call>", '<|"|>', "<tool_call|>")
_FUNCTION_GEMMA = ("<start_function_call>", "<escape>", "<end_function_call>")
_GLM_MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)

#: For models whose template shows no form of their own.
HERMES = ToolFormat(
    "hermes",
    _json_calls,
    CallText(
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after="}\n</tool_call>",
        separator="\n",
    ),
    ("<tool_call>", "</tool_call>"),
    aliases=("qwen", "qwen25", "qwen3"),
    signs=("<tool_call>",),
)

#: In the order in which their signs are looked for.
TOOL_FORMATS = (
    ToolFormat(
        "harmony",
        lambda form, functions: HarmonyReader(),
        CallText(
            before_name=f"{harmony.Mark.CHANNEL}commentary to={HarmonyReader.FUNCTIONS}",
            before_arguments=f" {harmony.Mark.CONSTRAIN}json{harmony.Mark.MESSAGE}",
            after="",
            is_alone=True,
        ),
        tuple(harmony.Mark),
        aliases=("openai", "gptoss"),
        signs=(harmony.Mark.CHANNEL,),
    ),
    ToolFormat(
        "deepseek_v31",
        lambda form, functions: NamedCalls(
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
        _DEEPSEEK_MARKERS,
        signs=(_CALL_BEGIN,),
        unless="```json",
    ),
    ToolFormat(
        "deepseek_v3",
        lambda form, functions: NamedCalls(
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
        _DEEPSEEK_MARKERS,
        aliases=("deepseek_r1",),
        signs=(_CALL_BEGIN,),
    ),
    ToolFormat(
        "kimi_k2",
        lambda form, functions: NamedCalls(
            *_KIMI_CALL,
            before_name="functions.",
            after_name=_KIMI_ARGUMENTS,
            around=_KIMI_CALLS,
        ),
        CallText(
            first=_KIMI_CALLS[0],
            before_name=f"{_KIMI_CALL[0]}functions.",
            before_arguments=f":0{_KIMI_ARGUMENTS}",
            after=_KIMI_CALL[1],
            last=_KIMI_CALLS[1],
        ),
        (*_KIMI_CALLS, *_KIMI_CALL, _KIMI_ARGUMENTS),
    ),
    ToolFormat(
        "solar_open",
        lambda form, functions: NamedCalls(
            *_SOLAR_CALL,
            behind_id=_SOLAR_NAME,
            after_name=_SOLAR_ARGUMENTS,
            around=_SOLAR_CALLS,
        ),
        CallText(
            first=_SOLAR_CALLS[0],
            before_name=f"{_SOLAR_CALL[0]}call000000{_SOLAR_NAME}",
            before_arguments=_SOLAR_ARGUMENTS,
            after=_SOLAR_CALL[1],
            last=_SOLAR_CALLS[1],
        ),
        (*_SOLAR_CALLS, *_SOLAR_CALL, _SOLAR_NAME, _SOLAR_ARGUMENTS),
        signs=(_SOLAR_CALL[0],),
    ),
    ToolFormat(
        "mistral_named",
        _mistral_calls,
        CallText(before_name=_MISTRAL, before_arguments="[ARGS]", after=""),
        _MISTRAL_MARKERS,
        aliases=("mistral_v11",),
        signs=("[ARGS]",),
    ),
    ToolFormat(
        "mistral",
        _mistral_calls,
        _json_text(f"{_MISTRAL} [", ", ", "]"),
        _MISTRAL_MARKERS,
        signs=(_MISTRAL,),
    ),
    ToolFormat("gemma4", _brace_calls, _brace_text(*_GEMMA4), _GEMMA4),
    ToolFormat("functiongemma", _brace_calls, _brace_text(*_FUNCTION_GEMMA), _FUNCTION_GEMMA),
    ToolFormat(
        "functionary",
        lambda form, functions: NamedCalls("<function=", "</function>", after_name=">"),
        CallText(before_name="<function=", before_arguments=">", after="</function>"),
        ("<function=", "</function>"),
        signs=("<function=example_function_name>{",),
    ),
    ToolFormat(
        "glm45",
        _tag_calls,
        CallText(
            before_name="<tool_call>",
            before_arguments="\n",
            after="</tool_call>",
            separator="\n",
            arguments=TagText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        _GLM_MARKERS,
        signs=("</arg_key>\n<arg_value>", "\\n<arg_value>"),
    ),
    ToolFormat(
        "glm47",
        _tag_calls,
        CallText(
            before_name="<tool_call>",
            before_arguments="",
            after="</tool_call>",
            arguments=TagText("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        ),
        _GLM_MARKERS,
        signs=("<arg_key>",),
    ),
    ToolFormat(
        "seed_oss",
        _tag_calls,
        CallText(
            before_name="<seed:tool_call>\n<function=",
            before_arguments=">\n",
            after="</function>\n</seed:tool_call>",
            separator="\n",
            arguments=TagText("<parameter=", ">", "</parameter>\n"),
        ),
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    ToolFormat(
        "minimax_m2",
        _tag_calls,
        CallText(
            first="<minimax:tool_call>\n",
            before_name='<invoke name="',
            before_arguments='">\n',
            after="</invoke>\n",
            last="</minimax:tool_call>",
            arguments=TagText('<parameter name="', '">', "</parameter>\n"),
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolFormat(
        "qwen3_coder",
        _tag_calls,
        CallText(
            before_name="<tool_call>\n<function=",
            before_arguments=">\n",
            after="</function>\n</tool_call>",
            separator="\n",
            arguments=TagText("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        ("<tool_call>", "</tool_call>", "<function=", "</function>"),
        aliases=("qwen3_xml",),
        signs=("<function=",),
    ),
    ToolFormat(
        "apriel",
        _json_calls,
        _json_text("<tool_calls>[", ", ", "]</tool_calls>"),
        ("<tool_calls>", "</tool_calls>"),
        signs=("<tool_calls>[",),
    ),
    HERMES,
    ToolFormat(
        "nemotron_v2",
        _json_calls,
        _json_text("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        ("<TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolFormat(
        "minimax",
        _json_calls,
        _json_text("<tool_calls>\n", "\n", "\n</tool_calls>"),
        ("<tool_calls>", "</tool_calls>"),
        aliases=("minimax_m1",),
        signs=("<tool_calls>",),
    ),
    ToolFormat(
        "cohere_command",
        _json_calls,
        CallText(
            first="<|START_ACTION|>[\n    ",
            before_name='{"tool_call_id": "0", "tool_name": "',
            before_arguments='", "parameters": ',
            after="}",
            separator=",\n    ",
            last="\n]<|END_ACTION|>",
        ),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    ToolFormat(
        "granite",
        _json_calls,
        _json_text("<|tool_call|>[", ", ", "]"),
        ("<|tool_call|>",),
    ),
    ToolFormat(
        "gigachat31",
        _json_calls,
        CallText(
            before_name='<|function_call|>{"name": "',
            before_arguments='", "arguments": ',
            after="}",
            is_alone=True,
        ),
        ("<|function_call|>",),
        aliases=("gigachat3",),
    ),
    ToolFormat(
        "apertus",
        lambda form, functions: KeyedCalls(*form.markers),
        CallText(
            first="<|tools_prefix|>[",
            before_name='{"',
            before_arguments='": ',
            after="}",
            separator=", ",
            last="]<|tools_suffix|>",
        ),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    ToolFormat(
        "llama3_json",
        lambda form, functions: BareCalls(*form.markers, names=functions),
        CallText(
            before_name='{"name": "',
            before_arguments='", "parameters": ',
            after="}",
            separator="; ",
            has_marker=False,
        ),
        (_PYTHON_TAG,),
        aliases=("llama3", "llama4_json"),
        signs=(_PYTHON_TAG, '"parameters": dictionary of argument name'),
    ),
    ToolFormat(
        "lfm2",
        _python_calls,
        CallText(
            first="<|tool_call_start|>[",
            before_name="",
            before_arguments="(",
            after=")",
            separator=", ",
            last="]<|tool_call_end|>",
            arguments=_PYTHON,
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    ),
    ToolFormat(
        "gemma",
        _python_calls,
        CallText(
            first=f"{_FENCE}tool_code\n",
            before_name="",
            before_arguments="(",
            after=")",
            separator="\n",
            last=f"\n{_FENCE}",
            arguments=_PYTHON,
        ),
        (f"{_FENCE}tool_code", _FENCE),
        aliases=("gemma3",),
        signs=(f"{_FENCE}tool_code",),
    ),
)

#: In the order in which their signs are looked for.
REASONING_FORMATS = (
    ReasoningFormat(
        "qwen3",
        ("deepseek_r1", "deepseek_v3", "deepseek_v31", "think"),
        "<think>",
        "</think>",
        ("</think>", "<think>"),
    ),
    ReasoningFormat("mistral", ("magistral",), "[THINK]", "[/THINK]", ("[/THINK]",)),
    ReasoningFormat("gemma4", (), "<|channel>thought\n", "<channel|>", ("<|channel>thought",)),
    ReasoningFormat("seed_oss", (), "<seed:think>", "</seed:think>", ("</seed:think>",)),
    ReasoningFormat(
        "cohere_command",
        (),
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|END_THINKING|>",),
    ),
    ReasoningFormat("apertus", (), "<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_suffix|>",)),
    ReasoningFormat(
        "apriel",
        (),
        "Here are my reasoning steps:\n",
        "[BEGIN FINAL RESPONSE]",
        ("[BEGIN FINAL RESPONSE]",),
    ),
)
#: Names of harmony's channels among them.
HARMONY_NAMES = ("harmony", "openai", "openai_gptoss", "gptoss")

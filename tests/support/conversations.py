"""Conversations as clients of all providers send them, and a check of the prompts that chat
templates render from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jitney.engine.common.errors import RequestError
from jitney.engine.common.rendered import reason_of
from jitney.engine.core.text.template_worker import TemplateSource, render_source
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.messages import shaped_messages
from jitney.engine.server.chat.conversation.template_abilities import ChatAbilities
from jitney.engine.server.chat.conversation.tools import Tool, ToolUse
from jitney.engine.server.chat.openai.conversation import _template_message
from jitney.engine.server.chat.openai.schema import Message

type Json = dict[str, Any]

#: Special tokens that templates may ask for.
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class SandboxedTemplate:
    """A template rendered in the sandbox, in this process."""

    source: TemplateSource

    @classmethod
    def of(cls, text: str, tools_template: str = "") -> SandboxedTemplate:
        return cls(TemplateSource(text, SPECIAL_TOKENS, tools_template))

    async def render(self, messages: list[Json], variables: Json) -> str:
        """Render like a service. Raises RequestError."""
        all_variables = {"add_generation_prompt": True} | variables
        try:
            return render_source(self.source, messages, **all_variables)
        except Exception as error:  # a template may raise anything
            raise RequestError(reason_of(error) or type(error).__name__, param="messages") from None

    @cached_property
    def turns(self) -> TurnFormat:
        return TurnFormat.of(self.source.template)

    async def abilities(self) -> ChatAbilities:
        return await ChatAbilities.of(self.render)


@dataclass(frozen=True)
class Talk:
    """A conversation in OpenAI's form."""

    name: str
    messages: list[Json]
    tools: tuple[Tool, ...] = ()
    #: Whether the answer continues the last message.
    goes_on: bool = False

    async def prompt(
        self, template: SandboxedTemplate, abilities: ChatAbilities, warnings: list[str]
    ) -> str:
        """The prompt that the template renders. Raises RequestError."""
        use = ToolUse(self.tools) if self.tools else None
        messages = [_template_message(Message.model_validate(each)) for each in self.messages]
        shaped = finished(shaped_messages(messages, abilities, template.turns, use, warnings))
        variables: Json = abilities.variables(use)
        if self.goes_on:
            variables |= {"add_generation_prompt": False, "continue_final_message": True}
        return await template.render(shaped, variables)

    def faults(self, prompt: str) -> list[str]:
        """The faults of a prompt of the conversation: texts that are missing, repeated or out of
        order, tools without a name.
        """
        faults = [f"no tool {tool.name}" for tool in self.tools if tool.name not in prompt]
        floor = 0
        for group in _groups(self.messages):
            ends: list[int] = []
            for text in _said(group):
                place = _place(prompt, text, floor)
                if place is None:
                    is_early = _place(prompt, text, 0) is not None
                    faults.append(f"{'out of order' if is_early else 'missing'}: {text[:60]!r}")
                else:
                    ends.append(place + 1)
            faults += [
                f"doubled: {text[:60]!r}" for text in _once(group) if _count(prompt, text) > 1
            ]
            floor = max(ends, default=floor)
        if self.goes_on and not prompt.endswith(self.messages[-1]["content"].strip()):
            faults.append("does not end with the last message")
        return faults


def finished(work: Any) -> Any:
    """The result of sliced work, run to its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def _groups(messages: Sequence[Json]) -> Iterator[list[Json]]:
    """The messages in groups: a message with calls and the results after it, which a prompt may put
    between the calls.
    """
    group: list[Json] = []
    for message in messages:
        if group and message["role"] == "tool" and group[0].get("tool_calls"):
            group.append(message)
            continue
        if group:
            yield group
        group = [message]
    yield group


def _said(group: list[Json]) -> Iterator[str]:
    """All texts of a group."""
    yield from _once(group)
    for message in group:
        for call in message.get("tool_calls") or ():
            yield call["function"]["name"]
            yield from _values(call["function"]["arguments"])


def _once(group: list[Json]) -> Iterator[str]:
    """The texts of a group that a prompt may contain only once."""
    for message in group:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for part in parts:
            text = part.rpartition("</think>")[2].strip()
            if text:
                yield text


def _values(arguments: str) -> Iterator[str]:
    """The texts in a call's arguments that a prompt must show, or the model's raw text for them."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    if isinstance(value, dict):
        yield from (text for text in value.values() if isinstance(text, str) and text)
    elif arguments != "null":
        yield arguments.strip()


def _spellings(text: str) -> set[str]:
    """The text itself, and its form inside a JSON string."""
    return {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}


def _place(prompt: str, text: str, start: int) -> int | None:
    places = [prompt.find(each, start) for each in _spellings(text)]
    return min((place for place in places if place >= 0), default=None)


def _count(prompt: str, text: str) -> int:
    return max(prompt.count(each) for each in _spellings(text))


def system(text: str, role: str = "system") -> Json:
    return {"role": role, "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str | None = "", *calls: Json, **more: Any) -> Json:
    fields: Json = {"role": "assistant", "content": text} | more
    return fields | {"tool_calls": list(calls)} if calls else fields


def call(id: str, arguments: str = '{"city": "Oslo"}', name: str = "get_weather") -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, text: str) -> Json:
    return {"role": "tool", "tool_call_id": id, "content": text}


_WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "where"}},
        "required": ["city"],
    },
)
_CLOCK = Tool("read_clock", "The time")
#: A tool with optional parameters, as schema generators write them.
_OPTIONAL = Tool(
    "search_notes",
    "Search",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "tags": {"type": ["array", "null"], "items": {"type": "string"}},
            "order": {"enum": ["up", "down"]},
            "rest": True,
        },
    },
)
_TOOLS = (_WEATHER, _CLOCK)
_HI = user("Is it cold in Norway?")
_ASKED = [
    _HI,
    assistant(None, call("call_5Yb0kq2TnVw8aaaaa")),
    result("call_5Yb0kq2TnVw8aaaaa", "RESULT minus four"),
]
_ANSWER = assistant("Yes: minus four degrees.")
_TWO = assistant(
    None,
    call("toolu_01AbCdEfGhIj", '{"city": "Bergen"}'),
    call("toolu_01AbCdEfGhIk", '{"city": "Tromso"}'),
)
_BOTH = [result("toolu_01AbCdEfGhIj", "RESULT rain"), result("toolu_01AbCdEfGhIk", "RESULT snow")]

TALKS = (
    Talk("one question", [_HI]),
    Talk("system", [system("RULE be brief"), _HI, _ANSWER, user("And Sweden?")]),
    Talk("system twice", [system("RULE be brief"), system("RULE be kind"), _HI]),
    Talk("developer", [system("RULE be brief", "developer"), _HI]),
    Talk("system, developer", [system("RULE be brief"), system("RULE no lists", "developer"), _HI]),
    Talk(
        "system in the middle",
        [system("RULE be brief"), _HI, _ANSWER, system("RULE now in French"), user("And Sweden?")],
    ),
    Talk(
        "system only in the middle",
        [_HI, _ANSWER, system("RULE now in French"), user("And Sweden?")],
    ),
    Talk("system at the end", [_HI, _ANSWER, user("And Sweden?"), system("REMINDER one word")]),
    Talk("system after the answer", [_HI, _ANSWER, system("REMINDER go on")]),
    Talk("empty system", [system(""), _HI]),
    Talk("user twice", [_HI, user("I mean Oslo."), _ANSWER, user("Thanks."), user("And Sweden?")]),
    Talk("assistant first", [assistant("Welcome to the north."), _HI]),
    Talk(
        "system, assistant first",
        [system("RULE be brief"), assistant("Welcome to the north."), _HI],
    ),
    Talk(
        "assistant twice",
        [_HI, assistant("Let me think."), assistant("Yes, rather."), user("And Sweden?")],
    ),
    Talk("null content", [_HI, assistant(None), user("Hello?")]),
    Talk("no content", [_HI, {"role": "assistant"}, user("Hello?")]),
    Talk("empty list of calls", [_HI, assistant("Yes.", tool_calls=[]), user("Hello?")]),
    Talk("thoughts only", [_HI, assistant(None, reasoning_content="hm, north"), user("Hello?")]),
    Talk(
        "thoughts in the text",
        [_HI, assistant("<think>hm, north</think>\n\nYes, indeed."), user("Hello?")],
    ),
    Talk(
        "thoughts and calls",
        [
            _HI,
            assistant("Looking it up.", call("call_1"), reasoning="hm, north"),
            result("call_1", "RESULT four"),
            _ANSWER,
            user("Thanks."),
        ],
        _TOOLS,
    ),
    Talk("tools", [_HI], _TOOLS),
    Talk("system and tools", [system("RULE be brief"), _HI], _TOOLS),
    Talk("tool without description", [_HI], (Tool("read_clock"),)),
    Talk(
        "tools of a schema generator",
        [_HI],
        (_OPTIONAL, Tool("bare_tool", parameters={"type": "object"})),
    ),
    Talk("a call and its result", [system("RULE be brief"), *_ASKED], _TOOLS),
    Talk(
        "answered after a call",
        [system("RULE be brief"), *_ASKED, _ANSWER, user("And Sweden?")],
        _TOOLS,
    ),
    Talk("user after a result", [*_ASKED, user("Shorter, please.")], _TOOLS),
    Talk("system after a result", [*_ASKED, system("REMINDER one word")], _TOOLS),
    Talk(
        "two rounds",
        [
            *_ASKED,
            assistant("", call("1", '{"city": "Malmo"}')),
            result("1", "RESULT two"),
            _ANSWER,
        ],
        _TOOLS,
    ),
    Talk("parallel calls", [_HI, _TWO, *_BOTH, _ANSWER, user("And Sweden?")], _TOOLS),
    Talk("parallel calls, results swapped", [_HI, _TWO, *_BOTH[::-1]], _TOOLS),
    Talk(
        "text beside calls",
        [_HI, assistant("Let me look that up.", *_TWO["tool_calls"]), *_BOTH, _ANSWER, user("Ok.")],
        _TOOLS,
    ),
    Talk("calls without tools in the request", [*_ASKED, _ANSWER, user("And Sweden?")]),
    Talk(
        "cut arguments",
        [
            _HI,
            assistant(None, call("c1", '{"city": "Os')),
            result("c1", "ERROR bad arguments"),
            user("Try again."),
        ],
        _TOOLS,
    ),
    Talk(
        "arguments that are a list",
        [
            _HI,
            assistant("Looking.", call("c1", '["Oslo"]')),
            result("c1", "ERROR bad arguments"),
            user("Again."),
        ],
        _TOOLS,
    ),
    Talk(
        "empty arguments",
        [_HI, assistant("", call("c1", "", "read_clock")), result("c1", "RESULT noon"), _ANSWER],
        _TOOLS,
    ),
    Talk(
        "arguments null",
        [_HI, assistant("", call("c1", "null", "read_clock")), result("c1", "RESULT noon")],
        _TOOLS,
    ),
    Talk(
        "half a surrogate, a long number",
        [
            _HI,
            assistant("", call("c1", '{"city": "a\\ud800b"}'), call("c2", f'{{"n": {9**40}}}')),
            result("c1", "RESULT one"),
            result("c2", "RESULT two"),
        ],
        _TOOLS,
    ),
    Talk(
        "result without content",
        [
            _HI,
            assistant(None, call("c1")),
            {"role": "tool", "tool_call_id": "c1"},
            _ANSWER,
            user("Ok?"),
        ],
        _TOOLS,
    ),
    Talk(
        "call without result",
        [_HI, assistant("", call("c1")), user("Never mind the city.")],
        _TOOLS,
    ),
    Talk("one of two results", [_HI, _TWO, _BOTH[0], user("Stop here.")], _TOOLS),
    Talk(
        "result without call",
        [result("gone", "RESULT of old"), assistant("So it was."), _HI],
        _TOOLS,
    ),
    Talk(
        "result of another id",
        [_HI, assistant("", call("call_a")), result("other", "RESULT five"), _ANSWER],
        _TOOLS,
    ),
    Talk(
        "user within a call",
        [
            _HI,
            assistant("", call("call_a")),
            user("Quick!"),
            result("call_a", "RESULT six"),
            _ANSWER,
        ],
        _TOOLS,
    ),
    Talk(
        "the same id twice",
        [
            *_ASKED,
            *[each | {} for each in _ASKED[1:2]],
            result("call_5Yb0kq2TnVw8aaaaa", "RESULT again"),
            _ANSWER,
        ],
        _TOOLS,
    ),
    Talk(
        "text parts",
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "PART one"},
                    {"type": "text", "text": "PART two"},
                ],
            }
        ],
    ),
    Talk(
        "unicode and quotes",
        [
            system('RULE "quote" \\ it'),
            user("snø — 雪 🙂 {{ x }} {% y %}"),
            assistant("", call("c1", '{"city": "Ålesund \\"x\\" 雪"}')),
            result("c1", '{"RESULT": "snø \\"y\\""}'),
            user("\ttabs\nlines  "),
        ],
        _TOOLS,
    ),
    Talk(
        "names of users",
        [
            user("I am Ann.") | {"name": "ann"},
            assistant("Hello Ann."),
            user("I am Bob.") | {"name": "bob"},
        ],
    ),
    Talk("goes on", [_HI, assistant("Yes, the weather")], goes_on=True),
    Talk(
        "goes on after system twice",
        [system("RULE be brief"), system("RULE be kind"), _HI, assistant("Yes, the weather")],
        goes_on=True,
    ),
    Talk("goes on after tools", [*_ASKED, assistant("Yes, the weather")], _TOOLS, goes_on=True),
    Talk(
        "claude code",
        [
            system("RULE you are an agent"),
            user("REMINDER dates\nFix the bug."),
            assistant("I read the file first.", call("toolu_1", '{"path": "a.py"}', "read")),
            result("toolu_1", "RESULT x = 1"),
            user("REMINDER todo list"),
            assistant("", call("toolu_2", '{"path": "b.py"}', "read")),
            result("toolu_2", "RESULT y = 2"),
        ],
        (
            Tool(
                "read",
                "Read a file",
                {"type": "object", "properties": {"path": {"type": "string"}}},
            ),
        ),
    ),
    Talk(
        "codex",
        [
            system("RULE you are a coding agent"),
            system("RULE sandbox is on", "developer"),
            user("ENVIRONMENT cwd"),
            user("Fix the bug."),
            assistant("", call("call_x1", '{"command": "ls"}', "shell"), reasoning_content="look"),
            result("call_x1", "RESULT files"),
            assistant("All is well."),
            system("RULE sandbox is off", "developer"),
            user("Go on."),
        ],
        (Tool("shell", None, {"type": "object", "properties": {"command": {"type": "string"}}}),),
    ),
    Talk("only a system", [system("RULE write a poem")]),
    Talk("only an assistant", [assistant("I begin.")]),
)

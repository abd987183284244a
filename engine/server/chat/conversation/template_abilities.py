"""The abilities of a chat template, found by rendering small conversations."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.conversation.tools import Tool, ToolUse

#: Renders messages. Raises RequestError where the template refuses or takes too long.
type Render = Callable[[list[JsonDict], JsonDict], Awaitable[str]]
#: Whether templates read a call's arguments as an object or as JSON text.
type _ArgumentsForm = Literal["object", "text"]
#: Where a template shows a text that accompanies calls: in their message, in a message before it,
#: or in one before an empty user message; None: nowhere.
type _TextBesideCalls = Literal["beside", "before", "before_empty_turn"] | None
#: Place of a user's text after a result: next, after an empty turn, or at the result's end.
type _UserAfterResult = Literal["next", "after_empty_turn", "in_result"]


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """Abilities of a template, in one way to render it. By default, users and assistants
    alternate.
    """

    #: A system message at the beginning, whatever the role of the last message.
    system: bool = False
    #: Several of them at the beginning.
    systems: bool = False
    #: A system message after other messages, where it stands.
    system_later: bool = False
    #: Two messages in a row of the user, or of the assistant.
    user_twice: bool = False
    assistant_twice: bool = False
    #: A conversation that the assistant begins, also with calls.
    assistant_first: bool = False
    #: An assistant's message without text.
    empty_assistant: bool = False
    #: An assistant's calls, with their arguments in this form; None: they are not shown.
    arguments: _ArgumentsForm | None = None
    #: The arguments of the calls, not only their names.
    shows_arguments: bool = False
    #: Results in messages of the role tool.
    results: bool = False
    #: Several calls in one message.
    parallel_calls: bool = False
    #: Calls that no result follows.
    unanswered_calls: bool = False
    text_beside_calls: _TextBesideCalls = None
    #: Whether a message that only calls has the content null rather than an empty text.
    null_beside_calls: bool = False
    user_after_result: _UserAfterResult = "in_result"
    #: Whether ids of calls must have nine letters and digits.
    short_ids: bool = False


class ChatAbilities(NamedTuple):
    """The abilities of a model's chat template, which may differ where there are tools."""

    #: Rendered without tools.
    plain: TemplateAbilities = TemplateAbilities()
    #: Rendered with them; None: the template does not show tools.
    with_tools: TemplateAbilities | None = None
    #: Whether tools must be written out (`Tool.completed`).
    needs_complete_tools: bool = False
    #: Whether it is rendered with an empty list if there are no tools.
    needs_tools: bool = False
    #: The error if not even one user message can be rendered; else empty.
    refusal: str = ""

    @classmethod
    async def of(cls, render: Render) -> ChatAbilities:
        """Find the abilities by rendering some fifty small conversations."""
        abilities, variables = cls(), JsonDict()
        try:
            await render([_USER], {})
        except RequestError as error:
            variables["tools"] = []
            abilities = cls(refusal=str(error))
        try:
            await render([_USER], variables)
        except RequestError:
            return abilities
        abilities = cls(await _Prober(render, variables).abilities(), needs_tools=bool(variables))
        complete = await _shows_tools(render, [_TOOL.completed()])
        if not complete:
            return abilities
        bare = await _shows_tools(render, [tool.shown() for tool in _BARE_TOOLS])
        return abilities._replace(
            with_tools=await _Prober(render, {"tools": [_TOOL.completed()]}).abilities(),
            needs_complete_tools=not bare,
        )

    def beside(self, use: ToolUse | None) -> TemplateAbilities:
        """The abilities for a request with these tools."""
        return self.plain if use is None or self.with_tools is None else self.with_tools

    def variables(self, use: ToolUse | None) -> JsonDict:
        """The template variables for the tools."""
        if use is None or self.with_tools is None:
            return {"tools": []} if self.needs_tools else {}
        if self.needs_complete_tools:
            return {"tools": [tool.completed() for tool in use.tools]}
        return {"tools": [tool.shown() for tool in use.tools]}

    def limited(self, use: ToolUse | None) -> ToolUse | None:
        """The tools, limited to a call per turn if the template cannot show several later."""
        can = self.beside(use)
        if use is None or can.arguments is None or can.parallel_calls:
            return use
        return replace(use, most_calls=1)


#: Texts of the small conversations; no template contains them.
_USER: JsonDict = {"role": "user", "content": "quserone"}
_USER_2: JsonDict = {"role": "user", "content": "qusertwo"}
_ASSISTANT: JsonDict = {"role": "assistant", "content": "qassistone"}
_ASSISTANT_2: JsonDict = {"role": "assistant", "content": "qassisttwo"}
_SYSTEM: JsonDict = {"role": "system", "content": "qsystemone"}
_SYSTEM_2: JsonDict = {"role": "system", "content": "qsystemtwo"}
_EMPTY: JsonDict = {"role": "assistant", "content": ""}
_EMPTY_USER: JsonDict = {"role": "user", "content": ""}
_TOOL = Tool(
    "qtoolname",
    "qtooltext",
    {"type": "object", "properties": {"qkey": {"type": "string"}}, "required": ["qkey"]},
)
_BARE_PROPERTIES: JsonDict = {"qkey": {"type": ["string", "null"]}, "qany": True}
#: A tool without its optional fields.
_BARE_TOOLS = (
    Tool("qbarename", parameters={"type": "object", "properties": _BARE_PROPERTIES}),
    Tool("quntypedname", parameters={"properties": _BARE_PROPERTIES}),
    Tool("qemptyname", parameters={"type": "object"}),
)


async def _shows_tools(render: Render, tools: list[JsonDict]) -> bool:
    """Whether the prompt names all tools, without "None" for missing fields."""
    try:
        prompt = await render([_USER], {"tools": tools})
    except RequestError:
        return False
    return all([tool["function"]["name"] in prompt for tool in tools]) and "None" not in prompt


class _CallShape(NamedTuple):
    """The form of calls and their results in a small conversation."""

    form: _ArgumentsForm
    short_ids: bool
    #: Whether results have the role tool; else a user tells of them.
    results: bool
    #: Content of a message that only calls.
    content: str | None
    has_arguments: bool = True

    def calls(self, *numbers: int, content: str | None = None) -> JsonDict:
        """A message that makes these calls."""
        calls = [self._call(number) for number in numbers]
        content = content or self.content
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def answered(self, *numbers: int, content: str | None = None) -> list[JsonDict]:
        """A message that makes these calls, and their results."""
        calls = self.calls(*numbers, content=content)
        if not self.results:
            texts = [f"qresult{number}" for number in numbers]
            return [calls, {"role": "user", "content": "\n".join(texts)}]
        return [calls, *[self._result(number) for number in numbers]]

    def _id(self, number: int) -> str:
        return f"qcallid0{number}" if self.short_ids else f"call_qcallid0000{number}"

    def _call(self, number: int) -> JsonDict:
        value: JsonDict = {"qargument": f"qvalue{number}"} if self.has_arguments else {}
        arguments = value if self.form == "object" else json.dumps(value)
        function: JsonDict = {"name": _TOOL.name, "arguments": arguments}
        return {"id": self._id(number), "type": "function", "function": function}

    def _result(self, number: int) -> JsonDict:
        return {
            "role": "tool",
            "tool_call_id": self._id(number),
            "name": _TOOL.name,
            "content": f"qresult{number}",
        }


#: Shapes of calls to try, the most common first.
_CALL_SHAPES = [
    [_CallShape(form, short_ids, results, content, has_arguments) for form in ("object", "text")]
    for has_arguments in (True, False)
    for results in (True, False)
    for content in ("", None)
    for short_ids in (False, True)
]


class _Prober:
    """Finds the abilities of a template that is rendered with these variables."""

    def __init__(self, render: Render, variables: JsonDict):
        self._render = render
        self._variables = variables

    async def abilities(self) -> TemplateAbilities:
        shows = self._shows
        system = await self._shows_first_system()
        abilities = TemplateAbilities(
            system=system,
            systems=system and await shows(_SYSTEM, _SYSTEM_2, _USER, _ASSISTANT, _USER_2),
            system_later=system and await self._shows_later_system(),
            user_twice=await shows(_USER, _USER_2, _ASSISTANT),
            assistant_twice=await shows(_USER, _ASSISTANT, _ASSISTANT_2, _USER_2),
            assistant_first=await shows(_ASSISTANT, _USER),
            empty_assistant=await shows(_USER, _EMPTY, _USER_2),
        )
        shape = await self._call_shape()
        return abilities if shape is None else await self._with_calls(abilities, shape)

    async def _shows_first_system(self) -> bool:
        ends = ([_USER], [_USER, _ASSISTANT], [_USER, _ASSISTANT, _USER_2])
        return all([await self._shows(_SYSTEM, *end) for end in ends])

    async def _shows_later_system(self) -> bool:
        ends = ([_SYSTEM_2], [_SYSTEM_2, _USER_2], [_USER_2, _SYSTEM_2])
        return all([await self._shows(_SYSTEM, _USER, _ASSISTANT, *end) for end in ends])

    async def _call_shape(self) -> _CallShape | None:
        """The first way to write calls that the template shows; None: it shows no calls."""
        for shapes in _CALL_SHAPES:
            shown = [shape for shape in shapes if await self._shows_rounds(shape)]
            clean = [shape for shape in shown if await self._is_clean(shape)]
            if shown:
                return await self._with_null((clean or shown)[0])
        return None

    async def _shows_rounds(self, shape: _CallShape) -> bool:
        """Whether two rounds of a call and its result are shown, also at the end."""
        return await self._shows_answered(*shape.answered(1), *shape.answered(2))

    async def _shows_answered(self, *messages: JsonDict) -> bool:
        """Whether calls with results are shown in the middle and at the end of a conversation."""
        ends = ([], [_ASSISTANT, _USER_2])
        return all([await self._shows(_USER, *messages, *end) for end in ends])

    async def _is_clean(self, shape: _CallShape) -> bool:
        """Whether the prompt shows arguments neither as Python's repr nor as doubly encoded
        JSON.
        """
        prompt = await self._prompt(_USER, *shape.answered(1))
        return prompt is not None and "'qargument'" not in prompt and '\\"qargument' not in prompt

    async def _with_null(self, shape: _CallShape) -> _CallShape:
        """The shape with null content, if an empty text would make a turn of its own."""
        if shape.content is None:
            return shape
        with_null = shape._replace(content=None)
        empty = await self._prompt(_USER, *shape.answered(1), _ASSISTANT)
        null = await self._prompt(_USER, *with_null.answered(1), _ASSISTANT)
        if empty is None or null is None or len(null) >= len(empty):
            return shape
        return with_null if await self._shows_rounds(with_null) else shape

    async def _with_calls(
        self, abilities: TemplateAbilities, shape: _CallShape
    ) -> TemplateAbilities:
        """The abilities of a template that shows calls of this shape."""
        shows, answered = self._shows, shape.answered(1)
        system = abilities.system and await shows(_SYSTEM, _USER, *answered)
        after: _UserAfterResult = "in_result"
        if await shows(_USER, *answered, _USER_2, _ASSISTANT):
            after = "next"
        elif await shows(_USER, *answered, _EMPTY, _USER_2, _ASSISTANT):
            after = "after_empty_turn"
        return replace(
            abilities,
            system=system,
            systems=system and abilities.systems,
            system_later=system and abilities.system_later,
            # Some templates show only the text of a first message, beside the tools.
            assistant_first=abilities.assistant_first and await shows(*answered, _USER_2),
            arguments=shape.form,
            shows_arguments=shape.has_arguments,
            results=shape.results,
            parallel_calls=await self._shows_answered(*shape.answered(1, 2)),
            unanswered_calls=await shows(_USER, shape.calls(1))
            and await shows(_USER, shape.calls(1), _USER_2, _ASSISTANT),
            text_beside_calls=await self._text_beside(shape),
            null_beside_calls=shape.content is None,
            user_after_result=after,
            short_ids=shape.short_ids,
        )

    async def _text_beside(self, shape: _CallShape) -> _TextBesideCalls:
        text = "qbesides"
        if await self._shows_answered(*shape.answered(1, content=text)):
            return "beside"
        said: JsonDict = {"role": "assistant", "content": text}
        if await self._shows_answered(said, *shape.answered(1)):
            return "before"
        if await self._shows_answered(said, _EMPTY_USER, *shape.answered(1)):
            return "before_empty_turn"
        return None

    async def _shows(self, *messages: JsonDict) -> bool:
        """Whether the template accepts the messages and shows each text once, in order."""
        prompt = await self._prompt(*messages)
        return prompt is not None and _has_in_order(prompt, messages)

    async def _prompt(self, *messages: JsonDict) -> str | None:
        try:
            return await self._render(list(messages), self._variables)
        except RequestError:
            return None


def _has_in_order(prompt: str, messages: Sequence[JsonDict]) -> bool:
    place = 0
    for message in messages:
        content = message["content"]
        if content and prompt.count(content) != 1:
            return False
        texts = [content] if content else []
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
            texts += [call["function"]["name"], *value.values()]
        for text in texts:
            place = prompt.find(text, place)
            if place < 0:
                return False
            place += len(text)
    return True

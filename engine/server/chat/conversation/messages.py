"""Adapts the messages of a conversation to a model's chat template. Clients send conversations that
other providers accept: several system messages, two user messages in a row, calls beside text. Each
rule depends on one ability of the template, and looks ahead only from a call to its results, so
that the prompt of a growing conversation keeps its beginning (for the prefix cache).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Iterator, Sequence

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.template_abilities import (
    ChatAbilities,
    TemplateAbilities,
)
from jitney.engine.server.chat.conversation.tools import ToolUse

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_SHORT_ID_CHARS = 9
#: An assistant's message that says nothing.
_NO_TEXT: JsonDict = {"role": "assistant", "content": ""}


def shaped_messages(
    messages: Sequence[JsonDict],
    abilities: ChatAbilities,
    turns: TurnFormat,
    use: ToolUse | None,
    warnings: list[str],
) -> Generator[None, None, list[JsonDict]]:
    """The messages in the form that the chat template accepts, with every text of the conversation,
    in order. Work that may be stopped.

    messages: in OpenAI's form; `content` may be null or missing. turns: has texts for what the
    template does not show. use: the tools of the request; a template that shows none gets them in a
    system text. warnings: gets a line for each change to the assistant's calls.
    """
    shaper = _Shaper(abilities.beside(use), turns, warnings)
    if use is not None and abilities.with_tools is None:
        messages = _with_system(messages, turns.tools_text(use))
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if message.get("tool_calls"):
            results = list(_results_after(messages, place))
            place += len(results)
            shaper.add_calls(message, results)
        else:
            shaper.add(message, is_last=place == len(messages))
        yield
    return shaper.finished()


class _Shaper:
    """Builds the shaped messages one by one."""

    def __init__(self, can: TemplateAbilities, turns: TurnFormat, warnings: list[str]):
        self._can = can
        self._turns = turns
        self._warnings = warnings
        self._made: list[JsonDict] = []
        #: Texts of system messages that the template refuses, for the next user message.
        self._instructions = ""
        #: Ids for the template, by the ids that clients sent.
        self._short_ids: dict[str, str] = {}
        self._taken_ids: set[str] = set()

    def add(self, message: JsonDict, *, is_last: bool) -> None:
        """Add a message without calls."""
        text = message.get("content") or ""
        match message["role"]:
            case "system":
                self._add_system(message, text)
            case "user":
                self._add_user(message, text)
            case "tool":
                self._add_user({"role": "user"}, self._turns.result_text(text))
            case _ if text or is_last or self._can.empty_assistant:
                self._add_assistant(message, text)
            case _:
                pass  # drop an empty turn, which the template would refuse

    def finished(self) -> list[JsonDict]:
        self._tell_instructions()
        self._begin_turn()
        return self._made

    def _add_system(self, message: JsonDict, text: str) -> None:
        can, last = self._can, self._last
        is_first = last.get("role", "system") == "system" and not self._instructions
        if is_first and can.system and last and not can.systems:
            self._extend(text)
        elif can.system if is_first else can.system_later:
            self._tell_instructions()
            self._made.append(_with_content(message, text))
        else:
            self._instructions = _joined(self._instructions, text)

    def _tell_instructions(self) -> None:
        if self._instructions:
            self._add_user({"role": "user"}, "")

    def _add_user(self, message: JsonDict, text: str) -> None:
        """Add a user's message, preceded by system texts that the template refused elsewhere."""
        can, role = self._can, self._last.get("role")
        text = _joined(self._instructions, text)
        self._instructions = ""
        after_result = can.user_after_result if role == "tool" else None
        if after_result == "in_result" or (role == "user" and not can.user_twice):
            self._extend(text)
        else:
            if after_result == "after_empty_turn":
                self._made.append(_NO_TEXT)
            self._made.append(_with_content(message, text))

    def _add_assistant(self, message: JsonDict, text: str) -> None:
        earlier = self._unfinished_turn()
        if earlier is not None:
            message, text = _one_turn(earlier, message, text)
        self._begin_turn()
        self._made.append(_with_content(message, text))

    def add_calls(self, message: JsonDict, results: Sequence[JsonDict]) -> None:
        """Add a message with calls and their results."""
        text = message.get("content") or ""
        earlier = self._unfinished_turn()
        if earlier is not None:
            message, text = _one_turn(earlier, message, text)
        calls = [_Call(call, self._can, self._id(call["id"])) for call in message["tool_calls"]]
        for call in calls:
            if call.lost_arguments:
                self._warn(
                    f"the arguments of a call of {call.name} are no JSON object; read as {{}}"
                )
                text = _joined(text, call.lost_arguments)
        if not self._shows(calls, results, text):
            self._add_in_words(message, text, calls, results)
            return
        self._begin_turn()
        text = self._text_beside(text)
        rest = _with_content(message, text)
        for number, (group, answers) in enumerate(self._rounds(_answered(calls, results))):
            if number:
                rest = _NO_TEXT
            if self._can.null_beside_calls and not rest["content"]:
                rest = rest | {"content": None}
            self._made.append(rest | {"tool_calls": [call.shown for call in group]})
            self._add_results(answers)

    def _shows(self, calls: list[_Call], results: Sequence[JsonDict], text: str) -> bool:
        """Whether the template shows such calls."""
        can = self._can
        return (
            can.arguments is not None
            and (can.shows_arguments or not any([call.has_arguments for call in calls]))
            and (can.unanswered_calls or len(results) >= len(calls))
            and (not text or can.text_beside_calls is not None)
        )

    def _text_beside(self, text: str) -> str:
        """Place the text of a turn with calls; returns the part for the message with the calls."""
        can = self._can
        if not text or can.text_beside_calls == "beside":
            return text
        self._made.append({"role": "assistant", "content": text})
        if can.text_beside_calls == "before_empty_turn":
            self._made.append({"role": "user", "content": ""})
        return ""

    def _rounds(
        self, answered: list[tuple[_Call, list[JsonDict]]]
    ) -> Iterator[tuple[list[_Call], list[JsonDict]]]:
        """The calls of each message, with the results that follow it."""
        if not self._can.parallel_calls:
            yield from [([call], answers) for call, answers in answered]
            return
        calls = [call for call, _ in answered]
        yield calls, [answer for _, answers in answered for answer in answers]

    def _add_results(self, results: Sequence[JsonDict]) -> None:
        if not self._can.results:
            self._add_results_in_words(results)
            return
        for result in results:
            shown = _with_content(result, result.get("content") or "")
            shown["tool_call_id"] = self._id(result["tool_call_id"])
            self._made.append(shown)

    def _add_in_words(
        self, message: JsonDict, text: str, calls: list[_Call], results: Sequence[JsonDict]
    ) -> None:
        said = [text] if text else []
        said += [self._turns.call_text(call.name, call.arguments) for call in calls]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        self._add_assistant(rest, "\n".join(said))
        self._add_results_in_words(results)

    def _add_results_in_words(self, results: Sequence[JsonDict]) -> None:
        texts = [self._turns.result_text(result.get("content") or "") for result in results]
        if texts:
            self._add_user({"role": "user"}, "\n".join(texts))

    @property
    def _last(self) -> JsonDict:
        return self._made[-1] if self._made else {}

    def _extend(self, text: str) -> None:
        """Add to the text of the last message."""
        self._made[-1] = _with_content(self._last, _joined(self._last["content"], text))

    def _unfinished_turn(self) -> JsonDict | None:
        """Remove and return the last message if the assistant's next one must be joined to it."""
        self._tell_instructions()
        last = self._last
        is_open = last.get("role") == "assistant" and "tool_calls" not in last
        return self._made.pop() if is_open and not self._can.assistant_twice else None

    def _begin_turn(self) -> None:
        """Insert an empty user message if the template refuses that the assistant begins."""
        has_begun = any(message["role"] != "system" for message in self._made)
        if not has_begun and not self._can.assistant_first:
            self._made.append({"role": "user", "content": ""})

    def _id(self, id: str) -> str:
        """A call's id in the form that the template accepts; distinct ids stay distinct."""
        if not self._can.short_ids:
            return id
        if id not in self._short_ids:
            if not _SHORT_ID.fullmatch(id):
                self._warn("ids of tool calls are shortened to nine characters")
            short = next(each for each in _short_ids(id) if each not in self._taken_ids)
            self._short_ids[id] = short
            self._taken_ids.add(short)
        return self._short_ids[id]

    def _warn(self, warning: str) -> None:
        if warning not in self._warnings:
            self._warnings.append(warning)


class _Call:
    """A call of the assistant's. id: as the template takes it."""

    __slots__ = ("arguments", "has_arguments", "id", "lost_arguments", "name", "shown")

    def __init__(self, call: JsonDict, can: TemplateAbilities, id: str):
        function = call["function"]
        self.id: str = call["id"]
        self.name: str = function["name"]
        text: str = function["arguments"].strip() or "{}"
        parsed = _object(text)
        #: Arguments that cannot be shown because they are no JSON object.
        self.lost_arguments = text if parsed is None else ""
        #: JSON text of an object.
        self.arguments = text if parsed else "{}"
        self.has_arguments = bool(parsed)
        arguments = self.arguments if can.arguments == "text" else parsed or {}
        self.shown: JsonDict = call | {
            "id": id,
            "function": function | {"arguments": arguments},
        }


def _object(text: str) -> JsonDict | None:
    """The object in a JSON text; None for other values and for integers beyond msgpack's range."""
    try:
        value = json.loads(text)
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def _short_ids(id: str) -> Iterator[str]:
    """Candidates of nine letters and digits for an id: the id if it fits, then digests of it."""
    if _SHORT_ID.fullmatch(id):
        yield id
    for salt in range(1 << 16):
        yield hashlib.sha256(f"{salt} {id}".encode()).hexdigest()[:_SHORT_ID_CHARS]


def _results_after(messages: Sequence[JsonDict], place: int) -> Iterator[JsonDict]:
    """The results from this index up to the next other message."""
    while place < len(messages) and messages[place]["role"] == "tool":
        yield messages[place]
        place += 1


def _answered(
    calls: Sequence[_Call], results: Sequence[JsonDict]
) -> list[tuple[_Call, list[JsonDict]]]:
    """Each call with its results, named: by id, else in order; the last call gets the rest."""
    left = list(results)
    answered: list[tuple[_Call, list[JsonDict]]] = []
    for call in calls:
        own = [number for number, each in enumerate(left) if each["tool_call_id"] == call.id]
        answers = [left.pop(own[0] if own else 0)] if left else []
        if call is calls[-1]:
            answers += left
        answered.append((call, [{"name": call.name} | each for each in answers]))
    return answered


def _with_content(message: JsonDict, text: str) -> JsonDict:
    """A message with this text, and without a list of calls that is empty."""
    fields = {name: value for name, value in message.items() if value is not None}
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    return fields | {"content": text}


def _one_turn(earlier: JsonDict, message: JsonDict, text: str) -> tuple[JsonDict, str]:
    """An assistant's message joined to an earlier one, and the text of both."""
    thoughts = [each.get("reasoning_content") for each in (earlier, message)]
    if any(thoughts):
        message = message | {"reasoning_content": "\n\n".join(filter(None, thoughts))}
    return earlier | message, _joined(earlier["content"], text)


def _joined(one: str, other: str) -> str:
    return "\n\n".join(filter(None, (one, other)))


def _with_system(messages: Sequence[JsonDict], text: str) -> list[JsonDict]:
    """The messages with a text at the end of the first system message, made if absent."""
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [first | {"content": _joined(first.get("content") or "", text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]

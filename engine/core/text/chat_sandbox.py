"""Renders chat templates in jinja2's sandbox, to the text that transformers makes of them.

As `transformers.utils.chat_template_utils.render_jinja_template` of release 5.24, for messages that
are JSON: to import transformers takes 0.8 s of CPU time in each process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jitney.engine.common.requests import JsonDict

#: Marks the end of a final message that is continued.
_END = "CONTINUE_FINAL_MESSAGE_TAG "
#: Names that are not variables but the result of rendering.
_OWN_VARIABLES = frozenset({"messages", "chat_template"})
#: Names of a message's reasoning; templates read the first, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """`{% generation %}`, which marks an assistant's tokens for training: its body."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # In a scope of its own, like the body of a macro.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of a class, by which a template could leave the sandbox."""

    def __call__(self, *args: Any, **items: Any) -> JsonDict:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> JsonDict:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names that Python uses itself."""

    def __init__(*args: Any, **attributes: Any):
        self, *rest = args  # `self` may be an attribute
        fields = dict(*rest, **attributes)
        for name in fields:
            _check_name(name)
        Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    """Raise SecurityError for an attribute of a namespace that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes what HTML would read."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """The template. Raises jinja2's TemplateSyntaxError, and errors of Python's compiler."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox.from_string(template)


def render(template: str, messages: Sequence[JsonDict], variables: Mapping[str, Any]) -> str:
    """The prompt text of a conversation. Raises any error of the template.

    messages, variables: JSON. variables: with the special tokens; continue_final_message: leave out
    the template's text after the last message.
    """
    for name in _OWN_VARIABLES & variables.keys():
        raise ValueError(f"{name} cannot be set for a chat template")
    prepared = [_with_reasoning(message) for message in messages]
    context: JsonDict = {"tools": None, "documents": None, "add_generation_prompt": False}
    context |= variables
    goes_on = context.pop("continue_final_message", False)
    end = _mark_end(prepared, template) if goes_on else ""
    text = compiled(template).render(context | {"messages": prepared})
    return _cut(text, end) if goes_on else text


def _with_reasoning(message: JsonDict) -> JsonDict:
    """The message with its reasoning under both names that templates read."""
    if not isinstance(message, dict):
        raise TypeError(f"a chat message is no object: {message!r}")
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(messages: list[JsonDict], template: str) -> str:
    """Put `_END` behind the text of the last message. -> that text. Raises ValueError."""
    content = messages[-1].get("content") if messages else None
    if content is None:
        raise ValueError("continue_final_message: there is no final message with content")
    if "content" not in template:
        raise ValueError("continue_final_message: the chat template reads no content")
    if not isinstance(content, list):
        messages[-1]["content"] = content + _END
        return content
    blocks = [dict(block) for block in content]
    last = next((block for block in reversed(blocks) if "text" in block), None)
    if last is None:
        raise ValueError("continue_final_message: the final message has no text")
    text = last["text"]
    last["text"] = text + _END
    messages[-1]["content"] = blocks
    return text


def _cut(text: str, end: str) -> str:
    """The prompt up to the end of its last message. Raises ValueError if that is not in it."""
    if end.strip() not in text or _END.strip() not in text:
        raise ValueError(
            "continue_final_message: the template leaves out parts of the final message"
        )
    at = text.rindex(_END.strip())
    # A template that trims messages took the space behind the mark.
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()

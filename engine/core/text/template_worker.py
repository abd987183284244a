"""Renders chat templates in a process of its own, which can be ended: `python -P -m
jitney.engine.core.text.template_worker`.

transformers' sandbox keeps a model's template from the machine, but not from running for ever. The
first message in is a `TemplateSource`, then come `Chat`s, each answered by a `Rendered`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.worker_pipe import answer_requests, limit_memory, time_limit

#: Most bytes of memory that rendering may take.
_MORE_MEMORY = 1 << 30
#: Most characters of a template's own error that are repeated.
_MOST_REASON = 200


class TemplateSource(msgspec.Struct, frozen=True):
    """A model's chat template."""

    #: Jinja.
    template: str
    #: Special tokens that it may write, by their names, such as "bos_token".
    special_tokens: dict[str, str]
    #: Jinja for chats with tools; empty: `template`.
    tools_template: str = ""


class Chat(msgspec.Struct, frozen=True):
    """A conversation to be rendered."""

    messages: list[JsonDict]
    #: More characters of text are an error.
    most_chars: int
    #: Seconds after which this process ends by itself, should nobody be left to end it.
    limit_s: float
    #: What else goes to the template, and to what renders it (`continue_final_message`).
    variables: JsonDict = {}


class Rendered(msgspec.Struct, frozen=True):
    """What came of a chat."""

    text: str = ""
    #: Why there is no text, in the template's words.
    refusal: str = ""
    #: How many characters the text has, if those are too many.
    too_long: int = 0

    @classmethod
    def within(cls, make: Callable[[], str], limit_s: float, most_chars: int) -> Rendered:
        """Make a text. The process ends if that takes longer than limit_s seconds."""
        try:
            with time_limit(limit_s):
                text = make()
        except Exception as error:  # a template may raise anything: jinja2's errors, TypeError, ...
            return cls(refusal=reason_of(error) or type(error).__name__)
        if len(text) > most_chars:
            return cls(too_long=len(text))
        return cls(text)


#: Has transformers' sandbox for templates; it takes most of a second to load.
_SANDBOX = "transformers.utils.chat_template_utils"


def _render(source: TemplateSource, messages: list[JsonDict], **variables: Any) -> str:
    """The prompt text of a conversation. Raises whatever the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given: JsonDict = source.special_tokens | variables
    template = source.template
    if given.get("tools") is not None:
        template = source.tools_template or template
    texts, _ = render_jinja_template([messages], chat_template=template, **given)
    return texts[0]


def reason_of(error: Exception) -> str:
    """An error of a template, as a client may read it."""
    return " ".join(str(error).split())[:_MOST_REASON]


def _start(source: TemplateSource) -> tuple[Rendered, Callable[[Chat], Rendered]]:
    importlib.import_module(_SANDBOX)
    limit_memory(_MORE_MEMORY)  # beside what the sandbox itself takes

    def answer(chat: Chat) -> Rendered:
        given = {"add_generation_prompt": True} | chat.variables
        return Rendered.within(
            lambda: _render(source, chat.messages, **given), chat.limit_s, chat.most_chars
        )

    return Rendered(), answer


if __name__ == "__main__":
    sys.exit(answer_requests(TemplateSource, Chat, _start))

"""Worker process that renders chat templates: `python -P -m
jitney.engine.core.text.template_worker`.

The sandbox keeps a template from the machine, but not from running forever. The first message is a
`TemplateSource`; each following `Chat` is answered by a `Rendered`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from jitney.engine.common.rendered import Rendered
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.worker_pipe import answer_requests, limit_memory

#: Most bytes of memory for rendering.
_MORE_MEMORY = 1 << 30


class TemplateSource(msgspec.Struct, frozen=True):
    """A model's chat template."""

    #: Jinja.
    template: str
    #: Special tokens by variable, such as "bos_token".
    special_tokens: dict[str, str]
    #: Jinja for chats with tools; "": `template`.
    tools_template: str = ""


class Chat(msgspec.Struct, frozen=True):
    """A conversation to render."""

    messages: list[JsonDict]
    #: Longer texts are an error.
    most_chars: int
    #: Seconds after which the process ends itself.
    limit_s: float
    #: Other variables of the template, and options of rendering (`continue_final_message`).
    variables: JsonDict = {}


#: Imported where a chat is rendered: benchmarks on machines without jinja2 have none.
_SANDBOX = "jitney.engine.core.text.chat_sandbox"


def render_source(source: TemplateSource, messages: list[JsonDict], /, **variables: Any) -> str:
    """The prompt text of a conversation. Raises any error of the template."""
    from jitney.engine.core.text.chat_sandbox import render

    template = source.template
    if variables.get("tools") is not None:
        template = source.tools_template or template
    return render(template, messages, source.special_tokens | variables)


def _start(source: TemplateSource) -> tuple[Rendered, Callable[[Chat], Rendered]]:
    importlib.import_module(_SANDBOX)
    limit_memory(_MORE_MEMORY)  # in addition to the sandbox's own

    def answer(chat: Chat) -> Rendered:
        variables = {"add_generation_prompt": True} | chat.variables
        return Rendered.within(
            lambda: render_source(source, chat.messages, **variables), chat.limit_s, chat.most_chars
        )

    return Rendered(), answer


if __name__ == "__main__":
    sys.exit(answer_requests(TemplateSource, Chat, _start))

"""Chat templates rendered in a process of their own: `python -P -m
jitney.engine.core.text.template_worker`, started by `jitney.engine.server.chat.chat_templates`.

A template is a program out of a model's folder, in transformers' sandbox, which keeps it from the
machine but not from running for ever. A thread cannot be ended, a process can.

The first message in is a `TemplateSource`, then come `Chat`s; each is answered by one `Rendered`
(`jitney.engine.common.worker_pipe`).
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.worker_pipe import WorkerPipe, limit_memory

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
        """What comes of making a text. The process ends if that takes longer than limit_s
        seconds.
        """
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends the process
        try:
            text = make()
        except Exception as error:  # a template may raise anything: jinja2's errors, TypeError, ...
            return cls(refusal=reason_of(error) or type(error).__name__)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
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


def _main() -> int:
    """Render until standard input ends."""
    pipe = WorkerPipe()
    first = pipe.read()
    if first is None:
        return 0
    source = msgspec.msgpack.decode(first, type=TemplateSource)
    importlib.import_module(_SANDBOX)
    limit_memory(_MORE_MEMORY)  # beside what the sandbox itself takes
    pipe.send(Rendered())
    decoder = msgspec.msgpack.Decoder(Chat)
    while (request := pipe.read()) is not None:
        pipe.send(_answer(source, decoder.decode(request)))
    return 0


def _answer(source: TemplateSource, chat: Chat) -> Rendered:
    given = {"add_generation_prompt": True} | chat.variables
    return Rendered.within(
        lambda: _render(source, chat.messages, **given), chat.limit_s, chat.most_chars
    )


if __name__ == "__main__":
    sys.exit(_main())

"""`jitney chat`: a chat in the terminal, with the engine in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jitney.engine.cli.generate import SamplingArguments
from jitney.engine.common.errors import ModelError, RequestError, did_you_mean
from jitney.engine.common.requests import SamplingParams
from jitney.engine.common.terminal import visible_on_terminal
from jitney.engine.config import Command, Flag, FlagGroup, say
from jitney.engine.core import load_llm

if TYPE_CHECKING:
    from jitney.engine.core import LLM

_CLEAR = ("/clear", "/new")
_EXIT = ("/exit", "/quit")
_COMMANDS = ("/help", *_CLEAR, *_EXIT)
_HELP = (
    "/help shows this; /clear starts a new conversation; /exit, an empty line or Ctrl-D ends. "
    "Ctrl-C stops an answer. A line that begins with a blank is sent as it is."
)
_SYSTEM = Flag.of("--system", "system message of the conversation", "", metavar="TEXT")
_COMMAND = Command(
    "chat",
    "Talk to a model in the terminal. " + _HELP,
    (FlagGroup([_SYSTEM, SamplingArguments.ADAPTER]), SamplingArguments.SAMPLING),
    sections=("model", "engine", "sampling"),
    leave_out=Command.ONLY_SERVED,
)


def run(arguments: Sequence[str]) -> int:
    """Chat until the input ends; exit status 0."""
    args = _COMMAND.parse_as(SamplingArguments, arguments)
    config = args.load_config()
    args.sampling()  # raises for a bad flag before the model is loaded
    args.check_adapter(config)
    llm = load_llm(config)
    if not llm.tokenizer.has_chat_template:
        raise ModelError(f"{config.model.id} has no chat template; use jitney generate")
    say(_HELP)
    params = args.sampling(defaults=llm.info.model.sampling_defaults)
    _converse(_Conversation(llm, params, args.system, args.adapter))
    llm.close()
    return 0


class _Conversation:
    """The messages so far. adapter: name of the adapter that answers, "" for none."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str = "", adapter: str = ""):
        self._llm = llm
        self._params = params
        self._adapter = adapter
        self._system = [_message("system", system)] if system else []
        self._messages = list(self._system)

    def clear(self) -> None:
        """Forget all messages but the system message."""
        self._messages = list(self._system)

    def ask(self, text: str) -> None:
        """Print the answer as it is generated, and append both messages; Ctrl-C stops it. A refused
        message is not appended.
        """
        messages = [*self._messages, _message("user", text)]
        answer = ""
        try:
            with contextlib.suppress(KeyboardInterrupt):
                ids = self._llm.chat_ids(messages)
                for piece in self._llm.stream(ids, self._params, adapter=self._adapter):
                    print(visible_on_terminal(piece), end="", flush=True)
                    answer += piece
        except RequestError as error:
            say(f"{error} (/clear starts a new conversation)")
            return
        print()
        self._messages = [*messages, _message("assistant", answer)]


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _converse(conversation: _Conversation) -> None:
    """Answer lines until the user leaves."""
    for line in _lines():
        if not line.startswith("/"):
            conversation.ask(line.strip())
            continue
        command = line.split()[0].lower()
        if command in _EXIT:
            return
        if command in _CLEAR:
            conversation.clear()
            say("A new conversation.")
        elif command == "/help":
            say(_HELP)
        else:
            say(f"no command {command}{did_you_mean(command, _COMMANDS)}\n{_HELP}")


def _lines() -> Iterator[str]:
    """Lines of input until an empty one or its end; on a terminal, arrow keys recall lines."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):  # absent on some systems
            import readline  # noqa: F401  `input` uses it once it is imported
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (line := input(prompt)).strip():
            yield line

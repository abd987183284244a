"""`jitney chat`: a conversation in the terminal, with the engine in this process."""

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
    "/help shows this; /clear forgets the conversation; /exit, an empty line or Ctrl-D ends. "
    "Ctrl-C cuts an answer short. A line that begins with a blank is sent as it is."
)
_SYSTEM = Flag.of("--system", "instructions that precede the conversation", "", metavar="TEXT")
_COMMAND = Command(
    "chat",
    "Talk to a model in the terminal. " + _HELP,
    (FlagGroup([_SYSTEM, SamplingArguments.ADAPTER]), SamplingArguments.SAMPLING),
    sections=("model", "engine", "sampling"),
    leave_out=Command.ONLY_SERVED,
)


def run(arguments: Sequence[str]) -> int:
    """Talk until the input ends; exit status 0."""
    args = _COMMAND.parse_as(SamplingArguments, arguments)
    config = args.load_config()
    args.sampling()  # raises for a bad flag before anything is loaded
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
    """Everything said so far. adapter: the name of the one that answers, empty for none."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str = "", adapter: str = ""):
        self._llm = llm
        self._params = params
        self._adapter = adapter
        self._opening = [_said("system", system)] if system else []
        self._messages = list(self._opening)

    def clear(self) -> None:
        """Forget all but the instructions."""
        self._messages = list(self._opening)

    def ask(self, text: str) -> None:
        """Print the answer as it comes, and remember both; Ctrl-C cuts it short. What cannot be
        answered is not remembered.
        """
        asked = [*self._messages, _said("user", text)]
        parts: list[str] = []
        try:
            with contextlib.suppress(KeyboardInterrupt):
                ids = self._llm.chat_ids(asked)
                for part in self._llm.stream(ids, self._params, adapter=self._adapter):
                    print(visible_on_terminal(part), end="", flush=True)
                    parts.append(part)
        except RequestError as error:
            say(f"{error} (/clear forgets the conversation)")
            return
        print()
        self._messages = [*asked, _said("assistant", "".join(parts))]


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _converse(conversation: _Conversation) -> None:
    """Until the person leaves."""
    for line in _lines():
        if not line.startswith("/"):
            conversation.ask(line.strip())
            continue
        command = line.split()[0].lower()
        if command in _EXIT:
            return
        if command in _CLEAR:
            conversation.clear()
            say("The conversation is forgotten.")
        elif command == "/help":
            say(_HELP)
        else:
            say(f"no command {command}{did_you_mean(command, _COMMANDS)}\n{_HELP}")


def _lines() -> Iterator[str]:
    """What the person types, until an empty line or the end of input. On a terminal the arrow keys
    bring back earlier lines.
    """
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):  # not everywhere
            import readline  # noqa: F401  `input` uses it once it is there
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (line := input(prompt)).strip():
            yield line

"""`jitney chat`: a chat in the terminal, with the engine in this process or with a server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from jitney.engine.cli.generate import SamplingArguments
from jitney.engine.common.errors import ConfigError, ModelError, RequestError, did_you_mean
from jitney.engine.common.requests import SamplingParams
from jitney.engine.common.terminal import say, visible_on_terminal
from jitney.engine.config import KEY_FLAG, Command, Flag, FlagGroup, settings
from jitney.engine.core import load_llm

if TYPE_CHECKING:
    from jitney.engine.core import LLM

_CLEAR = ("/clear", "/new")
_EXIT = ("/exit", "/quit")
_RETRY = "/retry"
_COMMANDS = ("/help", _RETRY, *_CLEAR, *_EXIT)
#: At the end of a line: the message continues in the next line.
_GOES_ON = "\\"
_HELP = (
    "/help shows this; /retry asks for another answer; /clear starts a new conversation; /exit, an "
    "empty line or Ctrl-D ends. Ctrl-C stops an answer. A line that ends with \\ goes on in the "
    "next one; one that begins with a blank is sent as it is. Arrow keys recall lines."
)
_SYSTEM = Flag.of("--system", "system message of the conversation", "", metavar="TEXT")
_URL = Flag.of("--url", "talk to this running server; no model is loaded here", "", metavar="URL")

#: Function from a conversation's messages to the answer in pieces. It raises RequestError if the
#: request is refused. Closing the generator aborts the request.
type _Answers = Callable[[list[dict[str, str]]], Generator[str, None, None]]
_COMMAND = Command(
    "chat",
    "Talk to a model in the terminal. " + _HELP,
    (FlagGroup([_URL, KEY_FLAG, _SYSTEM, SamplingArguments.ADAPTER]), SamplingArguments.SAMPLING),
    sections=("model", "engine", "sampling"),
    leave_out=Command.ONLY_SERVED,
)


def run(arguments: Sequence[str]) -> int:
    """Chat until the input ends; exit status 0."""
    args = _COMMAND.parse_as(SamplingArguments, arguments)
    if args.url:
        return _talk(_of_server(args), args.system)
    if args.key_file:
        raise ConfigError("--key-file: give --url too; no key is needed for a model loaded here")
    config = args.load_config()
    args.sampling()  # raises for a bad flag before the model is loaded
    args.check_adapter(config)
    llm = load_llm(config)
    if not llm.tokenizer.has_chat_template:
        raise ModelError(f"{config.model.id} has no chat template; use jitney generate")
    params = args.sampling(defaults=llm.info.model.sampling_defaults)
    status = _talk(partial(_answer_here, llm, params, args.adapter), args.system)
    llm.close()
    return status


def _talk(answers: _Answers, system: str) -> int:
    say(_HELP)
    _converse(_Conversation(answers, system))
    return 0


def _answer_here(
    llm: LLM, params: SamplingParams, adapter: str, messages: list[dict[str, str]]
) -> Generator[str, None, None]:
    """The answer of an engine in this process. adapter: its name, "" for none."""
    yield from llm.stream(llm.chat_ids(messages), params, adapter=adapter)


def _of_server(args: SamplingArguments) -> _Answers:
    """The answers of a running server. Raises ConfigError and `asking.Refused`."""
    from jitney.engine.cli.server_chat import ServerChat

    flags = [args.flag_of(name) for name in vars(args) if name in settings()]
    if args.config or args.model_word or flags:
        named = ", ".join(flags) or ("--config" if args.config else "MODEL")
        raise ConfigError(f"{named}: leave it out with --url; a server has settings of its own")
    args.sampling()  # raises for a bad flag
    return ServerChat.of(args.url, args.engine_key(), args.adapter, args.explicit_sampling()).answer


class _Conversation:
    def __init__(self, answers: _Answers, system: str = ""):
        self._answers = answers
        self._system = [_message("system", system)] if system else []
        self._messages = list(self._system)

    def clear(self) -> None:
        """Forget all messages but the system message."""
        self._messages = list(self._system)

    def retry(self) -> None:
        """Ask the last question again."""
        if self._messages == self._system:
            say("there is no answer yet")
            return
        *self._messages, question, _ = self._messages
        self.ask(question["content"])

    def ask(self, text: str) -> None:
        """Print the answer and append both messages; Ctrl-C stops it, a refusal appends none."""
        messages = [*self._messages, _message("user", text)]
        answer = ""
        try:
            with (
                contextlib.suppress(KeyboardInterrupt),
                contextlib.closing(self._answers(messages)) as pieces,
            ):
                for piece in pieces:
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
        elif command == _RETRY:
            conversation.retry()
        elif command == "/help":
            say(_HELP)
        else:
            say(f"no command {command}{did_you_mean(command, _COMMANDS)}\n{_HELP}")


def _lines() -> Iterator[str]:
    """Messages of the input until an empty line or its end; arrow keys recall lines."""
    prompt = more = ""
    if sys.stdin.isatty():
        prompt, more = "> ", ". "
        with contextlib.suppress(ImportError):  # absent on some systems
            import readline  # noqa: F401  `input` uses it once it is imported
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (line := input(prompt)).strip():
            while line.endswith(_GOES_ON):
                line = line.removesuffix(_GOES_ON) + "\n" + input(more)
            yield line

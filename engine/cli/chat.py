"""`jitney chat`: a conversation in the terminal, with the engine in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jitney.engine.cli.display import load_llm
from jitney.engine.cli.flags import Command, Flag, FlagGroup
from jitney.engine.cli.generate import SamplingArguments
from jitney.engine.errors import ModelError
from jitney.engine.types import SamplingParams

if TYPE_CHECKING:
    from jitney.engine.llm import LLM

_HELP = "Empty line or Ctrl-D ends; /new starts over."
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
    print(_HELP, file=sys.stderr)
    params = args.sampling(defaults=llm.info.model.sampling_defaults)
    _converse(llm, params, args.system, args.adapter)
    llm.close()
    return 0


def _converse(llm: LLM, params: SamplingParams, system: str, adapter: str = "") -> None:
    """Read, answer, remember. adapter: the name of the one that answers."""
    opening = [_said("system", system)] if system else []
    messages = list(opening)
    for line in _lines():
        if line == "/new":
            messages = list(opening)
            continue
        messages.append(_said("user", line))
        messages.append(_said("assistant", _answer(llm, params, messages, adapter)))


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]], adapter: str) -> str:
    """Print the answer as it comes; Ctrl-C cuts it short. Returns what was printed."""
    parts: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        for text in llm.stream(llm.chat_ids(messages), params, adapter=adapter):
            print(text, end="", flush=True)
            parts.append(text)
    print()
    return "".join(parts)


def _lines() -> Iterator[str]:
    """What the person types, until an empty line or the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while line := input(prompt).strip():
            yield line

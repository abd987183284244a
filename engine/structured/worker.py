"""Grammars checked in a process of their own: `python -P -m jitney.engine.structured.worker`,
started by `jitney.engine.api.grammars`.

A grammar comes from a client, and what it takes to compile it is not known before; a process can be
ended. Messages are msgpack behind four bytes of length. The first one in is a `CheckerSetup`, then
come grammars; each is answered by one `Checked`. The end of standard input ends the process.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from jitney.engine.errors import ErrorInfo, RequestError
from jitney.engine.structured.compiling import in_lark, new_matcher
from jitney.engine.structured.setup import LENGTH, Checked, CheckerSetup
from jitney.engine.types import Grammar

#: Most bytes of memory that checking may take.
_MORE_MEMORY = 512 << 20
#: Seconds after which this process ends by itself, should nobody be left to end it.
_LIMIT_S = 10.0


class _Tokens:
    """Single bytes and the special tokens: enough to tell whether a grammar can be used."""

    bos_token_id = None

    def __init__(self, setup: CheckerSetup):
        names = [name.encode() for name in setup.special_tokens]
        self.tokens = [bytes([byte]) for byte in range(256)] + names
        self.special_token_ids = list(range(256, len(self.tokens)))
        # One more that ends a text.
        self.eos_token_id = len(self.tokens)
        self.special_token_ids.append(self.eos_token_id)
        self.tokens.append(b"<|end of the text|>")
        # The rest of the model's tokens, which a grammar may name by their ids.
        self.tokens += [b""] * (setup.vocab_size - len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Checker:
    """Says of grammars whether they can be used."""

    def __init__(self, setup: CheckerSetup):
        tokens = _Tokens(setup)
        self._trie = LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.eos_token_id, slices=[])

    def check(self, grammar: Grammar) -> Checked:
        try:
            ready = in_lark(grammar)
            new_matcher(ready, self._trie)
        except RequestError as error:
            return Checked(None, error.info)
        except BaseException as error:  # a panic of the library's, or too little memory
            reason = f"the grammar cannot be used: {type(error).__name__}"
            return Checked(None, ErrorInfo("grammar_too_complex", reason))
        return Checked(ready)


def main() -> int:
    """Check until standard input ends."""
    # They reach the whole process group; whoever started this one decides when it ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # Whatever prints must not come between the answers.
    sys.stdout = sys.stderr
    first = _read(requests)
    if first is None:
        return 0
    checker = Checker(msgspec.msgpack.decode(first, type=CheckerSetup))
    _limit_memory()
    _send(answers, checker.check(Grammar("json_object")))
    decoder = msgspec.msgpack.Decoder(Grammar)
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)  # SIGALRM ends the process
        _send(answers, checker.check(decoder.decode(request)))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return 0


def _limit_memory() -> None:
    """No more than _MORE_MEMORY from now on, where the system says how much there is (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _send(stream: BinaryIO, checked: Checked) -> None:
    data = msgspec.msgpack.encode(checked)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO) -> bytes | None:
    """The next message, None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


if __name__ == "__main__":
    sys.exit(main())

"""Worker process that checks grammars: `python -P -m jitney.engine.core.grammar.worker`.

Compiling a client's grammar may take forever, and a process can be killed. The first message is a
`CheckerSetup`; each following grammar is answered by a `Checked`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from llguidance import LLTokenizer, TokenizerWrapper

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.requests import Grammar
from jitney.engine.common.worker_pipe import answer_requests, limit_memory, time_limit
from jitney.engine.core.grammar.compiling import checked
from jitney.engine.core.grammar.setup import Checked, CheckerSetup

#: Most bytes of memory for checking.
_MORE_MEMORY = 512 << 20
#: Seconds after which the process ends itself.
_LIMIT_S = 10.0


class _Tokens:
    """A vocabulary of single bytes and the special tokens, which suffices to check a grammar."""

    bos_token_id = None

    def __init__(self, setup: CheckerSetup):
        names = [name.encode() for name in setup.special_tokens]
        self.tokens = [bytes([byte]) for byte in range(256)] + names
        self.special_token_ids = list(range(256, len(self.tokens)))
        # A token that ends a text.
        self.eos_token_id = len(self.tokens)
        self.special_token_ids.append(self.eos_token_id)
        self.tokens.append(b"<|end of the text|>")
        # The model's other tokens, which a grammar may name by id.
        self.tokens += [b""] * (setup.vocab_size - len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Checker:
    """Checks whether grammars can be used."""

    def __init__(self, setup: CheckerSetup):
        tokens = _Tokens(setup)
        self._trie = LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.eos_token_id, slices=[])

    def check(self, grammar: Grammar) -> Checked:
        try:
            ready = checked(grammar, self._trie)
        except RequestError as error:
            return Checked(None, error.info)
        except BaseException as error:  # a Rust panic, or out of memory
            reason = f"the grammar cannot be used: {type(error).__name__}"
            return Checked(None, ErrorInfo("grammar_too_complex", reason))
        return Checked(ready.grammar, unenforced=tuple(ready.left_out))


def _start(setup: CheckerSetup) -> tuple[Checked, Callable[[Grammar], Checked]]:
    checker = Checker(setup)
    limit_memory(_MORE_MEMORY)

    def answer(grammar: Grammar) -> Checked:
        with time_limit(_LIMIT_S):
            return checker.check(grammar)

    return checker.check(Grammar("json_object")), answer


if __name__ == "__main__":
    sys.exit(answer_requests(CheckerSetup, Grammar, _start))

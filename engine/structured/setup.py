"""What is said to and by the process that checks grammars (`structured.worker`)."""

from __future__ import annotations

import msgspec

from jitney.engine.errors import ErrorInfo, RequestError
from jitney.engine.types import Grammar


class CheckerSetup(msgspec.Struct, frozen=True):
    """What a check must know of the tokenizer."""

    #: Special tokens that a grammar may name.
    special_tokens: tuple[str, ...]
    #: Of the model.
    vocab_size: int


class Checked(msgspec.Struct, frozen=True):
    """What came of a grammar."""

    #: The grammar, in Lark if it was in GBNF; None if it cannot be used.
    grammar: Grammar | None
    error: ErrorInfo | None = None

    def usable(self, param: str) -> Grammar:
        """The grammar as the engine takes it. Raises RequestError, blamed on the field that it came
        in, for one that cannot be used.
        """
        if self.grammar is not None:
            return self.grammar
        if self.error is None:
            raise RequestError("the grammar cannot be used", param=param)
        raise RequestError(self.error.message, code=self.error.code, param=param)

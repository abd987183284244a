"""What is said to and by the process that checks grammars (`structured.worker`)."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.requests import Grammar


class CheckerSetup(msgspec.Struct, frozen=True):
    """What a check must know of the tokenizer."""

    #: Special tokens that a grammar may name.
    special_tokens: tuple[str, ...]
    #: Of the model.
    vocab_size: int


class Checked(msgspec.Struct, frozen=True):
    """What came of a grammar."""

    #: The grammar as the engine takes it; None if it cannot be used.
    grammar: Grammar | None
    error: ErrorInfo | None = None
    #: Pointers to what its schemas say and it does not; those of a tool behind its name, such as
    #: "label#/properties/a/uniqueItems".
    unenforced: tuple[str, ...] = ()

    def usable(self, param: str) -> CheckedGrammar:
        """The grammar. Raises RequestError that names the tool's field or the grammar's."""
        if self.grammar is not None:
            return CheckedGrammar(self.grammar, self.unenforced)
        if self.error is None:
            raise RequestError("the grammar cannot be used", param=param)
        raise RequestError.from_info(self.error).blaming(self.error.param or param)


class CheckedGrammar(NamedTuple):
    """A grammar that the engine takes."""

    grammar: Grammar
    #: See `Checked`.
    unenforced: tuple[str, ...]

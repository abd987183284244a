"""Messages of the process that checks grammars (`engine.core.grammar.worker`)."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.requests import Grammar


class CheckerSetup(msgspec.Struct, frozen=True):
    """The part of a tokenizer that checks need."""

    #: Special tokens that a grammar may name.
    special_tokens: tuple[str, ...]
    #: V of the model.
    vocab_size: int


class Checked(msgspec.Struct, frozen=True):
    """The result of checking a grammar."""

    #: The grammar for the engine; None if it cannot be used.
    grammar: Grammar | None
    error: ErrorInfo | None = None
    #: JSON pointers to keywords that are not enforced, after the tool's name if there is one, such
    #: as "label#/properties/a/uniqueItems".
    unenforced: tuple[str, ...] = ()

    def usable(self, param: str) -> CheckedGrammar:
        """The grammar. Raises RequestError naming the tool's field, else `param`."""
        if self.grammar is not None:
            return CheckedGrammar(self.grammar, self.unenforced)
        if self.error is None:
            raise RequestError("the grammar cannot be used", param=param)
        raise RequestError.from_info(self.error).blaming(self.error.param or param)


class CheckedGrammar(NamedTuple):
    """A grammar for the engine."""

    grammar: Grammar
    #: See `Checked`.
    unenforced: tuple[str, ...]

"""The terms of a JSON schema: enforced strictly or as far as possible, and what errors name.

The terms are stored inside the schema, so that a grammar with several tools' schemas is one text.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.core.grammar.refusals import bad_grammar, refused


class Terms(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The terms of one schema."""

    #: Keyword of the terms in the outermost schema.
    KEYWORD: ClassVar[str] = "x-jitney"

    #: Keywords that cannot be enforced are errors; False: they are left out and reported.
    strict: bool = True
    #: Objects get additionalProperties false unless they set it (`closing`).
    closed: bool = False
    #: Name of the tool with these arguments; "": no tool.
    name: str = ""
    #: Field of the tool in the body, such as "tools[3]".
    param: str = ""

    @classmethod
    def split(cls, schema: JsonDict) -> tuple[Terms, JsonDict]:
        """(terms of a schema, the schema without them). Raises RequestError for unknown terms."""
        rest = dict(schema)
        try:
            return msgspec.convert(rest.pop(cls.KEYWORD, {}), cls), rest
        except msgspec.ValidationError as error:
            raise bad_grammar(f"{cls.KEYWORD}: {error}") from None

    def with_schema(self, schema: JsonDict) -> JsonDict:
        """The schema with these terms in place of its own."""
        return schema | {self.KEYWORD: msgspec.to_builtins(self)}

    def refusal(self, place: str, reason: str) -> RequestError:
        """The error of a schema that cannot be enforced. place: a JSON pointer into it."""
        subject = f'{self.param} "{self.name}"' if self.name else "the schema cannot be enforced"
        return refused(f"{subject}: at {place}", reason, self.param or None)

    def pointer(self, place: str) -> str:
        """A JSON pointer into the schema, after the tool's name."""
        return self.name + place

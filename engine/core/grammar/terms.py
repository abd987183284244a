"""The terms of a JSON schema: strictly or as far as possible, and whom an error names.

They travel inside the schema, so that a grammar with schemas of several tools is one text.
"""

from __future__ import annotations

import json
from typing import ClassVar

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.core.grammar.refusals import bad_grammar, refused

_NO_ARGUMENTS: JsonDict = {"properties": {}, "additionalProperties": False}


class Terms(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one schema is enforced."""

    #: The keyword that they stand under, in the outermost schema.
    KEYWORD: ClassVar[str] = "x-jitney"

    #: What cannot be enforced is an error; else it is left out, and named.
    strict: bool = True
    #: Objects have no properties but those that they name, unless they say so (`closing`).
    closed: bool = False
    #: The tool whose arguments these are; empty: no tool.
    name: str = ""
    #: The field that the tool came in, such as "tools[3]".
    param: str = ""

    @classmethod
    def split(cls, schema: JsonDict) -> tuple[Terms, JsonDict]:
        """The terms of a schema, and the schema without them. Raises RequestError for unknown
        terms.
        """
        rest = dict(schema)
        try:
            return msgspec.convert(rest.pop(cls.KEYWORD, {}), cls), rest
        except msgspec.ValidationError as error:
            raise bad_grammar(f"{cls.KEYWORD}: {error}") from None

    def with_schema(self, schema: JsonDict) -> JsonDict:
        """The schema on these terms, whatever it said itself."""
        return schema | {self.KEYWORD: msgspec.to_builtins(self)}

    def refusal(self, place: str, reason: str) -> RequestError:
        """The schema cannot be enforced. place: a JSON pointer into it."""
        whose = f'{self.param} "{self.name}"' if self.name else "the schema cannot be enforced"
        return refused(f"{whose}: at {place}", reason, self.param or None)

    def pointer(self, place: str) -> str:
        """How a place in the schema is named among those of other schemas."""
        return self.name + place


def json_rule(schema: JsonValue) -> str:
    """JSON that fits a schema, as part of a grammar in Lark."""
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}  # llguidance wants an object
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def arguments_schema(parameters: JsonDict | None, terms: Terms) -> JsonDict:
    """The schema of a tool's arguments on these terms. parameters: the client's, or None."""
    schema = {"type": "object"} | (_NO_ARGUMENTS if parameters is None else parameters)
    schema.pop("x-guidance", None)  # llguidance's own options are not the client's
    return terms.with_schema(schema)

"""Fields of grammars: OpenAI's `response_format`, vLLM's `structured_outputs`, `guided_*`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar, JsonDict
from jitney.engine.core import Terms, schema_grammar

#: Most characters of a regular expression, a grammar or a schema; choices, and characters of each.
_MOST_CHARS = 1 << 16
_MOST_CHOICES = 1024
_MOST_CHOICE_CHARS = 1024
#: Found in Lark but not in GBNF: a directive, or a rule named start.
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")

Pattern = Annotated[str, Field(min_length=1, max_length=_MOST_CHARS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_MOST_CHOICE_CHARS)]],
    Field(min_length=1, max_length=_MOST_CHOICES),
]
#: A JSON schema, or its text.
Schema = JsonDict | bool | Annotated[str, Field(max_length=_MOST_CHARS)]


class WantedGrammar(NamedTuple):
    """The grammar that an answer must follow."""

    #: The field that contains it, for errors.
    param: str
    grammar: Grammar

    @classmethod
    def of_fields(
        cls,
        prefix: str,
        schema: JsonDict | bool | str | None,
        regex: str | None,
        choice: list[str] | None,
        text: str | None,
    ) -> list[WantedGrammar]:
        """The grammars of the given fields. prefix: of the fields' names. Raises RequestError."""
        grammars: list[WantedGrammar] = []
        if schema is not None:
            param = prefix + "json"
            grammars.append(cls(param, _schema(schema, param)))
        if regex is not None:
            grammars.append(cls(prefix + "regex", Grammar("regex", regex)))
        if choice is not None:
            grammars.append(cls(prefix + "choice", choice_grammar(choice)))
        if text is not None:
            grammars.append(cls(prefix + "grammar", text_grammar(text)))
        return grammars

    @classmethod
    def of_schema(cls, param: str, schema: JsonDict, *, is_strict: bool) -> WantedGrammar:
        """A schema's grammar. is_strict: refuse what cannot be enforced. Raises RequestError."""
        return cls(param, _of_schema(schema, f"{param}.schema", is_strict=is_strict))


class _Exact(BaseModel):
    """Part of a body in which unknown fields are errors: an ignored field would enforce less than
    the request asks for.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class _NamedSchema(_Exact):
    """The schema of an answer. If it is not strict, unsupported keywords are left out."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    json_schema: Annotated[JsonDict, Field(alias="schema")]
    description: Annotated[str | None, Field(max_length=4096)] = None
    strict: bool | None = None


class ResponseFormat(_Exact):
    """OpenAI's: any text, any object of JSON, or what a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    def grammars(self) -> list[WantedGrammar]:
        """One, or none. Raises RequestError for a type and a schema that do not go together."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "json_schema is needed with type json_schema, and with no other",
                param="response_format.json_schema",
            )
        if self.json_schema is not None:
            param = "response_format.json_schema.schema"
            is_strict = self.json_schema.strict is True
            made = _of_schema(self.json_schema.json_schema, param, is_strict=is_strict)
            return [WantedGrammar(param, made)]
        if self.type == "json_object":
            return [WantedGrammar("response_format", Grammar("json_object"))]
        return []


class StructuredOutputs(_Exact):
    """vLLM's; exactly one of these."""

    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None

    def grammars(self) -> list[WantedGrammar]:
        """One. Raises RequestError unless exactly one is given."""
        grammars = WantedGrammar.of_fields(
            "structured_outputs.", self.json_schema, self.regex, self.choice, self.grammar
        )
        if self.json_object:
            grammars.append(WantedGrammar("structured_outputs.json_object", Grammar("json_object")))
        if len(grammars) != 1:
            raise RequestError(
                "exactly one of json, json_object, regex, choice and grammar is needed",
                param="structured_outputs",
            )
        return grammars


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """A grammar that matches one of these texts."""
    return Grammar("choice", orjson.dumps(list(texts)).decode())


def text_grammar(text: str) -> Grammar:
    """A grammar in Lark or in GBNF (llama.cpp's), guessed from its text."""
    if _LARK.search(text):
        return Grammar("lark", text)
    return Grammar("gbnf", text)


def _schema(schema: JsonDict | bool | str, param: str) -> Grammar:
    """The grammar of a strict schema in vLLM's fields. Raises RequestError."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the schema is no JSON: {error}", param=param) from None
    if not isinstance(schema, dict | bool):
        raise RequestError("the schema must be an object, true or false", param=param)
    return _of_schema(schema, param, is_strict=True)


def _of_schema(schema: JsonDict | bool, param: str, *, is_strict: bool) -> Grammar:
    """The grammar of a JSON schema. Raises RequestError for one that is too long."""
    made = schema_grammar(schema, Terms(strict=is_strict, closed=True))
    if len(made.text) > _MOST_CHARS:
        raise RequestError(f"a schema may have at most {_MOST_CHARS} characters", param=param)
    return made

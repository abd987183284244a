"""The OpenAPI document as one page of HTML, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from html import escape

import orjson

from jitney.engine.common.requests import JsonDict, JsonValue

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2, h3 { line-height: 1.25; }
code { font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }
details { border-top: 1px solid #8888; padding: 0.5rem 0; }
summary { cursor: pointer; }
:target { outline: 2px solid; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.5rem 0.25rem 0; }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
#: Nothing is loaded, and nothing may frame the page.
CONTENT_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_REFERENCE = "#/components/schemas/"


@cache
def docs_page(document: bytes) -> bytes:
    """The page of an OpenAPI document. Takes some 30 ms for that of an engine."""
    openapi: JsonDict = orjson.loads(document)
    return "".join(_page(openapi)).encode()


def _page(openapi: JsonDict) -> Iterator[str]:
    title = escape(openapi["info"]["title"])
    yield "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
    yield f"<title>{title}: routes</title><style>{_STYLE}</style>"
    yield "<meta name=viewport content='width=device-width'></head><body><main>"
    yield f"<h1>{title}</h1><p>{escape(openapi['info']['description'])} "
    yield "The same as a document for programs: <a href=openapi.json>openapi.json</a>.</p>"
    yield "<h2>Routes</h2>"
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            yield from _route(path, method, operation)
    yield "<h2>Bodies and answers</h2>"
    for name, schema in sorted(openapi["components"]["schemas"].items()):
        yield from _schema(name, schema)
    yield "</main></body></html>\n"


def _route(path: str, method: str, operation: JsonDict) -> Iterator[str]:
    key = "" if operation["security"] else " (no key)"
    yield f"<details><summary><code>{method.upper()} {escape(path)}</code> "
    yield f"{escape(operation['summary'])}{key}</summary>"
    parameters = operation.get("parameters", [])
    if parameters:
        named = {each["name"]: each["schema"] for each in parameters}
        yield from _fields("Parameters", named, [])
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Takes <code>{escape(media_type)}</code>: {_type(content.get('schema', {}))}</p>"
    yield "<table><thead><tr><th scope=col>Status<th scope=col>When<th scope=col>Answer</thead>"
    for status, answer in operation["responses"].items():
        answers = [
            _type(content["schema"]) if "schema" in content else f"<code>{escape(kind)}</code>"
            for kind, content in answer["content"].items()
        ]
        yield f"<tr><td><code>{status}</code><td>{escape(answer['description'])}"
        yield f"<td>{', '.join(answers)}"
    yield "</table></details>"


def _schema(name: str, schema: JsonDict) -> Iterator[str]:
    yield f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary>"
    if "description" in schema:
        yield f"<p>{escape(schema['description'])}</p>"
    if "properties" in schema:
        yield from _fields("Fields", schema["properties"], schema.get("required", []))
    else:
        yield f"<p>{_type(schema)}</p>"
    yield "</details>"


def _fields(caption: str, fields: JsonDict, required: list[str]) -> Iterator[str]:
    yield f"<table><caption>{caption}</caption>"
    yield "<thead><tr><th scope=col>Name<th scope=col>Type<th scope=col>Notes</thead>"
    for name, schema in fields.items():
        notes = ["required"] if name in required else []
        notes += [
            f"{label} {escape(_json(schema[key]))}"
            for key, label in _NOTED.items()
            if key in schema
        ]
        if "description" in schema:
            notes.append(escape(schema["description"]))
        yield f"<tr><th scope=row><code>{escape(name)}</code>"
        yield f"<td>{_type(schema)}<td>{'; '.join(notes)}"
    yield "</table>"


#: Keywords of a schema that stand in the notes, and how.
_NOTED = {
    "default": "default",
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
}


def _type(schema: JsonDict) -> str:
    """A schema in a few words; one with a name leads to its table."""
    reference = schema.get("$ref")
    if reference is not None:
        name = escape(reference.removeprefix(_REFERENCE))
        return f"<a href='#{name}'>{name}</a>"
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return " or ".join(dict.fromkeys(map(_type, branches)))
    if "const" in schema:
        return f"<code>{escape(_json(schema['const']))}</code>"
    if "enum" in schema:
        return ", ".join(f"<code>{escape(_json(value))}</code>" for value in schema["enum"])
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    return escape(str(schema.get("type", "any")))


def _json(value: JsonValue) -> str:
    return orjson.dumps(value).decode()

"""Fields that hold an answer to a grammar: what they become, and what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest
from api_fakes import FakeClient, Reply, call, make_app, run

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar
from jitney.engine.core.grammar import checks as grammars
from jitney.engine.core.grammar.checks import Grammars
from jitney.engine.core.grammar.terms import Terms
from jitney.engine.server.chat.conversation.grammars import json_rule

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": "ab"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "ab"}]},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOKENS = ("<eos>",), 260


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema} | more}


def strictly(schema: Any) -> dict[str, Any]:
    return named(schema, strict=True)


def ask(path: str, fields: dict[str, Any]) -> tuple[Reply, FakeClient]:
    client = FakeClient()
    return run(call(make_app(client), path, ROUTES[path] | fields)), client


TAKEN: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": named(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"response_format": named(SCHEMA, strict=True)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": "{}"}}, Grammar("json_schema", "{}")),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"structured_outputs": {"regex": "[a-z]+"}}, Grammar("regex", "[a-z]+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar("choice", '["yes","no"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_regex": "a|b"}, Grammar("regex", "a|b")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"guided_grammar": 'start: "a" <eos>'}, Grammar("lark", 'start: "a" <eos>')),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "grammar"), TAKEN)
def test_what_the_engine_gets(path: str, fields: dict[str, Any], grammar: Grammar | None):
    reply, client = ask(path, fields)
    assert reply.status == 200, reply.body
    found = client.requests[0].sampling.grammar
    if grammar is not None and grammar.kind == "json_schema":
        assert found is not None and json.loads(found.text) == json.loads(grammar.text)
    else:
        assert found == grammar


@pytest.mark.parametrize("path", ROUTES)
def test_gbnf_becomes_lark(path: str):
    reply, client = ask(path, {"guided_grammar": 'root ::= "a" | "b"'})
    grammar = client.requests[0].sampling.grammar
    assert reply.status == 200 and grammar is not None
    assert grammar.kind == "lark" and "start:" in grammar.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "nope"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": named(SCHEMA) | {"type": "text"}}, "response_format.json_schema"),
    ({"response_format": named(5)}, "response_format.json_schema.schema"),
    ({"response_format": strictly({"type": "nope"})}, "response_format.json_schema.schema"),
    ({"response_format": strictly({"not": {}})}, "response_format.json_schema.schema"),
    ({"response_format": strictly({"$ref": "http://x/y"})}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": {"contains": {}}}}, "structured_outputs.json"),
    ({"guided_json": {"contains": {}}}, "guided_json"),
    ({"response_format": named(SCHEMA, name="a b")}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_kept_to_is_refused_by_name(path: str, fields: dict[str, Any], param: str):
    reply, client = ask(path, fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param and len(reply.error["message"]) < 400
    assert not client.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_grammar": 'root ::= s\ns ::= s "a"'}, "guided_grammar"),
        ({"guided_grammar": "start: T\nT: /a/ & /b/"}, "guided_grammar"),
        ({"guided_regex": r"a[^\s\S]"}, "guided_regex"),
    ],
)
def test_a_grammar_that_matches_no_text_is_not_too_complex(fields: dict[str, Any], param: str):
    reply, client = ask("/v1/completions", fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["code"] is None and not client.requests


def test_an_error_says_where_in_the_schema_it_is():
    inner = {"type": "object", "properties": {"x/y": {"uniqueItems": True}}}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": inner}}}
    reply, _ = ask("/v1/completions", {"response_format": strictly(schema)})
    assert "#/properties/a/items/properties/x~1y: " in reply.error["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_what_cannot_be_enforced_is_left_out_and_named_where_nobody_is_strict(path: str):
    schema = SCHEMA | {"properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 5}}}
    for fields, is_told in (
        ({"response_format": named(schema)}, True),
        ({"response_format": named(SCHEMA)}, False),
    ):
        reply, client = ask(path, fields)
        assert reply.status == 200, reply.body
        told = reply.headers.get("x-unenforced-schema")
        assert told == ("#/properties/a/uniqueItems" if is_told else None)
        grammar = client.requests[0].sampling.grammar
        assert grammar is not None and ('"maxItems":5' in grammar.text) == is_told


def test_formats_that_nobody_knows_are_annotations():
    """JSON Schema 2020-12, Validation, 7.2.3: also where the schema is strict."""
    for format in ("password", "path", "binary", "uuid4", "base64", "jwt", "regex", "x y"):
        schema = SCHEMA | {"properties": {"a": {"type": "string", "format": format}}}
        for strict in (True, False, None):
            reply, _ = ask("/v1/completions", {"response_format": named(schema, strict=strict)})
            assert reply.status == 200, reply.body
            assert "x-unenforced-schema" not in reply.headers


async def test_a_schema_that_takes_for_ever_is_left_out_where_nobody_is_strict(
    monkeypatch: pytest.MonkeyPatch,
):
    """And the others hold. llguidance 1.9 takes seconds for a large divisor."""
    slow = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 1_000_003}}}
    fine = SCHEMA | {"properties": {"a": {"type": "integer", "maximum": 5}}}

    def turn(*, strict: bool) -> Grammar:
        rules = [
            json_rule(Terms(strict, closed=True, name=name, param="tools[0]").with_schema(schema))
            for name, schema in (("slow", slow), ("fine", fine))
        ]
        return Grammar("lark", f"start: {rules[0]} | {rules[1]}")

    checks = Grammars(*TOKENS, timeout_s=0.7)
    try:
        found = await checks.checked(turn(strict=False), "tools")
        assert found.unenforced == ("slow#",) and '"maximum": 5' in found.grammar.text
        with pytest.raises(RequestError, match="longer than"):
            await checks.checked(turn(strict=True), "tools")
    finally:
        await checks.close()


async def outcome(checks: Grammars, grammar: Grammar) -> str:
    """ "ok", or the error's code."""
    try:
        await checks.checked(grammar, "guided_regex")
    except RequestError as error:
        assert error.info.param == "guided_regex" or error.info.code == "draining"
        return error.info.code
    return "ok"


async def test_a_process_checks_them_and_what_it_said_is_kept():
    checks = Grammars(*TOKENS)
    try:
        assert await outcome(checks, Grammar("regex", "a+")) == "ok"
        assert await outcome(checks, Grammar("regex", "(")) == "invalid_value"
        await checks.close()
        assert await outcome(checks, Grammar("regex", "a+")) == "ok"  # kept
        assert await outcome(checks, Grammar("regex", "(")) == "invalid_value"
        assert await outcome(checks, Grammar("regex", "b+")) == "draining"
    finally:
        await checks.close()


async def test_one_that_takes_too_long_is_given_up_with_its_process():
    checks = Grammars(*TOKENS, timeout_s=1.0)
    try:
        await checks._workers.start()
        held = [worker.process for worker in checks._workers._workers]
        for process in held:
            assert process is not None
            process.send_signal(signal.SIGSTOP)  # as one that never answers
        tasks = [asyncio.create_task(outcome(checks, Grammar("regex", c))) for c in "cd"]
        await asyncio.wait(tasks, timeout=30)
        assert {task.result() for task in tasks} == {"grammar_too_complex"}
        assert all(process is not None and process.returncode for process in held)
        checks._workers._timeout_s = 30.0
        assert await outcome(checks, Grammar("regex", "e+")) == "ok"
        assert await outcome(checks, Grammar("regex", "c")) == "grammar_too_complex"  # kept
    finally:
        await checks.close()


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars, "_MOST_CHARS", 5 * grammars._CHARS_EACH)
    checks = Grammars(*TOKENS)
    try:
        for number in range(12):
            assert await outcome(checks, Grammar("regex", f"a{{{number + 1}}}")) == "ok"
        assert len(checks._results) <= 5
    finally:
        await checks.close()

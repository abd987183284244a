"""What a model can write under the grammars of tools: its family's form of calls, whose arguments
fit, and nothing else.
"""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any

import pytest
from families import TEMPLATES
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar
from jitney.engine.core.grammar.compiling import new_matcher
from jitney.engine.core.grammar.setup import CheckerSetup
from jitney.engine.core.grammar.worker import Checker
from jitney.engine.core.text.fast_tokenizers import _tiny_fast
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.server.chat.conversation import harmony
from jitney.engine.server.chat.conversation.events import AssistantMessage
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.grammars import Turn
from jitney.engine.server.chat.conversation.tools import Tool, ToolMode, ToolUse

BYTES = LLTokenizer("byte")
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
}
WEATHER = Tool("get_weather", "Now", PLACE, strict=True)
CLOCK = Tool("clock")
PARIS = '{"city":"Paris"}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'


def use_of(mode: ToolMode, *, parallel: bool = True) -> ToolUse:
    use = ToolUse.of([WEATHER, CLOCK], mode, None, parallel=parallel)
    assert use is not None
    return use


def tool_grammar(
    turns: TurnFormat, use: ToolUse, prompt: str, special_ids: dict[str, int]
) -> Grammar | None:
    return Turn(turns, prompt, special_ids).grammar(use, None)


def behind_thoughts(
    turns: TurnFormat, grammar: Grammar, prompt: str, special_ids: dict[str, int]
) -> Grammar | None:
    return Turn(turns, prompt, special_ids).grammar(None, grammar)


def matcher(grammar: Grammar | None) -> LLMatcher:
    assert grammar is not None and grammar.kind == "lark"
    return new_matcher(grammar, BYTES)


def takes(grammar: Grammar | None, text: str) -> bool:
    """Whether this may be the whole turn."""
    inner = matcher(grammar)
    data = list(text.encode())
    return inner.try_consume_tokens(data) == len(data) and inner.is_accepting()


PROMPTS = {"deepseek_v3": "<think>\n", "deepseek_v31": "<think>\n"}


@pytest.mark.parametrize("family", ["harmony", "qwen3", *PROMPTS])
def test_a_forced_turn_behind_thoughts_is_a_call_that_fits(family: str):
    """Whatever the model would like to write; test_forms.py has the forms of all families."""
    turns = TurnFormat.of(TEMPLATES[family])
    prompt = PROMPTS.get(family, "<think>\n\n</think>\n\n")
    use = use_of("required", parallel=False)
    grammar = tool_grammar(turns, use, prompt, {})
    begun = {"harmony": "<|channel|>commentary"} | dict.fromkeys(PROMPTS, "</think>")
    thoughts = begun.get(family, "")  # past the thoughts, which may be of any length
    inner = matcher(grammar)
    assert inner.consume_tokens(list(thoughts.encode()))
    for seed in range(4):
        turn = thoughts + _finish(inner.deep_copy(), seed)
        parser = turns.parser(prompt, use.functions, forced=True)
        message = AssistantMessage.of([*parser.push(turn, []), *parser.finish()])
        [made] = message.tool_calls
        arguments = json.loads(made.arguments)
        if made.name == "clock":
            assert arguments == {}
        else:
            assert arguments["city"] in ("Paris", "Rome") and set(arguments) <= {"city", "days"}
        assert message.content == ""


def _finish(inner: LLMatcher, seed: int) -> str:
    """A way to the end of a grammar; another for each seed. Blanks and long thoughts are passed
    by.
    """
    data = bytearray()
    for step in itertools.count():
        if inner.is_stopped() or step > 3000:
            break
        mask = inner.compute_bitmask()
        allowed = [id for id in range(256) if mask[id // 8] >> (id % 8) & 1]
        kept = [id for id in allowed if id not in b" \n\t\r"] or allowed
        closing = [id for id in kept if id in b'}"'] if step > 60 else []
        pool = closing or kept
        byte = pool[(seed * 7919 + step * 31) % len(pool)]
        assert inner.consume_token(byte)
        data.append(byte)
    assert inner.is_stopped(), bytes(data[-80:])
    return data.decode()


@pytest.mark.parametrize("family", ["plain", "hermes"])
def test_strict_tools_leave_text_free_and_calls_not(family: str):
    grammar = tool_grammar(TurnFormat.of(TEMPLATES[family]), use_of("auto"), "", {})
    for text in ("", "Hello.", "a <tool", f"So: {HERMES}", f"{HERMES}\n{HERMES} done."):
        assert takes(grammar, text), text
    for text in ("<tool_call>x", HERMES.replace("Paris", "Bonn"), HERMES.replace("get_", "put_")):
        assert not takes(grammar, text), text


def test_required_allows_no_other_text():
    turns = TurnFormat.of(TEMPLATES["hermes"])
    several = tool_grammar(turns, use_of("required"), "", {})
    one = tool_grammar(turns, use_of("required", parallel=False), "", {})
    assert takes(several, HERMES) and takes(one, HERMES)
    assert takes(several, f"{HERMES}\n{HERMES}") and not takes(one, f"{HERMES}\n{HERMES}")
    for text in ("", "Hello.", f"So: {HERMES}", f"{HERMES} so"):
        assert not takes(several, text), text


def test_thoughts_come_before_forced_calls():
    turns = TurnFormat.of(TEMPLATES["qwen3"])
    use = use_of("required")
    free = tool_grammar(turns, use, "assistant\n", {})
    assert takes(free, f"<think>\nHm <tool_call>.\n</think>\n\n{HERMES}") and takes(free, HERMES)
    closed = tool_grammar(turns, use, "<think>\n\n</think>\n\n", {})
    assert takes(closed, HERMES) and not takes(closed, f"<think>Hm</think>{HERMES}")
    opened = tool_grammar(turns, use, "<think>\n", {})
    assert takes(opened, f"Hm.</think>{HERMES}") and not takes(opened, HERMES)


def test_llamas_text_begins_with_no_brace():
    grammar = tool_grammar(TurnFormat.of(TEMPLATES["llama3_json"]), use_of("auto"), "", {})
    call = f'{{"name": "get_weather", "parameters": {PARIS}}}'
    assert takes(grammar, call) and takes(grammar, "Hi {") and takes(grammar, "")
    assert not takes(grammar, '{"a": 1}') and not takes(grammar, ' {"a": 1}')


def test_whoever_checks_grammars_knows_all_of_the_models_tokens():
    checker = Checker(CheckerSetup(("<|a|>",), 5000))
    for number, is_known in ((4999, True), (5000, False)):
        grammar = tool_grammar(
            TurnFormat.of(TEMPLATES["mistral"]), use_of("required"), "", {"[TOOL_CALLS]": number}
        )
        assert grammar is not None
        assert (checker.check(grammar).grammar is not None) == is_known


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), '{"a":1}', "[1]"),
        (Grammar("json_schema", '{"type":"integer"}'), "12", '"a"'),
        (Grammar("choice", '["yes","no"]'), "no", "maybe"),
    ],
)
def test_an_answers_grammar_begins_behind_the_thoughts(grammar: Grammar, good: str, bad: str):
    turns = TurnFormat.of(TEMPLATES["qwen3"])
    held = behind_thoughts(turns, grammar, "<think>\n", {})
    assert takes(held, f"Hm {bad}.</think>\n\n{good}")
    assert not takes(held, f"Hm.</think>{bad}") and not takes(held, good)
    harmony = behind_thoughts(TurnFormat.of(TEMPLATES["harmony"]), grammar, "", {})
    final = f"<|channel|>final<|message|>{good}"
    assert takes(harmony, final)
    assert takes(harmony, f"<|channel|>analysis<|message|>x<|end|><|start|>assistant{final}")
    assert not takes(harmony, f"<|channel|>final<|message|>{bad}")
    closed = "<think>\n\n</think>\n\n"
    assert behind_thoughts(turns, grammar, closed, {}) is grammar
    assert behind_thoughts(TurnFormat.of(TEMPLATES["plain"]), grammar, "", {}) is grammar


def test_a_grammar_that_cannot_follow_thoughts_is_refused():
    turns = TurnFormat.of(TEMPLATES["qwen3"])
    with pytest.raises(RequestError, match="neither behind thoughts nor beside tools"):
        behind_thoughts(turns, Grammar("regex", "a+"), "", {})


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("gemma", "```tool_code\nget_weather(city='Paris', days=3)\n```"),
        ("hermes", HERMES),
        ("qwen3", HERMES),
        ("plain", HERMES),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}'),
    ],
)
def test_beside_tools_a_turn_calls_or_says_what_its_grammar_allows(family: str, call: str):
    turns = TurnFormat.of(TEMPLATES[family])
    turn = Turn(turns, "<think>\n\n</think>\n\n", {})
    number = Grammar("json_schema", '{"type":"integer"}')
    held = turn.grammar(use_of("auto"), number)
    assert takes(held, "12") and takes(held, call)
    for text in ("Hello.", '"a"', "", f"12{call}", call.replace("Paris", "Bonn")):
        assert not takes(held, text), text
    # Who must call says nothing.
    forced = turn.grammar(use_of("required"), None)
    assert turn.grammar(use_of("required"), number) == forced


def test_with_channels_a_grammar_of_the_answer_is_that_of_the_last_one():
    turn = Turn(TurnFormat.of(TEMPLATES["harmony"]), "", {})
    held = turn.grammar(use_of("auto"), Grammar("json_object"))
    final = f"{harmony.Mark.CHANNEL}final{harmony.Mark.MESSAGE}"
    assert takes(held, final + "{}") and not takes(held, final + "[]")


def test_calls_that_are_not_read_are_held_to_nothing_unless_they_are_forced():
    turn = Turn(TurnFormat.of(TEMPLATES["hermes"], "none"), "", {})
    for answer in (None, Grammar("json_object")):
        with pytest.raises(RequestError, match="only where they are forced"):
            turn.grammar(use_of("auto"), answer)
    assert takes(turn.grammar(use_of("required"), None), HERMES)


def test_schemas_are_closed_where_that_is_plain():
    open_ended: dict[str, Any] = {
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}},
    }
    tool = Tool("f", None, open_ended, strict=True)
    use = ToolUse.of([tool], "required", None, parallel=False)
    assert use is not None
    grammar = tool_grammar(TurnFormat.of(""), use, "", {})

    def call(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'

    assert takes(grammar, call('{"a": {"b": 1}}')) and takes(grammar, call("{}"))
    assert not takes(grammar, call('{"c": 1}')) and not takes(grammar, call('{"a": {"c": 1}}'))


@pytest.fixture(scope="module")
def thinker() -> tuple[LLTokenizer, dict[str, int], Any]:
    """A tokenizer whose markers are tokens: one special, one shown as text."""
    fast = _tiny_fast()
    rust: Any = fast.rust
    rust.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    marks = [
        harmony.Mark.CHANNEL,
        harmony.Mark.MESSAGE,
        harmony.Mark.END,
        harmony.Mark.START,
        "<tool_call>",
    ]
    rust.add_special_tokens([AddedToken(text, special=True) for text in marks])
    ids = {text: rust.token_to_id(text) for text in (*marks, "<think>", "</think>")}
    size = rust.get_vocab_size(True)
    end = rust.token_to_id("<|im_end|>")
    return LLTokenizer(rust.to_str(), n_vocab=size, eos_token=[end]), ids, Tokenizer(fast)


def walked(inner: LLMatcher, random: Random, wanted: list[int], most: int) -> list[int]:
    """Tokens that a model writes which wants these first, and then anything."""
    tokens: list[int] = []
    for _ in range(most):
        mask = inner.compute_bitmask()
        allowed = [id for id in range(len(mask) * 8) if mask[id // 8] >> (id % 8) & 1]
        if not allowed or inner.is_stopped():
            break
        liked = [id for id in wanted if id in allowed]
        token = liked[0] if liked else random.choice(allowed)
        wanted = wanted[1:] if liked else wanted
        assert inner.consume_token(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("budget", [0, 1, 7, 40])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "harmony"])
@pytest.mark.parametrize("answer", ["text", "json", "call", "tools"])
def test_a_budget_ends_the_thoughts_to_the_token(thinker, budget: int, family: str, answer: str):
    """And the answer begins, whatever it must be. A model that never ends them by itself."""
    trie, ids, tokenizer = thinker
    prompt = "<think>\n" if family == "deepseek_v3" else "assistant\n"
    turns = TurnFormat.of(TEMPLATES[family], "hermes" if family != "harmony" else "auto")
    turn = Turn(turns, prompt, ids, budget)
    use = {"call": use_of("required"), "tools": use_of("auto")}.get(answer)
    content = Grammar("json_schema", '{"enum":["yes"]}') if answer == "json" else None
    grammar = turn.grammar(use, content)
    assert grammar is not None
    random = Random(budget)
    opening = {
        "qwen3": "<think>",
        "deepseek_v3": "",
        "harmony": "<|channel|>analysis<|message|>",
    }[family]
    wanted = tokenizer.encode(opening, add_special_tokens=False)
    end = ids[harmony.Mark.END if family == "harmony" else "</think>"]
    for _ in range(5):
        inner = LLMatcher(trie, LLMatcher.grammar_from_lark(grammar.text))
        assert not inner.is_error(), inner.get_error()
        assert inner.consume_tokens(wanted) if wanted else True
        thoughts: list[int] = []
        while len(thoughts) <= budget:
            mask = inner.compute_bitmask()
            allowed = [id for id in range(len(mask) * 8) if mask[id // 8] >> (id % 8) & 1]
            if allowed == [end]:
                break
            token = random.choice([id for id in allowed if id != end])
            assert inner.consume_token(token)
            thoughts.append(token)
        assert len(thoughts) == budget and allowed == [end]
        assert inner.consume_token(end)
        parser = turns.parser(prompt, frozenset(), forced=False)
        for token in [*wanted, *thoughts, end]:
            parser.push(tokenizer.token_bytes(token).decode(errors="replace"), [token])
        assert parser.reasoning_tokens == budget
        rest = b"".join(tokenizer.token_bytes(id) for id in walked(inner, random, [], 60))
        if answer == "json":
            assert rest.endswith(b'"yes"')
        if answer == "call":
            assert rest.lstrip().startswith((b"<tool_call>", b"<|start|>assistant<|channel|>comm"))


def test_a_model_may_end_its_thoughts_before_the_budget(thinker):
    trie, ids, tokenizer = thinker
    turn = Turn(TurnFormat.of(TEMPLATES["qwen3"]), "<think>\n", ids, 50)
    grammar = turn.grammar(None, None)
    assert grammar is not None
    inner = LLMatcher(trie, LLMatcher.grammar_from_lark(grammar.text))
    tokens = tokenizer.encode("Hm.</think>So, <b>it is</b>.", add_special_tokens=False)
    assert inner.consume_tokens(tokens) and inner.is_accepting()


def test_a_budget_needs_a_token_to_end_the_thoughts():
    for family, ids in (("qwen3", {}), ("hermes", {"</think>": 5}), ("harmony", {})):
        turn = Turn(TurnFormat.of(TEMPLATES[family]), "", ids, 5)
        with pytest.raises(RequestError, match="no token of its own"):
            turn.grammar(None, None)

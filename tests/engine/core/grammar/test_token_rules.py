"""Tokens that a request may not choose: those it does not allow, and those that would complete a
word it bans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from fakes import EOS, VOCAB, code_of, ends_of, make_core, make_request, tokens_of
from grammars import CHARACTERS, text_of, tokenizer_json
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.common.errors import RequestError
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import Grammar, SamplingParams
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.grammar.manager import GrammarManager
from jitney.engine.core.grammar.matchers import Matchers, TokenConstraint, _TokenRules

PROMPT = [1, 2, 3]


@dataclass
class Trie:
    """As much of a vocabulary as needs no text."""

    vocab_size: int = VOCAB
    eos_tokens: tuple[int, ...] = (EOS,)


def make_constrained_core() -> EngineCore:
    core = make_core()
    core.intake.grammars = GrammarManager(Matchers(cast(Any, Trie())))
    return core


def answer(**sampling: Any) -> list[int]:
    core = make_constrained_core()
    core.add(make_request("a", PROMPT, max_tokens=20, **sampling))
    outputs = core.run_until_idle()
    core.check()
    return tokens_of(outputs, "a")


def mask_of(matcher: TokenConstraint, vocab_size: int = VOCAB) -> set[int]:
    masks = np.zeros((1, -(-vocab_size // 32)), np.int32)
    matcher.fill(masks, 0)
    bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


tokens = st.integers(0, VOCAB - 1)


@given(
    st.frozensets(tokens, max_size=8),
    st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=6),
    st.lists(tokens, max_size=12),
)
def test_the_mask_is_what_the_definition_says(allowed, banned, output):
    params = SamplingParams(
        allowed_token_ids=tuple(allowed), banned_sequences=tuple(map(tuple, banned))
    )
    matcher = TokenConstraint(_TokenRules(params, VOCAB), None)
    for end in range(len(output) + 1):  # token by token, as a sequence grows
        matcher.take(PROMPT + output[:end], len(PROMPT))
    wanted = set(allowed) or set(range(VOCAB))
    for token in range(VOCAB):
        text = [*output, token]
        for word in banned:
            if len(text) >= len(word) and text[len(text) - len(word) :] == word:
                wanted.discard(token)
    assert mask_of(matcher) == wanted


def test_only_allowed_tokens_come():
    allowed = (5, 7, 11, 39)
    found = answer(allowed_token_ids=allowed)
    assert len(found) == 20 and set(found) <= set(allowed)


def test_a_banned_word_never_comes_whole():
    free = answer(allowed_token_ids=tuple(range(5, 15)))
    word = tuple(free[3:6])
    found = answer(allowed_token_ids=tuple(range(5, 15)), banned_sequences=(word,))
    last = next(at for at in range(2, 6) if tuple(free[at - 2 : at + 1]) == word)
    assert found[:last] == free[:last] and found[last] != free[last]
    assert not any(tuple(found[at : at + 3]) == word for at in range(18))
    assert free[0] not in answer(banned_sequences=((free[0],),))


def test_a_prompt_does_not_begin_a_banned_word():
    first = answer(allowed_token_ids=(5, 6))[0]
    assert answer(allowed_token_ids=(5, 6), banned_sequences=((PROMPT[-1], first),))[0] == first


def test_an_answer_for_which_nothing_is_left_ends():
    core = make_constrained_core()
    params = {"allowed_token_ids": (5,), "banned_sequences": ((5, 5),)}
    core.add(make_request("a", PROMPT, **params))
    outputs = core.run_until_idle()
    assert tokens_of(outputs, "a") == [5] and ends_of(outputs)["a", 0].finish == "stop"


def test_an_answer_that_is_not_what_its_grammar_asks_for_does_not_end_well():
    core = make_core()
    core.learn(tokenizer_json())
    code = Grammar("regex", "a[bc]{3}")
    allowed = (1 + CHARACTERS.index("a"), 1 + CHARACTERS.index("b"), EOS)
    banned = ((allowed[1], allowed[1]),)
    core.add(
        make_request("a", PROMPT, grammar=code, allowed_token_ids=allowed, banned_sequences=banned)
    )
    outputs: list[SequenceOutput] = []
    most = time.monotonic() + 30
    while core.has_work:
        outputs += core.step().outputs
        assert time.monotonic() < most
    end = ends_of(outputs)["a", 0]
    assert text_of(tokens_of(outputs, "a")) == "ab"
    assert end.finish == "error" and code_of(end) == "invalid_value"


def test_ends_are_not_chosen_before_min_tokens():
    found = answer(allowed_token_ids=(EOS, 5), min_tokens=20)
    assert found == [5] * 20


def test_neighbours_notice_nothing():
    alone = make_core()
    alone.add(make_request("b", PROMPT, max_tokens=20))
    core = make_constrained_core()
    core.add(make_request("a", PROMPT, max_tokens=20, allowed_token_ids=(5, 7), n=2))
    core.add(make_request("b", PROMPT, max_tokens=20))
    outputs = core.run_until_idle()
    assert tokens_of(outputs, "b") == tokens_of(alone.run_until_idle(), "b")
    assert set(tokens_of(outputs, "a", 1)) <= {5, 7}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1, 5)}, "allowed_token_ids"),
        ({"banned_sequences": ((VOCAB,),)}, "bad_words"),
        ({"banned_sequences": ((1,) * 257,)}, "bad_words"),
        ({"allowed_token_ids": (5, 6), "banned_sequences": ((5,), (6,))}, "bad_words"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(params: dict[str, Any], param: str):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params).validate(VOCAB)
    assert caught.value.info.param == param

"""The text half: pieces join to the whole, characters stay whole, stop strings cut in one place."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.common.requests import SamplingParams
from jitney.engine.core.text.detokenizer import TextStream
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource

EOS = 1000


class PieceTokenizer:
    """A vocabulary of byte strings, so that tokens may split characters anywhere; EOS is
    special.
    """

    special_ids = frozenset({EOS})

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces

    def token_bytes(self, id: int) -> bytes:
        return b"<eos>" if id == EOS else self.pieces[id]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[id] for id in ids if id != EOS).decode(errors="replace")


ALPHABET = "ab\n é𝄞👩‍👩‍👧é̂ש‏\u200b�"
texts = st.text(ALPHABET, max_size=40)


@st.composite
def tokenised(draw, text=texts):
    """A text, cut into byte tokens at random places, and the tokens grouped into pushes."""
    data = draw(text).encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=30)) | {0, len(data)})
    pieces = [data[a:b] for a, b in pairwise(cuts)]
    borders = sorted(draw(st.sets(st.integers(0, len(pieces)), max_size=10)) | {0, len(pieces)})
    pushes = [list(range(a, b)) for a, b in pairwise(borders)]
    return data.decode(), PieceTokenizer(pieces), pushes


def stream_all(tokenizer, params, pushes):
    stream, text, tokens = TextStream(tokenizer, params), "", 0
    for push in pushes:
        delta = stream.push(push)
        text, tokens = text + delta.text, tokens + delta.tokens
        assert len(delta.offsets) == delta.tokens
        if delta.stopped:
            return text, tokens, delta.stop
    return text + stream.push([], final=True).text, tokens, None


@given(tokenised())
def test_pieces_join_to_the_whole_text(case):
    text, tokenizer, pushes = case
    assert stream_all(tokenizer, SamplingParams(), pushes) == (text, len(tokenizer.pieces), None)


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=20))
def test_any_bytes_decode_as_a_whole_decode_would(pieces):
    tokenizer = PieceTokenizer(pieces)
    ids = list(range(len(pieces)))
    assert stream_all(tokenizer, SamplingParams(), [[id] for id in ids])[0] == tokenizer.decode(ids)


def cut_by_hand(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The definition, quadratic: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    tokenised(st.text("ab\né", max_size=30)),
    st.lists(st.text("ab\né", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_the_cut_does_not_depend_on_tokens_or_pushes(case, stops, include):
    text, tokenizer, pushes = case
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    got, _, stop = stream_all(tokenizer, params, pushes)
    want, want_stop = cut_by_hand(text, tuple(stops), include)
    assert (got, stop) == (want, want_stop)


@given(tokenised(st.text("ab", max_size=30)))
def test_nothing_that_may_become_a_stop_string_is_let_go(case):
    _, tokenizer, pushes = case
    stream, shown = TextStream(tokenizer, SamplingParams(stop=("abab",))), ""
    for push in pushes:
        delta = stream.push(push)
        shown += delta.text
        if delta.stopped:
            break
        seen = tokenizer.decode(list(range(push[-1] + 1))) if push else shown
        held = seen[len(shown) :]
        assert "abab".startswith(held) and held != "abab"
        assert not any(
            "abab".startswith(seen[start:]) for start in range(max(0, len(seen) - 3), len(shown))
        )


def longest_beginning(text: str, stops: list[str]) -> int:
    """The definition: characters at the end of a text with which a stop string may begin."""
    lengths = [
        length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])
    ]
    return max(lengths)


@given(
    tokenised(st.text("abé", max_size=30)),
    st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=8),
)
def test_nothing_is_held_that_begins_no_stop_string(case, stops):
    """What is held is half a character, or exactly what a stop string may begin with."""
    text, tokenizer, _ = case
    stream, shown, data = TextStream(tokenizer, SamplingParams(stop=tuple(stops))), "", b""
    for id, piece in enumerate(tokenizer.pieces):
        delta = stream.push([id])
        shown += delta.text
        data += piece
        if delta.stopped:
            return
        whole = data.decode(errors="ignore")
        assert shown == whole[: len(whole) - longest_beginning(whole, stops)]
    assert shown + stream.push([], final=True).text == text


def test_tokens_up_to_the_one_that_completes_the_stop_count():
    tokenizer = PieceTokenizer([b"one ", b"EN", b"D tail", b"more"])
    delta = TextStream(tokenizer, SamplingParams(stop=("END",))).push([0, 1, 2, 3])
    assert (delta.text, delta.tokens, delta.stop, delta.offsets) == ("one ", 3, "END", [0, 4, 6])


def test_half_a_character_waits_and_a_lost_half_is_marked():
    tokenizer = PieceTokenizer(["é".encode()[:1], "é".encode()[1:], b"x"])
    stream = TextStream(tokenizer, SamplingParams())
    assert stream.push([0]).text == ""
    assert stream.push([1]).text == "é"
    assert stream.push([0]).text == ""
    assert stream.push([], final=True).text == "\N{REPLACEMENT CHARACTER}"


def test_a_character_begun_by_the_prompt_is_completed():
    tokenizer = PieceTokenizer([b"abc", "é".encode()[:1], "é".encode()[1:]])
    assert TextStream(tokenizer, SamplingParams(), [0, 1]).push([2]).text == "é"


def test_special_tokens_are_skipped_or_shown():
    tokenizer = PieceTokenizer([b"hi"])
    assert TextStream(tokenizer, SamplingParams()).push([0, EOS], True).text == "hi"
    shown = TextStream(tokenizer, SamplingParams(skip_special_tokens=False))
    assert shown.push([0, EOS], True).text == "hi<eos>"


def test_the_token_that_ended_the_sequence_is_text_only_when_asked_for():
    tokenizer = PieceTokenizer([b"hi", b"."])
    quiet = TextStream(tokenizer, SamplingParams()).push([0, 1], True, stop_token=1)
    assert (quiet.text, quiet.tokens) == ("hi", 2)
    loud = TextStream(tokenizer, SamplingParams(include_stop_str_in_output=True))
    assert loud.push([0, 1], True, stop_token=1).text == "hi."


def test_stop_strings_are_not_searched_before_min_tokens():
    tokenizer = PieceTokenizer([b"a", b"a", b"a"])
    stream = TextStream(tokenizer, SamplingParams(stop=("a",), min_tokens=2))
    assert [stream.push([id]).text for id in (0, 1)] == ["a", "a"]
    assert stream.push([2]).stopped


def test_our_own_tokenizer_streams_what_it_decodes():
    tokenizer = Tokenizer.load(ModelSource.resolve("tiny-random"))
    ids = [*tokenizer.encode("naïve 👩‍👩‍👧 数学"), *tokenizer.special_ids, 0xE9, 65]
    stream = TextStream(tokenizer, SamplingParams())
    pieces = [
        stream.push([id], final=position == len(ids) - 1).text for position, id in enumerate(ids)
    ]
    assert "".join(pieces) == tokenizer.decode(ids)

"""A stream that is gone on with at another replica is the stream it would have been."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jitney.engine.fleet.forwarding import _split_events
from jitney.engine.fleet.resume import ResumeMismatch, StreamState

ANSWER = "Once upon a time, there was a bus that never waited. Ünïcode, too."


def pieces(text: str, chance: random.Random) -> list[str]:
    """The text, cut at random."""
    cuts = sorted(chance.sample(range(1, len(text)), 7))
    return [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def chat(chance: random.Random, id: str, answers: tuple[str, ...] = (ANSWER,)) -> list[dict]:
    """A stream of chunks as the engine writes them, of n choices in turn."""
    chunks: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        deltas: list[Any] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": "hm", "reasoning": "hm"}]
        deltas += [{"content": piece} for piece in pieces(answer, chance)]
        call = {"index": 0, "id": f"call_{id}", "type": "function"}
        deltas += [{"tool_calls": [call | {"function": {"name": "go", "arguments": ""}}]}]
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
            for piece in pieces('{"to": "the end of the line"}', chance)
        ]
        chunks += [choice(id, index, delta) for delta in deltas]
        chunks.append(choice(id, index, {}, "tool_calls"))
    return chunks


def choice(id: str, index: int, delta: dict, finish: str | None = None) -> dict[str, Any]:
    head = {"id": id, "object": "chat.completion.chunk", "created": 1 if id == "one" else 2}
    entry = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    return head | {"model": "m", "choices": [entry]}


def told(chunks: list[dict]) -> dict[Any, Any]:
    """What a client makes of a stream."""
    made: dict[Any, Any] = {}
    for chunk in chunks:
        assert (chunk["id"], chunk["created"]) == ("one", 1)
        for entry in chunk["choices"]:
            own = made.setdefault(entry["index"], {"finish": [], "call": {}})
            own["finish"] += [entry["finish_reason"]] if entry["finish_reason"] else []
            for name, value in entry["delta"].items():
                if name == "tool_calls":
                    (call,) = value
                    # Each engine makes up its own id; the client gets one, once.
                    own["call"] |= {"ids": own["call"].get("ids", 0) + ("id" in call)}
                    for part, text in call["function"].items():
                        own["call"][part] = own["call"].get(part, "") + text
                else:
                    own[name] = own.get(name, "") + value
    return made


@pytest.mark.parametrize("seed", range(20))
def test_the_rest_comes_from_another_replica_word_for_word(seed: int):
    chance = random.Random(seed)
    answers = (ANSWER, ANSWER[::-1])
    first = chat(chance, "one", answers)
    sent = StreamState()
    cut = chance.randrange(1, len(first))
    out = first[:cut]
    for chunk in out:
        sent.note(chunk)
    for id in ("two", "three"):  # the second one dies too
        sent.begin_again()
        second = chat(chance, id, answers)
        stop = chance.randrange(len(second)) if id == "two" else len(second)
        rests = [sent.rest_of(chunk) for chunk in second[:stop]]
        out += [rest for rest in rests if rest is not None]
    assert told(out) == told(first)


def test_another_answer_is_not_gone_on_with():
    sent = StreamState()
    for chunk in chat(random.Random(1), "one"):
        sent.note(chunk)
    sent.begin_again()
    with pytest.raises(ResumeMismatch):
        for chunk in chat(random.Random(2), "two", (ANSWER.replace("bus", "car"),)):
            sent.rest_of(chunk)


def test_log_probabilities_and_ids_are_counted():
    def chunk(texts: list[str]) -> dict[str, Any]:
        logprobs = {"tokens": texts, "token_logprobs": [-1.0] * len(texts)}
        entry = {"index": 0, "text": "".join(texts), "finish_reason": None, "logprobs": logprobs}
        return {"id": "x", "choices": [entry | {"token_ids": list(range(len(texts)))}]}

    sent = StreamState()
    sent.note(chunk(["a", "b"]))
    sent.note(chunk(["c"]))
    sent.begin_again()
    assert sent.rest_of(chunk(["a"])) is None
    rest = sent.rest_of(chunk(["b", "c", "d"]))
    assert rest is not None
    (entry,) = rest["choices"]
    assert entry["text"] == "d" and entry["token_ids"] == [2]
    assert entry["logprobs"] == {"tokens": ["d"], "token_logprobs": [-1.0]}


def test_usage_comes_at_the_end_all_the_same():
    sent = StreamState(head={"id": "one"})
    assert sent.rest_of({"id": "two", "choices": [], "usage": {"total_tokens": 3}}) == {
        "id": "one",
        "choices": [],
        "usage": {"total_tokens": 3},
    }


def test_events_are_cut_where_they_end():
    assert _split_events(b"data: a\n\ndata: b", b"\n\n") == (b"data: a\n\n", b"data: b")
    assert _split_events(b"data: a", b"\n\n") == (b"", b"data: a")
    assert _split_events(b"\n\n", b"\n\n") == (b"\n\n", b"")
    assert _split_events(b'{"a": 1}\n{"b"', b"\n") == (b'{"a": 1}\n', b'{"b"')

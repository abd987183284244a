"""Checks of all kinds of drafting heads: their drafts equal those of a naive pass over the whole
text, and they change no token.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from many_devices import run_on_devices
from reference_logits import SCRIPT
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.scheduler.plan import REJECTED, Plan, StepResult

Tensors = dict[str, np.ndarray]

VOCAB = 96
#: Steps of one size, so that drafts always pay; prompts are cut into chunks.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 4,
    "token_budget": 32,
    "context": 192,
    "page_size": 8,
    "seat_buckets": [4],
    "token_buckets": [32],
}
PROMPTS = [
    np.random.default_rng(number).integers(4, VOCAB, length).tolist()
    for number, length in enumerate((5, 40, 71, 23, 34))
]
GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
#: Sampling parameters, one for each of the prompts.
MIXED = [
    SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.1, seed=3, max_tokens=60, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, frequency_penalty=0.01),
    SamplingParams(temperature=0.2, seed=5, top_k=4, max_tokens=40, min_tokens=20),
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
]


def with_layer(tensors: Tensors, like: str, name: str, added: float) -> Tensors:
    """The tensors with one layer more; layers add `added` times as much."""
    for own in [own for own in tensors if own.startswith(like)]:
        new = name + own.removeprefix(like)
        tensors[new] = SCRIPT.random_tensor(new, tensors[own].shape)
    closing = "o_proj.weight", "down_proj.weight", "out_proj.weight"
    return {
        own: added * tensor if own.endswith(closing) else tensor for own, tensor in tensors.items()
    }


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def shares_of(scores: np.ndarray) -> np.ndarray:
    """Softmax over the keys up to each row's own, scores [H, T, T]."""
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def fed_forward(own: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    gate = x @ own[f"{name}.gate_proj"].T
    return (gate / (1 + np.exp(-gate)) * (x @ own[f"{name}.up_proj"].T)) @ own[
        f"{name}.down_proj"
    ].T


def with_bytes(folder: str) -> str:
    """A model folder with a tokenizer of single bytes, so that answers can follow a grammar."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    tokenizer = Tokenizer(BPE({byte: token for token, byte in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{folder}/tokenizer.json")
    return folder


class Watch:
    """Records the drafts of each step that an engine runs, from the device at launch."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.runner: Any = llm.core.runner
        self.plans: list[tuple[Plan, list[int], np.ndarray]] = []
        self.results: dict[int, StepResult] = {}
        launch, fetch = self.runner.launch, self.runner.fetch

        def launching(batch: Any) -> Any:
            launched = launch(batch)
            seats = [chunk.seq.seat for chunk in batch.plan.chunks]
            drafts = np.asarray(self.runner.state.seat_tokens.drafts)
            self.plans.append((batch.plan, seats, drafts))
            return launched

        def fetching(launched: Any) -> StepResult:
            result = self.results[launched.plan.number] = fetch(launched)
            return result

        monkeypatch.setattr(self.runner, "launch", launching)
        monkeypatch.setattr(self.runner, "fetch", fetching)

    def found(self) -> list[tuple[list[int], list[int]]]:
        """(text, drafts after it) for every step of each decoding sequence."""
        lengths: dict[Any, int] = {}
        steps: list[tuple[list[int], list[int]]] = []
        for plan, seats, drafts in self.plans:
            result = self.results[plan.number]
            row = 0
            for number, chunk in enumerate(plan.chunks):
                seq = chunk.seq
                if chunk.decode and not chunk.draft:
                    widths = [own.draft for own in plan.chunks if own.seq is seq]
                    text = seq.tokens[: lengths[seq]]
                    if len(text) < len(seq.tokens):
                        steps.append((text, drafts[seats[number]][: max(widths) + 1].tolist()))
                if chunk.sample:
                    before = lengths.get(seq, seq.n_prompt)
                    lengths[seq] = before + (result.tokens[row] != REJECTED)
                    row += 1
        return steps


def check_drafts(
    llm: LLM,
    naive: Callable[[list[int], int], list[int]],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare the drafts of some forty steps, at most `count` per sequence, with naive(text, number
    of drafts), which returns the head's drafts after a text.
    """
    watch = Watch(llm, monkeypatch)
    for prompts in (PROMPTS, [PROMPTS[2]]):
        llm.generate(prompts, GREEDY)
    llm.core.check()
    totals = llm.core.ledger.totals
    assert totals["accepted"] > 20 and totals["rejected"] > 5 and totals["cached_tokens"] > 0
    steps = [(text, [*takewhile(is_draft, drafts)]) for text, drafts in watch.found()]
    assert max(len(drafts) for _, drafts in steps) == count
    for text, drafts in steps[:: len(steps) // 40]:
        assert drafts and drafts == naive(text, len(drafts))


def is_draft(token: int) -> bool:
    return token >= 0


def answers(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    outputs = [one for output in llm.generate(prompts, params) for one in output.outputs]
    llm.core.check()
    return outputs


def check_crowd(expected: list[Any], found: list[Any], llm: LLM) -> None:
    """Answers equal those without drafts; some drafts are right, some wrong, and some lost with
    their sequence's pages. The first answer has log-probabilities.
    """
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    scores, own = (
        [entry.logprob for entry in outputs[0].logprobs] for outputs in (expected, found)
    )
    np.testing.assert_allclose(own, scores, atol=1e-4)
    totals = llm.core.ledger.totals
    assert totals["accepted"] > 10 and totals["rejected"] > 0 and totals["preempted"] > 0


def check_few_pages(expected: list[Any], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences lose their pages. Then the engine sleeps and wakes, and a prompt runs alone twice,
    the second time with a cached prefix. expected: answers to MIXED without drafts.
    """
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    check_crowd(expected, answers(llm, MIXED), llm)
    compiled = llm.core.runner.compiles
    llm.core.sleep(lambda: None)
    llm.core.wake(lambda: None)
    for prompt in (PROMPTS[0], PROMPTS[0]):
        (alone,) = answers(llm, MIXED[0], [prompt])
        assert alone.token_ids == expected[0].token_ids
    assert llm.core.runner.compiles == compiled


def check_rules(plain: LLM, llm: LLM) -> None:
    """Sequences under a grammar, whose tokens are chosen after the step, also verify drafts."""
    params = msgspec.structs.replace(GREEDY, banned_sequences=((5, 6), (7, 7, 7)))
    before = llm.core.ledger.totals["accepted"]
    ruled_answers = answers(llm, params)
    assert [one.token_ids for one in ruled_answers] == [
        one.token_ids for one in answers(plain, params)
    ]
    assert llm.core.ledger.totals["accepted"] - before > 20


def check_several_devices(
    plain: LLM, model: str, speculative: str, draft_model: str, folder: Path
) -> None:
    """Two devices, in a separate process, draft as well as one device, and give its answers."""
    prompts, params = PROMPTS[:2], msgspec.structs.replace(GREEDY, max_tokens=40)
    job = "drafted", "drafted", [2, speculative, draft_model, model, prompts]
    results = run_on_devices("sharding_program.py", folder, [job])
    expected = [one.token_ids for one in answers(plain, params, prompts)]
    assert results["drafted tokens"].tolist() == expected
    right, wrong = results["drafted drafts"]
    assert right > 10 and wrong > 0


def check_what_is_left(plain: LLM, llm: LLM) -> None:
    """State left by an aborted request and a failed step is not read."""
    (expected,) = answers(plain, MIXED[0], [PROMPTS[2]])
    llm.core.add(EngineRequest(id="left", prompt=PROMPTS[1], sampling=GREEDY, arrival=0.0))
    for _ in range(12):
        llm.core.step()
    llm.core.abort("left")
    (answer,) = answers(llm, MIXED[0], [PROMPTS[2]])
    assert answer.token_ids == expected.token_ids
    llm.core.runner.restore(RuntimeError("as if a step had failed"))
    llm.core.reset_prefix_cache()
    (answer,) = answers(llm, MIXED[0], [PROMPTS[2]])
    assert answer.token_ids == expected.token_ids

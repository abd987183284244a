"""Compares engines with and without speculation: the same answers, their speed, and the cost of
steps with more rows.

    python docs/benchmarks/speculation.py equality [--requests 10000] [--first 0] [--draft MODEL]
        [--mtp] [--eagle3 [FOLDER]] [--model tiny-random]
    python docs/benchmarks/speculation.py speed [--model smollm2-135m] [--rounds 3] [--draft MODEL]
        [--mtp] [--eagle3 FOLDER] [--vllm VENV/bin/vllm --vllm-model FOLDER]
    python docs/benchmarks/speculation.py rows [--model smollm2-135m]

equality: the same random requests (greedy, sampled, grammars, banned words, penalties,
log-probabilities, n, biases, adapters, few pages, aborts, deaths), numbered from --first on, to an
engine with and one without drafts in this process; every token is compared. The model has random
weights (tiny-random:qwen3_5 and others).
speed: greedy streams over HTTP on this machine, servers with and without drafts in turns: one
stream of texts that repeat their prompt, one of free text, and 32 of free text. --vllm: beside
vLLM without and with its n-gram drafts, on the same model as a Hugging Face folder.
rows: the time of decode steps of 1, 2, 4 and 8 rows.

Drafts are looked up in the text, or made by the model that --draft names (its weights' format:
--draft-weights), by the model's own head with --mtp (tiny-random:deepseek_v3), or with --eagle3 by
the head in FOLDER (for tiny-random: one of random weights, which is hardly ever right).

Speeds vary with the load of the machine: compare only ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jitney.engine import LLM
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.requests import EngineRequest, Grammar, SamplingParams
from jitney.engine.lab.bench.peer_process import Peer

#: Jitney's defaults, under vLLM's names.
_VLLM_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
_FACTS = (
    "The harbour opened in 1871 and has four piers. The longest pier, of 312 metres, carries "
    "a tram to the lighthouse. Grain leaves from the second pier, timber from the third, and the "
    "ferry to Marren calls at the fourth twice a day. In winter the ice is broken by two tugs, the "
    "Hedda and the Brage, which were built in 1958 at the yard behind the customs house. "
)
_REPEATING = [
    f"Copy this text exactly, and change nothing else but '{old}' to '{new}':\n\n{_FACTS}"
    for old, new in (("1871", "1872"), ("Hedda", "Helga"), ("twice", "thrice"), ("ice", "frost"))
]
_SUBJECTS = (
    "a lighthouse", "two brothers", "a lost map", "the last train", "rain", "bees", "a clock",
    "an old bridge", "a cat and a dog", "winter", "a baker", "the moon", "a forgotten song",
    "a letter", "the market", "a mountain", "three sisters", "a garden", "a thief", "the desert",
    "a robot", "a king", "the library", "a violin", "dust", "an orchard", "a wolf", "the river",
    "a mirror", "a doctor", "the night bus", "a well",
)  # fmt: skip
_FREE = [f"Write a short story about {subject}." for subject in _SUBJECTS]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("equality", "speed", "rows"))
    parser.add_argument("--model", default="")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--eagle3", nargs="?", const="random", default="")
    parser.add_argument("--vllm", default="")
    parser.add_argument("--vllm-model", default="")
    args = parser.parse_args()
    drafting: dict[str, Any] = {"speculative": "ngram"}
    if args.draft:
        weights = args.draft_weights
        drafting = {"speculative": "draft", "draft_model": args.draft, "draft_weights": weights}
    if args.mtp:
        drafting = {"speculative": "mtp"}
    if args.eagle3:
        drafting = {"speculative": "eagle3", "draft_model": args.eagle3}
    print(cpu_name())
    if args.what == "equality":
        compare_answers(args.model or "tiny-random", args.first, args.requests, drafting)
    elif args.what == "speed":
        model = args.model or "smollm2-135m"
        engines = compared_engines(model, drafting, args.vllm, args.vllm_model)
        compare_speeds(engines, args.rounds)
    else:
        measure_rows(args.model or "smollm2-135m")


#: Grammars of answers that repeat themselves, that end by the grammar, and that leave no choice.
_GRAMMARS = (
    Grammar("regex", "([ab]{2,3} ){3,20}"),
    Grammar("choice", '["yes yes yes yes yes", "yes no"]'),
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["ab", "ba"]}, "minItems": 4}'),
)
_ADAPTER_RANK = 4
#: No product is XLA's, whose last bits differ where the CPU cannot multiply pairs of bfloat16
#: (docs/decisions, 0033): the engines put a row into steps of different sizes.
_ANY_ROWS = 4096


def random_request(
    rng: random.Random, number: int, vocab: int, *, adapted: bool = True
) -> EngineRequest:
    """A request with few different tokens, so that texts repeat. adapted: there is an adapter."""
    few = rng.sample(range(10, vocab - 10), 6)
    prompt = [rng.choice(few) for _ in range(rng.randint(1, 40))]
    chance, rules = rng.random(), rng.random()
    grammar, banned, max_tokens = None, (), rng.randint(1, 60)
    if rules < 0.3:
        grammar = rng.choice(_GRAMMARS)
    elif rules < 0.4:
        banned = ((few[0], few[1]), (few[2], few[2], few[2]))
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.5, 1.0)),
        seed=number,
        n=rng.choice((1, 1, 1, 2)),
        max_tokens=max_tokens,
        min_tokens=min(rng.choice((0, 0, 5)), max_tokens),
        top_k=rng.choice((0, 0, 5)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=1.2 if chance < 0.1 else 1.0,
        frequency_penalty=0.1 if 0.1 < chance < 0.2 else 0.0,
        logprobs=2 if 0.2 < chance < 0.3 else None,
        stop_token_ids=(few[0],) if rng.random() < 0.3 else (),
        logit_bias={token: 100.0 for token in few} if rng.random() < 0.8 else {},
        ignore_eos=rng.random() < 0.5,
        grammar=grammar,
        banned_sequences=banned,
    )
    return EngineRequest(
        id=str(number),
        prompt=prompt,
        sampling=params,
        arrival=time.monotonic(),
        adapter=rng.choice((0, 0, int(adapted))),
    )


@dataclass
class _Answer:
    """Tokens and scores of one sequence so far."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    ended: bool = False
    error: str = ""


class _Client:
    """Sends random requests to an engine: a random number of them are open, some are aborted late,
    and now and then the engine loses all requests, as if its process died.
    """

    def __init__(self, llm: LLM, first: int, count: int, vocab: int, *, adapted: bool):
        self._core, self._numbers, self._vocab = llm.core, range(first, first + count), vocab
        self._core.learn(llm.tokenizer.json)
        self._adapted = adapted
        self._rng = random.Random(first)
        self._open: dict[str, EngineRequest] = {}
        #: Each request's answers, one per sequence.
        self.answers: dict[str, list[_Answer]] = {}
        self.deaths = 0

    def run(self) -> dict[str, list[_Answer]]:
        """Send every request and read it to its end."""
        core, waiting, room = self._core, list(self._numbers), 1
        while waiting or core.has_work:
            while waiting and len(self._open) < room:
                self._send(waiting.pop(0))
                room = self._rng.choice((1, 2, 4, 12))
            number = self._numbers[-1] - len(waiting)
            if number % 50 == 7 and str(number) in self._open:
                core.abort(str(number))
            self._step()
            if core.ledger.steps % 997 == 0 and self._open:
                self._die()
        core.check()
        return self.answers

    def _send(self, number: int) -> None:
        request = random_request(self._rng, number, self._vocab, adapted=self._adapted)
        self._open[request.id] = request
        self.answers[request.id] = [_Answer() for _ in range(request.sampling.n)]
        self._core.add(request)

    def _step(self) -> None:
        for output in self._core.step().outputs:
            answer = self.answers[output.request_id][output.index]
            answer.tokens += output.tokens
            answer.logprobs += [entry.logprob for entry in output.logprobs or []]
            answer.ended |= output.finish is not None
            answer.error = answer.error or output.error_code
            if all(each.ended for each in self.answers[output.request_id]):
                self._open.pop(output.request_id, None)

    def _die(self) -> None:
        """Abort every open request, and send it again with its tokens so far."""
        self.deaths += 1
        tokens = {
            name: [None if each.ended else list(each.tokens) for each in self.answers[name]]
            for name in self._open
        }
        for name in tokens:
            self._core.abort(name)
        while self._core.has_work:
            self._core.step()  # the outputs are lost
        self._core.reset_prefix_cache()
        for name, resumed in tokens.items():
            request = self._open[name]
            again = EngineRequest(
                id=name,
                prompt=request.prompt,
                sampling=request.sampling,
                arrival=time.monotonic(),
                adapter=request.adapter,
                resumed=resumed,
            )
            self._core.add(again)


def write_adapter(folder: Path) -> Path:
    """Write an adapter of random numbers for `tiny-random`: its query and output projections."""
    draw, tensors = np.random.default_rng(1), {}
    for layer in range(2):
        for name in ("q_proj", "o_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for side, shape in (("A", (_ADAPTER_RANK, 64)), ("B", (64, _ADAPTER_RANK))):
                tensors[f"{prefix}.lora_{side}.weight"] = draw.normal(0, 0.1, shape)
    folder.mkdir()
    arrays = {name: array.astype(np.float32) for name, array in tensors.items()}
    save_file(arrays, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _ADAPTER_RANK, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_eagle3(folder: Path) -> str:
    """Write an EAGLE-3 head of random numbers for `tiny-random`; it drafts half of its tokens."""
    draw, size, tokens = np.random.default_rng(2), 64, 256
    shapes = {
        "fc": (size, 3 * size),
        "lm_head": (tokens, size),
        "midlayer.mlp.down_proj": (size, 2 * size),
        "midlayer.mlp.gate_proj": (2 * size, size),
        "midlayer.mlp.up_proj": (2 * size, size),
        "midlayer.self_attn.k_proj": (size // 2, 2 * size),
        "midlayer.self_attn.o_proj": (size, size),
        "midlayer.self_attn.q_proj": (size, 2 * size),
        "midlayer.self_attn.v_proj": (size // 2, 2 * size),
    }
    arrays = {
        f"{name}.weight": draw.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        arrays[f"midlayer.{norm}.weight"] = np.ones(size, np.float32)
    arrays |= {"norm.weight": np.ones(size, np.float32), "d2t": np.arange(tokens)}
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    config = {
        "draft_vocab_size": tokens,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "vocab_size": 2 * tokens,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def compare_answers(model: str, first: int, count: int, drafting: dict[str, Any]) -> None:
    """Print how many sequences differ; an aborted one may be longer in one engine."""
    runs: list[dict[str, list[_Answer]]] = []
    with TemporaryDirectory() as folder:
        adapted = model == "tiny-random"  # the adapter has this model's shapes
        adapter = write_adapter(Path(folder) / "adapter")
        if drafting.get("draft_model") == "random":
            drafting = drafting | {"draft_model": write_eagle3(Path(folder) / "head")}
        engines: list[dict[str, Any]] = [{"speculative": "off"}, drafting]
        for settings in engines:
            llm = LLM(
                model,
                max_seats=8,
                pages=12,
                context=128,
                dtype="bfloat16",
                product_rows=_ANY_ROWS,
                adapters=f"one={adapter}" if adapted else "",
                **settings,
            )
            client = _Client(llm, first, count, 512, adapted=adapted)
            started = time.perf_counter()
            runs.append(client.run())
            seconds = time.perf_counter() - started
            totals = llm.core.ledger.totals
            rows = {kind: totals[kind] for kind in ("decode", "accepted", "rejected", "preempted")}
            print(
                f"{settings['speculative']}: {seconds:.0f} s, {llm.core.ledger.steps} steps, "
                f"{client.deaths} deaths, {rows}",
                flush=True,
            )
            llm.close()
    plain, drafted = runs
    _print_differences(plain, drafted, count // 50)


def _print_differences(
    plain: dict[str, list[_Answer]], drafted: dict[str, list[_Answer]], aborted: int
) -> None:
    pairs = {
        (name, index): (answer, drafted[name][index])
        for name, answers in plain.items()
        for index, answer in enumerate(answers)
    }
    apart = [
        key
        for key, (a, b) in pairs.items()
        if a.error != b.error
        or any(one != other for one, other in zip(a.tokens, b.tokens, strict=False))
    ]
    shorter = [key for key, (a, b) in pairs.items() if len(a.tokens) != len(b.tokens)]
    errors = Counter(answer.error for answer, _ in pairs.values() if answer.error)
    scores = [zip(a.logprobs, b.logprobs, strict=False) for a, b in pairs.values()]
    furthest = max([abs(one - other) for each in scores for one, other in each], default=0.0)
    tokens = sum(len(answer.tokens) for answer, _ in pairs.values())
    print(
        f"{len(pairs)} sequences, {tokens} tokens: {len(apart)} differ in a token {apart[:5]}; "
        f"{len(shorter)} in length ({aborted} requests at most were aborted); "
        f"log-probabilities by {furthest:.1e} at most; errors: {dict(errors)}"
    )


def measure_rows(model: str) -> None:
    """Print the median milliseconds of decode steps by rows; a draft's row is like any other."""
    llm = LLM(model, max_seats=8, seat_buckets=[1, 2, 4, 8])
    core = llm.core
    usual = 0.0
    for rows in (1, 2, 4, 8):
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, n=rows)
        core.add(EngineRequest(id=f"{rows}", prompt=[5] * 200, sampling=params, arrival=0.0))
        first = core.ledger.steps
        core.run_until_idle()
        records = core.ledger.since(first)
        seconds = float(np.median(records[records["bucket_tokens"] == rows]["device_s"]))
        usual = usual or seconds
        print(f"{rows} rows: {1e3 * seconds:.2f} ms, {seconds / usual:.2f} times")
    llm.close()


def stream(url: str, model: str, prompt: str, tokens: int) -> list[float]:
    """Seconds from sending a request to each token of its answer; several can arrive at once."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    began, times = time.perf_counter(), list[float]()
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter() - began
                count = json.loads(line[6:])["usage"]["completion_tokens"]
                times += [now] * (count - len(times))
    return times


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return json.load(answer)["data"][0]["id"]


def measure_streams(
    url: str, model: str, prompts: list[str], tokens: int, streams: int
) -> tuple[float, float, float]:
    """Tokens a second of all streams, median seconds to the first token, and the 99th percentile of
    the seconds between two tokens.
    """
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(lambda prompt: stream(url, model, prompt, tokens), prompts))
    seconds = time.perf_counter() - began
    first = median(times[0] for times in answers)
    gaps = np.concatenate([np.diff(times) for times in answers])
    return len(prompts) * tokens / seconds, first, float(np.quantile(gaps, 0.99))


def compare_speeds(engines: list[tuple[Peer, Peer]], rounds: int) -> None:
    """Print ratios with drafts to without, by engine: medians over the rounds, in which the servers
    take turns.
    """
    cases = {
        "repeats its prompt, 1 stream": (_REPEATING, 150, 1),
        "free text, 1 stream": (_FREE[:4], 150, 1),
        "free text, 32 streams": (_FREE, 64, 32),
    }
    with ExitStack() as stack:
        peers = [peer for pair in engines for peer in pair]
        urls = [stack.enter_context(peer.serving(18431 + n)) for n, peer in enumerate(peers)]
        models = [served_model(url) for url in urls]
        for name, case in cases.items():
            table = np.array(
                [
                    [measure_streams(*server, *case) for server in zip(urls, models, strict=True)]
                    for _ in range(rounds + 1)
                ]
            )[1:]  # the first round warms up
            for number, (plain, _) in enumerate(engines):
                without, with_drafts = table[:, 2 * number], table[:, 2 * number + 1]
                ratios = np.median(with_drafts / without, axis=0)
                speeds = np.median(without[:, 0]), np.median(with_drafts[:, 0])
                print(
                    f"{name}, {plain.name}: {speeds[0]:.1f} -> {speeds[1]:.1f} tokens/s, "
                    f"{ratios[0]:.2f} times; first token {ratios[1]:.2f} times, "
                    f"p99 between tokens {ratios[2]:.2f} times",
                    flush=True,
                )


def compared_engines(
    model: str, drafting: dict[str, Any], vllm: str, vllm_model: str
) -> list[tuple[Peer, Peer]]:
    """Each engine without and with drafts. vllm: the path of its command, "": Jitney alone."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in drafting.items()]
    sizes = ["--no-measured-sizes"]
    engines = [
        (
            Peer.ours(model, "auto", "bfloat16", more=sizes),
            Peer.ours(model, "auto", "bfloat16", more=[*sizes, *flags]),
        )
    ]
    if vllm:
        plain = Peer.vllm(vllm, vllm_model, "bfloat16")
        drafts = ("--speculative-config", json.dumps(_VLLM_NGRAM))
        engines.append((plain, plain._replace(command=(*plain.command, *drafts))))
    return engines


if __name__ == "__main__":
    main()

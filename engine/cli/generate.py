"""`jitney generate`: complete prompts offline, in one batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from jitney.engine.cli.display import load_llm
from jitney.engine.cli.flags import Parser, add_settings, config_from
from jitney.engine.errors import ConfigError, RequestError
from jitney.engine.types import SamplingParams

if TYPE_CHECKING:
    from jitney.engine.llm import Completion

NOTHING: Mapping[str, float] = MappingProxyType({})


def run(arguments: Sequence[str]) -> int:
    """Print one text per prompt; exit status 0."""
    parser = Parser("generate", "Complete prompts offline and print the texts.")
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be repeated; without it, standard input is one prompt",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per sequence and line"
    )
    add_sampling(parser)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="sequences per prompt [1]")
    add_settings(parser, ("model", "engine", "sampling"))
    args = parser.parse(arguments)
    config = config_from(args)
    sampling_from(args, n=args.n)  # a bad flag is told before anything is loaded
    prompts = args.prompt or [sys.stdin.read()]
    llm = load_llm(config)
    params = sampling_from(args, args.n, llm.info.sampling_defaults)
    failed = None
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        for sequence in output.outputs:
            show(prompt, sequence, as_json=args.json)
        failed = failed or output.error
    llm.close()
    if failed is not None:
        raise RequestError.from_info(failed)
    return 0


def show(prompt: str, sequence: Completion, *, as_json: bool) -> None:
    """One sequence on standard output."""
    if as_json:
        print(
            json.dumps(
                {
                    "prompt": prompt,
                    "index": sequence.index,
                    "text": sequence.text,
                    "finish_reason": sequence.finish_reason,
                    "tokens": len(sequence.token_ids),
                },
                ensure_ascii=False,
            )
        )
    else:
        print(sequence.text)


def add_sampling(parser: Parser) -> None:
    """The sampling flags that `generate` and `chat` share."""
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, metavar="N", default=256, help="most tokens to generate [256]")
    add("--temperature", type=float, metavar="X", help="0 is greedy [the model's own]")
    add(
        "--top-p",
        type=float,
        metavar="X",
        help="keep the likeliest tokens up to this mass [the model's own]",
    )
    add(
        "--top-k",
        type=int,
        metavar="N",
        help="keep this many of the likeliest tokens; 0: all [the model's own]",
    )
    add(
        "--min-p",
        type=float,
        metavar="X",
        help="drop tokens below this share of the best [the model's own]",
    )
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        default=[],
        help="end before this text; may be repeated",
    )


def sampling_from(
    args: argparse.Namespace, n: int = 1, defaults: Mapping[str, float] = NOTHING
) -> SamplingParams:
    """The parameters that the flags describe; defaults: the model's. Raises ConfigError naming the
    flag that is out of range."""
    values = dict(defaults)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        given = getattr(args, name)
        if given is not None:
            values[name] = given
    params = SamplingParams(n=n, max_tokens=args.max_tokens, seed=args.seed, stop=tuple(args.stop))
    params = msgspec.structs.replace(params, **values)
    try:
        params.validate(vocab_size=1)  # the flags name no token
    except RequestError as error:
        raise ConfigError(f"--{str(error).replace('_', '-')}") from None
    return params

"""`jitney generate`: completes prompts offline, in one batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.common.requests import JsonDict, SamplingParams
from jitney.engine.common.terminal import visible_on_terminal
from jitney.engine.config import Arguments, Command, Config, Flag, FlagGroup
from jitney.engine.core import load_llm

if TYPE_CHECKING:
    pass

#: Sampling parameters for which a model may have defaults.
_MODEL_DEFAULTED = ("temperature", "top_p", "top_k", "min_p")


class SamplingArguments(Arguments):
    """The parsed flags of a command with `SAMPLING` and `ADAPTER`."""

    SAMPLING: ClassVar = FlagGroup(
        (
            Flag.whole("--max-tokens", "most tokens to generate", 256),
            Flag.number("--temperature", "0 is greedy [the model's own]"),
            Flag.number("--top-p", "keep the likeliest tokens up to this mass [the model's own]"),
            Flag.whole(
                "--top-k", "keep this many of the likeliest tokens; 0: all [the model's own]"
            ),
            Flag.number("--min-p", "drop tokens below this share of the best [the model's own]"),
            Flag.whole("--seed", "the same seed gives the same text"),
            Flag.of(
                "--stop",
                "end before this text; may be repeated",
                [],
                action="append",
                metavar="TEXT",
            ),
        ),
        "sampling",
    )
    ADAPTER: ClassVar = Flag.of(
        "--adapter", "use this one of --adapters [the model alone]", "", metavar="NAME"
    )

    def check_adapter(self, config: Config) -> None:
        """Raise ConfigError if --adapter is not among the configured adapters."""
        if self.adapter and self.adapter not in config.model.adapter_folders:
            raise ConfigError(f"--adapter: give --adapters {self.adapter}=FOLDER too")

    def explicit_sampling(self) -> JsonDict:
        """The flags that were given, and --max-tokens, as fields of a request."""
        fields = self._explicit((*_MODEL_DEFAULTED, "seed", "max_tokens"))
        return fields | ({"stop": self.stop} if self.stop else {})

    def _explicit(self, names: Iterable[str]) -> JsonDict:
        flags = {name: getattr(self, name) for name in names}
        return {name: value for name, value in flags.items() if value is not None}

    def sampling(
        self, *, n: int = 1, defaults: Mapping[str, float] = MappingProxyType({})
    ) -> SamplingParams:
        """The parameters of the flags; defaults: the model's. Raises ConfigError."""
        fields = SamplingParams.fields_with(defaults, self._explicit(_MODEL_DEFAULTED))
        params = SamplingParams(
            n=n, max_tokens=self.max_tokens, seed=self.seed, stop=tuple(self.stop), **fields
        )
        _check(params)
        return params


_FLAGS = (
    Flag.of(
        "--prompt",
        "a prompt; may be repeated; without it, standard input is one prompt",
        action="append",
        metavar="TEXT",
    ),
    Flag.switch("--json", "print one JSON object per sequence and line"),
    Flag.whole("--n", "sequences per prompt", 1),
    SamplingArguments.ADAPTER,
)
_COMMAND = Command(
    "generate",
    "Complete prompts offline and print the texts.",
    (FlagGroup(_FLAGS), SamplingArguments.SAMPLING),
    sections=("model", "engine", "sampling"),
    leave_out=Command.ONLY_SERVED,
)


def run(arguments: Sequence[str]) -> int:
    """Print one text per prompt; exit status 0."""
    args = _COMMAND.parse_as(SamplingArguments, arguments)
    config = args.load_config()
    args.sampling(n=args.n)  # raises for a bad flag before the model is loaded
    prompts = args.prompt or [sys.stdin.read()]
    args.check_adapter(config)
    llm = load_llm(config)
    params = args.sampling(n=args.n, defaults=llm.info.model.sampling_defaults)
    outputs = llm.generate(prompts, params, adapter=args.adapter)
    llm.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        for sequence in output.outputs:
            shown = sequence.text
            if args.json:
                line = {
                    "prompt": prompt,
                    "index": sequence.index,
                    "text": sequence.text,
                    "finish_reason": sequence.finish_reason,
                    "tokens": len(sequence.token_ids),
                }
                shown = json.dumps(line, ensure_ascii=False)
            print(visible_on_terminal(shown))
    for output in outputs:
        if output.error is not None:
            raise RequestError.from_info(output.error)
    return 0


def _check(params: SamplingParams) -> None:
    try:
        params.validate(vocab_size=1)  # no flag names a token
    except RequestError as error:
        raise ConfigError(f"--{str(error).replace('_', '-')}") from None

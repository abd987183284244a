"""Tries a model's tokenizer in a process with limits: `python -P -m
jitney.engine.core.text.tokenizer_trial MODEL SECONDS GIB`.

On untrusted files the library can run forever, take all memory or crash. Other errors are left to
the server.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.worker_pipe import limit_memory
from jitney.engine.core.grammar.manager import GrammarManager
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource

#: Characters that a hostile normalizer may replace by longer texts, again and again.
_TEXT = "".join(map(chr, range(1, 0x500))) + "한국어 中文 🙂"


def _main() -> int:
    model, seconds, gib = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(JitneyError):
        _try(ModelSource.resolve(model), int(gib) << 30)
    return 0


def _try(source: ModelSource, most_bytes: int) -> None:
    """Use a tokenizer as the server and its core do at their start and for a text."""
    limit_memory(most_bytes + Path(source.path).stat().st_size)  # a GGUF file is mapped
    tokenizer = Tokenizer.load(source)
    tokenizer.encode(_TEXT)
    tokenizer.decode(range(tokenizer.vocab_size))
    with contextlib.suppress(ValueError):  # this tokenizer supports no grammars
        GrammarManager.open(tokenizer.json, source.config.vocab_size, tokenizer.eos_ids)


if __name__ == "__main__":
    sys.exit(_main())

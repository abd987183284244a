"""Writes a model's tokenizer as a folder, for clients that want one and would else ask a hub.

    python docs/clients/save_tokenizer.py MODEL FOLDER

MODEL is what `jitney serve` takes. The folder can then be given wherever transformers takes a
tokenizer's name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jitney.engine.core.text.fast_tokenizers import fast_tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource


def save_tokenizer(model: str, folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template into the folder."""
    fast_tokenizer(ModelSource.resolve(model)).as_transformers().save_pretrained(str(folder))


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description="Write a model's tokenizer as a folder.")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    save_tokenizer(args.model, args.folder)


if __name__ == "__main__":
    main()

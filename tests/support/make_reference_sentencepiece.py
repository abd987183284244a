"""Make tests/data/reference_sentencepiece.json: a small BPE vocabulary with byte fallback, and ids
of some texts.

Run where the `sentencepiece` package is installed (it is not a dependency of Jitney), with the
settings Llama 2's tokenizer was trained with: `python
tests/support/make_reference_sentencepiece.py`. Written with sentencepiece 0.2.3.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

TESTS = Path(__file__).parents[1]
OUTPUT = TESTS / "data" / "reference_sentencepiece.json"
TEXTS = [
    "",
    " ",
    "Hello",
    " Hello",
    "the License",
    "the  License   shall\n\nterminate",
    "in 2026, 1024 copies",
    "You may reproduce and distribute copies of the Work",
    "déjà vu",
    "naïve 日本語 text",
    "a😀b",
    "\t\ttabs\n",
    "CONDITIONS (a) through (d); limitations_of_use?",
    "trailing space ",
    "▁ already",
    "zzzzqqqq",
    "def f(x):\n    return x  # works",
]


def main() -> None:
    import sentencepiece

    model = io.BytesIO()
    lines = (TESTS.parent / "LICENSE").read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(trained.get_piece_size())
    kinds = [
        2
        if trained.is_unknown(id)
        else 3
        if trained.is_control(id)
        else 6
        if trained.is_byte(id)
        else 1
        for id in ids
    ]
    OUTPUT.write_text(
        json.dumps(
            {
                "tokens": [trained.id_to_piece(id) for id in ids],
                "scores": [trained.get_score(id) for id in ids],
                "token_type": kinds,
                "texts": {text: trained.encode(text) for text in TEXTS},
            },
            separators=(",", ":"),
        )
        + "\n"
    )


if __name__ == "__main__":
    main()

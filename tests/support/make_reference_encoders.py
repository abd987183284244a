"""Make tests/data/reference_encoders.json: vectors and scores of tiny random encoders as
transformers computes them.

Run where PyTorch and transformers are installed (PyTorch is not a dependency of Jitney): `python
tests/support/make_reference_encoders.py`. Written with torch 2.13.0 and transformers 5.24.0. The
weights are not stored: both sides draw them with `random_tensor`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from make_reference_logits import random_tensor as drawn
from safetensors.numpy import load_file, save_file

OUTPUT = Path(__file__).parents[1] / "data" / "reference_encoders.json"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
#: First token and separator of texts and pairs, by architecture.
BERT_TOKENS = {"first": 90, "separator": 91}
XLM_TOKENS = {"first": 0, "separator": 2}
#: Architecture -> settings in addition to SIZES.
CASES = {
    "BertModel": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "BertForSequenceClassification": {"num_labels": 1},
    "XLMRobertaModel": {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "XLMRobertaForSequenceClassification": {
        "num_labels": 1,
        "pad_token_id": 1,
        "type_vocab_size": 1,
    },
}
#: (tokens of a query, tokens of its document); tokens of the single texts.
PAIRS = [(3, 2), (5, 30), (20, 37), (1, 1)]
TEXTS = [1, 4, 33, 60]


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 weights that depend only on the tensor's name and shape; about 1 for norms."""
    name = name.replace("LayerNorm", "norm")
    if name.endswith("norm.bias"):
        return drawn(name, shape) - np.float32(1.0)
    return drawn(name, shape)


def words(count: int, seed: int) -> list[int]:
    """Random ids of ordinary tokens."""
    return np.random.default_rng(seed).integers(4, 90, count).tolist()


def prompts(architecture: str) -> list[tuple[list[int], list[int]]]:
    """(token ids, token types) of the model's inputs: texts, or pairs of texts."""
    is_bert = architecture.startswith("Bert")
    tokens = BERT_TOKENS if is_bert else XLM_TOKENS
    first, separator = [tokens["first"]], [tokens["separator"]]
    if architecture.endswith("Model"):
        texts = [first + words(count, count) + separator for count in TEXTS]
        return [(text, [0] * len(text)) for text in texts]
    made = []
    for query, document in PAIRS:
        begin = first + words(query, query) + separator
        end = words(document, 100 + document) + separator
        if not is_bert:
            end = separator + end
        made.append((begin + end, [0] * len(begin) + [int(is_bert)] * len(end)))
    return made


def reference(architecture: str, settings: dict) -> dict:
    """config.json as transformers writes it, tensor shapes, and for each prompt the first row and
    the mean of all rows, or the logit.
    """
    import torch
    import transformers

    prefix = "Bert" if architecture.startswith("Bert") else "XLMRoberta"
    config = getattr(transformers, f"{prefix}Config")(**SIZES | settings)
    model_class = getattr(transformers, architecture)
    with tempfile.TemporaryDirectory() as folder:
        model_class(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        state = {key: random_tensor(key, value.shape) for key, value in load_file(file).items()}
        save_file(state, file, {"format": "pt"})
        model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
        written = json.loads((Path(folder) / "config.json").read_text())
    outputs = []
    for ids, types in prompts(architecture):
        with torch.no_grad():
            output = model(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        if architecture.endswith("Model"):
            rows = output.last_hidden_state[0].numpy()
            outputs.append({"cls": rounded(rows[0]), "mean": rounded(rows.mean(axis=0))})
        else:
            outputs.append({"classify": rounded(output.logits[0].numpy())})
    shapes = {key: list(tensor.shape) for key, tensor in state.items()}
    return {"config": written, "shapes": shapes, "outputs": outputs}


def rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 6) for value in values]


if __name__ == "__main__":
    made = {name: reference(name, settings) for name, settings in CASES.items()}
    OUTPUT.write_text(json.dumps(made, separators=(",", ":")) + "\n")

"""Make tests/data/reference_logits.json: logits of tiny random models as transformers computes
them.

Run where PyTorch and transformers are installed (PyTorch is not a dependency of Jitney): `python
tests/support/make_reference_logits.py NAME ...` makes the cases of these names anew and keeps the
others; without names it makes all. `--new NAME CONFIG.json LENGTH ...` adds a case: the settings
that differ from transformers' own, with `model_type` and `architectures`, and lengths of prompts
that are continued greedily. Written with torch 2.13.0 and transformers 5.23.0 (mixtures of
experts: 5.19.0; those with continuations and newer ones: 5.24.0). The weights are not stored: both
sides draw them with `random_tensor`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

OUTPUT = Path(__file__).parents[1] / "data" / "reference_logits.json"
#: Rows whose logits are stored: the first two, around a window of 8, and the end.
ROWS = [0, 1, 7, 8, 30, 47]
#: Vocabulary size of every case.
VOCABULARY = 96
#: Architecture without a text-only class -> the vision tower that its model is made with.
TOWERS = {
    "MuseGlimmer": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
}
#: Tokens of a continuation: past every window of 8.
COUNT = 16


def stored() -> dict[str, dict[str, Any]]:
    """The cases of the file. In addition to computed numbers, a case has these settings:

    config: of the model. greedy: keys are the lengths of prompts that are continued, past windows
    of 8 and original contexts of 32. context: with which it is served, if transformers chooses RoPE
    frequencies by the text's length. embed_spread: standard deviation of the embeddings if not 1:
    Gemma scales them up, and would repeat a token for ever.
    """
    return json.loads(OUTPUT.read_text())["cases"]


def random_tensor(name: str, shape: tuple[int, ...], spread: float = 1.0) -> np.ndarray:
    """float32 weights that depend only on the tensor's name and shape; spread: of embeddings."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("_blocks"):
        return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, shape, np.uint8)
    if name.endswith("_scales"):  # experts' weights have magnitudes up to 1.5, gates up to 6
        return (124 + 2 * ("gate" in name) + np.clip(drawn, -2, 0)).astype(np.uint8)
    if name.endswith("_scale_inv"):  # of numbers up to 448
        return ((1.0 + 0.5 * np.tanh(drawn)) / 64).astype(np.float32)
    if "norm" in name or name.endswith(("_scalar", "_scale", ".scale")):
        drawn = 1.0 + 0.2 * drawn
    elif name.endswith((".bias", "_proj_bias")):
        drawn = 0.3 * drawn
    elif name.endswith("sinks"):  # some outweigh all keys, others none
        drawn = 4 * drawn
    elif name.endswith(".A_log"):  # heads remember some tokens, or some hundred
        drawn = 1.5 * drawn - 3.0
    elif "embed" in name:
        drawn = spread * drawn
    else:
        drawn = 1.5 * drawn / np.sqrt(shape[-1])
    return drawn.astype(np.float32)


def prompt(count: int = 48) -> np.ndarray:
    """Token ids; a longer prompt begins with a shorter one."""
    return np.random.default_rng(7).integers(4, VOCABULARY, count)


def greedy(model, lengths: list[int]) -> dict[str, list[list[float]]]:
    """Greedy continuations of prompts of these lengths, each token from a complete forward pass,
    and the log-probabilities of the tokens.
    """
    import torch

    outputs = {}
    for length in lengths:
        tokens, logprobs = prompt(length).tolist(), []
        for _ in range(COUNT):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best, second = torch.topk(logits, 2).values.tolist()
            assert best - second > 1e-3, f"a tie at {len(tokens)}: {best} {second}"
            tokens.append(int(logits.argmax()))
            logprobs.append(round(float(torch.log_softmax(logits, -1).max()), 6))
        outputs[str(length)] = [tokens[length:], logprobs]
    return outputs


def in_mxfp4(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of a file whose experts [X, I, O] are in MXFP4."""
    stored_shapes = {}
    for key, shape in shapes.items():
        if key.endswith("_proj"):
            experts, inputs, outputs = shape
            stored_shapes[f"{key}_blocks"] = experts, outputs, inputs // 32, 16
            stored_shapes[f"{key}_scales"] = experts, outputs, inputs // 32
        else:
            stored_shapes[key] = shape
    return stored_shapes


def in_fp8(shapes: dict[str, tuple[int, ...]], left_out: list[str]) -> dict[str, tuple[int, ...]]:
    """The tensors of a file whose matrices are in fp8, except those left out; and scales."""
    unquantised = tuple(f"{name}.weight" for name in ("embed_tokens", *left_out))
    scales = {
        f"{key}_scale_inv": tuple(-(-size // 128) for size in shape)
        for key, shape in shapes.items()
        if len(shape) == 2 and not key.endswith(unquantised)
    }
    return dict(shapes) | scales


def save(state: dict[str, np.ndarray], file: Path) -> None:
    """Save tensors in float32, except those with block scales, which are saved in fp8 times 64."""
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = {key: torch.from_numpy(tensor) for key, tensor in state.items()}
    for key in state:
        if f"{key}_scale_inv" in state:
            tensors[key] = (64 * tensors[key]).to(torch.float8_e4m3fn)
    save_torch(tensors, file, {"format": "pt"})


def whole_model(name: str, config):
    """The model of a text configuration, with its vision tower if there is no text-only class.

    name: of its architecture.
    """
    import transformers

    if name not in TOWERS:
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()
    config = getattr(transformers, f"{name}Config")(
        text_config=config.to_dict(), vision_config=TOWERS[name], attn_implementation="eager"
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def read_config(settings: dict[str, Any], folder: str):
    """The text configuration of these settings, for weights that are not quantised."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    (Path(folder) / "config.json").write_text(json.dumps(settings))
    kind = CONFIG_MAPPING[settings["model_type"]]
    return kind.from_pretrained(folder, attn_implementation="eager")


def made(given: dict[str, Any]) -> tuple:
    """transformers' model of a case in float32, and the case: its config.json and tensor shapes."""
    import torch
    import transformers

    settings = dict(given["config"])
    quantised = settings.pop("quantization_config", None)
    name = settings["architectures"][0].removesuffix("ForCausalLM")
    text = "model." if name not in TOWERS else "model.language_model."
    spread = given.get("embed_spread", 1.0)
    # Load by the names in the file: in memory experts are one tensor.
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(settings, folder)
        model = whole_model(name, config)
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {
            key.replace(text, "model.", 1): tensor.shape
            for key, tensor in load_file(file).items()
            if name not in TOWERS or key.startswith((text, "lm_head."))
        }
        options: dict[str, Any] = {"attn_implementation": "eager"}
        if quantised is not None:
            config.quantization_config = quantised
            config.save_pretrained(folder)
            if quantised["quant_method"] == "mxfp4":
                shapes = in_mxfp4(shapes)
                read = transformers.Mxfp4Config(dequantize=True)
            else:
                left_out = quantised["modules_to_not_convert"]
                shapes = in_fp8(shapes, left_out)
                read = transformers.FineGrainedFP8Config(
                    dequantize=True, modules_to_not_convert=left_out
                )
            options["quantization_config"] = read
        state = {key: random_tensor(key, shape, spread) for key, shape in shapes.items()}
        save({key.replace("model.", text, 1): tensor for key, tensor in state.items()}, file)
        model = type(model).from_pretrained(folder, dtype=torch.float32, **options).eval()
    written = json.loads(config.to_json_string(use_diff=True))
    case = {
        "config": written | {"architectures": settings["architectures"]},
        "shapes": {key: list(tensor.shape) for key, tensor in state.items()},
        "weights_sum": float(
            sum(np.abs(tensor.astype(np.float64)).sum() for tensor in state.values())
        ),
    }
    if quantised is not None:
        case["config"]["quantization_config"] = quantised
    return model, given | case


def reference(given: dict[str, Any]) -> dict[str, Any]:
    """A case with float32 logits of ROWS, and greedy continuations."""
    import torch

    model, case = made(given)
    with torch.no_grad():
        logits = model(torch.from_numpy(prompt())[None]).logits[0, ROWS].numpy()
    case["logits"] = [[round(float(value), 6) for value in row] for row in logits]
    if "greedy" in given:
        case["greedy"] = greedy(model, [int(length) for length in given["greedy"]])
    return case


def main(words: list[str]) -> None:
    """Make the cases of these names again, or all cases; or add one."""
    cases = stored()
    if words[:1] == ["--new"]:
        _, name, file, *lengths = words
        cases[name] = {"config": json.loads(Path(file).read_text())}
        if lengths:
            cases[name]["greedy"] = dict.fromkeys(lengths)
        words = [name]
    unknown = [name for name in words if name not in cases]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; known: {', '.join(cases)}")
    cases |= {name: reference(cases[name]) for name in words or list(cases)}
    OUTPUT.write_text(json.dumps({"rows": ROWS, "cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

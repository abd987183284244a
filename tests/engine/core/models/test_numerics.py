"""Every architecture against transformers' logits, through the same path a served model takes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import DENSE, dense_attention, nothing_kept
from reference_logits import DATA, SCRIPT, as_stored, weights_of, write_folder
from rounding_kernels import PARTS, PRODUCTS, ROUNDING
from safetensors.numpy import save_file

from jitney.engine.core.models.layers import normal
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.registry import abstract_model, model_class, random_model
from jitney.engine.core.weights.checkpoints.families import FAMILIES, tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model
from jitney.kernels.delta_net import StateSlots
from jitney.kernels.interface import AttentionMeta, KernelSet, RoundingKernels
from jitney.kernels.partial_sums import PartialSums

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASES = DATA["cases"]
#: Of the others `test_families` has the log-probabilities of greedy answers; with
#: JITNEY_TEST_COMPILE=1 all are compared here, too.
COMPARED = [
    name
    for name, case in CASES.items()
    if "greedy" not in case or os.environ.get("JITNEY_TEST_COMPILE") == "1"
]


def prompts_meta(*lengths: int) -> AttentionMeta:
    """Whole prompts of these lengths in one step."""
    lens = np.array(lengths, np.int32)
    return AttentionMeta(
        kv_lens=jnp.asarray(lens),
        cu_q=jnp.asarray(np.concatenate([[0], lens.cumsum()]), jnp.int32),
        page_table=jnp.zeros((len(lens), 1), jnp.int32),
        write_rows=jnp.zeros(lens.sum(), jnp.int32),
        positions=jnp.concatenate([jnp.arange(n, dtype=jnp.int32) for n in lens]),
        counts=jnp.array([0, len(lens), lens.sum()], jnp.int32),
        state=StateSlots.in_place(jnp.arange(len(lens), dtype=jnp.int32)),
    )


def all_logits(
    model: Model, tokens: np.ndarray, *lengths: int, kernels: KernelSet = DENSE
) -> np.ndarray:
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state, tokens, meta):
        merged = nnx.merge(graph, state)
        kept = nothing_kept(merged.config, len(lengths))
        hidden, _ = merged(tokens, kept, meta, kernels)
        return merged.logits(hidden, kernels)

    return np.asarray(forward(state, jnp.asarray(tokens, jnp.int32), prompts_meta(*lengths)))


def source_of(case: dict, folder: Path) -> ModelSource:
    tensors = weights_of(case)
    total = sum(np.abs(tensor.astype(np.float64)).sum() for tensor in tensors.values())
    assert total == pytest.approx(case["weights_sum"], rel=1e-9), (
        "numpy draws other weights than the script did"
    )
    return ModelSource.resolve(write_folder(folder, case["config"], as_stored(tensors)))


@pytest.mark.parametrize("name", COMPARED)
def test_logits_equal_transformers(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
):
    source = source_of(CASES[name], tmp_path)
    context = CASES[name].get("context", source.config.context_length)
    model = load_model(source, replace(source.config, context_length=context), jnp.float32)
    tokens = SCRIPT.prompt()
    logits = all_logits(model, tokens, len(tokens))[DATA["rows"]]
    np.testing.assert_allclose(logits, CASES[name]["logits"], atol=1e-4, rtol=0)
    record_property("case", name)  # for docs/benchmarks/model_families.py
    record_property("logits", float(np.abs(logits - np.array(CASES[name]["logits"])).max()))


#: Wrapper -> `model_type` of its text_config, and a case of it.
WRAPPED = {
    "Gemma4ForConditionalGeneration": ("gemma4_text", "gemma4"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified_text", "gemma4_unified"),
    "Gemma3ForConditionalGeneration": ("gemma3_text", "gemma3"),
    "MuseGlimmerForConditionalGeneration": ("muse_glimmer_text", "muse_glimmer"),
    "Mistral3ForConditionalGeneration": ("mistral", "mistral_full"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text", "qwen3"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text", "qwen3_5_moe"),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_the_text_model_of_a_wrapper_is_served_and_its_tower_not_read(wrapper: str, tmp_path: Path):
    """The shard of the tower is not even there."""
    kind, case_name = WRAPPED[wrapper]
    case, prefix, head = CASES[case_name], "model.language_model.", "lm_head"
    if kind == "mistral":
        prefix, head = "language_model.model.", "language_model.lm_head"
    text = {key: value for key, value in case["config"].items() if key != "architectures"}
    config = {"architectures": [wrapper], "text_config": text | {"model_type": kind}}
    tensors = {
        name.replace("lm_head", head).replace("model.", prefix, name.startswith("model.")): tensor
        for name, tensor in weights_of(case).items()
    }
    save_file(tensors, tmp_path / "text.safetensors")
    places = dict.fromkeys(tensors, "text.safetensors") | {
        "model.vision_tower.patch.weight": "tower.safetensors",
        "visual.blocks.0.norm.weight": "tower.safetensors",
        "mtp.fc.weight": "tower.safetensors",
        "multi_modal_projector.linear.weight": "tower.safetensors",
    }
    index = json.dumps({"weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = ModelSource.resolve(str(tmp_path))
    assert source.config.tie_embeddings == ("lm_head.weight" not in case["shapes"])
    logits = all_logits(load_model(source, source.config, jnp.float32), SCRIPT.prompt(), 48)
    np.testing.assert_allclose(logits[DATA["rows"]], case["logits"], atol=1e-4, rtol=0)


def test_a_float32_residual_stream_is_nearer_to_float32(smollm2, reference):
    """The default model in bfloat16, against float32's top-5 log-probabilities: rounding the stream
    behind each of 60 additions costs more than half of what bfloat16 costs at all.
    """
    model = load_model(smollm2, smollm2.config, jnp.bfloat16)
    item = reference[1]
    ids = np.array(item["prompt_ids"] + item["output_ids"])

    def error(kernels: KernelSet) -> float:
        logprobs = np.asarray(jax.nn.log_softmax(all_logits(model, ids, len(ids), kernels=kernels)))
        rows = logprobs[-len(item["output_ids"]) - 1 : -1]
        off = [
            row[top["ids"]] - top["logprobs"] for row, top in zip(rows, item["top5"], strict=True)
        ]
        return float(np.sqrt(np.mean(np.square(off))))

    narrow, wide = (error(replace(DENSE, float32_residual=wide)) for wide in (False, True))
    assert wide < 0.8 * narrow


@pytest.mark.parametrize("shape", [(7,), (3, 5, 4), (256, 320), (400, 400)])
def test_random_weights_are_their_keys_numbers(shape: tuple[int, ...]):
    """However many are drawn to have them."""
    found = normal(nnx.Rngs(3), shape, 0.3, jnp.bfloat16)
    wanted = 0.3 * jax.random.normal(nnx.Rngs(3).params(), shape, jnp.float32)
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


#: A decoder of each class of models.
DECODERS = tuple(
    {
        model_class(architecture): family.name
        for architecture, family in FAMILIES.items()
        if "encoder" not in family.tiny
    }.values()
)


@pytest.mark.parametrize(
    ("architecture", "dtype", "float32_residual"),
    [
        ("llama", jnp.float32, False),
        ("llama", jnp.bfloat16, False),
        *((name, jnp.bfloat16, True) for name in DECODERS),
    ],
)
def test_dtype_in_is_dtype_out(architecture: str, dtype, float32_residual: bool):
    """Activations and weights keep the model's dtype at every layer; only logits, the weights of
    some norms, decays, biases of a router's choice, and the residual stream where the kernel set
    says so, are always float32.
    """
    model = abstract_model(tiny_config(architecture), dtype=dtype)
    seen = []

    def attend(q, k, v, kv, meta, **options):
        seen.extend([x.dtype for x in (q, k, v) if x is not None])  # latents are keys and values
        return dense_attention(q, k, v, kv, meta, **options)

    kernels = replace(DENSE, paged_attention=attend, float32_residual=float32_residual)

    def activations(model: Model) -> tuple[jax.Array, ...]:
        hidden, _ = model(jnp.arange(8), nothing_kept(model.config, 1), prompts_meta(8), kernels)
        return hidden.states, model.normed(hidden, kernels), model.logits(hidden, kernels)

    states, normed, logits = nnx.eval_shape(activations, model)
    assert states.dtype == (jnp.float32 if float32_residual else dtype)
    assert normed.dtype == dtype
    assert logits.dtype == jnp.float32
    assert set(seen) == {jnp.dtype(dtype)}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        wide = model.config.float32_norms and "norm" in str(path)
        wide |= path[-1] in ("log_decay", "rate_bias", "skip", "choice_bias", "value_norm")
        assert leaf.dtype == (jnp.float32 if wide else dtype), path


def test_a_padded_table_of_embeddings_is_read_without_its_padding():
    config = replace(tiny_config("qwen3"), tie_embeddings=False)
    model, tokens = random_model(config), np.arange(24) * 7 % 512
    before = all_logits(model, tokens, 24)
    model.pack(replace(DENSE, table_columns=48))
    assert dict(nnx.to_flat_state(nnx.state(model)))[("embed",)].shape == (512, 96)
    np.testing.assert_array_equal(all_logits(model, tokens, 24), before)


def test_bfloat16_stays_near_float32():
    """The same random weights, rounded: logits (spread about 1.5) move by rounding only."""
    config = tiny_config("qwen3")
    tokens = np.arange(24) * 7 % 512
    wide = all_logits(random_model(config), tokens, 24)
    narrow = all_logits(random_model(config, dtype=jnp.bfloat16), tokens, 24)
    assert np.abs(wide - narrow).max() < 0.25 * wide.std()
    assert np.corrcoef(wide.ravel(), narrow.ravel())[0, 1] > 0.999


def test_random_models_repeat_and_decide():
    """The same seed gives the same model, another seed another; greedy choices are no ties and no
    constant.
    """
    config = tiny_config()
    tokens = np.arange(64) * 5 % 512
    logits = all_logits(random_model(config, seed=1), tokens, 64)
    np.testing.assert_array_equal(logits, all_logits(random_model(config, seed=1), tokens, 64))
    assert np.abs(logits - all_logits(random_model(config, seed=2), tokens, 64)).max() > 1
    top = np.sort(logits, axis=-1)
    assert np.median(top[:, -1] - top[:, -2]) > 0.1
    assert len(set(logits.argmax(axis=-1))) > 40


def counting(kernels: Any, calls: list[str], *names: str) -> dict[str, Callable[..., Any]]:
    """These functions of the kernels, which note their names as they are called."""

    def counted(name: str) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            calls.append(name)
            return getattr(kernels, name)(*operands)

        return call

    return {name: counted(name) for name in names}


def compare(model: Model, plain: KernelSet, special: KernelSet) -> None:
    """Both kernel sets give the same logits."""
    model.pack(plain)
    tokens = SCRIPT.prompt()
    expected, logits = (
        all_logits(model, tokens, len(tokens), kernels=kernels) for kernels in (plain, special)
    )
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("family", "norms"),
    [
        ("llama", 3),
        ("gemma2", 0),
        ("gemma4_unified", 0),
        ("granite", 0),
        ("olmo2", 0),
        ("qwen3_5", 5),
        ("deepseek_v3", 2),
    ],
)
@pytest.mark.parametrize("weights", ["plain", "fp8"])
def test_norms_add_the_parts_of_the_products_that_they_read(family: str, norms: int, weights: Any):
    """Llama: the norm after each half of a layer. Products that are scaled, or normed before they
    are added, are added up first.
    """
    calls: list[str] = []
    config = tiny_config(family)

    def matmul(x: Any, w: Any, scale: Any = None) -> PartialSums | None:
        product = PARTS.matmul(x, w, scale)
        # Attention of this test does not rotate.
        return product if product is None or product.shape[1] == config.hidden_size else None

    readers = counting(PARTS, calls, "norm_sum", "rounded_norm_sum")
    whole = replace(DENSE, fp8=PRODUCTS)
    parts = replace(whole, parts=replace(PARTS, matmul=matmul, **readers))
    compare(random_model(config, weights=weights), whole, parts)
    assert len(calls) == norms


@pytest.mark.parametrize(
    ("family", "norms", "gates"), [("llama", 3, 2), ("qwen3_5", 3, 3), ("deepseek_v3", 1, 2)]
)
def test_kernels_round_the_rows_that_only_fp8_products_read(family: str, norms: int, gates: int):
    """Llama: both norms of a layer and its gate, and in the last layer only attention's before the
    rows with logits are taken. Latent attention, delta nets and routers read rows that are not
    rounded.
    """
    calls: list[str] = []
    kernels = RoundingKernels(**counting(ROUNDING, calls, "norm_sum", "gated"))
    rounding = replace(DENSE, fp8=replace(PRODUCTS, rounding=kernels))
    without = replace(DENSE, fp8=replace(PRODUCTS, rounding=None))
    compare(random_model(tiny_config(family), weights="fp8"), without, rounding)
    assert (calls.count("norm_sum"), calls.count("gated")) == (norms, gates)

"""Reading `config.json` and GGUF key-values: both spellings, per-layer windows, clear refusals,
hostile values.
"""

from __future__ import annotations

import json
import logging
import math

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.families import FAMILIES, tiny_config
from jitney.engine.core.weights.checkpoints.gguf_config import _read_gguf_config
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.layer_configs import (
    EncoderConfig,
    ExpertsConfig,
    RopeConfig,
    RopeScaling,
    ShortConvConfig,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

CASES = json.loads((DATA / "reference_logits.json").read_text())["cases"]
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
}
MIXTURE = BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
}
LFM2 = BASE | {"architectures": ["Lfm2ForCausalLM"], "num_key_value_heads": 2}
GGUF = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 2,
    "qwen2.context_length": 64,
    "qwen2.embedding_length": 32,
    "qwen2.feed_forward_length": 48,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.rope.freq_base": 1e6,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.eot_token_id": 5,
}
SHAPES = {"token_embd.weight": (96, 32), "blk.0.attn_q.bias": (32,)}


def test_a_plain_llama():
    config = read_hf_config(
        BASE
        | {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "eos_token_id": 7, "tie_word_embeddings": True},
        {"eos_token_id": [7, 9]},
    )
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=96,
        hidden_size=48,
        n_layers=3,
        n_heads=4,
        n_kv_heads=4,
        head_dim=12,
        intermediate_size=80,
        windows=(0, 0, 0),
        context_length=128,
        ropes=(RopeConfig(5e5),),
        rms_eps=1e-5,
        tie_embeddings=True,
        eos_ids=(7, 9),
    )
    assert config.qkv_size == (4 + 2 * 4) * 12


@pytest.mark.parametrize(
    "name",
    [n for n in CASES if "rope_parameters" in CASES[n]["config"] and not n.startswith("gemma4")],
)
def test_old_and_new_spelling_of_rope_agree(name: str):
    new = CASES[name]["config"]
    rope = dict(new["rope_parameters"])
    local = rope.pop("sliding_attention", {})
    rope = dict(rope.get("full_attention", rope))
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = rope.pop("rope_theta")
    if local:
        old["rope_local_base_freq"] = local["rope_theta"]
    if rope["rope_type"] != "default":
        old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    assert read_hf_config(old) == read_hf_config(new)


def test_windows_follow_each_architecture():
    def windows(architecture: str, **settings) -> tuple[int, ...]:
        settings |= {"architectures": [architecture], "num_key_value_heads": 4}
        return read_hf_config(BASE | settings).windows

    assert windows("LlamaForCausalLM", sliding_window=8) == (0, 0, 0)
    assert windows("MistralForCausalLM") == (4096,) * 3
    assert windows("MistralForCausalLM", sliding_window=None) == (0, 0, 0)
    assert windows(
        "Qwen3ForCausalLM",
        sliding_window=8,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ) == (8, 0, 8)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None},
        {"sliding_window": 8, "max_window_layers": 0},
    ],
)
def test_what_a_qwen_file_leaves_out_is_as_in_its_configuration_class(name: str, given: dict):
    """Heads, their size, and which layers have a window, as transformers has them."""
    sizes = BASE | {"num_attention_heads": 32, "hidden_size": 64, "moe_intermediate_size": 24}
    theirs = getattr(transformers, f"{name}Config")(**sizes | given)
    ours = read_hf_config(sizes | given | {"architectures": [f"{name}ForCausalLM"]})
    assert ours.n_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 64 // 32)
    every = theirs.sliding_window or 0
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 3)
    assert ours.windows == tuple([every * (kind == "sliding_attention") for kind in kinds])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"full_attn_idxs": [1], "tie_embedding": False, "block_ff_dim": 96},
        {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False},
    ],
)
def test_what_a_file_of_lfm2_leaves_out_is_as_in_its_configuration_class(given: dict):
    """Also what its first files call otherwise."""
    sizes = BASE | {"num_attention_heads": 8, "block_auto_adjust_ff_dim": False}
    theirs = transformers.Lfm2Config(**sizes | given)
    ours = read_hf_config(sizes | given | {"architectures": ["Lfm2ForCausalLM"]})
    kinds = ["full_attention" if i in ours.pool_layers else "conv" for i in range(ours.n_layers)]
    assert kinds == theirs.layer_types
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.intermediate_size == theirs.intermediate_size
    assert (ours.n_kv_heads, ours.rms_eps) == (theirs.num_key_value_heads, theirs.norm_eps)
    assert isinstance(ours.recurrent, ShortConvConfig)
    assert ours.recurrent.taps == theirs.conv_L_cache


def test_yarn_extends_the_context():
    config = read_hf_config(BASE | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert config.context_length == 512
    scaling = RopeScaling("yarn", 4.0, 128, attention_factor=0.1 * math.log(4) + 1)
    assert config.ropes == (RopeConfig(scaling=scaling),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["unknown architecture"]),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": BASE},
            ["text_config", "model_type", "known: mistral"],
        ),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"type": "wavy", "factor": 2.0}}, ["wavy", "llama3"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor 1.5"]),
        ({"hidden_size": None}, ["hidden_size", "integer"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1024"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "positive"]),
        ({"num_key_value_heads": 3}, ["3 key-value heads"]),
        ({"eos_token_id": 96}, ["96", "outside the vocabulary"]),
        ({"eos_token_id": "2"}, ["eos_token_id"]),
        ({"hidden_size": 52}, ["head_dim", "13"]),
        (MIXTURE | {"num_experts": 4, "num_experts_per_tok": 5}, ["5 of 4 experts"]),
        (MIXTURE | {"num_experts": 0}, ["num_experts", "integer"]),
        (MIXTURE | {"moe_intermediate_size": "wide"}, ["moe_intermediate_size"]),
        (MIXTURE | {"mlp_only_layers": 0}, ["mlp_only_layers", "list"]),
        (MIXTURE | {"decoder_sparse_step": 0}, ["decoder_sparse_step", "integer"]),
        (CASES["gpt_oss"]["config"] | {"swiglu_alpha": 5.0}, ["swiglu_alpha other than 1.702"]),
        (CASES["gpt_oss"]["config"] | {"swiglu_limit": 5.0}, ["swiglu_limit other than 7.0"]),
        (LFM2 | {"conv_bias": True}, ["conv_bias", "not supported"]),
        (LFM2 | {"layer_types": ["conv", "rnn", "conv"]}, ["layer_types", "or conv"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(change: dict, words: list[str]):
    with pytest.raises(ModelError) as caught:
        read_hf_config(BASE | change)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


def test_auto_map_of_a_known_architecture_is_data_only(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        config = read_hf_config(BASE | {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}})
    assert config == read_hf_config(BASE)
    assert "auto_map" in caplog.text
    with pytest.raises(ModelError, match="EvilForCausalLM"):
        read_hf_config(
            BASE | {"architectures": ["EvilForCausalLM"], "auto_map": {"AutoModel": "evil.Evil"}}
        )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(
        sorted({*CASES["qwen3_layer_types"]["config"], "rope_scaling", "attention_bias"})
    ),
    value=ANYTHING,
    architecture=st.sampled_from(sorted(CASES)),
)
def test_any_json_is_read_or_refused(key: str, value, architecture: str):
    try:
        read_hf_config(CASES[architecture]["config"] | {key: value})
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000


@settings(max_examples=100, deadline=None)
@given(
    key=st.sampled_from(
        [*GGUF, "qwen2.rope.scaling.type", "qwen2.attention.key_length", "qwen2.expert_count"]
    ),
    value=ANYTHING,
)
def test_any_gguf_value_is_read_or_refused(key: str, value):
    try:
        _read_gguf_config(GGUF | {key: value}, SHAPES)
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


def test_gguf_values_and_tensors_tell_the_shape():
    config = _read_gguf_config(GGUF, SHAPES)
    assert config == ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=96,
        hidden_size=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        windows=(0, 0),
        context_length=64,
        ropes=(RopeConfig(1e6),),
        rms_eps=1e-5,
        tie_embeddings=True,
        qkv_bias=True,
        eos_ids=(3, 5),
    )
    assert not _read_gguf_config(GGUF, SHAPES | {"output.weight": (96, 32)}).tie_embeddings
    scaling = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0}
    linear = _read_gguf_config(GGUF | scaling, SHAPES)
    assert linear.ropes == (RopeConfig(1e6, RopeScaling("linear", 2.0)),)
    scaling = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    yarn = _read_gguf_config(GGUF | scaling, SHAPES)
    scaling = RopeScaling("yarn", 4.0, 64, attention_factor=0.1 * math.log(4) + 1)
    assert yarn.ropes == (RopeConfig(1e6, scaling),)


def test_gguf_refusals():
    with pytest.raises(ModelError, match="unknown architecture 'mamba'"):
        _read_gguf_config(GGUF | {"general.architecture": "mamba"}, SHAPES)
    with pytest.raises(ModelError, match="mixture-of-experts"):
        _read_gguf_config(GGUF | {"qwen2.expert_count": 8}, SHAPES)
    with pytest.raises(ModelError, match="yarn_ext_factor"):
        _read_gguf_config(
            GGUF
            | {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.yarn_ext_factor": 0.1,
            },
            SHAPES,
        )
    with pytest.raises(ModelError, match="rope_freqs"):
        _read_gguf_config(GGUF, SHAPES, rope_factors={"rope_freqs.weight": (1.0, 2.0)})
    with pytest.raises(ModelError, match="token_embd"):
        _read_gguf_config(GGUF, {})


def test_tiny_configs_exist_for_all():
    for architecture, family in FAMILIES.items():
        config = tiny_config(family.name)
        assert (config.architecture, config.vocab_size) == (architecture, 512)


def test_experts_are_read_from_files_of_old_and_new_transformers():
    settings = {"num_experts_per_tok": 3, "norm_topk_prob": True}
    old, new = (
        read_hf_config(MIXTURE | settings | {key: 6})
        for key in ("num_experts", "num_local_experts")
    )
    assert old == new
    assert old.experts == ExpertsConfig(6, 3, renormalised=True)
    assert old.intermediate_size == 24 and old.qk_norm
    assert read_hf_config(MIXTURE).experts == ExpertsConfig(128, 8, renormalised=False)
    settings = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    assert read_hf_config(MIXTURE | settings).experts == ExpertsConfig(4, 2, renormalised=True)


def test_tiny_of_an_unknown_architecture():
    with pytest.raises(ModelError, match="known: llama, mistral, qwen2, qwen3"):
        tiny_config("gpt5")


#: As published: BAAI/bge-reranker-v2-m3, without what nobody reads.
BGE_RERANKER = {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}


def test_encoders_are_read():
    reranker = read_hf_config(BGE_RERANKER)
    assert reranker.encoder == EncoderConfig("classify", 1, first_position=2)
    assert (reranker.context_length, reranker.activation) == (8192, "gelu")
    assert (reranker.pool_layers, reranker.output_size) == ((), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, ["2 labels"]),
        ({"id2label": None}, ["2 labels"]),
        ({"position_embedding_type": "relative_key"}, ["position_embedding_type"]),
        ({"is_decoder": True}, ["is_decoder"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu", "gelu"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantised"]),
        ({"hidden_size": 1000}, ["hidden_size", "multiple"]),
        ({"max_position_embeddings": 3}, ["max_position_embeddings"]),
        ({"layer_norm_eps": 0}, ["layer_norm_eps"]),
    ],
)
def test_encoders_that_cannot_be_served_are_refused_by_name(change: dict, words: list[str]):
    with pytest.raises(ModelError) as caught:
        read_hf_config(BGE_RERANKER | change)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)

"""Make tests/data/reference_logits.json: logits of tiny random models as transformers computes
them.

Run where PyTorch and transformers are installed (PyTorch is not a dependency of Jitney): `python
tests/support/make_reference_logits.py NAME ...` makes the cases of these names anew and keeps the
others; without names it makes all. Written with torch 2.13.0 and transformers 5.23.0 (mixtures of
experts: 5.19.0; those of GREEDY and newer ones: 5.24.0). The weights are not stored: both sides
draw them with `random_tensor`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

OUTPUT = Path(__file__).parents[1] / "data" / "reference_logits.json"
#: Rows whose logits are stored: the first two, around a window of 8, and the end.
ROWS = [0, 1, 7, 8, 30, 47]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
#: Of models with prompts longer than SIZES allow.
LONGER = {"hidden_size": 64, "max_position_embeddings": 256, "pad_token_id": 0}
#: LongRoPE of 12 of the 16 numbers of a head.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
}
PHI3 = {"original_max_position_embeddings": 32}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
GPT_OSS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 600.0,
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
#: Four layers, of which the last one attends.
QWEN3_5 = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
#: Latent attention and a mixture behind one dense layer.
LATENT = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
#: Two head sizes, of which the larger rotates a quarter; prompts go past the windows of 8.
GEMMA4 = LONGER | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
#: Name -> (transformers' prefix, settings beside SIZES, and those of SIZES that it goes without).
CASES = {
    "llama2": (
        "Llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama2_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 24}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "qwen2": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen2_yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_layer_types": (
        "Qwen3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_shares": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 20,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe_window": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "gpt_oss": ("GptOss", GPT_OSS | {"sliding_window": 8}),
    # As published: experts in MXFP4, a window of 128.
    "gpt_oss_mxfp4": (
        "GptOss",
        GPT_OSS | {"intermediate_size": 128, "max_position_embeddings": 512},
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    # As E2B: the last layers read the keys and values of earlier ones.
    "gemma4": (
        "Gemma4Text",
        GEMMA4
        | {
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
        },
    ),
    # As 26B-A4B: keys serve as values, and there are experts beside the feed-forward.
    "gemma4_experts": (
        "Gemma4Text",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedText",
        GEMMA4 | {"attention_k_eq_v": True, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "olmo2_biases": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama_dynamic": (
        "Llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "ministral3": (
        "Ministral3",
        LONGER
        | {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "phi3": ("Phi3", LONGER | {"rope_parameters": LONGROPE} | PHI3),
    "phi3_short": (
        "Phi3",
        LONGER | {"rope_parameters": LONGROPE} | PHI3 | {"original_max_position_embeddings": 64},
    ),
    "smollm3": (
        "SmolLM3",
        LONGER
        | {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "olmo3": (
        "Olmo3",
        LONGER
        | {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "granite": ("Granite", LONGER | GRANITE),
    "granite4": (
        "GraniteMoeHybrid",
        LONGER
        | GRANITE
        | {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
        },
    ),
    "glm4": ("Glm4", LONGER | {"head_dim": 16}),
    "seed_oss": ("SeedOss", LONGER | {"head_dim": 24}),
    "exaone4": (
        "Exaone4",
        LONGER | {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3},
    ),
    "exaone4_full": (
        "Exaone4",
        LONGER | {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "cohere2": (
        "Cohere2",
        LONGER
        | {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "logit_scale": 0.25,
            "layer_norm_eps": 1e-4,
        },
    ),
    "qwen3_5": ("Qwen3_5Text", {**QWEN3_5, "linear_num_key_heads": 2}),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {
            **QWEN3_5,
            "without": ("intermediate_size",),
            "linear_num_key_heads": 1,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "lfm2": (
        "Lfm2",
        LONGER
        | {
            "without": ("rms_norm_eps",),
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "intermediate_size": 144,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # As published in fp8: matrices of both kinds of layers and of experts in blocks of 128 x 128.
    "qwen3_5_fp8": (
        "Qwen3_5MoeText",
        {
            **QWEN3_5,
            "without": ("intermediate_size",),
            "hidden_size": 256,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 64,
            "linear_key_head_dim": 32,
            "linear_num_key_heads": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # The second layer attends, the last two have experts; the router knows them by a correction.
    "lfm2_moe": (
        "Lfm2Moe",
        LONGER
        | {
            "without": ("rms_norm_eps",),
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 2,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "granite4_h": (
        "GraniteMoeHybrid",
        LONGER
        | GRANITE
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 2,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_d_head": 16,
            "mamba_chunk_size": 16,
            "time_step_limit": [0.2, 2.0],
        },
    ),
    # Layers that see all are the first and the last.
    "muse_glimmer": (
        "MuseGlimmerText",
        LONGER
        | {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "sliding_window": 8,
            "rms_norm_eps": 1e-2,
            "post_norm_eps": 1e-3,
            "output_multiplier": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # Layers of each kind, one of them behind another that mixes rows.
    "nemotron_h": (
        "NemotronH",
        LONGER
        | {
            "without": ("rms_norm_eps", "num_hidden_layers"),
            "hybrid_override_pattern": "MEM*EM-ME",
            "head_dim": 16,
            "layer_norm_epsilon": 1e-5,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            # A floor that transformers gives to prompts alone, not as it goes on.
            "time_step_min": 1e-9,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **QWEN3_5,
            "linear_num_key_heads": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe_dense": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": LATENT_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT
        | {
            "q_lora_rank": 32,
            "n_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        LATENT
        | {
            "without": ("first_k_dense_replace",),
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "mistral4": (
        "Mistral4",
        LATENT
        | {
            "q_lora_rank": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "rope_parameters": LATENT_YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        },
    ),
}
#: Cases whose experts are stored so.
MXFP4 = ("gpt_oss_mxfp4",)
#: Cases whose matrices are stored in fp8 with scales of blocks, and those that are not.
FP8 = ("qwen3_5_fp8",)
FP8_SETTINGS = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "gate", "shared_expert_gate"],
}
#: Prefix of a configuration's class -> that of its model's, where they differ.
MODELS = {
    "Gemma3Text": "Gemma3",
    "Gemma4Text": "Gemma4",
    "Gemma4UnifiedText": "Gemma4Unified",
    "MuseGlimmerText": "MuseGlimmer",
    "Qwen3_5Text": "Qwen3_5",
    "Qwen3_5MoeText": "Qwen3_5Moe",
}
#: The towers of models without a class for their text alone.
TOWERS = {
    "MuseGlimmerText": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
}
#: Contexts with which some are served: transformers takes the frequencies of a text's length.
CONTEXTS = {"llama_dynamic": 48, "phi3_short": 64}
#: Cases with greedy continuations, and lengths of the prompts that are continued: past windows of
#: 8, and original contexts of 32. Those of phi3 are all longer than this, of phi3_short shorter.
GREEDY = {
    "gpt_oss": (5, 20, 48),
    "gpt_oss_mxfp4": (1, 40, 125, 300),
    "gemma2": (5, 20, 48),
    "gemma3": (5, 20, 48),
    "gemma4": (1, 20, 180),
    "gemma4_experts": (1, 20, 180),
    "gemma4_unified": (20,),
    "olmo2": (5, 20, 48),
    "ministral3": (1, 20, 180),
    "phi3": (40, 180),
    "phi3_short": (1, 21, 40),
    "smollm3": (1, 20, 180),
    "olmo3": (1, 20, 180),
    "granite": (1, 20, 170),
    "granite4": (20,),
    "glm4": (1, 20, 180),
    "seed_oss": (20,),
    "exaone4": (1, 20, 180),
    "cohere2": (1, 20, 180),
    "qwen3_5": (1, 20, 200),
    "qwen3_5_moe": (1, 20, 200),
    "qwen3_next": (1, 20, 200),
    "lfm2": (1, 20, 180),
    "lfm2_moe": (1, 20, 180),
    "granite4_h": (1, 20, 180),
    "nemotron_h": (1, 20, 180),
    "muse_glimmer": (1, 20, 180),
    "qwen3_moe_dense": (20,),
    "deepseek_v2": (1, 20, 180),
    "deepseek_v3": (20,),
    "glm4_moe_lite": (1, 20, 180),
    "mistral4": (1, 20, 180),
}
#: Tokens of a continuation: past every window of 8.
COUNT = 16
#: Spread of the embeddings of some: Gemma scales them up, and would repeat a token for ever.
SPREADS = {
    "gemma2": 0.2,
    "gemma3": 0.15,
    "gemma4": 0.15,
    "gemma4_experts": 0.15,
    "gemma4_unified": 0.15,
}


def random_tensor(name: str, shape: tuple[int, ...], spread: float = 1.0) -> np.ndarray:
    """float32 weights that depend on the tensor's name and shape alone; spread: of embeddings."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("_blocks"):
        return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, shape, np.uint8)
    if name.endswith("_scales"):  # magnitudes of experts' weights up to 1.5, or 6 of gates
        return (124 + 2 * ("gate" in name) + np.clip(drawn, -2, 0)).astype(np.uint8)
    if name.endswith("_scale_inv"):  # of numbers up to 448
        return ((1.0 + 0.5 * np.tanh(drawn)) / 64).astype(np.float32)
    if "norm" in name or name.endswith(("_scalar", "_scale", ".scale")):
        drawn = 1.0 + 0.2 * drawn
    elif name.endswith((".bias", "_proj_bias")):
        drawn = 0.3 * drawn
    elif name.endswith("sinks"):  # some of them outweigh every key, some no key
        drawn = 4 * drawn
    elif name.endswith(".A_log"):  # a memory of some tokens, or of some hundred
        drawn = 1.5 * drawn - 3.0
    elif "embed" in name:
        drawn = spread * drawn
    else:
        drawn = 1.5 * drawn / np.sqrt(shape[-1])
    return drawn.astype(np.float32)


def prompt(count: int = 48) -> np.ndarray:
    """Token ids; a longer prompt begins with a shorter one."""
    return np.random.default_rng(7).integers(4, SIZES["vocab_size"], count)


def greedy(model, lengths: tuple[int, ...]) -> dict[str, list[list[float]]]:
    """Greedy continuations of the prompts of these lengths, each token from a whole forward, and
    the log-probabilities of its tokens.
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
    found = {}
    for key, shape in shapes.items():
        if key.endswith("_proj"):
            experts, inputs, outputs = shape
            found[f"{key}_blocks"] = experts, outputs, inputs // 32, 16
            found[f"{key}_scales"] = experts, outputs, inputs // 32
        else:
            found[key] = shape
    return found


def in_fp8(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of a file whose matrices are in fp8, with their scales."""
    kept = tuple(f"{name}.weight" for name in FP8_SETTINGS["modules_to_not_convert"])
    scales = {
        f"{key}_scale_inv": tuple(-(-size // 128) for size in shape)
        for key, shape in shapes.items()
        if len(shape) == 2 and not key.endswith(("embed_tokens.weight", *kept))
    }
    return dict(shapes) | scales


def save(state: dict[str, np.ndarray], file: Path) -> None:
    """Tensors in float32, but for those with scales of blocks, which become fp8 times 64."""
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = {key: torch.from_numpy(tensor) for key, tensor in state.items()}
    for key in state:
        if f"{key}_scale_inv" in state:
            tensors[key] = (64 * tensors[key]).to(torch.float8_e4m3fn)
    save_torch(tensors, file, {"format": "pt"})


def whole_model(prefix: str, config):
    """The model of a text configuration, with its tower if there is no class without."""
    import transformers

    name = MODELS.get(prefix, prefix)
    if prefix not in TOWERS:
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()
    config = getattr(transformers, f"{name}Config")(
        text_config=config.to_dict(), vision_config=TOWERS[prefix], attn_implementation="eager"
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def made(name: str, prefix: str, settings: dict) -> tuple:
    """transformers' model of a case in float32, and the case: its config.json and tensor shapes."""
    import torch
    import transformers

    left_out = ("without", *settings.get("without", ()))
    wanted = {key: value for key, value in (SIZES | settings).items() if key not in left_out}
    config = getattr(transformers, f"{prefix}Config")(**wanted, attn_implementation="eager")
    architecture = f"{MODELS.get(prefix, prefix)}ForCausalLM"
    model = whole_model(prefix, config)
    text = "model." if prefix not in TOWERS else "model.language_model."
    spread = SPREADS.get(name, 1.0)
    # By the names of the file: in memory experts are one tensor.
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {
            key.replace(text, "model.", 1): tensor.shape
            for key, tensor in load_file(file).items()
            if prefix not in TOWERS or key.startswith((text, "lm_head."))
        }
        options = {"attn_implementation": "eager"}
        if name in MXFP4:
            shapes = in_mxfp4(shapes)
            config.quantization_config = {"quant_method": "mxfp4"}
            config.save_pretrained(folder)
            options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        if name in FP8:
            shapes = in_fp8(shapes)
            config.quantization_config = FP8_SETTINGS
            config.save_pretrained(folder)
            options["quantization_config"] = transformers.FineGrainedFP8Config(
                dequantize=True, modules_to_not_convert=FP8_SETTINGS["modules_to_not_convert"]
            )
        state = {key: random_tensor(key, shape, spread) for key, shape in shapes.items()}
        save({key.replace("model.", text, 1): tensor for key, tensor in state.items()}, file)
        model = type(model).from_pretrained(folder, dtype=torch.float32, **options).eval()
    written = json.loads(config.to_json_string(use_diff=True)) | {"architectures": [architecture]}
    case = {
        "config": written,
        "shapes": {key: list(tensor.shape) for key, tensor in state.items()},
        "weights_sum": float(
            sum(np.abs(tensor.astype(np.float64)).sum() for tensor in state.values())
        ),
    }
    if name in MXFP4:
        case["config"]["quantization_config"] = {"quant_method": "mxfp4"}
    if name in FP8:
        case["config"]["quantization_config"] = FP8_SETTINGS
    if spread != 1.0:
        case["embed_spread"] = spread
    return model, case


def reference(name: str, prefix: str, settings: dict) -> dict:
    """A case with float32 logits of ROWS, and greedy continuations."""
    import torch

    model, case = made(name, prefix, settings)
    with torch.no_grad():
        logits = model(torch.from_numpy(prompt())[None]).logits[0, ROWS].numpy()
    case["logits"] = [[round(float(value), 6) for value in row] for row in logits]
    if name in GREEDY:
        case["greedy"] = greedy(model, GREEDY[name])
    if name in CONTEXTS:
        case["context"] = CONTEXTS[name]
    return case


def main(names: list[str]) -> None:
    """Make the cases of these names, or all; the file has all cases in the order of CASES."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; known: {', '.join(CASES)}")
    cases: dict[str, dict] = {}
    if names:
        cases = json.loads(OUTPUT.read_text())["cases"]
    cases |= {name: reference(name, *CASES[name]) for name in names or CASES}
    cases = {name: cases[name] for name in CASES if name in cases}
    OUTPUT.write_text(json.dumps({"rows": ROWS, "cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Cases of the reference logits in GGUF files, with the names, shapes, orders and key-values of
llama.cpp's converter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from llamas import permuted

type Tensors = dict[str, np.ndarray]

#: `model_type` -> `general.architecture`, where that is another.
ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
}
#: Model types whose queries and keys are stored in pairs of rows.
PAIRED = {"mixtral", "granite", "granitemoehybrid", "nemotron_h", "ministral3", "smollm3"}
#: Model types whose norms are stored as 1 + w.
_OFFSET = {"gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
_STACK = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")


def converted(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Key-values and tensors of a model's file; an array of bytes holds blocks of MXFP4."""
    kind = config["model_type"]
    name = ARCHITECTURES.get(kind, kind)
    if kind == "granitemoehybrid" and set(config["layer_types"]) == {"full_attention"}:
        name = "granite"
    own = {**_common(config), **_own(kind, config)}
    keys = {f"{name}.{key}": value for key, value in own.items() if value is not None}
    keys |= {"general.architecture": name, "tokenizer.ggml.eos_token_id": config["eos_token_id"]}
    arch = next(arch for arch, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(arch, own["block_count"])
    stored: Tensors = {}
    for from_folder, tensor in _converted(kind, config, tensors):
        in_file = names.get_name(from_folder, try_suffixes=(".weight", ".bias"))
        if from_folder.startswith(("blk.", "rope_f")):
            in_file = from_folder
        assert in_file is not None, from_folder
        stored[in_file] = np.ascontiguousarray(tensor)
    return keys, stored


def write_file(
    path: Path,
    keys: dict[str, Any],
    tensors: Tensors,
    kinds: Mapping[str, str] = MappingProxyType({}),
    tensors_a_file: int = 0,
) -> Path:
    """Write the file and return its path. kinds: block types of some tensors, by the end of their
    names. tensors_a_file: most tensors per file if the library splits it, with its own file names;
    0: one file.
    """
    arch = keys["general.architecture"]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_a_file)
    for key, value in keys.items():
        if key != "general.architecture":  # the writer adds it
            _add(writer, key, value)
    for name, tensor in tensors.items():
        blocks = gguf.GGMLQuantizationType.MXFP4 if tensor.dtype == np.uint8 else None
        for end, kind in kinds.items():
            if name.endswith(end):
                blocks = gguf.GGMLQuantizationType[kind]
                tensor = gguf.quants.quantize(tensor, blocks)
        writer.add_tensor(name, tensor, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _common(config: dict[str, Any]) -> dict[str, Any]:
    """Key-values that the converter writes for every model; None: left out."""
    rope = config.get("rope_parameters", {"rope_type": "default"})
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim")
    keys: dict[str, Any] = {
        "block_count": config.get("num_hidden_layers"),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("norm_eps")),
        "rope.freq_base": rope.get("rope_theta"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return keys


def _own(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Key-values of the family."""
    match kind:
        case "gpt_oss":
            return {
                "attention.sliding_window": config["sliding_window"],
                "expert_feed_forward_length": config["intermediate_size"],
            }
        case "qwen3_moe":
            return {"expert_feed_forward_length": config["moe_intermediate_size"]}
        case "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next":
            return _of_delta_nets(config)
        case "lfm2" | "lfm2_moe":
            return _of_short_convs(config)
        case "granitemoehybrid":
            return _of_granite(config)
        case "nemotron_h":
            return _of_nemotron(config)
        case "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite" | "mistral4":
            return _of_latents(config)
        case "gemma4_text" | "gemma4_unified_text":
            return _of_gemma4(config)
        case "ministral3":
            return {
                "rope.scaling.yarn_log_multiplier": 1.0,
                "attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"],
            }
        case "phi3":
            return {
                "rope.dimension_count": 12,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.attn_factor": math.sqrt(1 + math.log(256 / 32) / math.log(32)),
            }
        case "granite":
            return _granite_factors(config)
        case "glm4":
            return {"rope.dimension_count": config["head_dim"] // 2}
        case "olmo3" | "exaone4":
            return {"attention.sliding_window": config["sliding_window"]}
        case "gemma3_text":
            return {
                "attention.sliding_window": config["sliding_window"],
                "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
            }
        case "cohere2":
            return {
                "attention.sliding_window": config["sliding_window"],
                "attention.layer_norm_rms_epsilon": config["layer_norm_eps"],
                "logit_scale": config["logit_scale"],
            }
    return {}


def _of_delta_nets(config: dict[str, Any]) -> dict[str, Any]:
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    share = config["rope_parameters"]["partial_rotary_factor"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * size,
        "full_attention_interval": 4,
        "rope.dimension_count": int(share * config["head_dim"]),
        "rope.dimension_sections": [11, 11, 10, 0],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _heads_by_layer(config: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    heads = config["num_key_value_heads"]
    return {"attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds]}


def _of_short_convs(config: dict[str, Any]) -> dict[str, Any]:
    keys = {"shortconv.l_cache": config["conv_L_cache"], "vocab_size": config["vocab_size"]}
    if config["model_type"] == "lfm2":
        factor, step = config["block_ffn_dim_multiplier"], config["block_multiple_of"]
        inner = int(factor * int(2 * config["intermediate_size"] / 3))
        keys["feed_forward_length"] = step * ((inner + step - 1) // step)
    else:
        keys |= {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        }
    return keys | _heads_by_layer(config, config["layer_types"])


def _granite_factors(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _of_granite(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["mamba_n_heads"]
    return _granite_factors(config) | {
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": False,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["mamba_d_head"],
        **_heads_by_layer(config, config["layer_types"]),
    }


def _of_nemotron(config: dict[str, Any]) -> dict[str, Any]:
    heads, kinds = config["mamba_num_heads"], config["layers_block_type"]
    inner = config["moe_intermediate_size"]
    return {
        "block_count": len(kinds),
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "rope.scaling.finetuned": False,
        "feed_forward_length": [inner if kind == "moe" else 0 for kind in kinds],
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["mamba_head_dim"],
        **_heads_by_layer(config, kinds),
    }


def _of_latents(config: dict[str, Any]) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    scale = config["rope_parameters"].get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": scale and 0.1 * scale,
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
    }


def _of_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    kinds, readers = config["layer_types"], config["num_kv_shared_layers"]
    own = {int(layer): one for layer, one in config["per_layer_config"].items()}
    heads, inner = config["num_key_value_heads"], config["intermediate_size"]
    first_reader = len(kinds) - readers
    wide = 2 if config["use_double_wide_mlp"] else 1
    full = next(iter(own.values()))["head_dim"]
    return {
        "attention.shared_kv_layers": readers,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [
            own.get(layer, {}).get("num_key_value_heads", heads) for layer in range(len(kinds))
        ],
        "feed_forward_length": [
            inner if layer < first_reader else wide * inner for layer in range(len(kinds))
        ],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_used_count": config.get("top_k_experts"),
    }


def _of_gemma4_tensor(name: str) -> str:
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest == "router.scale":
        return f"blk.{layer}.ffn_gate_inp.scale"
    if rest == "router.per_expert_scale":
        return f"blk.{layer}.ffn_down_exps.scale"
    bare = "layer_scalar", "experts.gate_up_proj", "experts.down_proj"
    return f"{name}.weight" if rest in bare else name


def _divisors(config: dict[str, Any]) -> np.ndarray:
    """Divisors of frequencies in Gemma 4's full-attention layers, which rotate few pairs."""
    full = config["rope_parameters"]["full_attention"]
    size = next(iter(config["per_layer_config"].values()))["head_dim"]
    rotated = int(size * full["partial_rotary_factor"] / 2)
    return np.array([1.0] * rotated + [1e30] * (size // 2 - rotated), np.float32)


def _converted(kind: str, config: dict[str, Any], tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """The tensors, with the names in the gguf library's name map, or with those of the file."""
    if "gemma4" in kind:
        yield "rope_freqs.weight", _divisors(config)
    if kind == "phi3":
        for length in ("short", "long"):
            factors = config["rope_parameters"][f"{length}_factor"]
            yield f"rope_factors_{length}.weight", np.array(factors, np.float32)
    for name, tensor in _with_stacks(tensors).items():
        if kind == "gpt_oss":
            yield from _of_gpt_oss(name, tensor, tensors)
        elif "linear_attn" in name:
            yield from _of_delta_net(kind, config, name, tensor)
        elif ".mamba." in name or (".mixer." in name and name.endswith(_OF_MAMBA)):
            groups = "mamba_n_groups" if kind == "granitemoehybrid" else "n_groups"
            yield _of_mamba(name, tensor, config[groups])
        elif "input_linear" in name:
            yield from _of_input_linear(name, tensor, has_experts=bool(config["num_local_experts"]))
        elif "shared_mlp.output_linear" in name and not config["num_local_experts"]:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        elif "gemma4" in kind:
            yield _of_gemma4_tensor(name), tensor
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield f"{name}.weight", tensor
        elif "kv_b_proj" in name:
            yield from _of_kv_b(config, name, tensor)
        elif kind in PAIRED and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            yield name, permuted(tensor, config[heads])
        elif "conv.conv" in name:
            yield name, tensor.squeeze(1)
        elif kind in _OFFSET and name.endswith("norm.weight"):
            yield name, tensor + np.float32(1)
        else:
            yield _named(name), tensor


#: Name suffixes of Mamba-2 tensors, except its opening and closing matrices.
_OF_MAMBA = ("A_log", "D", "dt_bias", "conv1d.weight", "mixer.norm.weight")


def _named(name: str) -> str:
    """The tensor's name in the gguf library's name map."""
    if "experts.w" in name:
        name = name.replace("model.layers", "layers")
    if "mixer.experts" in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp")
    for bias in ("e_score_correction_bias", "expert_bias"):
        if name.endswith(bias):
            name = name.replace(bias, f"{bias.replace('_bias', '')}.bias")
    return name.replace("feed_forward.expert.bias", "feed_forward.expert_bias.bias")


def _of_delta_net(
    kind: str, config: dict[str, Any], name: str, tensor: np.ndarray
) -> Iterator[tuple[str, Any]]:
    """A tensor of a gated delta net as stored. Decays are stored as they are used. In Qwen3.5 the
    first value heads of all key heads come before the second ones, also in the columns of the
    closing matrix.
    """
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    size, of_keys = config["linear_value_head_dim"], config["linear_key_head_dim"]
    before = 2 * keys * of_keys

    def tiled(values: np.ndarray, width: int) -> np.ndarray:
        if kind == "qwen3_next":
            return values
        apart = values.reshape(keys, heads // keys, width, *values.shape[1:])
        return apart.swapaxes(0, 1).reshape(values.shape)

    match name.partition("linear_attn.")[2]:
        case "A_log":
            yield name, tiled(-np.exp(tensor), 1)
        case "dt_bias":
            yield name.replace("dt_bias", "dt_proj.bias"), tiled(tensor, 1)
        case "in_proj_a.weight" | "in_proj_b.weight":
            yield name, tiled(tensor, 1)
        case "in_proj_z.weight":
            yield name, tiled(tensor, size)
        case "in_proj_qkv.weight" | "conv1d.weight":
            tensor = tensor.squeeze(1) if "conv1d" in name else tensor
            yield name, np.concatenate([tensor[:before], tiled(tensor[before:], size)])
        case "out_proj.weight":
            yield name, tiled(tensor.T, size).T
        case "in_proj_qkvz.weight":
            shared = heads // keys * size
            parts = np.split(
                tensor.reshape(keys, -1, tensor.shape[1]),
                np.cumsum([of_keys, of_keys, shared]),
                axis=1,
            )
            rows = [part.reshape(-1, tensor.shape[1]) for part in parts]
            yield name.replace("qkvz", "qkv"), np.concatenate(rows[:3])
            yield name.replace("qkvz", "z"), rows[3]
        case _:
            yield name, tensor


def _of_mamba(name: str, tensor: np.ndarray, groups: int) -> tuple[str, Any]:
    match name.rpartition(".")[2], name.rpartition(".")[0].rpartition(".")[2]:
        case "A_log", _:
            return name, -np.exp(tensor)[:, None]
        case "D", _:
            return name, tensor[:, None]
        case "dt_bias", _:
            return name.replace("dt_bias", "dt_proj.bias"), tensor
        case "weight", "conv1d":
            return name, tensor.squeeze(1)
        case "weight", "norm":
            return name, tensor.reshape(groups, -1)
    return name, tensor


def _of_input_linear(
    name: str, tensor: np.ndarray, *, has_experts: bool
) -> Iterator[tuple[str, Any]]:
    """Gates and ups of Granite 4's experts, or of its shared feed-forward."""
    layer = name.partition(".layers.")[2].partition(".")[0]
    kind = "mlp.experts" if "block_sparse_moe" in name else "mlp.shared_expert"
    if not has_experts:
        kind = "mlp"
    for matrix, part in zip(("gate", "up"), np.split(tensor, 2, axis=-2), strict=True):
        yield f"model.layers.{layer}.{kind}.{matrix}_proj.weight", part


def _of_kv_b(config: dict[str, Any], name: str, tensor: np.ndarray) -> Iterator[tuple[str, Any]]:
    """The matrices of keys, transposed, and of values."""
    plain = config["qk_nope_head_dim"]
    heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
    yield name.replace("kv_b", "k_b"), heads[:, :plain].swapaxes(1, 2)
    yield name.replace("kv_b", "v_b"), heads[:, plain:]


def _with_stacks(tensors: Tensors) -> Tensors:
    """The tensors with the matrices of all experts in one tensor, [X, O, I]."""
    stacks: dict[str, list[np.ndarray]] = {}
    rest: Tensors = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if match is None:
            rest[name] = tensor
            continue
        prefix, _, matrix = match.groups()
        prefix = prefix.replace("block_sparse_moe", "feed_forward")
        stacks.setdefault(f"{prefix}.experts.{matrix}.weight", []).append(tensor)
    return rest | {name: np.stack(matrices) for name, matrices in stacks.items()}


def _of_gpt_oss(name: str, tensor: np.ndarray, others: Tensors) -> Iterator[tuple[str, Any]]:
    """A tensor of gpt-oss as stored. Experts are [X, I, O], or blocks [X, O, I / 32, 16]; gates and
    ups alternate.
    """
    layer, _, matrix = name.partition(".experts.")
    if not matrix:
        yield name.replace("sinks", "sinks.weight"), tensor
        return
    if matrix.endswith("_scales"):
        return
    ending = "bias" if matrix.endswith("_bias") else "weight"
    if matrix.endswith("_blocks"):
        tensor = _mxfp4(tensor, others[name.replace("_blocks", "_scales")])
    elif ending == "weight":
        tensor = tensor.swapaxes(1, 2)
    if matrix.startswith("gate_up"):
        yield f"{layer}.experts.gate_proj.{ending}", tensor[:, ::2]
        yield f"{layer}.experts.up_proj.{ending}", tensor[:, 1::2]
    else:
        yield f"{layer}.experts.down_proj.{ending}", tensor


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks with bytes of inputs (2j, 2j + 1) -> blocks of an exponent and bytes of inputs (j, j +
    16).
    """
    inputs = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
    codes = inputs[..., :16] | inputs[..., 16:] << 4
    whole = np.concatenate([scales[..., None], codes], axis=-1)
    return whole.reshape(*whole.shape[:2], -1)

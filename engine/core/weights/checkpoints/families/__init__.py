"""The supported families of models, and the reader of each one's configuration.

To add one: its reader in a file beside this one, a `Family` in FAMILIES, and its module in
`jitney.engine.core.models.registry`. Jax-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.core.weights.checkpoints import gguf_families
from jitney.engine.core.weights.checkpoints.config_fields import TensorFields
from jitney.engine.core.weights.checkpoints.families import (
    dense,
    encoders,
    gemma,
    hybrids,
    latent,
    mixtures,
    qwen,
    tiny,
)
from jitney.engine.core.weights.checkpoints.layer_configs import (
    EncoderConfig,
    ExpertsConfig,
    RopeConfig,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig


@dataclass(frozen=True)
class Family:
    """The readers of one family's files."""

    #: In `tiny-random:NAME`.
    name: str
    #: The configuration in a config.json, but for `architecture`; raises ModelError.
    from_hf: Callable[[JsonObject], ModelConfig]
    #: From the metadata of a GGUF file and the common configuration; None: GGUF is not supported,
    #: or such files have another family's name.
    from_gguf: Callable[[TensorFields, ModelConfig], ModelConfig] | None = None
    #: How its tiny random model differs from tiny.SMALLEST.
    tiny: JsonDict = field(default_factory=dict)
    #: `general.architecture` of its GGUF files; empty: as `name`.
    gguf: str = ""

    @property
    def gguf_name(self) -> str:
        """`general.architecture` of its GGUF files."""
        return self.gguf or self.name


#: Class name in `architectures` of config.json -> its family.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", dense.llama, gguf_families.llama),
    "MistralForCausalLM": Family("mistral", dense.mistral, None, {"windows": (32, 32)}),
    "Qwen2ForCausalLM": Family("qwen2", qwen.qwen2, gguf_families.plain, {"qkv_bias": True}),
    "Qwen3ForCausalLM": Family("qwen3", qwen.qwen3, gguf_families.plain, {"qk_norm": True}),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        qwen.qwen3_moe,
        gguf_families.mixture,
        {"qk_norm": True, "experts": ExpertsConfig(8, 2, True)},
        "qwen3moe",
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5", qwen.qwen3_5, gguf_families.qwen3_5, tiny.QWEN3_5, "qwen35"
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe", qwen.qwen3_5_moe, gguf_families.qwen3_5_moe, tiny.QWEN3_5_MOE, "qwen35moe"
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", qwen.qwen3_next, gguf_families.qwen3_5_moe, tiny.QWEN3_5_MOE, "qwen3next"
    ),
    "Lfm2ForCausalLM": Family("lfm2", hybrids.lfm2, gguf_families.lfm2, tiny.LFM2),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe",
        hybrids.lfm2_moe,
        gguf_families.lfm2_moe,
        tiny.LFM2
        | {
            "experts": ExpertsConfig(
                8,
                2,
                True,
                scoring="sigmoid",
                choice_bias=True,
                dense_layers=frozenset({0}),
                dense_size=96,
            ),
        },
        "lfm2moe",
    ),
    "MixtralForCausalLM": Family(
        "mixtral", mixtures.mixtral, None, {"experts": ExpertsConfig(4, 2, True)}
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        gemma.gemma2,
        gguf_families.gemma2,
        tiny.GEMMA | {"attention_softcap": 5.0, "logit_softcap": 10.0},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        gemma.gemma3,
        gguf_families.gemma3,
        tiny.GEMMA3,
    ),
    "Gemma4ForCausalLM": Family("gemma4", gemma.gemma4, gguf_families.gemma4, tiny.GEMMA4),
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4_unified", gemma.gemma4_unified, None, tiny.GEMMA4_EXPERTS
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss", mixtures.gpt_oss, gguf_families.gpt_oss, tiny.GPT_OSS, "gpt-oss"
    ),
    "Olmo2ForCausalLM": Family("olmo2", dense.olmo2, gguf_families.olmo, {"wide_qk_norm": True}),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        dense.olmo3,
        None,
        {"wide_qk_norm": True, "windows": (32, 0), "ropes": (RopeConfig(100.0), RopeConfig())},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        dense.exaone4,
        gguf_families.exaone4,
        {"qk_norm": True, "windows": (32, 0), "ropes": (RopeConfig(), None)},
    ),
    "Ministral3ForCausalLM": Family(
        "mistral3",
        dense.ministral3,
        gguf_families.mistral3,
        {"ropes": (RopeConfig(query_beta=0.5, query_context=64),)},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", dense.smollm3, gguf_families.smollm3, {"ropes": (RopeConfig(), None)}
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss", dense.seed_oss, gguf_families.plain, {"qkv_bias": True}
    ),
    "Phi3ForCausalLM": Family(
        "phi3", dense.phi3, gguf_families.plain, {"ropes": (RopeConfig(dims=12),)}
    ),
    "Glm4ForCausalLM": Family(
        "glm4", dense.glm4, gguf_families.plain, {"qkv_bias": True, "ropes": (RopeConfig(dims=8),)}
    ),
    "GraniteForCausalLM": Family("granite", dense.granite, gguf_families.granite, tiny.GRANITE),
    "GraniteMoeHybridForCausalLM": Family(
        "granitehybrid", hybrids.granite4, gguf_families.granite_hybrid, tiny.GRANITE_H
    ),
    "MuseGlimmerForCausalLM": Family(
        "muse_glimmer",
        dense.muse_glimmer,
        None,
        {
            "windows": (32, 0),
            "ropes": (RopeConfig(), None),
            "qk_norm": True,
            "float32_norms": True,
            "post_norm_eps": 1e-8,
            "attention_gate": True,
            "gates_apart": True,
            "query_scalar": 1.0,
            "logit_softcap": 10.0,
        },
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", hybrids.nemotron_h, gguf_families.nemotron_h, tiny.NEMOTRON_H
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        dense.cohere2,
        gguf_families.cohere2,
        {
            "windows": (32, 0),
            "ropes": (RopeConfig(), None),
            "centred_norms": True,
            "logit_factor": 0.5,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2", latent.deepseek_v2, gguf_families.deepseek2, tiny.DEEPSEEK_V2, "deepseek2"
    ),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", latent.deepseek_v3, None, tiny.PREDICTING),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", latent.glm4_moe_lite, None, tiny.PREDICTING),
    "Mistral4ForCausalLM": Family(
        "mistral4",
        latent.mistral4,
        gguf_families.mistral4,
        tiny.LATENT | {"ropes": (RopeConfig(query_beta=0.5, query_context=64),)},
    ),
    "BertModel": Family("bert", encoders.bert, None, tiny.of_encoder(EncoderConfig("cls", 2))),
    "BertForSequenceClassification": Family(
        "bert_reranker",
        encoders.scoring(encoders.bert),
        None,
        tiny.of_encoder(EncoderConfig("classify", 2, separator_id=259)),
    ),
    "XLMRobertaModel": Family(
        "xlm_roberta", encoders.xlm_roberta, None, tiny.of_encoder(EncoderConfig("mean", 1, 2))
    ),
    "XLMRobertaForSequenceClassification": Family(
        "xlm_roberta_reranker",
        encoders.scoring(encoders.xlm_roberta),
        None,
        tiny.of_encoder(EncoderConfig("classify", 1, 2)),
    ),
}
#: Class names in `architectures` of models that also see or hear; their text model is served.
#: Each with the `model_type` of its text_config -> class name of the text model.
WRAPPERS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "Cohere2VisionForConditionalGeneration": {"cohere2": "Cohere2ForCausalLM"},
    "MuseGlimmerForConditionalGeneration": {"muse_glimmer_text": "MuseGlimmerForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
}


def tiny_config(name: str = "llama") -> ModelConfig:
    """The configuration behind `tiny-random[:NAME]`. Raises ModelError for an unknown family."""
    for architecture, family in FAMILIES.items():
        if family.name == name:
            return replace(tiny.SMALLEST, architecture=architecture, **family.tiny)
    names = ", ".join(family.name for family in FAMILIES.values())
    raise ModelError(f"tiny-random has no architecture {name!r}; known: {names}")

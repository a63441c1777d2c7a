"""The architectures by the name in a checkpoint's config, one line each, and what a config says without weights."""

from __future__ import annotations

import re
from typing import Any

from quire.models.base import CausalLM, Model, ModelDescription
from quire.types.errors import ModelError, UnknownArchitectureError
from quire.utils.registry import Registry

ARCHITECTURES: Registry[type[Model]] = Registry(
    "architecture",
    "quire.models",
    {
        "BailingHybridForCausalLM": "bailing_hybrid:BailingHybrid",
        "BambaForCausalLM": "bamba:Bamba",
        "BertForMaskedLM": "bert:Bert",
        "BertModel": "bert:Bert",
        "DebertaV2ForMaskedLM": "deberta:DebertaV2",
        "DebertaV2Model": "deberta:DebertaV2",
        "DeepseekV2ForCausalLM": "deepseek_v2:DeepseekV2",
        "DeepseekV3ForCausalLM": "deepseek_v3:DeepseekV3",
        "DeepseekV32ForCausalLM": "deepseek_v3:DeepseekV32",
        "DistilBertForMaskedLM": "distilbert:DistilBert",
        "DistilBertModel": "distilbert:DistilBert",
        "Dots1ForCausalLM": "dots1:Dots1",
        "Ernie4_5_MoeForCausalLM": "ernie4_5_moe:Ernie45Moe",
        "EuroBertForMaskedLM": "llama:EuroBert",
        "EuroBertModel": "llama:EuroBert",
        "FalconH1ForCausalLM": "falcon_h1:FalconH1",
        "FalconMambaForCausalLM": "mamba:Mamba",
        "Gemma2ForCausalLM": "gemma:Gemma2",
        "Gemma3ForCausalLM": "gemma:Gemma3",
        "Glm4MoeForCausalLM": "glm4_moe:Glm4Moe",
        "Gemma3TextModel": "gemma:Gemma3",
        "Glm4MoeLiteForCausalLM": "deepseek_v3:Glm4MoeLite",
        "GlmMoeDsaForCausalLM": "deepseek_v3:GlmMoeDsa",
        "GptOssForCausalLM": "gpt_oss:GptOss",
        "GraniteForCausalLM": "granite:Granite",
        "GraniteMoeForCausalLM": "granite:GraniteMoe",
        "GraniteMoeHybridForCausalLM": "granite_moe_hybrid:GraniteMoeHybrid",
        "GteForMaskedLM": "gte:Gte",
        "GteModel": "gte:Gte",
        "HunYuanMoEV1ForCausalLM": "hunyuan_moe:HunYuanMoe",
        "JambaForCausalLM": "jamba:Jamba",
        "JinaEmbeddingsV3ForMaskedLM": "gte:JinaEmbeddingsV3",
        "JinaEmbeddingsV3Model": "gte:JinaEmbeddingsV3",
        "KimiLinearForCausalLM": "kimi_linear:KimiLinear",
        "Lfm2ForCausalLM": "lfm2:Lfm2",
        "Lfm2MoeForCausalLM": "lfm2:Lfm2Moe",
        "Llama4ForCausalLM": "llama4:Llama4",
        "LlamaForCausalLM": "llama:Llama",
        "LongcatFlashForCausalLM": "longcat_flash:LongcatFlash",
        "MPNetForMaskedLM": "mpnet:MPNet",
        "MPNetModel": "mpnet:MPNet",
        "Mamba2ForCausalLM": "mamba2:Mamba2",
        "MambaForCausalLM": "mamba:Mamba",
        "MiniCPM3ForCausalLM": "minicpm3:MiniCPM3",
        "MiniMaxForCausalLM": "minimax:MiniMax",
        "MiniMaxM2ForCausalLM": "mixtral:MiniMaxM2",
        "MistralForCausalLM": "llama:Mistral",
        "MixtralForCausalLM": "mixtral:Mixtral",
        "ModernBertForMaskedLM": "modernbert:ModernBert",
        "ModernBertModel": "modernbert:ModernBert",
        "NemotronHForCausalLM": "nemotron_h:NemotronH",
        "NomicBertForMaskedLM": "nomic_bert:NomicBert",
        "NomicBertModel": "nomic_bert:NomicBert",
        "Olmo2ForCausalLM": "llama:Olmo2",
        "OlmoeForCausalLM": "olmoe:Olmoe",
        "Phi3ForCausalLM": "llama:Phi3",
        "PhiMoEForCausalLM": "mixtral:PhiMoe",
        "PhimoeForCausalLM": "mixtral:PhiMoe",
        "Qwen2ForCausalLM": "qwen2:Qwen2",
        "Qwen2MoeForCausalLM": "qwen2_moe:Qwen2Moe",
        "Qwen3ForCausalLM": "qwen2:Qwen3",
        "Qwen3MoeForCausalLM": "qwen2_moe:Qwen3Moe",
        "Qwen3NextForCausalLM": "qwen3_next:Qwen3Next",
        "Qwen3_5ForCausalLM": "qwen3_5:Qwen35",
        "Qwen3_5MoeForCausalLM": "qwen3_5:Qwen35Moe",
        "RobertaForMaskedLM": "roberta:Roberta",
        "RobertaModel": "roberta:Roberta",
        "SmolLM3ForCausalLM": "llama:SmolLM3",
        "XLMRobertaForMaskedLM": "roberta:Roberta",
        "XLMRobertaModel": "roberta:Roberta",
    },
    error=UnknownArchitectureError,
)

_HEAD = re.compile(r"(For(SequenceClassification|TokenClassification|RewardModel|ProcessRewardModel)|Model)$")
_LONGEST = 1 << 24  # tokens: the size limit of position tables


def architecture_of(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not names:
        raise ModelError('the model config has no "architectures"; it must name one, such as "LlamaForCausalLM"')
    return str(names[0])


def model_class(config: dict[str, Any]) -> type[Model]:
    name = architecture_of(config)
    # A classifier or an embedder is called by what is on top of the decoder or encoder that it is.
    below_head = _HEAD.sub("", name)
    known = (other for other in (name, f"{below_head}Model", f"{below_head}ForCausalLM") if other in ARCHITECTURES)
    return ARCHITECTURES.get(next(known, name))


def generator_class(config: dict[str, Any]) -> type[CausalLM]:
    """The class of a model that generates tokens; ModelError if it is of another kind."""
    found = model_class(config)
    if not issubclass(found, CausalLM) or "generates" not in found.capabilities:
        raise ModelError(
            f"{architecture_of(config)} does not generate tokens; what it does: "
            f"{', '.join(sorted(found.capabilities))}. Choose a model that generates"
        )
    return found


def describe(config: dict[str, Any]) -> ModelDescription:
    """Sizes and KV needs of a model, from its config alone."""
    description = model_class(config).describe(config)
    if description.max_position_embeddings > _LONGEST:
        raise ModelError(
            f"the model config is for {description.max_position_embeddings} tokens, and {_LONGEST} is the most there"
            " can be; correct max_position_embeddings or what scales it"
        )
    return description

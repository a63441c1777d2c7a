"""The architectures by the name in a checkpoint's config, one line each, and what a config says without weights."""

from __future__ import annotations

import re
from typing import Any

from quire.models.base import CausalLM, Model, ModelDescription
from quire.types.errors import ModelError, UnknownArchitectureError
from quire.utils.registry import Registry

_ENCODERS = {
    "Bert": "bert:Bert",
    "DebertaV2": "deberta:DebertaV2",
    "DistilBert": "bert:DistilBert",
    "EuroBert": "llama:EuroBert",
    "Gte": "gte:Gte",
    "JinaEmbeddingsV3": "gte:JinaEmbeddingsV3",
    "MPNet": "mpnet:MPNet",
    "ModernBert": "modernbert:ModernBert",
    "New": "gte:NewGte",
    "NomicBert": "nomic_bert:NomicBert",
    "Roberta": "bert:Roberta",
    "XLMRoberta": "bert:Roberta",
}
ARCHITECTURES: Registry[type[Model]] = Registry(
    "architecture",
    "quire.models",
    {
        **{f"{name}{head}": path for name, path in _ENCODERS.items() for head in ("ForMaskedLM", "Model")},
        "BailingHybridForCausalLM": "kimi_linear:BailingHybrid",
        "BambaForCausalLM": "bamba:Bamba",
        "DeepseekV2ForCausalLM": "deepseek:DeepseekV2",
        "DeepseekV3ForCausalLM": "deepseek:DeepseekV3",
        "DeepseekV32ForCausalLM": "deepseek:DeepseekV32",
        "Dots1ForCausalLM": "dots1:Dots1",
        "Ernie4_5_MoeForCausalLM": "moe:Ernie45Moe",
        "FalconH1ForCausalLM": "falcon_h1:FalconH1",
        "FalconMambaForCausalLM": "mamba:Mamba",
        "Gemma2ForCausalLM": "gemma:Gemma2",
        "Gemma3ForCausalLM": "gemma:Gemma3",
        "Glm4MoeForCausalLM": "dots1:Glm4Moe",
        "Gemma3TextModel": "gemma:Gemma3",
        "Glm4MoeLiteForCausalLM": "deepseek:Glm4MoeLite",
        "GlmMoeDsaForCausalLM": "deepseek:GlmMoeDsa",
        "GptOssForCausalLM": "gpt_oss:GptOss",
        "GraniteForCausalLM": "granite:Granite",
        "GraniteMoeForCausalLM": "granite:GraniteMoe",
        "GraniteMoeHybridForCausalLM": "granite:GraniteMoeHybrid",
        "HF_ColBERT": "bert:ColBert",
        "HunYuanMoEV1ForCausalLM": "moe:HunYuanMoe",
        "JambaForCausalLM": "jamba:Jamba",
        "KimiLinearForCausalLM": "kimi_linear:KimiLinear",
        "Lfm2ForCausalLM": "lfm2:Lfm2",
        "Lfm2MoeForCausalLM": "lfm2:Lfm2Moe",
        "Llama4ForCausalLM": "llama4:Llama4",
        "LlamaForCausalLM": "llama:Llama",
        "LongcatFlashForCausalLM": "longcat_flash:LongcatFlash",
        "Mamba2ForCausalLM": "mamba:Mamba2",
        "MambaForCausalLM": "mamba:Mamba",
        "MiniCPM3ForCausalLM": "deepseek:MiniCPM3",
        "MiniMaxForCausalLM": "minimax:MiniMax",
        "MiniMaxM2ForCausalLM": "mixtral:MiniMaxM2",
        "MistralForCausalLM": "llama:Mistral",
        "MixtralForCausalLM": "mixtral:Mixtral",
        "NemotronHForCausalLM": "nemotron_h:NemotronH",
        "Olmo2ForCausalLM": "llama:Olmo2",
        "OlmoeForCausalLM": "moe:Olmoe",
        "Phi3ForCausalLM": "llama:Phi3",
        "PhiMoEForCausalLM": "mixtral:PhiMoe",
        "PhimoeForCausalLM": "mixtral:PhiMoe",
        "Qwen2ForCausalLM": "qwen2:Qwen2",
        "Qwen2MoeForCausalLM": "qwen2:Qwen2Moe",
        "Qwen3ForCausalLM": "qwen2:Qwen3",
        "Qwen3MoeForCausalLM": "qwen2:Qwen3Moe",
        "Qwen3NextForCausalLM": "qwen3_next:Qwen3Next",
        "Qwen3_5ForCausalLM": "qwen3_next:Qwen35",
        "Qwen3_5MoeForCausalLM": "qwen3_next:Qwen35Moe",
        "SmolLM3ForCausalLM": "llama:SmolLM3",
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

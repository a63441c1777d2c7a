"""The architectures by the name in a checkpoint's config, one line each, and what a config says without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.models.decoder import DecoderLM
from quire.types.errors import ConfigError, ModelError, UnknownArchitectureError
from quire.utils.registry import Registry

ARCHITECTURES: Registry[type[DecoderLM]] = Registry(
    "architecture",
    "quire.models",
    {
        "Gemma2ForCausalLM": "gemma2:Gemma2",
        "Gemma3ForCausalLM": "gemma3:Gemma3",
        "GraniteForCausalLM": "granite:Granite",
        "LlamaForCausalLM": "llama:Llama",
        "MistralForCausalLM": "mistral:Mistral",
        "Olmo2ForCausalLM": "olmo2:Olmo2",
        "Phi3ForCausalLM": "phi3:Phi3",
        "Qwen2ForCausalLM": "qwen2:Qwen2",
        "Qwen3ForCausalLM": "qwen3:Qwen3",
        "SmolLM3ForCausalLM": "smollm3:SmolLM3",
    },
    error=UnknownArchitectureError,
)

_LONGEST = 1 << 24  # tokens: tables of positions are made for so many


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


@dataclass(frozen=True)
class ModelDescription:
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int  # tokens the model is meant for, RoPE scaling included
    max_model_len: int  # what will be served: the caller's choice, or all of the above
    layers: tuple[LayerKV, ...]


def architecture_of(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not names:
        raise ModelError('the model config has no "architectures"; it must name one, such as "LlamaForCausalLM"')
    return str(names[0])


def model_class(config: dict[str, Any]) -> type[DecoderLM]:
    return ARCHITECTURES.get(architecture_of(config))


def describe(config: dict[str, Any], max_model_len: int | None = None) -> ModelDescription:
    """Sizes and KV needs of a model, from its config alone."""
    decoder = model_class(config).decoder_config(config)
    if decoder.max_position_embeddings > _LONGEST:
        raise ModelError(
            f"the model config is for {decoder.max_position_embeddings} tokens, and {_LONGEST} is the most there can"
            " be; correct max_position_embeddings or what scales it"
        )
    if max_model_len is not None and max_model_len < 1:
        raise ConfigError(f"max_model_len must be at least 1, not {max_model_len}")
    return ModelDescription(
        architecture=architecture_of(config),
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        num_layers=decoder.num_layers,
        max_position_embeddings=decoder.max_position_embeddings,
        max_model_len=max_model_len or decoder.max_position_embeddings,
        layers=tuple(LayerKV(decoder.num_kv_heads, decoder.head_dim, window) for window in decoder.sliding_windows),
    )

"""Llama, and models that differ from it by a few switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.models.config import ConfigReader, DecoderConfig, every_layer, read_config
from quire.models.decoder import PRE_POST_NORM_WEIGHTS, DecoderLM
from quire.types.errors import ModelError


class Llama(DecoderLM):
    """Llama: pre-norm, grouped-query attention, SiLU-gated MLP."""

    fits_float16 = True


class Mistral(DecoderLM):
    """Mistral: Llama with a sliding window on every layer, where the config gives one."""

    fits_float16 = True
    flags: ClassVar = {"is_sliding": every_layer}


class Phi3(DecoderLM):
    """Phi3 and Phi4: Llama whose checkpoints hold qkv and gate_up already merged; longrope for the long variants."""

    defaults: ClassVar = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    flags: ClassVar = {"is_sliding": every_layer}


class SmolLM3(DecoderLM):
    """SmolLM3: Llama where every fourth layer rotates nothing; those layers may slide."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        interval = config.get("no_rope_layer_interval") or 4
        num_layers = ConfigReader(config, {})["num_hidden_layers"]
        rotates = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if len(rotates) != num_layers:
            raise ModelError(f"no_rope_layers must have an entry for each of {num_layers} layers, not {len(rotates)}")
        decoder = read_config(
            config,
            defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
            is_sliding=(lambda layer: not rotates[layer]) if config.get("use_sliding_window") else None,
        )
        rope = tuple(rope if rotates[layer] else None for layer, rope in enumerate(decoder.rope))
        return replace(decoder, rope=rope)


class Olmo2(DecoderLM):
    """OLMo2: attention and MLP are normalized after, not before; q and k are normalized over all heads together."""

    weight_map = PRE_POST_NORM_WEIGHTS
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    flags: ClassVar = {"norms": "post", "qk_norm": "full"}


class EuroBert(DecoderLM):
    """EuroBERT: Llama whose tokens see those after them too."""

    capabilities = frozenset({"pools", "encodes"})
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    flags: ClassVar = {"causal": False}

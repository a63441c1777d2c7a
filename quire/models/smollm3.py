"""SmolLM3: Llama where every fourth layer rotates nothing; those layers may slide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.decoder import DecoderLM
from quire.types.errors import ModelError


class SmolLM3(DecoderLM):
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

"""Phi3 and Phi4: Llama whose checkpoints hold qkv and gate_up already merged; longrope for the long variants."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import DecoderLM


class Phi3(DecoderLM):
    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
            is_sliding=lambda layer: True,
        )

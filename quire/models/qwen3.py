"""Qwen3: RMS norms on each head of q and k; biases only where the config asks for them."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import DecoderLM
from quire.models.qwen2 import upper_layers


class Qwen3(DecoderLM):
    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(
            config,
            defaults={"head_dim": 128},
            is_sliding=upper_layers(config),
            qk_norm="head",
        )

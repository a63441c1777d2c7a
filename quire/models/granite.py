"""Granite: Llama with multipliers on embeddings, attention, residuals and logits."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.decoder import DecoderLM


class Granite(DecoderLM):
    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {})
        return read_config(
            config,
            attention_scale=read.get("attention_multiplier", 1.0),
            embedding_scale=read.get("embedding_multiplier", 1.0),
            residual_multiplier=read.get("residual_multiplier", 1.0),
            logit_divisor=read.get("logits_scaling", 1.0),
        )

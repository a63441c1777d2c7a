"""Llama: pre-norm, grouped-query attention, SiLU-gated MLP."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import DecoderLM


class Llama(DecoderLM):
    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        attention_bias = bool(config.get("attention_bias"))
        return read_config(
            config, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=bool(config.get("mlp_bias"))
        )

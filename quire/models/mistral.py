"""Mistral: Llama with a sliding window on every layer, where the config gives one."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import DecoderLM


class Mistral(DecoderLM):
    fits_float16 = True

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(config, is_sliding=lambda layer: True)

"""Llama: pre-norm, grouped-query attention, SiLU-gated MLP."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import DecoderLM


class Llama(DecoderLM):
    fits_float16 = True

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(config)

"""EuroBERT: Llama whose tokens see those after them too."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import DecoderLM


class EuroBert(DecoderLM):
    capabilities = frozenset({"pools", "encodes"})

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(config, defaults={"rms_norm_eps": 1e-5}, causal=False)

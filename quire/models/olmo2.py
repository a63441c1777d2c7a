"""OLMo2: attention and MLP are normalized after, not before; q and k are normalized over all heads together."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import PRE_POST_NORM_WEIGHTS, DecoderLM


class Olmo2(DecoderLM):
    weight_map = PRE_POST_NORM_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5},
            norms="post",
            qk_norm="full",
        )

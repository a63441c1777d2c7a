"""Qwen3.5-MoE, its text model: Qwen3-Next with projections apart."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig
from quire.models.qwen2_moe import Qwen2Moe
from quire.models.qwen3_5 import LANGUAGE_MODEL, PROJECTIONS, text_config
from quire.models.qwen3_next import Qwen3Next, delta_weights


class Qwen35Moe(Qwen3Next):
    weight_map = delta_weights(Qwen2Moe.weight_map, *PROJECTIONS).renaming(LANGUAGE_MODEL).ignoring("model.visual.*")
    delta_mixer = "gated_delta"

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return super().decoder_config(text_config(config))

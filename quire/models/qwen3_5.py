"""Qwen3.5, its text model, dense and with experts."""

from __future__ import annotations

from typing import Any

from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS
from quire.models.qwen2_moe import Qwen2Moe
from quire.models.qwen3_next import Qwen3Next, delta_weights

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
LANGUAGE_MODEL = ("model.language_model", "model")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Of a checkpoint with or without an encoder of images."""
    text = {**config, **(config.get("text_config") or {})}
    rope = {key: value for key, value in (text.get("rope_parameters") or {}).items() if key != "mrope_section"}
    return {**text, "rope_parameters": rope or None}  # of text, all axes have the same position


class Qwen35(Qwen3Next):
    """Qwen3.5, its text model: Qwen3-Next with dense MLPs and projections apart."""

    weight_map = delta_weights(PRE_NORM_WEIGHTS, *PROJECTIONS).renaming(LANGUAGE_MODEL).ignoring("model.visual.*")
    delta_mixer = "gated_delta"

    @classmethod
    def base_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(config)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return super().decoder_config(text_config(config))


class Qwen35Moe(Qwen3Next):
    """Qwen3.5-MoE, its text model: Qwen3-Next with projections apart."""

    weight_map = delta_weights(Qwen2Moe.weight_map, *PROJECTIONS).renaming(LANGUAGE_MODEL).ignoring("model.visual.*")
    delta_mixer = "gated_delta"

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return super().decoder_config(text_config(config))

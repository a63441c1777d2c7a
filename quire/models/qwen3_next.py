"""Qwen3-Next and the text models of Qwen3.5: Gated DeltaNet, gated attention in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.layers.weights import WeightMap
from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.qwen2 import Qwen2Moe
from quire.models.recurrent import moved

_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}


def delta_weights(base: WeightMap, *projections: str) -> WeightMap:
    names = (*projections, "conv1d", "A_log", "dt_bias", "norm", "out_proj")
    stacked = {**base.stack, "in_proj": projections}
    return replace(base, stack=stacked).renaming(*moved("linear_attn", *names)).ignoring("mtp.*")


class Qwen3Next(DecoderLM):
    """Qwen3-Next: Gated DeltaNet, gated attention in every fourth layer, experts beside a shared one."""

    weight_map = delta_weights(Qwen2Moe.weight_map, "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z")
    delta_mixer: ClassVar[str] = "grouped_gated_delta"

    @classmethod
    def base_config(cls, config: dict[str, Any]) -> DecoderConfig:
        """What the family has of experts."""
        return Qwen2Moe.decoder_config({"norm_topk_prob": True, "intermediate_size": 0, "qkv_bias": False, **config})

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, _SIZES)
        interval = read["full_attention_interval"]
        delta = "half_grouped_gated_delta" if read.flag("in_proj_qkv_apart") else cls.delta_mixer  # a GGUF file's
        mixers = {"linear_attention": delta, "full_attention": "gated_attention"}
        rope = read_config(
            {"intermediate_size": 0, **config, "layer_types": None}, defaults={"partial_rotary_factor": 0.25}
        ).rope
        return replace(
            cls.base_config({**config, "layer_types": None}),
            rope=rope,
            qk_norm="head",
            norm_weight_offset=1.0,
            mixers=read.mixers(mixers, lambda layer: (layer + 1) % interval == 0),
            qkv_bias=read.flag("attention_bias"),
            o_bias=read.flag("attention_bias"),
            recurrent=RecurrentConfig(
                conv_width=read["linear_conv_kernel_dim"],
                num_heads=read["linear_num_value_heads"],
                num_key_heads=read["linear_num_key_heads"],
                key_dim=read["linear_key_head_dim"],
                value_dim=read["linear_value_head_dim"],
                eps=read.get("rms_norm_eps", 1e-6),
            ),
        )


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

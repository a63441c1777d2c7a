"""Bamba: Mamba-2, and attention with partial RoPE in some layers; gated MLPs."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.mamba import BEHIND_MIXER, MAMBA_NAMES, dt_limits
from quire.models.recurrent import moved


def mamba2_sizes(read: ConfigReader) -> RecurrentConfig:
    """By the keys that start with mamba_."""
    width = read.get("mamba_d_ssm") or read.get("mamba_expand", 2) * read["hidden_size"]
    heads, groups = read.get("mamba_n_heads", 128), read.get("mamba_n_groups", 1)
    size = read.get("mamba_d_head", "auto")
    return RecurrentConfig(
        conv_width=read.get("mamba_d_conv", 4),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=read.get("mamba_d_state", 256),
        value_dim=width // heads if size == "auto" else size,
        bias=read.flag("mamba_proj_bias"),
        conv_bias=read.get("mamba_conv_bias", True),
        eps=read.get("rms_norm_eps", 1e-5),
        norm_groups=groups,
        dt_limits=dt_limits(read),
    )


class Bamba(DecoderLM):
    weight_map = PRE_NORM_WEIGHTS.renaming(
        *moved("mamba", *MAMBA_NAMES),
        *BEHIND_MIXER,
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"attn_layer_indices": ()})
        attends = set(read["attn_layer_indices"])
        layers = range(read["num_hidden_layers"])
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
            mixers=tuple("attention" if layer in attends else "mamba2" for layer in layers),
            recurrent=mamba2_sizes(read),
        )

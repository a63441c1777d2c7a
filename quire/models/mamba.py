"""Mamba and Mamba-2: models of nothing but mixers."""

from __future__ import annotations

import math
from typing import Any

from quire.layers.weights import WeightMap
from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig
from quire.models.decoder import DecoderLM
from quire.models.recurrent import moved
from quire.types.errors import ModelError

LONGEST = 1 << 17  # tokens that a config without a limit is taken to be for
MAMBA_NAMES = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "dt_bias", "norm", "out_proj")
# What hybrids call the norm and the MLP behind a mixer, and the last norm.
BEHIND_MIXER = (("pre_ff_layernorm", "mlp_norm"), ("feed_forward", "mlp"), ("final_layernorm", "norm"))
BACKBONE = WeightMap(
    rename={
        "backbone.embeddings": "model.embed_tokens",
        "backbone.norm_f": "model.norm",
        **dict(moved("mixer", *MAMBA_NAMES)),
        "backbone.layers": "model.layers",
    }
)


def only_mixers(read: ConfigReader, mixer: str, recurrent: RecurrentConfig) -> DecoderConfig:
    """A model without attention and MLPs."""
    count = read["num_hidden_layers"]
    return DecoderConfig(
        vocab_size=read["vocab_size"],
        hidden_size=read["hidden_size"],
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        attention_scale=1.0,
        activation="silu",
        norm_eps=read["layer_norm_epsilon"],
        tied_embeddings=read["tie_word_embeddings"],
        max_position_embeddings=read.get("max_position_embeddings") or LONGEST,
        rope=(None,) * count,
        sliding_windows=(None,) * count,
        mixers=(mixer,) * count,
        mlps=("none",) * count,
        causal=read.get("is_causal", True),
        recurrent=recurrent,
    )


class Mamba2(DecoderLM):
    """Mamba-2: a mixer in each layer and nothing else."""

    weight_map = BACKBONE.renaming(("norm", "attn_norm"), ("model.attn_norm", "model.norm"))

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(
            config,
            {
                **{"layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "num_heads": 128, "head_dim": 64},
                **{"state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True},
            },
        )
        recurrent = RecurrentConfig(
            conv_width=read["conv_kernel"],
            num_heads=read["num_heads"],
            num_key_heads=read["n_groups"],
            key_dim=read["state_size"],
            value_dim=read["head_dim"],
            bias=read.flag("use_bias"),
            conv_bias=read["use_conv_bias"],
            eps=read["layer_norm_epsilon"],
            norm_groups=read["n_groups"],
            dt_limits=dt_limits(read),
        )
        return only_mixers(read, "mamba2", recurrent)


def dt_limits(read: ConfigReader) -> tuple[float, float]:
    """JSON has no infinity: it may stand as {"__float__": "Infinity"}."""
    given = read.get("time_step_limit") or (0.0, math.inf)
    limits: list[Any] = [limit.get("__float__") if isinstance(limit, dict) else limit for limit in given]
    try:
        low, high = map(float, limits)
    except (TypeError, ValueError) as error:
        raise ModelError(f"time_step_limit is {given}; it must be the least and the most of a step") from error
    return low, high


class Mamba(DecoderLM):
    """Mamba, and Falcon-Mamba, which norms steps, inputs and readouts of the scan."""

    weight_map = Mamba2.weight_map

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(
            config,
            {
                **{"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "state_size": 16, "expand": 2},
                **{"conv_kernel": 4, "use_conv_bias": True, "time_step_rank": "auto", "mixer_rms_eps": 1e-6},
            },
        )
        hidden, rank = read["hidden_size"], read["time_step_rank"]
        recurrent = RecurrentConfig(
            conv_width=read["conv_kernel"],
            num_heads=int(read["expand"] * hidden),
            key_dim=read["state_size"],
            bias=read.flag("use_bias"),
            conv_bias=read["use_conv_bias"],
            dt_rank=-(-hidden // 16) if rank == "auto" else rank,
            dt_norms=read["mixer_rms_eps"] if config.get("model_type") == "falcon_mamba" else None,
            dt_norm_weights=False,
        )
        return only_mixers(read, "mamba", recurrent)

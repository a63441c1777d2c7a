"""Mamba, and Falcon-Mamba, which norms steps, inputs and readouts of the scan."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig
from quire.models.decoder import DecoderLM
from quire.models.mamba2 import Mamba2, only_mixers


class Mamba(DecoderLM):
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

"""Jamba: Mamba with normed steps, attention without RoPE in some layers, experts in every other layer."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, RecurrentConfig, read_config
from quire.models.decoder import EXPERT_WEIGHTS, DecoderLM
from quire.models.mamba import MAMBA_NAMES
from quire.models.recurrent import moved
from quire.ops.routing import Routing

_DEFAULTS = {
    **{"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    **{"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    **{"mamba_dt_rank": "auto", "mamba_conv_bias": True},
}


class Jamba(DecoderLM):
    weight_map = EXPERT_WEIGHTS.renaming_first(("feed_forward", "mlp")).renaming(
        *moved("mamba", *MAMBA_NAMES, "dt_layernorm", "b_layernorm", "c_layernorm"),
        ("pre_ff_layernorm", "mlp_norm"),
        ("final_layernorm", "norm"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, _DEFAULTS)
        layers, hidden, rank = range(read["num_hidden_layers"]), read["hidden_size"], read["mamba_dt_rank"]
        attends = {n for n in layers if n % read["attn_layer_period"] == read["attn_layer_offset"]}
        sparse = {n for n in layers if n % read["expert_layer_period"] == read["expert_layer_offset"]}
        several = read["num_experts"] > 1
        return read_config(
            config,
            rope=(None,) * len(layers),
            mixers=tuple("attention" if layer in attends else "mamba" for layer in layers),
            mlps=tuple("experts" if several and layer in sparse else "gated" for layer in layers),
            experts=ExpertsConfig(
                read["num_experts"], read["intermediate_size"], Routing(read["num_experts_per_tok"])
            )
            if several
            else None,
            recurrent=RecurrentConfig(
                conv_width=read["mamba_d_conv"],
                num_heads=int(read["mamba_expand"] * hidden),
                key_dim=read["mamba_d_state"],
                bias=read.flag("mamba_proj_bias"),
                conv_bias=read["mamba_conv_bias"],
                dt_rank=-(-hidden // 16) if rank == "auto" else rank,
                dt_norms=read.get("rms_norm_eps", 1e-6),
            ),
        )

"""LFM2-MoE: LFM2 whose MLPs are experts behind the first dense layers, chosen by sigmoid scores and a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig
from quire.models.lfm2 import Lfm2
from quire.ops.routing import Routing


class Lfm2Moe(Lfm2):
    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(
            config,
            {"num_dense_layers": 2, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        )
        routing = Routing(
            read["num_experts_per_tok"],
            score="sigmoid",
            renormalize=read["norm_topk_prob"],
            scale=read["routed_scaling_factor"],
        )
        dense = read["num_dense_layers"]
        return replace(
            super().decoder_config(config),
            mlps=tuple("gated" if layer < dense else "experts" for layer in range(read["num_hidden_layers"])),
            experts=ExpertsConfig(
                read["num_experts"], read["moe_intermediate_size"], routing, choice_bias=read["use_expert_bias"]
            ),
        )

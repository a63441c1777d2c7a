"""Phi-3.5-MoE: LayerNorms, biases in attention and head, and sparse mixer's choice of two experts."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import DecoderLM
from quire.models.mixtral import Mixtral
from quire.ops.routing import Routing


class PhiMoe(DecoderLM):
    weight_map = Mixtral.weight_map

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01})
        margin = 2 * read["router_jitter_noise"]
        routing = Routing(read["num_experts_per_tok"], score="logits", weighting="sparse_mixer", mixer_margin=margin)
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5},
            is_sliding=lambda layer: True,
            layer_norms=True,
            head_bias=read.flag("lm_head_bias"),
            mlps=("experts",) * read["num_hidden_layers"],
            experts=ExpertsConfig(read["num_local_experts"], read["intermediate_size"], routing),
        )

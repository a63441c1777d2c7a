"""Granite and Granite-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import EXPERT_WEIGHTS, DecoderLM
from quire.ops.routing import Routing


class Granite(DecoderLM):
    """Granite: Llama with multipliers on embeddings, attention, residuals and logits."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {})
        return read_config(
            config,
            attention_scale=read.get("attention_multiplier", 1.0),
            embedding_scale=read.get("embedding_multiplier", 1.0),
            residual_multiplier=read.get("residual_multiplier", 1.0),
            logit_divisor=read.get("logits_scaling", 1.0),
        )


class GraniteMoe(Granite):
    """Granite-MoE: Granite with experts; a token's weights are the softmax over the logits of its experts."""

    weight_map = EXPERT_WEIGHTS.renaming(
        ("block_sparse_moe.router.layer", "mlp.router"),
        ("block_sparse_moe.input_linear", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear", "mlp.experts.down_proj"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"num_experts_per_tok": 2, "num_local_experts": 8})
        routing = Routing(read["num_experts_per_tok"], score="logits", weighting="softmax")
        return replace(
            super().decoder_config(config),
            mlps=("experts",) * read["num_hidden_layers"],
            experts=ExpertsConfig(read["num_local_experts"], read["intermediate_size"], routing),
        )

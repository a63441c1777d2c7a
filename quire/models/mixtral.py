"""Mixtral: Mistral whose MLPs are experts, the weights of a token's experts adding up to 1."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.ops.routing import Routing


class Mixtral(DecoderLM):
    weight_map = PRE_NORM_WEIGHTS.renaming(
        ("block_sparse_moe", "mlp"),
        ("mlp.gate", "mlp.router"),
        ("e_score_correction_bias", "choice_bias"),
        ("w1", "gate_proj"),
        ("w3", "up_proj"),
        ("w2", "down_proj"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"num_experts_per_tok": 2, "num_local_experts": 8})
        routing = Routing(read["num_experts_per_tok"], renormalize=True)
        return read_config(
            config,
            is_sliding=lambda layer: True,
            mlps=("experts",) * read["num_hidden_layers"],
            experts=ExpertsConfig(read["num_local_experts"], read["intermediate_size"], routing),
        )

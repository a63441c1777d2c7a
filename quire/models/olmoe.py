"""OLMoE: Llama with experts, q and k normalized over all heads together."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import EXPERT_WEIGHTS, DecoderLM
from quire.ops.routing import Routing
from quire.types.errors import ModelError


class Olmoe(DecoderLM):
    weight_map = EXPERT_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        defaults = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False}
        read = ConfigReader(config, defaults)
        if read.get("clip_qkv") is not None:
            raise ModelError(f"clip_qkv is {read['clip_qkv']}; OLMoE models that clip q, k and v are not supported")
        routing = Routing(read["num_experts_per_tok"], renormalize=read["norm_topk_prob"])
        return read_config(
            config,
            defaults=defaults,
            qk_norm="full",
            mlps=("experts",) * read["num_hidden_layers"],
            experts=ExpertsConfig(read.first("num_experts", "num_local_experts"), read["intermediate_size"], routing),
        )

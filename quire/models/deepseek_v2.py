"""DeepSeek-V2 and V2-Lite: latent attention; experts chosen by softmax scores, beside shared ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig
from quire.models.decoder import DecoderLM
from quire.models.dots1 import SHARED_EXPERTS, grouped_experts
from quire.models.latent import latent_weights, read_latent
from quire.types.errors import ModelError

LATENT_EXPERTS = latent_weights(SHARED_EXPERTS)


class DeepseekV2(DecoderLM):
    weight_map = LATENT_EXPERTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"topk_method": "greedy", "n_routed_experts": None})
        method = read["topk_method"]
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelError(f"topk_method is {method!r}; use 'greedy' or 'group_limited_greedy'")
        flags = grouped_experts(config)
        experts = flags["experts"]
        groups = {} if method == "group_limited_greedy" else {"num_groups": 1, "top_groups": 1}
        # transformers scales the weights whether or not the config asks for renormalized ones.
        routing = replace(experts.routing, score="softmax", group_score="max", renormalize=False, **groups)
        flags["experts"] = replace(experts, routing=routing, choice_bias=False)
        return read_latent(config, interleaved_rope=True, **flags)

"""Ernie-4.5-MoE: interleaved RoPE; experts chosen by softmax scores and a bias, beside shared ones."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import DecoderLM
from quire.models.dots1 import SHARED_EXPERTS
from quire.ops.routing import Routing

_DEFAULTS = {
    **{"moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_norm_min": 1e-12, "use_bias": False},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
}


class Ernie45Moe(DecoderLM):
    # Published checkpoints have layers of their own for drafting tokens.
    weight_map = SHARED_EXPERTS.renaming(("mlp.moe_statics.choice_bias", "mlp.router.choice_bias")).ignoring(
        "model.mtp_*"
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, _DEFAULTS)
        num_layers, width = read["num_hidden_layers"], read["moe_intermediate_size"]
        first, last = read["moe_layer_start_index"], read["moe_layer_end_index"] % num_layers
        sparse = [
            first <= layer <= last and (layer + 1) % read["moe_layer_interval"] == 0 for layer in range(num_layers)
        ]
        routing = Routing(
            read.first("moe_k", "num_experts_per_tok"), renormalize=True, least_sum=float(read["moe_norm_min"])
        )
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
            **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), read["use_bias"]),
            interleaved_rope=True,
            mlps=tuple("experts" if has_experts else "gated" for has_experts in sparse),
            experts=ExpertsConfig(
                read.first("moe_num_experts", "num_experts"),
                width,
                routing,
                choice_bias=True,
                shared_width=width * read["moe_num_shared_experts"] or None,
            ),
        )

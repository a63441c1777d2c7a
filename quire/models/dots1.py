"""dots1 and GLM-4-MoE: experts in groups, chosen by sigmoid scores and a bias, beside shared ones."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import EXPERT_WEIGHTS, DecoderLM
from quire.ops.routing import Routing

SHARED_EXPERTS = EXPERT_WEIGHTS.renaming(("shared_experts", "shared"))


class Dots1(DecoderLM):
    """dots1: Qwen3's attention; experts in groups, chosen by sigmoid scores and a bias, beside shared ones."""

    weight_map = SHARED_EXPERTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"max_window_layers": 62})
        return read_config(
            config,
            is_sliding=lambda layer: bool(layer >= read["max_window_layers"]),
            qk_norm="head",
            **grouped_experts(config),
        )


def grouped_experts(config: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Fields of a DecoderConfig by DeepSeek-V3's keys: the first layers are dense, the others have experts."""
    common = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    layers = {"first_k_dense_replace": 0, "moe_layer_freq": 1, "n_shared_experts": 0}
    read = ConfigReader(config, {**common, **layers, **defaults})
    routing = Routing(
        read["num_experts_per_tok"],
        score="sigmoid",
        renormalize=read["norm_topk_prob"],
        scale=read["routed_scaling_factor"],
        num_groups=read["n_group"],
        top_groups=read["topk_group"],
        group_score="top2",
    )
    width, dense = read["moe_intermediate_size"], read["first_k_dense_replace"]
    types = read.get("mlp_layer_types") or [
        "dense" if i < dense or i % read["moe_layer_freq"] else "sparse" for i in range(read["num_hidden_layers"])
    ]
    return {
        "mlps": read.kinds("mlp_layer_types", types, {"dense": "gated", "sparse": "experts"}),
        "experts": ExpertsConfig(
            read.first("n_routed_experts", "num_local_experts"),
            width,
            routing,
            choice_bias=True,
            shared_width=width * read["n_shared_experts"] or None,
        ),
    }


_DEFAULTS = {"num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1}


class Glm4Moe(DecoderLM):
    """GLM-4-MoE: experts as in dots1; partial RoPE, biases on q, k and v or norms on q and k where the config
    asks."""

    weight_map = SHARED_EXPERTS
    has_draft_layer = True

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
            qk_norm="head" if config.get("use_qk_norm") else "none",
            o_bias=False,
            **grouped_experts(config, norm_topk_prob=True, **_DEFAULTS),
        )

"""Mixtral, and models whose checkpoints name experts as it does."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, every_layer, read_config
from quire.models.decoder import EXPERT_MATRICES, PRE_NORM_WEIGHTS, DecoderLM
from quire.ops.routing import Routing
from quire.types.errors import ModelError


class Mixtral(DecoderLM):
    """Mixtral: Mistral whose MLPs are experts, the weights of a token's experts adding up to 1."""

    weight_map = PRE_NORM_WEIGHTS.renaming(
        ("block_sparse_moe", "mlp"),
        ("mlp.gate", "mlp.router"),
        ("e_score_correction_bias", "choice_bias"),
        *EXPERT_MATRICES,
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"num_experts_per_tok": 2, "num_local_experts": 8})
        routing = Routing(read["num_experts_per_tok"], renormalize=True)
        return read_config(
            config,
            is_sliding=every_layer,
            experts=ExpertsConfig(read["num_local_experts"], read["intermediate_size"], routing),
        )


class PhiMoe(DecoderLM):
    """Phi-3.5-MoE: LayerNorms, biases in attention and head, and sparse mixer's choice of two experts."""

    weight_map = Mixtral.weight_map

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01})
        margin = 2 * read["router_jitter_noise"]
        routing = Routing(read["num_experts_per_tok"], score="logits", weighting="sparse_mixer", mixer_margin=margin)
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5},
            is_sliding=every_layer,
            layer_norms=True,
            head_bias=read.flag("lm_head_bias"),
            experts=ExpertsConfig(read["num_local_experts"], read["intermediate_size"], routing),
        )


class MiniMaxM2(DecoderLM):
    """MiniMax-M2: experts chosen by sigmoid scores and a bias; q and k normalized over all heads, partial RoPE."""

    weight_map = Mixtral.weight_map.renaming(("mlp.choice_bias", "mlp.router.choice_bias"))

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"head_dim": 128, "num_experts_per_tok": 8})
        routing = Routing(read["num_experts_per_tok"], score="sigmoid", renormalize=True)
        if "rotary_dim" in read and "partial_rotary_factor" not in read:
            if read["rotary_dim"] > read["head_dim"]:
                raise ModelError(f"rotary_dim is {read['rotary_dim']}, more than the {read['head_dim']} of a head")
            config = {**config, "partial_rotary_factor": read["rotary_dim"] / read["head_dim"]}
        return read_config(
            config,
            defaults={"head_dim": 128, "rope_theta": 5_000_000.0},
            qk_norm="full",
            experts=ExpertsConfig(
                read.first("num_local_experts", "num_experts"), read["intermediate_size"], routing, choice_bias=True
            ),
        )

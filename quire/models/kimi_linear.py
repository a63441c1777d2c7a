"""Kimi-Linear and Ling 3.0 (Bailing hybrid): Kimi delta attention beside latent attention, DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig
from quire.models.decoder import EXPERT_MATRICES, DecoderLM
from quire.models.deepseek import LATENT_EXPERTS, DeepseekV3
from quire.models.dots1 import grouped_experts
from quire.models.kimi_delta import KIMI_STACK
from quire.models.latent import read_latent

KIMI_MIXERS = {"linear_attention": "kimi_delta", "full_attention": "latent"}
_STACK = {**LATENT_EXPERTS.stack, **KIMI_STACK}
_STACK["a_proj"] = tuple(dict.fromkeys((*LATENT_EXPERTS.stack["a_proj"], *KIMI_STACK["a_proj"])))
KIMI_WEIGHTS = replace(LATENT_EXPERTS, stack=_STACK)


class KimiLinear(DecoderLM):
    """Kimi-Linear: Kimi delta attention, latent attention without RoPE in every fourth layer, DeepSeek-V3's
    experts."""

    weight_map = KIMI_WEIGHTS.renaming_first(("block_sparse_moe", "mlp"), *EXPERT_MATRICES)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        of_linear = config.get("linear_attn_config") or {}
        read = ConfigReader(config, {**{"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}})
        read.one_of("moe_router_activation_func", "sigmoid")
        count = read["num_hidden_layers"]
        attending = of_linear.get("full_attn_layers")  # counted from 1
        attends = {layer - 1 for layer in attending} if attending is not None else set(range(4, count, 4))
        usual = with_usual_names(config, 1 << 20)
        experts = grouped_experts(usual, routed_scaling_factor=2.446, first_k_dense_replace=1, topk_group=1)
        decoder = read_latent(usual, defaults={"rms_norm_eps": 1e-5}, **experts)
        size = of_linear.get("head_dim") or read["linear_head_dim"]
        return replace(
            decoder,
            rope=(None,) * count,
            mixers=read.mixers(KIMI_MIXERS, attends.__contains__),
            recurrent=RecurrentConfig(
                conv_width=of_linear.get("short_conv_kernel_size") or read["linear_conv_kernel_dim"],
                num_heads=of_linear.get("num_heads") or read["linear_num_heads"],
                key_dim=size,
                gate_rank=size,
                eps=decoder.norm_eps,
            ),
        )


def with_usual_names(config: dict[str, Any], max_length: int) -> dict[str, Any]:
    """A config with DeepSeek's keys for what it may have under other names."""
    read = ConfigReader(config, {"num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1})
    found = {
        "n_routed_experts": read.first("num_experts", "num_local_experts", "n_routed_experts"),
        "num_experts_per_tok": read.first("num_experts_per_token", "num_experts_per_tok"),
        "norm_topk_prob": read.first("moe_renormalize", "norm_topk_prob"),
        "n_group": read.get("num_expert_group", read.get("n_group")),
        "n_shared_experts": read.first("num_shared_experts", "n_shared_experts"),
        "max_position_embeddings": read.get("max_position_embeddings", read.get("model_max_length", max_length)),
    }
    return {**config, **found}


class BailingHybrid(DeepseekV3):
    """Ling 3.0 (Bailing hybrid): Kimi delta attention with bounded decays, gated latent attention, V3's experts."""

    weight_map = KIMI_WEIGHTS.renaming_first(
        ("model.word_embeddings", "model.embed_tokens"),
        ("attention", "self_attn"),
        ("self_attn.dense", "self_attn.o_proj"),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(
            config, {"head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_lower_bound": -5.0}
        )
        usual = with_usual_names(config, 1 << 18)
        experts = grouped_experts(usual, **{**DeepseekV3.defaults, "first_k_dense_replace": 2, "n_shared_experts": 0})
        common = {"rope_theta": 6_000_000.0}
        decoder = read_latent({**usual, "q_lora_rank": None}, defaults=common, interleaved_rope=True, **experts)
        assert decoder.latent is not None
        size = read["layer_group_size"]
        return replace(
            decoder,
            mixers=read.mixers(KIMI_MIXERS, lambda layer: (layer + 1) % size == 0),
            latent=replace(decoder.latent, gated=True),
            recurrent=RecurrentConfig(
                conv_width=read.first("linear_conv_kernel_dim", "short_conv_kernel_size"),
                num_heads=read.get("linear_num_heads", decoder.num_heads),
                key_dim=read.first("linear_head_dim", "head_dim"),  # transformers writes another head_dim
                decay_floor=float(read["kda_lower_bound"]) if read.get("kda_safe_gate", True) else 0.0,
                eps=decoder.norm_eps,
            ),
        )

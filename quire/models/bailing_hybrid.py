"""Ling 3.0 (Bailing hybrid): Kimi delta attention with bounded decays, gated latent attention, V3's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, RecurrentConfig
from quire.models.deepseek_v3 import DEFAULTS, DeepseekV3
from quire.models.dots1 import grouped_experts
from quire.models.kimi_linear import KIMI_MIXERS, KIMI_WEIGHTS, with_usual_names
from quire.models.latent import read_latent


class BailingHybrid(DeepseekV3):
    weight_map = KIMI_WEIGHTS.renaming_first(
        ("model.word_embeddings", "model.embed_tokens"),
        ("attention", "self_attn"),
        ("self_attn.dense", "self_attn.o_proj"),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(
            config,
            {"head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_lower_bound": -5.0},
        )
        usual = with_usual_names(config, 1 << 18)
        experts = grouped_experts(usual, first_k_dense_replace=2, **DEFAULTS)
        common = {"rope_theta": 6_000_000.0}
        decoder = read_latent({**usual, "q_lora_rank": None}, defaults=common, interleaved_rope=True, **experts)
        assert decoder.latent is not None
        size, count = read["layer_group_size"], read["num_hidden_layers"]
        types = read.get("layer_types") or [
            "linear_attention" if (layer + 1) % size else "full_attention" for layer in range(count)
        ]
        return replace(
            decoder,
            mixers=read.kinds("layer_types", types, KIMI_MIXERS),
            latent=replace(decoder.latent, gated=True),
            recurrent=RecurrentConfig(
                conv_width=read.first("linear_conv_kernel_dim", "short_conv_kernel_size"),
                num_heads=read.get("linear_num_heads", decoder.num_heads),
                key_dim=read.first("linear_head_dim", "head_dim"),  # transformers writes another head_dim
                decay_floor=float(read["kda_lower_bound"]) if read.get("kda_safe_gate", True) else 0.0,
                eps=decoder.norm_eps,
            ),
        )

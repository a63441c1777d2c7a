"""Gemma3 (text): Gemma2 with q/k norms instead of soft caps, and its own RoPE base for the sliding layers."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.decoder import PRE_POST_NORM_WEIGHTS, DecoderLM

DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


class Gemma3(DecoderLM):
    weight_map = PRE_POST_NORM_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, DEFAULTS)
        both = bool(config.get("use_bidirectional_attention"))  # an embedder, whose window is on both sides
        if both:
            config = {**config, "sliding_window": read["sliding_window"] // 2 + 1}
        pattern = read["sliding_window_pattern"]
        return read_config(
            config,
            defaults=DEFAULTS,
            is_sliding=lambda layer: (layer + 1) % pattern != 0,
            causal=not both,
            norms="pre_post",
            norm_weight_offset=1.0,
            qk_norm="head",
            attention_scale=read["query_pre_attn_scalar"] ** -0.5,
            attention_soft_cap=config.get("attn_logit_softcapping"),
            logit_soft_cap=config.get("final_logit_softcapping"),
            embedding_scale=read["hidden_size"] ** 0.5,
        )

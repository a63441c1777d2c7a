"""Gemma2 and Gemma3 (text)."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.decoder import PRE_POST_NORM_WEIGHTS, DecoderLM

COMMON: dict[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
GEMMA2 = {**COMMON, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192}
GEMMA3 = {
    **COMMON,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def read_gemma(config: dict[str, Any], defaults: dict[str, Any], **flags: Any) -> DecoderConfig:
    # A soft cap that is null is switched off; one that is absent has its default.
    read, given = ConfigReader(config, defaults), {**defaults, **config}
    return read_config(
        config,
        defaults=defaults,
        norms="pre_post",
        norm_weight_offset=1.0,
        attention_scale=read["query_pre_attn_scalar"] ** -0.5,
        attention_soft_cap=given.get("attn_logit_softcapping"),
        logit_soft_cap=given.get("final_logit_softcapping"),
        embedding_scale=read["hidden_size"] ** 0.5,
        **flags,
    )


class Gemma2(DecoderLM):
    """Gemma2: four norms around 1, scaled embeddings, soft caps, every other layer sliding."""

    weight_map = PRE_POST_NORM_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_gemma(config, GEMMA2, is_sliding=lambda layer: layer % 2 == 0)


class Gemma3(DecoderLM):
    """Gemma3 (text): Gemma2 with q/k norms instead of soft caps, and its own RoPE base for the sliding layers."""

    weight_map = PRE_POST_NORM_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, GEMMA3)
        if config.get("use_bidirectional_attention"):  # an embedder, half of whose window is on either side
            config = {**config, "sliding_window": read["sliding_window"] // 2, "is_causal": False}
        pattern = read["sliding_window_pattern"]
        return read_gemma(config, GEMMA3, is_sliding=lambda layer: (layer + 1) % pattern != 0, qk_norm="head")

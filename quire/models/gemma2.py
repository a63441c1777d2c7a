"""Gemma2: four norms around 1, scaled embeddings, soft caps, every other layer sliding."""

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
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
}


class Gemma2(DecoderLM):
    weight_map = PRE_POST_NORM_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        # A soft cap that is null is switched off; one that is absent has its default.
        read, given = ConfigReader(config, DEFAULTS), {**DEFAULTS, **config}
        return read_config(
            config,
            defaults=DEFAULTS,
            is_sliding=lambda layer: layer % 2 == 0,
            norms="pre_post",
            norm_weight_offset=1.0,
            attention_scale=read["query_pre_attn_scalar"] ** -0.5,
            attention_soft_cap=given["attn_logit_softcapping"],
            logit_soft_cap=given["final_logit_softcapping"],
            embedding_scale=read["hidden_size"] ** 0.5,
        )

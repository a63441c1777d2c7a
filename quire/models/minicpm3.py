"""MiniCPM3: latent attention under dense MLPs; embeddings, residual branches and logits are scaled."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.models.latent import latent_weights, read_latent


class MiniCPM3(DecoderLM):
    weight_map = latent_weights(PRE_NORM_WEIGHTS)

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256})
        value_dim = read.get("v_head_dim") or read["hidden_size"] // read["num_attention_heads"]
        return read_latent(
            config,
            defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "v_head_dim": value_dim},
            embedding_scale=float(read["scale_emb"]),
            residual_multiplier=read["scale_depth"] / read["num_hidden_layers"] ** 0.5,
            logit_divisor=read["hidden_size"] / read["dim_model_base"],
        )

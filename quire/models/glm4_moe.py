"""GLM-4-MoE: experts as in dots1; partial RoPE, biases on q, k and v or norms on q and k where the config asks."""

from __future__ import annotations

from typing import Any

from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.decoder import DecoderLM
from quire.models.dots1 import SHARED_EXPERTS, grouped_experts

_DEFAULTS = {"num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1}


class Glm4Moe(DecoderLM):
    weight_map = SHARED_EXPERTS

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        # Published checkpoints have one layer more, which drafts tokens.
        self.weight_map = self.weight_map.ignoring(f"model.layers.{config.num_layers}.*")

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {})
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
            qk_norm="head" if read.flag("use_qk_norm") else "none",
            o_bias=False,
            **grouped_experts(config, norm_topk_prob=True, **_DEFAULTS),
        )

"""DeepSeek-V3 and R1, Kimi-K2: latent attention; experts in groups, chosen by sigmoid scores and a bias."""

from __future__ import annotations

from typing import Any

from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig
from quire.models.decoder import DecoderLM
from quire.models.deepseek_v2 import LATENT_EXPERTS
from quire.models.dots1 import grouped_experts
from quire.models.latent import read_latent

DEFAULTS = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}


class DeepseekV3(DecoderLM):
    weight_map = LATENT_EXPERTS

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        # Published checkpoints have a layer more, which drafts tokens.
        self.weight_map = self.weight_map.ignoring(f"model.layers.{config.num_layers}.*")

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        interleaved = ConfigReader(config, {"rope_interleave": True}).flag("rope_interleave")
        return read_latent(config, interleaved_rope=interleaved, **cls.experts(config))

    @classmethod
    def experts(cls, config: dict[str, Any]) -> dict[str, Any]:
        return grouped_experts(config, first_k_dense_replace=3, n_shared_experts=1, **DEFAULTS)

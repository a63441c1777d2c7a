"""DeepSeek-V3 and what is built like it."""

from __future__ import annotations

from typing import Any

from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, IndexConfig
from quire.models.decoder import DecoderLM
from quire.models.deepseek_v2 import LATENT_EXPERTS
from quire.models.dots1 import grouped_experts
from quire.models.latent import read_latent
from quire.types.errors import ModelError

DEFAULTS = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}


class DeepseekV3(DecoderLM):
    """DeepSeek-V3 and R1, Kimi-K2: latent attention; experts in groups, chosen by sigmoid scores and a bias."""

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


class Glm4MoeLite(DeepseekV3):
    """GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3 with other defaults."""

    @classmethod
    def experts(cls, config: dict[str, Any]) -> dict[str, Any]:
        defaults = {"norm_topk_prob": True, "routed_scaling_factor": 1.8}
        return grouped_experts(config, first_k_dense_replace=1, n_shared_experts=1, **defaults)


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2: V3 whose queries attend to the keys that a sparse indexer chooses."""

    interleaved_index = False

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64})
        if "shared" in read.get("indexer_types", ()):
            raise ModelError("indexer_types has layers that share the choice of another one, which is not supported")
        index = IndexConfig(read["index_n_heads"], read["index_head_dim"], read["index_topk"], cls.interleaved_index)
        return read_latent(config, index=index, interleaved_rope=True, **cls.experts(config))


class GlmMoeDsa(DeepseekV32):
    """GLM-5: DeepSeek-V3.2 whose index is rotated in pairs side by side."""

    interleaved_index = True

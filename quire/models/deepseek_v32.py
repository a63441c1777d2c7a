"""DeepSeek-V3.2: V3 whose queries attend to the keys that a sparse indexer chooses. GLM-5 is built alike."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, IndexConfig
from quire.models.deepseek_v3 import DeepseekV3
from quire.models.latent import read_latent
from quire.types.errors import ModelError


class DeepseekV32(DeepseekV3):
    interleaved_index = False

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64})
        if "shared" in read.get("indexer_types", ()):
            raise ModelError("indexer_types has layers that share the choice of another one, which is not supported")
        index = IndexConfig(read["index_n_heads"], read["index_head_dim"], read["index_topk"], cls.interleaved_index)
        return read_latent(config, index=index, interleaved_rope=True, **cls.experts(config))


class GlmMoeDsa(DeepseekV32):
    interleaved_index = True

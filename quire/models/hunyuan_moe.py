"""Hunyuan-MoE (v1): experts beside a shared one of the same width; q and k are normed after the rotation."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import EXPERT_WEIGHTS, DecoderLM
from quire.ops.routing import Routing
from quire.types.errors import ModelError


class HunYuanMoe(DecoderLM):
    weight_map = EXPERT_WEIGHTS.renaming(
        ("mlp.router.wg", "mlp.router"),
        ("shared_mlp", "shared"),
        ("query_layernorm", "qk_norm.q"),
        ("key_layernorm", "qk_norm.k"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {})
        width = read["intermediate_size"]
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5},
            qk_norm="head_rotated",
            mlps=("experts",) * read["num_hidden_layers"],
            experts=ExpertsConfig(
                read.first("num_experts", "num_local_experts"),
                width,
                Routing(_for_all(read, "moe_topk"), renormalize=True),
                shared_width=width,
            ),
        )


def _for_all(read: ConfigReader, key: str) -> int:
    """A number that a config may give for each layer, but of which all layers have the same."""
    values = read[key] if isinstance(read[key], list) else [read[key]]
    if len(set(values)) != 1:
        raise ModelError(f"{key} is {values}; models whose layers differ in it are not supported")
    return int(values[0])

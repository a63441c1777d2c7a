"""MiniMax-M2: experts chosen by sigmoid scores and a bias; q and k normalized over all heads, partial RoPE."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import DecoderLM
from quire.models.mixtral import Mixtral
from quire.ops.routing import Routing
from quire.types.errors import ModelError


class MiniMaxM2(DecoderLM):
    weight_map = Mixtral.weight_map.renaming(("mlp.choice_bias", "mlp.router.choice_bias"))

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"head_dim": 128, "num_experts_per_tok": 8})
        routing = Routing(read["num_experts_per_tok"], score="sigmoid", renormalize=True)
        if "rotary_dim" in read and "partial_rotary_factor" not in read:
            if read["rotary_dim"] > read["head_dim"]:
                raise ModelError(f"rotary_dim is {read['rotary_dim']}, more than the {read['head_dim']} of a head")
            config = {**config, "partial_rotary_factor": read["rotary_dim"] / read["head_dim"]}
        return read_config(
            config,
            defaults={"head_dim": 128, "rope_theta": 5_000_000.0},
            qk_norm="full",
            mlps=("experts",) * read["num_hidden_layers"],
            experts=ExpertsConfig(
                read.first("num_local_experts", "num_experts"), read["intermediate_size"], routing, choice_bias=True
            ),
        )

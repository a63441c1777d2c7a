"""Decoders with experts that differ from Llama by a few switches: OLMoE, Hunyuan-MoE and Ernie-4.5-MoE."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import EXPERT_WEIGHTS, DecoderLM
from quire.models.dots1 import SHARED_EXPERTS
from quire.ops.routing import Routing
from quire.types.errors import ModelError


class Olmoe(DecoderLM):
    """OLMoE: Llama with experts, q and k normalized over all heads together."""

    weight_map = EXPERT_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        defaults = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False}
        read = ConfigReader(config, defaults)
        if read.get("clip_qkv") is not None:
            raise ModelError(f"clip_qkv is {read['clip_qkv']}; OLMoE models that clip q, k and v are not supported")
        routing = Routing(read["num_experts_per_tok"], renormalize=read["norm_topk_prob"])
        return read_config(
            config,
            defaults=defaults,
            qk_norm="full",
            experts=ExpertsConfig(read.first("num_experts", "num_local_experts"), read["intermediate_size"], routing),
        )


class HunYuanMoe(DecoderLM):
    """Hunyuan-MoE (v1): experts beside a shared one of the same width; q and k are normed after the rotation."""

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


_DEFAULTS = {
    **{"moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_norm_min": 1e-12, "use_bias": False},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
}


class Ernie45Moe(DecoderLM):
    """Ernie-4.5-MoE: interleaved RoPE; experts chosen by softmax scores and a bias, beside shared ones."""

    # Published checkpoints have layers of their own for drafting tokens.
    weight_map = SHARED_EXPERTS.renaming(("mlp.moe_statics.choice_bias", "mlp.router.choice_bias")).ignoring(
        "model.mtp_*"
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, _DEFAULTS)
        num_layers, width = read["num_hidden_layers"], read["moe_intermediate_size"]
        first, last = read["moe_layer_start_index"], read["moe_layer_end_index"] % num_layers
        sparse = [
            first <= layer <= last and (layer + 1) % read["moe_layer_interval"] == 0 for layer in range(num_layers)
        ]
        routing = Routing(
            read.first("moe_k", "num_experts_per_tok"), renormalize=True, least_sum=float(read["moe_norm_min"])
        )
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
            **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), read["use_bias"]),
            interleaved_rope=True,
            mlps=tuple("experts" if has_experts else "gated" for has_experts in sparse),
            experts=ExpertsConfig(
                read.first("moe_num_experts", "num_experts"),
                width,
                routing,
                choice_bias=True,
                shared_width=width * read["moe_num_shared_experts"] or None,
            ),
        )

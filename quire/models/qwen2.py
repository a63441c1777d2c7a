"""Qwen2 and Qwen3: Llama with biases on q, k and v, or norms on each head of q and k; with and without experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import EXPERT_WEIGHTS, DecoderLM
from quire.ops.routing import Routing


class Qwen2(DecoderLM):
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally sliding windows on the upper layers."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(config, is_sliding=upper_layers(config), qkv_bias=True, o_bias=False)


class Qwen3(DecoderLM):
    """Qwen3: RMS norms on each head of q and k; biases only where the config asks for them."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(config, defaults={"head_dim": 128}, is_sliding=upper_layers(config), qk_norm="head")


def upper_layers(config: dict[str, Any]) -> Callable[[int], bool] | None:
    """Qwen's rule: layers from max_window_layers on slide, if sliding is used at all."""
    if not config.get("use_sliding_window"):
        return None
    first = ConfigReader(config, {"max_window_layers": 28})["max_window_layers"]
    return lambda layer: bool(layer >= first)


class Qwen2Moe(DecoderLM):
    """Qwen2-MoE: Qwen2 whose MLPs are experts beside a shared one, whose result each token weighs."""

    weight_map = EXPERT_WEIGHTS.renaming(("shared_expert", "shared"), ("shared_expert_gate", "shared_gate"))

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"norm_topk_prob": False, "qkv_bias": True})
        routing = Routing(read["num_experts_per_tok"], renormalize=read["norm_topk_prob"])
        return read_config(
            config,
            is_sliding=upper_layers(config),
            qkv_bias=read["qkv_bias"],
            o_bias=False,
            mlps=sparse_mlps(config),
            experts=ExpertsConfig(
                read.first("num_experts", "num_local_experts"),
                read["moe_intermediate_size"],
                routing,
                shared_width=read["shared_expert_intermediate_size"],
                shared_gate=True,
            ),
        )


class Qwen3Moe(DecoderLM):
    """Qwen3-MoE: Qwen3 whose MLPs are experts, but for layers that the config lists or skips."""

    weight_map = EXPERT_WEIGHTS

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"norm_topk_prob": False})
        routing = Routing(read["num_experts_per_tok"], renormalize=read["norm_topk_prob"])
        return read_config(
            config,
            is_sliding=upper_layers(config),
            qk_norm="head",
            mlps=sparse_mlps(config),
            experts=ExpertsConfig(
                read.first("num_experts", "num_local_experts"), read["moe_intermediate_size"], routing
            ),
        )


def sparse_mlps(config: dict[str, Any]) -> tuple[str, ...]:
    """Qwen's rule: every decoder_sparse_step-th layer has experts, but for mlp_only_layers."""
    read = ConfigReader(config, {"decoder_sparse_step": 1, "mlp_only_layers": ()})
    dense, step = set(read["mlp_only_layers"]), read["decoder_sparse_step"]
    layers = range(read["num_hidden_layers"])
    return tuple("gated" if layer in dense or (layer + 1) % step else "experts" for layer in layers)

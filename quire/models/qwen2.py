"""Qwen2 and Qwen3: Llama with biases on q, k and v, or norms on each head of q and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, read_config
from quire.models.decoder import DecoderLM


class Qwen2(DecoderLM):
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally sliding windows on the upper layers."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(config, is_sliding=upper_layers(config), qkv_bias=True, o_bias=False)


class Qwen3(DecoderLM):
    """Qwen3: RMS norms on each head of q and k; biases only where the config asks for them."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return read_config(
            config,
            defaults={"head_dim": 128},
            is_sliding=upper_layers(config),
            qk_norm="head",
        )


def upper_layers(config: dict[str, Any]) -> Callable[[int], bool] | None:
    """Qwen's rule: layers from max_window_layers on slide, if sliding is used at all."""
    if not config.get("use_sliding_window"):
        return None
    first = ConfigReader(config, {"max_window_layers": 28})["max_window_layers"]
    return lambda layer: bool(layer >= first)

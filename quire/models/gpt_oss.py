"""gpt-oss: every second layer slides, attention has sinks, and experts have biases and a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.ops.routing import Routing
from quire.types.errors import ModelError

_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # what the activation is written for


class GptOss(DecoderLM):
    # Matrices of all experts are parameters themselves, without a layer that has a weight.
    weight_map = PRE_NORM_WEIGHTS.renaming(
        ("experts.gate_up_proj$", "experts.gate_up_proj.weight$"),
        ("experts.gate_up_proj_bias$", "experts.gate_up_proj.bias$"),
        ("experts.down_proj$", "experts.down_proj.weight$"),
        ("experts.down_proj_bias$", "experts.down_proj.bias$"),
        ("self_attn.sinks$", "self_attn.sinks.weight$"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {**_SWIGLU, "num_experts_per_tok": 4, "attention_bias": True})
        for key, value in _SWIGLU.items():
            if read[key] != value:
                raise ModelError(f"{key} is {read[key]}, and {value} is the only value that is supported")
        return read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "head_dim": 64, "rope_theta": 150_000.0},
            is_sliding=lambda layer: layer % 2 == 0,
            qkv_bias=read["attention_bias"],
            o_bias=read["attention_bias"],
            attention_sinks=True,
            experts=ExpertsConfig(
                read.first("num_local_experts", "num_experts"),
                read["intermediate_size"],
                Routing(read["num_experts_per_tok"], score="logits", weighting="softmax"),
                router_bias=True,
                bias=True,
                activation="clamped_swiglu",
                layout="interleaved_columns",
            ),
        )

"""Llama-4, text: chunked attention with rotations and norms without weights; every fourth layer sees everything,
rotates nothing and scales queries by their position; one expert for each token, whose input is weighted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.layers.rope.parameters import QueryTemperature
from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import PRE_NORM_WEIGHTS, DecoderLM
from quire.ops.routing import Routing
from quire.types.errors import ModelError

_DEFAULTS = {
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "use_qk_norm": True,
}
_KINDS = ("full_attention", "chunked_attention")


class Llama4(DecoderLM):
    weight_map = PRE_NORM_WEIGHTS.renaming(
        ("feed_forward", "mlp"),
        ("shared_expert", "shared"),
        ("experts.gate_up_proj$", "experts.gate_up_proj.weight$"),
        ("experts.down_proj$", "experts.down_proj.weight$"),
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, _DEFAULTS)
        num_layers, width = read["num_hidden_layers"], read["intermediate_size"]
        if read["num_experts_per_tok"] != 1:
            raise ModelError(
                f"num_experts_per_tok is {read['num_experts_per_tok']}, and Llama-4 is supported with one expert for"
                " each token, as all published models have it"
            )
        interval, step = read["no_rope_layer_interval"], read["interleave_moe_layer_step"]
        rotates = read.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
        types = read.get("layer_types") or [_KINDS[bool(rotated)] for rotated in rotates]
        if len(rotates) != num_layers or len(types) != num_layers or set(types) - set(_KINDS):
            raise ModelError(
                f"no_rope_layers and layer_types ({', '.join(_KINDS)}) need an entry for each of {num_layers} layers;"
                f" they have {len(rotates)} and {len(types)}, with {', '.join(sorted(set(types)))}"
            )
        sparse = set(read.get("moe_layers", range(step - 1, num_layers, step)))
        chunk = read["attention_chunk_size"]
        decoder = read_config(
            config,
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
            intermediate_size=read.get("intermediate_size_mlp", 16384),
            sliding_windows=tuple(chunk if kind == "chunked_attention" else None for kind in types),
            chunked=True,
            interleaved_rope=True,
            qk_norm="unit_rotated" if read["use_qk_norm"] else "none",
            mlps=tuple("experts" if layer in sparse else "gated" for layer in range(num_layers)),
            experts=ExpertsConfig(
                read["num_local_experts"],
                width,
                Routing(1, score="logits", weighting="sigmoid"),
                shared_width=width,
                scales_input=True,
                layout="columns",
            ),
        )
        tuned = read["attn_temperature_tuning"]
        still = QueryTemperature(read["floor_scale"], read["attn_scale"]) if tuned else None
        return replace(decoder, rope=tuple(rope if rotates[at] else still for at, rope in enumerate(decoder.rope)))

"""Granite, Granite-MoE and the hybrid Granite-4: multipliers on embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.bamba import mamba2_sizes
from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig, ExpertsConfig, read_config
from quire.models.decoder import EXPERT_MATRICES, EXPERT_WEIGHTS, DecoderLM
from quire.models.mamba import MAMBA_NAMES
from quire.models.recurrent import moved
from quire.ops.routing import Routing


class Granite(DecoderLM):
    """Granite: Llama with multipliers on embeddings, attention, residuals and logits."""

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {})
        return read_config(
            config,
            attention_scale=read.get("attention_multiplier", 1.0),
            embedding_scale=read.get("embedding_multiplier", 1.0),
            residual_multiplier=read.get("residual_multiplier", 1.0),
            logit_divisor=read.get("logits_scaling", 1.0),
        )


class GraniteMoe(Granite):
    """Granite-MoE: Granite with experts; a token's weights are the softmax over the logits of its experts."""

    weight_map = EXPERT_WEIGHTS.renaming(
        ("block_sparse_moe.router.layer", "mlp.router"),
        ("block_sparse_moe.input_linear", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear", "mlp.experts.down_proj"),
    ).renaming_first(  # of each expert alone, where they are quantized
        ("block_sparse_moe.experts", "mlp.experts"), *EXPERT_MATRICES
    )

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"num_experts_per_tok": 2, "num_local_experts": 8})
        routing = Routing(read["num_experts_per_tok"], score="logits", weighting="softmax")
        return replace(
            super().decoder_config(config),
            mlps=("experts",) * read["num_hidden_layers"],
            experts=ExpertsConfig(read["num_local_experts"], read["intermediate_size"], routing),
        )


_MIXERS = {
    **dict.fromkeys(("attention", "full_attention"), "attention"),
    **dict.fromkeys(("mamba", "linear_attention"), "mamba2"),
}
_SHARED = (
    ("shared_mlp.input_linear", "mlp.shared.gate_up_proj"),
    ("shared_mlp.output_linear", "mlp.shared.down_proj"),
)
_DENSE = (("shared_mlp.input_linear", "mlp.gate_up_proj"), ("shared_mlp.output_linear", "mlp.down_proj"))


class GraniteMoeHybrid(GraniteMoe):
    """Granite-4 hybrid: Mamba-2 and attention mostly without RoPE, Granite's multipliers, experts beside a
    shared MLP."""

    weight_map = GraniteMoe.weight_map.renaming(*moved("mamba", *MAMBA_NAMES))

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.weight_map = self.weight_map.renaming(*(_DENSE if config.experts is None else _SHARED))

    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        read = ConfigReader(config, {"num_local_experts": 8, "shared_intermediate_size": 1024})
        count = read["num_hidden_layers"]
        types = read.get("layer_types") or read.get("layers_block_type") or ["mamba"] * count
        shared, config = read["shared_intermediate_size"], {**config, "layer_types": None}
        if read["num_local_experts"]:
            decoder = super().decoder_config(config)
            assert decoder.experts is not None
            decoder = replace(decoder, experts=replace(decoder.experts, shared_width=shared))
        else:
            decoder = Granite.decoder_config({**config, "intermediate_size": shared})
        return replace(
            decoder,
            rope=decoder.rope if read.get("position_embedding_type") == "rope" else (None,) * count,
            mixers=read.kinds("layer_types (layers_block_type)", types, _MIXERS),
            recurrent=mamba2_sizes(read),
        )

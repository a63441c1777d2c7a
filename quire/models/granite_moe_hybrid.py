"""Granite-4 hybrid: Mamba-2 and attention mostly without RoPE, Granite's multipliers, experts beside a shared MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.bamba import mamba2_sizes
from quire.models.base import BuildContext
from quire.models.config import ConfigReader, DecoderConfig
from quire.models.granite import Granite, GraniteMoe
from quire.models.mamba2 import MAMBA_NAMES
from quire.models.recurrent import moved

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

"""EAGLE and EAGLE-2: a layer that extrapolates the target's last hidden states, under the target's LM head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.layers.norm import ResidualMerge
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.models.decoder import PRE_NORM_WEIGHTS
from quire.models.drafters.base import DraftHead, whole_linear
from quire.models.llama import Llama

# Heads are published with and without the prefix, and some with a copy of the target's embeddings.
WEIGHTS = replace(PRE_NORM_WEIGHTS, rename={"model.layers": "layers", "layers.0": "layer", **PRE_NORM_WEIGHTS.rename})


class Eagle(DraftHead):
    weight_map = WEIGHTS.renaming(("model.fc", "fc")).ignoring("*embed_tokens.weight", "lm_head.weight")

    def __init__(self, config: DecoderConfig, ctx: BuildContext, *, fc_bias: bool = False) -> None:
        super().__init__(config, ctx)
        self.layer.attn_norm = ResidualMerge()  # what it reads is not normed
        self.fc = whole_linear(2 * config.hidden_size, config.hidden_size, ctx, bias=fc_bias)

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Eagle:
        return cls(cls.layer_config(config), ctx, fc_bias=bool(config.get("fc_bias", config.get("bias", False))))

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return Llama.decoder_config({**config, "num_hidden_layers": 1})

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        assert inputs_embeds is not None, "of a head, these are the hidden states before the tokens"
        return self.run_layer(self.joined(self._embed(input_ids), inputs_embeds, self.fc), positions, batch)

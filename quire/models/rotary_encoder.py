"""The encoder with rotated positions: a stack of decoder layers whose tokens see those after them too.

An architecture gives its DecoderConfig, which says all of this.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.models.base import BuildContext, Model, ModelDescription
from quire.models.config import DecoderConfig
from quire.models.decoder import Decoder, described
from quire.models.encoder import Encoder
from quire.models.heads import make_heads
from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs


class RotaryEncoder(Encoder):
    def __init__(self, stack: DecoderConfig, ctx: BuildContext) -> None:
        Model.__init__(self)
        self.stack = Decoder(stack, ctx)
        self.heads = make_heads(ctx.heads, ctx.target, self.stack.embed_tokens)

    @classmethod
    @abstractmethod
    def stack_config(cls, config: dict[str, Any]) -> DecoderConfig:
        """Sizes, rotations and windows of the layers."""

    @classmethod
    def built(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        return cls(cls.stack_config(config), ctx)

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        return described(cls.stack_config(config))

    def token_inputs(self, max_rows: int, max_model_len: int) -> TokenInputs:
        return PLAIN_INPUTS

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        embeds = self.stack.embed(input_ids) if inputs_embeds is None else inputs_embeds
        hidden, residual, _ = self.stack.run_layers(embeds, positions, batch)
        return self.stack.finish(hidden, residual)

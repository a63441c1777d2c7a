"""Medusa: heads that each guess a token some places ahead, all from the target's last hidden state."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from quire.layers.attention import ForwardBatch
from quire.layers.embedding import HeadProjection, LMHead
from quire.layers.fusion import whole
from quire.layers.weights import WeightMap
from quire.models.base import BuildContext, Model, ModelDescription
from quire.models.drafters.base import whole_linear
from quire.types.errors import EngineError, ModelError


class Medusa(Model):
    capabilities = frozenset()
    num_hidden_read = 1

    def __init__(
        self, num_heads: int, num_layers: int, sizes: tuple[int, int], ctx: BuildContext, bias: bool
    ) -> None:
        """sizes: of hidden states, and of the vocabulary."""
        super().__init__()
        self.hidden_size, vocab_size = sizes
        width = self.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(whole_linear(width, width, ctx, bias=bias) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            LMHead(HeadProjection(width, vocab_size, bias=False, **ctx.split), **ctx.split) for _ in range(num_heads)
        )
        names = {"medusa_heads.": ""}
        for head in range(num_heads):  # as its authors publish it, and as vLLM converts it
            names |= {
                f"lm_heads.{head}": f"lm_heads.{head}.projection",
                f"{head}.{num_layers}": f"lm_heads.{head}.projection",
            }
            names |= {f"blocks.{head}.layers.{layer}": f"blocks.{head}.{layer}" for layer in range(num_layers)}
            names |= {f"{head}.{layer}.linear": f"blocks.{head}.{layer}" for layer in range(num_layers)}
        self.weight_map = WeightMap(rename=names)

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        num_heads = config.get("num_heads") or config.get("medusa_num_heads")
        num_layers = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
        if not num_heads:
            raise ModelError('the config of Medusa heads has no "medusa_num_heads" (or "num_heads")')
        bias = bool(config.get("fc_bias", True))
        return cls(int(num_heads), int(num_layers), (config["hidden_size"], config["vocab_size"]), ctx, bias)

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        return ModelDescription(config["vocab_size"], config["hidden_size"], 0, 1 << 30, ())

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        raise EngineError("Medusa heads compute no tokens; they read hidden states of the target")

    @property
    def num_heads(self) -> int:
        return len(self.lm_heads)

    def logits_ahead(self, hidden: Tensor, head: int) -> Tensor:
        """hidden [m, hidden] of the target -> [m, vocab] of the token `head` places after the next one."""
        block = self.blocks[head]
        assert isinstance(block, nn.ModuleList)
        for layer in block:
            hidden = hidden + torch.nn.functional.silu(whole(layer(hidden)))
        logits: Tensor = self.lm_heads[head](hidden)
        return logits

"""Attention whose heads' results are multiplied by the sigmoid of gates, which the query projection gives too."""

from __future__ import annotations

import torch

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, whole
from quire.layers.linear import ReorderedLinear
from quire.layers.state import rows_of_heads
from quire.models.base import BuildContext
from quire.models.blocks import AttentionBlock
from quire.models.config import DecoderConfig
from quire.ops.recurrent import COMPACT, GATE
from quire.ops.select import GATHER_ROWS


class GatedAttention(AttentionBlock):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        heads, width, of_keys = config.num_heads, config.head_dim, (config.num_kv_heads, config.head_dim)
        first, count = ctx.group.slice_of(heads, "attention heads")
        # Of each head the query and then the gate, in checkpoints; here all gates and then all queries.
        rows = torch.arange(2 * heads * width, device="cpu").view(heads, 2, -1)[first : first + count]
        kept = rows_of_heads(ctx.group, of_keys)
        self.qkv_proj = ReorderedLinear(
            config.hidden_size,
            {"q_proj": 2 * heads * width, "k_proj": of_keys[0] * width, "v_proj": of_keys[0] * width},
            {"q_proj": rows.flip(1).transpose(0, 1).flatten(), "k_proj": kept, "v_proj": kept},
            bias=config.qkv_bias,
            target=ctx.target,
        )
        self._width = count * width
        self._gate, self._gather_rows = GATE.bind(ctx.target), GATHER_ROWS.bind(ctx.target)
        self._compact = COMPACT.bind(ctx.target)

    def settle(self) -> None:
        return None

    def forward(
        self, hidden: Passed, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None = None
    ) -> Passed:
        projected = whole(self.qkv_proj(hidden))
        gates, qkv = projected[:, : self._width], projected[:, self._width :]
        normed, head_norm = self.qk_norm(self._compact(qkv))
        mixed = self.attention(normed, head_norm, rotation, batch, wanted)
        if wanted is not None:
            gates = self._gather_rows(self._compact(gates), wanted.tokens)
        out: Passed = self.o_proj(self._gate(mixed, gates))
        return out

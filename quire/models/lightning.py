"""Lightning attention: linear attention whose heads decay by constants, a norm over all heads, a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import PLAIN, Forms, Passed, whole
from quire.layers.linear import ColumnParallelLinear
from quire.layers.norm import ParallelRMSNorm
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import RecurrentMixer
from quire.ops.recurrent import GATE, LINEAR_ATTENTION
from quire.ops.states import StateShape


class Lightning(RecurrentMixer):
    decays: Tensor  # [heads] float32

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        heads, dim = self.full.num_heads, self.full.key_dim
        width = heads * dim
        self.qkv_proj = self.project(config.hidden_size, (heads, 3 * dim))
        self.output_gate = ColumnParallelLinear(
            config.hidden_size, width, bias=False, target=ctx.target, group=ctx.group
        )
        self.gated_norm = ParallelRMSNorm(width, eps=self.kind.eps, target=ctx.target, group=ctx.group)
        self.out_proj = self.project_out(width, config)
        first, count = ctx.group.slice_of(heads, "recurrent heads")
        depth = 1.0 - layer / (config.num_layers - 1 + 1e-5) + 1e-5
        rates = torch.arange(first + 1, first + count + 1, dtype=torch.float32) * (-8.0 / heads)
        self.register_buffer("decays", torch.exp(-torch.exp2(rates) * depth), persistent=False)
        self._attend, self._gate = LINEAR_ATTENTION.bind(ctx.target), GATE.bind(ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        return StateShape(0, 1, kind.num_heads, kind.num_heads, kind.key_dim, kind.key_dim)

    @property
    def accepts(self) -> Forms:
        return PLAIN

    def forward(
        self, hidden: Passed, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None = None
    ) -> Passed:
        x, state = whole(hidden), self.state
        qkv = whole(self.qkv_proj(x))
        qkv = self._gate(torch.ones_like(qkv), qkv, True)
        mixed = self._attend(qkv, self.decays, state.cache, state.places(batch), state.shape)
        gated = self._gate(self.gated_norm(mixed), whole(self.output_gate(x)))
        out: Passed = self.out_proj(state.of_wanted(gated, wanted, batch))
        return out

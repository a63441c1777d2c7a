"""The Mamba mixer: a convolution, and a selective scan whose steps, inputs and readouts follow from its result."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, whole
from quire.layers.linear import RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import RecurrentMixer
from quire.ops.recurrent import COMPACT, GATE, SELECTIVE_SCAN, SHORT_CONV
from quire.ops.states import StateShape


class MambaMixer(RecurrentMixer):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind, width, all_width = self.kind, self.kind.num_heads, self.full.num_heads
        self._width, self._sizes = width, [kind.dt_rank, kind.key_dim, kind.key_dim]
        self.in_proj = self.project(config.hidden_size, (all_width, 1), (all_width, 1), bias=kind.bias)
        self.conv1d = self.convolve((all_width, 1))
        self.x_proj = RowParallelLinear(all_width, sum(self._sizes), bias=False, target=ctx.target, group=ctx.group)
        self.dt_proj = self.project(kind.dt_rank, (all_width, 1), bias=True)
        self.A_log, self.D = self.vector(width, kind.key_dim), self.vector(width)
        self.out_proj = self.project_out(all_width, config, bias=kind.bias)
        names = ("dt_layernorm", "b_layernorm", "c_layernorm") if kind.dt_norms is not None else ()
        for name, size in zip(names, self._sizes, strict=False):
            eps = kind.dt_norms or 0.0
            weighs = kind.dt_norm_weights
            self.add_module(name, RMSNorm(size, eps=eps, target=ctx.target) if weighs else PlainNorm(eps))
        self._norms = names
        self._conv, self._scan = SHORT_CONV.bind(ctx.target), SELECTIVE_SCAN.bind(ctx.target)
        self._gate, self._compact = GATE.bind(ctx.target), COMPACT.bind(ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        return StateShape(kind.num_heads, kind.conv_width, kind.num_heads, 1, kind.key_dim, 1, kind.key_dim)

    def forward(
        self, hidden: Passed, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None = None
    ) -> Passed:
        x, gate = whole(self.in_proj(hidden)).split(self._width, dim=-1)
        state = self.state
        place = (state.cache, state.places(batch), state.shape)
        x = self._conv(x, self.conv1d.weight, self.conv1d.bias, True, *place)
        parts = whole(self.x_proj(x)).split(self._sizes, dim=-1)
        if self._norms:
            parts = tuple(self.get_submodule(name)(part) for name, part in zip(self._norms, parts, strict=True))
        dt, b, c = parts
        steps = whole(self.dt_proj(self._compact(dt)))
        mixed = self._gate(self._scan(x, steps, b, c, self.A_log, self.D, *place), gate, True)
        out: Passed = self.out_proj(state.of_wanted(mixed, wanted, batch))
        return out


class PlainNorm(torch.nn.Module):
    """An RMS norm without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * wide.pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()).to(x.dtype)

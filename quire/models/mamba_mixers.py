"""The mixers of Mamba, a convolution and a selective scan, and of Mamba-2, a convolution and state-space duality."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import Passed, whole
from quire.layers.linear import RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import GatedNorm, RecurrentMixer, WholeGatedNorm
from quire.ops.recurrent import COMPACT, GATE, SELECTIVE_SCAN, SHORT_CONV, STATE_SPACE
from quire.ops.states import StateShape


class MambaMixer(RecurrentMixer):
    """A convolution, and a selective scan whose steps, inputs and readouts follow from its result."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind, width, all_width = self.kind, self.kind.num_heads, self.full.num_heads
        self._width, self._sizes = width, [kind.dt_rank, kind.key_dim, kind.key_dim]
        self.in_proj = self.project(config.hidden_size, (all_width, 1), (all_width, 1), bias=kind.bias)
        self.conv1d = self.convolve((all_width, 1))
        self.x_proj = RowParallelLinear(all_width, sum(self._sizes), bias=False, **ctx.split)
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

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        x, gate = whole(self.in_proj(hidden)).split(self._width, dim=-1)
        place = self.state.place(batch)
        x = self._conv(x, self.conv1d.weight, self.conv1d.bias, True, *place)
        parts = whole(self.x_proj(x)).split(self._sizes, dim=-1)
        if self._norms:
            parts = tuple(self.get_submodule(name)(part) for name, part in zip(self._norms, parts, strict=True))
        dt, b, c = parts
        steps = whole(self.dt_proj(self._compact(dt)))
        mixed = self._gate(self._scan(x, steps, b, c, self.A_log, self.D, *place), gate, True)
        return self.out_proj(self.state.of_wanted(mixed, batch))


class PlainNorm(torch.nn.Module):
    """An RMS norm without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * wide.pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()).to(x.dtype)


class Mamba2Mixer(RecurrentMixer):
    """A convolution over x, B and C, state-space duality, a gated norm."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind, full, shape = self.kind, self.full, self.state.shape
        width = kind.num_heads * kind.value_dim
        self._sizes = [width, shape.conv_channels, kind.num_heads]
        heads, of_keys = (full.num_heads, full.value_dim), (full.num_key_heads, full.key_dim)
        parts = (heads, heads, of_keys, of_keys, (full.num_heads, 1))
        self.in_proj = self.project(config.hidden_size, *parts, bias=kind.bias)
        self.conv1d = self.convolve(*parts[1:4])
        self.A_log, self.D, self.dt_bias = (self.vector(kind.num_heads) for _ in range(3))
        self.gated_norm: GatedNorm | WholeGatedNorm | None = None
        all_width, splits = full.num_heads * full.value_dim, ctx.group.size > 1
        if kind.norm and splits and kind.norm_groups == 1 and not kind.norm_first:
            self.gated_norm = WholeGatedNorm(all_width, eps=kind.eps, ctx=ctx)
        elif kind.norm:
            self.gated_norm = GatedNorm(
                width,
                eps=kind.eps,
                groups=ctx.group.slice_of(kind.norm_groups, "groups of the norm behind a recurrence")[1],
                shared=False,
                norm_first=kind.norm_first,
                sigmoid=False,
                ctx=ctx,
            )
        self.out_proj = self.project_out(all_width, config, bias=kind.bias)
        self._limits, self._scales = kind.dt_limits, kind.scales
        keys = kind.num_key_heads * kind.key_dim
        self._scaled_sizes = [width, width, keys, keys, kind.num_heads]
        self._conv, self._scan = SHORT_CONV.bind(ctx.target), STATE_SPACE.bind(ctx.target)
        self._gate = GATE.bind(ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        channels = kind.num_heads * kind.value_dim + 2 * kind.num_key_heads * kind.key_dim
        return StateShape(channels, kind.conv_width, kind.num_heads, kind.num_key_heads, kind.key_dim, kind.value_dim)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        projected = whole(self.in_proj(hidden))
        if self._scales:
            parts = zip(projected.split(self._scaled_sizes, dim=-1), self._scales, strict=True)
            projected = torch.cat([part * scale for part, scale in parts], dim=-1)
        gate, xbc, dt = projected.split(self._sizes, dim=-1)
        place = self.state.place(batch)
        xbc = self._conv(xbc, self.conv1d.weight, self.conv1d.bias, True, *place)
        mixed = self._scan(xbc, dt, self.dt_bias, self.A_log, self.D, self._limits, *place)
        mixed = self._gate(mixed, gate, True) if self.gated_norm is None else self.gated_norm(mixed, gate)
        return self.out_proj(self.state.of_wanted(mixed, batch))

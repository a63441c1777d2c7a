"""Gated DeltaNet: a convolution over queries, keys and values, the gated delta rule, a gated norm."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, whole
from quire.layers.linear import Linear, ReorderedLinear
from quire.layers.state import rows_of_heads
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import GatedNorm, RecurrentMixer
from quire.ops.recurrent import GATED_DELTA, SHORT_CONV
from quire.ops.states import StateShape


class GatedDelta(RecurrentMixer):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind, full = self.kind, self.full
        keys = full.num_key_heads, full.key_dim
        self._parts = (keys, keys, (full.num_heads, full.value_dim))
        width = kind.num_heads * kind.value_dim
        self.in_proj = self.make_projection(config.hidden_size)
        self.conv1d = self.convolve(*self._parts)
        self.A_log, self.dt_bias = self.vector(kind.num_heads), self.vector(kind.num_heads)
        self.gated_norm = GatedNorm(
            width,
            eps=kind.eps,
            groups=kind.num_heads,
            shared=True,
            norm_first=True,
            sigmoid=False,
            ctx=ctx,
        )
        self.out_proj = self.project_out(full.num_heads * full.value_dim, config)
        self._sizes = [self.state.shape.conv_channels, width, kind.num_heads, kind.num_heads]
        self._conv, self._delta = SHORT_CONV.bind(ctx.target), GATED_DELTA.bind(ctx.target)

    def make_projection(self, hidden_size: int) -> Linear:
        """To queries, keys and values together, gates, strengths and decays."""
        full = self.full
        parts: dict[str | None, tuple[tuple[int, int], ...]] = {
            "in_proj_qkv": self._parts,
            "in_proj_z": self._parts[2:],
            "in_proj_b": ((full.num_heads, 1),),
            "in_proj_a": ((full.num_heads, 1),),
        }
        sizes = {name: sum(heads * width for heads, width in part) for name, part in parts.items()}
        orders = {name: rows_of_heads(self.ctx.group, *part) for name, part in parts.items()}
        return ReorderedLinear(hidden_size, sizes, orders, bias=False, target=self.ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        channels = 2 * kind.num_key_heads * kind.key_dim + kind.num_heads * kind.value_dim
        return StateShape(channels, kind.conv_width, kind.num_heads, kind.num_key_heads, kind.key_dim, kind.value_dim)

    def forward(
        self, hidden: Passed, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None = None
    ) -> Passed:
        qkv, gate, strength, decay = whole(self.in_proj(hidden)).split(self._sizes, dim=-1)
        state = self.state
        place = (state.cache, state.places(batch), state.shape)
        qkv = self._conv(qkv, self.conv1d.weight, self.conv1d.bias, True, *place)
        mixed = self.gated_norm(self._delta(qkv, decay, strength, self.A_log, self.dt_bias, *place), gate)
        out: Passed = self.out_proj(state.of_wanted(mixed, wanted, batch))
        return out


class GroupedGatedDelta(GatedDelta):
    """The same, in checkpoints that keep together what belongs to one head of keys."""

    def make_projection(self, hidden_size: int) -> Linear:
        kind, full = self.kind, self.full
        keys, repeats = kind.num_key_heads, full.num_heads // full.num_key_heads
        first, _ = self.ctx.group.slice_of(full.num_key_heads, "heads of recurrent keys")
        of_values = repeats * kind.value_dim
        parts = {"in_proj_qkvz": (kind.key_dim, kind.key_dim, of_values, of_values), "in_proj_ba": (repeats, repeats)}
        return ReorderedLinear(
            hidden_size,
            {name: full.num_key_heads * sum(sizes) for name, sizes in parts.items()},
            {name: first * sum(sizes) + _by_part(keys, sizes) for name, sizes in parts.items()},
            bias=False,
            target=self.ctx.target,
        )


def _by_part(num_heads: int, sizes: tuple[int, ...]) -> Tensor:
    """The order that puts the first parts of all heads first, then the second parts, of heads that have all parts."""
    rows = torch.arange(num_heads * sum(sizes), device="cpu").view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])

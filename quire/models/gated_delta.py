"""Gated DeltaNet: a convolution over queries, keys and values, the gated delta rule, a gated norm."""

from __future__ import annotations

import torch

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, whole
from quire.layers.linear import MergedColumnParallelLinear, ReorderedLinear
from quire.layers.state import ConvWeights
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import GatedNorm, RecurrentMixer, recurrent_of
from quire.ops.recurrent import GATED_DELTA, SHORT_CONV
from quire.ops.states import StateShape


class GatedDelta(RecurrentMixer):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind, shape = recurrent_of(config), self.state.shape
        self._values = kind.num_heads * kind.value_dim
        self.in_proj = self.make_projection(config, kind, ctx)
        self.conv1d = ConvWeights(shape.conv_channels, kind.conv_width, bias=kind.conv_bias, target=ctx.target)
        self.A_log, self.dt_bias = self.vector(kind.num_heads), self.vector(kind.num_heads)
        self.gated_norm = GatedNorm(
            self._values,
            eps=kind.eps,
            groups=kind.num_heads,
            shared=True,
            norm_first=True,
            sigmoid=False,
            ctx=ctx,
        )
        self.out_proj = self.project_out(self._values, config)
        self._sizes = [shape.conv_channels, self._values, kind.num_heads, kind.num_heads]
        self._conv, self._delta = SHORT_CONV.bind(ctx.target), GATED_DELTA.bind(ctx.target)

    def make_projection(
        self, config: DecoderConfig, kind: RecurrentConfig, ctx: BuildContext
    ) -> MergedColumnParallelLinear:
        """To queries, keys and values together, gates, strengths and decays."""
        sizes = {
            "in_proj_qkv": self.state.shape.conv_channels,
            "in_proj_z": self._values,
            "in_proj_b": kind.num_heads,
            "in_proj_a": kind.num_heads,
        }
        return MergedColumnParallelLinear(config.hidden_size, sizes, bias=False, target=ctx.target, group=ctx.group)

    @classmethod
    def shape_of(cls, config: DecoderConfig) -> StateShape:
        kind = recurrent_of(config)
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

    def make_projection(
        self, config: DecoderConfig, kind: RecurrentConfig, ctx: BuildContext
    ) -> MergedColumnParallelLinear:
        keys, of_values = kind.num_key_heads, self._values // kind.num_key_heads
        repeats = kind.num_heads // keys
        return ReorderedLinear(
            config.hidden_size,
            {"in_proj_qkvz": self.state.shape.conv_channels + self._values, "in_proj_ba": 2 * kind.num_heads},
            {
                "in_proj_qkvz": _by_part(keys, (kind.key_dim, kind.key_dim, of_values, of_values)),
                "in_proj_ba": _by_part(keys, (repeats, repeats)),
            },
            bias=False,
            target=ctx.target,
            group=ctx.group,
        )


def _by_part(num_heads: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The order that puts the first parts of all heads first, then the second parts, of heads that have all parts."""
    rows = torch.arange(num_heads * sum(sizes), device="cpu").view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])

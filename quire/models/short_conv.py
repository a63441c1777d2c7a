"""The short convolution of LFM2: c * conv(b * x)."""

from __future__ import annotations

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, whole
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import RecurrentMixer
from quire.ops.recurrent import GATED_CONV
from quire.ops.states import StateShape


class ShortConv(RecurrentMixer):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        size, kind, channels = config.hidden_size, self.kind, (self.full.num_heads, 1)
        self.in_proj = self.project(size, channels, channels, channels, bias=kind.bias)
        self.conv = self.convolve(channels)
        self.out_proj = self.project_out(size, config, bias=kind.bias)
        self._conv = GATED_CONV.bind(ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        return StateShape(kind.num_heads, kind.conv_width)

    def forward(
        self, hidden: Passed, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None = None
    ) -> Passed:
        bcx, state = whole(self.in_proj(hidden)), self.state
        place = (state.cache, state.places(batch), state.shape)
        mixed = self._conv(bcx, self.conv.weight, self.conv.bias, *place)
        out: Passed = self.out_proj(state.of_wanted(mixed, wanted, batch))
        return out

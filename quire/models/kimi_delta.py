"""Kimi delta attention: the gated delta rule in which each channel of a key decays by itself."""

from __future__ import annotations

from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import Passed, whole
from quire.layers.linear import Linear, ReorderedLinear
from quire.layers.state import rows_of_heads
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import GatedNorm, RecurrentMixer
from quire.ops.recurrent import COMPACT, GATED_DELTA, SHORT_CONV
from quire.ops.states import StateShape

_QKV = ("q_proj", "k_proj", "v_proj")
KIMI_STACK = {
    "a_proj": (*_QKV, "b_proj", "f_a_proj", "g_a_proj", "f_proj", "g_proj"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
}


class KimiDelta(RecurrentMixer):
    """Decays and gates are projected from the input, at once or through `gate_rank` features."""

    ends = ("a_proj", "o_proj")

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind, full, rank = self.kind, self.full, self.full.gate_rank
        heads = (full.num_heads, full.key_dim)
        size, self._width = full.num_heads * full.key_dim, kind.num_heads * kind.key_dim
        gates = ("f_a_proj", "g_a_proj") if rank else ("f_proj", "g_proj")
        of_heads, of_rows = rows_of_heads(ctx.group, (full.num_heads, 1)), rows_of_heads(ctx.group, heads)
        sizes: dict[str | None, int] = {**dict.fromkeys(_QKV, size), "b_proj": full.num_heads}
        sizes |= dict.fromkeys(gates, rank or size)
        kept: dict[str | None, Tensor | None] = dict.fromkeys((*_QKV, "f_proj", "g_proj"), of_rows)
        kept["b_proj"] = of_heads
        # Named as in the latent attention beside it, whose checkpoint names are alike.
        self.a_proj = ReorderedLinear(config.hidden_size, sizes, kept, bias=False, target=ctx.target)
        self.f_b_proj: Linear | None = self.project(rank, heads) if rank else None
        self.g_b_proj: Linear | None = self.project(rank, heads) if rank else None
        self.conv1d = self.convolve(heads, heads, heads, names=KIMI_STACK["conv1d"])
        self.A_log, self.dt_bias = self.vector(kind.num_heads), self.vector(self._width)
        self.o_norm = GatedNorm(
            self._width, eps=kind.eps, groups=kind.num_heads, shared=True, norm_first=True, sigmoid=True, ctx=ctx
        )
        self.o_proj = self.project_out(size, config)
        self._sizes = [3 * self._width, kind.num_heads, *[rank or self._width] * 2]
        self._conv, self._delta = SHORT_CONV.bind(ctx.target), GATED_DELTA.bind(ctx.target)
        self._compact = COMPACT.bind(ctx.target)

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        heads, dim = kind.num_heads, kind.key_dim
        return StateShape(3 * heads * dim, kind.conv_width, heads, heads, dim, dim, decay_dim=dim)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        qkv, strength, decay, gate = whole(self.a_proj(hidden)).split(self._sizes, dim=-1)
        if self.f_b_proj is not None and self.g_b_proj is not None:
            decay = whole(self.f_b_proj(self._compact(decay)))
            gate = whole(self.g_b_proj(self._compact(gate)))
        place = self.state.place(batch)
        qkv = self._conv(qkv, self.conv1d.weight, self.conv1d.bias, True, *place)
        mixed = self._delta(qkv, decay, strength, self.A_log, self.dt_bias, *place, self.kind.decay_floor)
        return self.o_proj(self.state.of_wanted(self.o_norm(mixed, gate), batch))

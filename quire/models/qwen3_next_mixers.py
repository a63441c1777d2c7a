"""The mixers of Qwen3-Next: attention with gates on what heads give, and Gated DeltaNet."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import Passed, whole
from quire.layers.linear import ReorderedLinear
from quire.layers.state import rows_of_heads
from quire.models.base import BuildContext
from quire.models.blocks import AttentionBlock
from quire.models.config import DecoderConfig, RecurrentConfig
from quire.models.recurrent import GatedNorm, RecurrentMixer
from quire.ops.recurrent import COMPACT, GATE, GATED_DELTA, SHORT_CONV
from quire.ops.select import GATHER_ROWS
from quire.ops.states import StateShape


class GatedAttention(AttentionBlock):
    """Heads' results are multiplied by the sigmoid of gates, which the query projection gives too."""

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

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        projected = whole(self.qkv_proj(hidden))
        gates, qkv = projected[:, : self._width], projected[:, self._width :]
        normed, head_norm = self.qk_norm(self._compact(qkv))
        mixed = self.attention(normed, head_norm, rotation, batch)
        if batch.wanted is not None:
            gates = self._gather_rows(self._compact(gates), batch.wanted.tokens)
        return self.o_proj(self._gate(mixed, gates))


_Rows = tuple[int, Tensor | None]  # of a checkpoint's matrix: how many it has, and which of them this rank keeps


class GatedDelta(RecurrentMixer):
    """A convolution over queries, keys and values, the gated delta rule, a gated norm."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        kind, full = self.kind, self.full
        keys = full.num_key_heads, full.key_dim
        self._parts = (keys, keys, (full.num_heads, full.value_dim))
        width = kind.num_heads * kind.value_dim
        found = self.projections()
        self.in_proj = ReorderedLinear(
            config.hidden_size,
            {name: size for name, (size, _) in found.items()},
            {name: kept for name, (_, kept) in found.items()},
            bias=False,
            target=ctx.target,
        )
        self.conv1d = self.convolve(*self._parts)
        self.A_log, self.dt_bias = self.vector(kind.num_heads), self.vector(kind.num_heads)
        self.gated_norm = GatedNorm(
            width, eps=kind.eps, groups=kind.num_heads, shared=True, norm_first=True, sigmoid=False, ctx=ctx
        )
        self.out_proj = self.project_out(full.num_heads * full.value_dim, config)
        self._sizes = [self.state.shape.conv_channels, width, kind.num_heads, kind.num_heads]
        self._conv, self._delta = SHORT_CONV.bind(ctx.target), GATED_DELTA.bind(ctx.target)

    def projections(self) -> dict[str | None, _Rows]:
        """What checkpoints have of queries, keys and values, of gates, of strengths and of decays, in this order."""
        values, strengths = self._parts[2:], ((self.full.num_heads, 1),)
        named = {"in_proj_qkv": self._parts, "in_proj_z": values, "in_proj_b": strengths, "in_proj_a": strengths}
        return {
            name: (sum(heads * width for heads, width in parts), rows_of_heads(self.ctx.group, *parts))
            for name, parts in named.items()
        }

    @classmethod
    def shape_of(cls, kind: RecurrentConfig) -> StateShape:
        channels = 2 * kind.num_key_heads * kind.key_dim + kind.num_heads * kind.value_dim
        return StateShape(channels, kind.conv_width, kind.num_heads, kind.num_key_heads, kind.key_dim, kind.value_dim)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        qkv, gate, strength, decay = whole(self.in_proj(hidden)).split(self._sizes, dim=-1)
        place = self.state.place(batch)
        qkv = self._conv(qkv, self.conv1d.weight, self.conv1d.bias, True, *place)
        mixed = self.gated_norm(self._delta(qkv, decay, strength, self.A_log, self.dt_bias, *place), gate)
        return self.out_proj(self.state.of_wanted(mixed, batch))


class GroupedGatedDelta(GatedDelta):
    """The same, in checkpoints that keep together what belongs to one head of keys."""

    def projections(self) -> dict[str | None, _Rows]:
        kind, of_values = self.kind, self._repeats * self.kind.value_dim
        sizes = (kind.key_dim, kind.key_dim, of_values, of_values)
        return {"in_proj_qkvz": self._grouped(*sizes), "in_proj_ba": self._grouped(self._repeats, self._repeats)}

    @property
    def _repeats(self) -> int:
        return self.full.num_heads // self.full.num_key_heads

    def _grouped(self, *sizes: int) -> _Rows:
        """sizes: of what each head of keys has, one part after the other."""
        first, count = self.ctx.group.slice_of(self.full.num_key_heads, "heads of recurrent keys")
        return self.full.num_key_heads * sum(sizes), first * sum(sizes) + _by_part(count, sizes)


class HalfGroupedGatedDelta(GroupedGatedDelta):
    """As GGUF has it: strengths and decays by heads of keys, all else by kind."""

    def projections(self) -> dict[str | None, _Rows]:
        apart = GatedDelta.projections(self)
        of_both = self._grouped(self._repeats, self._repeats)
        return {"in_proj_qkv": apart["in_proj_qkv"], "in_proj_z": apart["in_proj_z"], "in_proj_ba": of_both}


def _by_part(num_heads: int, sizes: tuple[int, ...]) -> Tensor:
    """The order that puts the first parts of all heads first, then the second parts, of heads that have all parts."""
    rows = torch.arange(num_heads * sum(sizes), device="cpu").view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])

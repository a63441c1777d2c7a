"""The blocks that decoder models are made of: attention, gated MLP and the layer around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionSpec, HeadNorm, Rotation
from quire.layers.activation import gated_product
from quire.layers.attention import Attention, ForwardBatch, WantedTokens
from quire.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import Fp8RMSNorm, ParallelRMSNorm, RMSNorm
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.ops.fp8 import Fp8Lines
from quire.ops.parts import Parts
from quire.ops.scale import SCALE
from quire.ops.select import GATHER_ROWS
from quire.types.errors import ConfigError


class AttentionBlock(nn.Module):
    """qkv projection, attention with its q/k norm and rotation, output projection."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.qkv_bias,
            target=ctx.target,
            group=ctx.group,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.o_bias,
            target=ctx.target,
            group=ctx.group,
        )
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.qk_norm = QK_NORMS[config.qk_norm](config, ctx, num_heads, num_kv_heads)
        self.attention = Attention(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale,
                sliding_window=config.sliding_windows[layer],
                soft_cap=config.attention_soft_cap,
            ),
            layer,
            ctx.target,
        )
        if config.qk_norm != "full":
            self.qkv_proj.leave_in_parts()
        if config.merges_products:
            self.o_proj.leave_in_parts()

    def forward(
        self, hidden: Tensor | Fp8Lines, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None = None
    ) -> Tensor | Parts:
        qkv, head_norm = self.qk_norm(self.qkv_proj(hidden))
        out: Tensor | Parts = self.o_proj(self.attention(qkv, head_norm, rotation, batch, wanted))
        return out


class NoQKNorm(nn.Module):
    """Query and key features are used as they are."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()

    def forward(self, qkv: Any) -> tuple[Tensor | Parts, HeadNorm | None]:
        """(qkv, what attention is to do to each head before the rotation)."""
        return qkv, None


class PerHeadQKNorm(NoQKNorm):
    """Each head is normalized by itself; all query heads share a weight, and so do all key heads."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(config, ctx, num_heads, num_kv_heads)
        kind: dict[str, Any] = {"eps": config.norm_eps, "weight_offset": config.norm_weight_offset}
        self.q = RMSNorm(config.head_dim, target=ctx.target, **kind)
        self.k = RMSNorm(config.head_dim, target=ctx.target, **kind)
        self._norm = HeadNorm(self.q.weight, self.k.weight, config.norm_eps, config.norm_weight_offset)

    def forward(self, qkv: Any) -> tuple[Tensor | Parts, HeadNorm | None]:
        return qkv, self._norm


class FullWidthQKNorm(NoQKNorm):
    """All query heads are normalized together, and so are all key heads."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(config, ctx, num_heads, num_kv_heads)
        if ctx.group.size > config.num_kv_heads:
            raise ConfigError(
                f"a norm over all {config.num_kv_heads} KV heads cannot be split over {ctx.group.size} ranks; "
                f"use a tensor parallel size of at most {config.num_kv_heads}"
            )
        kind: dict[str, Any] = {"eps": config.norm_eps, "target": ctx.target, "group": ctx.group}
        self.q = ParallelRMSNorm(config.num_heads * config.head_dim, **kind)
        self.k = ParallelRMSNorm(config.num_kv_heads * config.head_dim, **kind)
        self._widths = [num_heads * config.head_dim, num_kv_heads * config.head_dim, num_kv_heads * config.head_dim]

    def forward(self, qkv: Any) -> tuple[Tensor | Parts, HeadNorm | None]:
        q, k, v = qkv.split(self._widths, dim=-1)
        return torch.cat((self.q(q), self.k(k), v), dim=-1), None


QK_NORMS: dict[str, type[NoQKNorm]] = {"none": NoQKNorm, "head": PerHeadQKNorm, "full": FullWidthQKNorm}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            {"gate_proj": width, "up_proj": width},
            bias=config.mlp_bias,
            target=ctx.target,
            group=ctx.group,
        )
        self.down_proj = RowParallelLinear(
            width, config.hidden_size, bias=config.mlp_bias, target=ctx.target, group=ctx.group
        )
        takes_lines = self.down_proj.method.takes_lines
        self._gated = gated_product(self.gate_up_proj, config.activation, ctx.target, takes_lines=takes_lines)
        if config.merges_products:
            self.down_proj.leave_in_parts()

    def forward(self, hidden: Tensor | Fp8Lines) -> Tensor | Parts:
        out: Tensor | Parts = self.down_proj(self._gated(hidden))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP on a residual stream. A norm that an architecture does not have is the identity."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        self.self_attn = AttentionBlock(config, ctx, layer)
        self.mlp = GatedMLP(config, ctx)

        def norm(before: Linear | None = None) -> RMSNorm | Fp8RMSNorm:
            kind = Fp8RMSNorm if before is not None and before.method.takes_lines else RMSNorm
            return kind(
                config.hidden_size, eps=config.norm_eps, target=ctx.target, weight_offset=config.norm_weight_offset
            )

        pre, post = config.norms in ("pre", "pre_post"), config.norms in ("pre_post", "post")
        self.attn_norm = norm(self.self_attn.qkv_proj) if pre else NoNorm()
        self.attn_post_norm = norm() if post else nn.Identity()
        self.mlp_norm = norm(self.mlp.gate_up_proj) if pre else NoNorm()
        self.mlp_post_norm = norm() if post else nn.Identity()
        self._multiplier = config.residual_multiplier
        self._gather_rows, self._scale = GATHER_ROWS.bind(ctx.target), SCALE.bind(ctx.target)

    def forward(
        self,
        hidden: Tensor | Parts,
        residual: Tensor | None,
        rotation: Rotation,
        batch: ForwardBatch,
        wanted: WantedTokens | None = None,
    ) -> tuple[Tensor | Parts, Tensor]:
        """`hidden` is what the layer before added last; it is merged into `residual` here.

        With `wanted` both results are of those tokens alone.
        """
        normed, residual = self.attn_norm.merge(hidden, residual)
        hidden = self._scaled(self.attn_post_norm(self.self_attn(normed, rotation, batch, wanted)))
        if wanted is not None:
            residual = self._gather_rows(residual, wanted.tokens)
        normed, residual = self.mlp_norm.merge(hidden, residual)
        return self._scaled(self.mlp_post_norm(self.mlp(normed))), residual

    def _scaled(self, hidden: Any) -> Tensor | Parts:
        return hidden if self._multiplier is None else self._scale(hidden, self._multiplier)


class NoNorm(nn.Module):
    """Stands where a norm would merge the residual stream, and only merges."""

    def merge(self, hidden: Tensor | Parts, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = merge_residual(hidden, residual)
        return total, total


def merge_residual(hidden: Tensor | Parts, residual: Tensor | None) -> Tensor:
    """The residual stream after `hidden` is added; before the first layer it is `hidden` itself."""
    whole = hidden.summed() if isinstance(hidden, Parts) else hidden
    return whole if residual is None else residual + whole

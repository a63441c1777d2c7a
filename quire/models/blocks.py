"""The blocks that decoder models are made of: attention, gated MLP and the layer around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionSpec
from quire.layers.activation import gated_activation
from quire.layers.attention import Attention, ForwardBatch
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import ParallelRMSNorm, RMSNorm
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.ops.rope import apply_rope
from quire.types.errors import ConfigError

Rotation = tuple[Tensor, Tensor] | None  # cos and sin of a step; None: the layer rotates nothing


class AttentionBlock(nn.Module):
    """qkv projection, optional q/k norm and rotation, attention, output projection."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.qkv_bias,
            dtype=ctx.dtype,
            group=ctx.group,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.o_bias,
            dtype=ctx.dtype,
            group=ctx.group,
        )
        self.head_dim = config.head_dim
        self.num_heads = [self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads]
        self.qk_width = sum(self.num_heads) * config.head_dim
        self.qk_norm = QK_NORMS[config.qk_norm](config, ctx, self.num_heads)
        self.attention = Attention(
            AttentionSpec(
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale,
                sliding_window=config.sliding_windows[layer],
                soft_cap=config.attention_soft_cap,
            ),
            layer,
        )

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        qkv: Tensor = self.qkv_proj(hidden)
        # Query and key heads stay together until both are rotated: half as many small ops.
        qk = self.qk_norm(qkv[:, : self.qk_width])
        v = qkv[:, self.qk_width :].view(qkv.shape[0], -1, self.head_dim)
        if rotation is not None:
            qk = apply_rope(qk, *rotation)
        q, k = qk[:, : self.num_heads[0]], qk[:, self.num_heads[0] :]
        out: Tensor = self.o_proj(self.attention(q, k, v, batch))
        return out


class NoQKNorm(nn.Module):
    """Cuts query and key features [n, width] into heads [n, num_heads + num_kv_heads, head_dim]; no parameters."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: list[int]) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = num_heads

    def forward(self, qk: Tensor) -> Tensor:
        return qk.view(qk.shape[0], -1, self.head_dim)


class PerHeadQKNorm(NoQKNorm):
    """Each head is normalized by itself; all query heads share a weight, and so do all key heads."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: list[int]) -> None:
        super().__init__(config, ctx, num_heads)
        kind: dict[str, Any] = {"eps": config.norm_eps, "dtype": ctx.dtype}
        self.q = RMSNorm(config.head_dim, weight_offset=config.norm_weight_offset, **kind)
        self.k = RMSNorm(config.head_dim, weight_offset=config.norm_weight_offset, **kind)

    def forward(self, qk: Tensor) -> Tensor:
        heads = super().forward(qk)
        q, k = self.q(heads[:, : self.num_heads[0]]), self.k(heads[:, self.num_heads[0] :])
        return torch.cat((q, k), dim=1)


class FullWidthQKNorm(NoQKNorm):
    """All query heads are normalized together, and so are all key heads."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: list[int]) -> None:
        super().__init__(config, ctx, num_heads)
        if ctx.group.size > config.num_kv_heads:
            raise ConfigError(
                f"a norm over all {config.num_kv_heads} KV heads cannot be split over {ctx.group.size} ranks; "
                f"use a tensor parallel size of at most {config.num_kv_heads}"
            )
        kind: dict[str, Any] = {"eps": config.norm_eps, "dtype": ctx.dtype, "group": ctx.group}
        self.q = ParallelRMSNorm(config.num_heads * config.head_dim, **kind)
        self.k = ParallelRMSNorm(config.num_kv_heads * config.head_dim, **kind)

    def forward(self, qk: Tensor) -> Tensor:
        q_width = self.num_heads[0] * self.head_dim
        return super().forward(torch.cat((self.q(qk[:, :q_width]), self.k(qk[:, q_width:])), dim=-1))


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
            dtype=ctx.dtype,
            group=ctx.group,
        )
        self.down_proj = RowParallelLinear(
            width, config.hidden_size, bias=config.mlp_bias, dtype=ctx.dtype, group=ctx.group
        )
        self._activation = gated_activation(config.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_up_proj(hidden)))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP on a residual stream. A norm that an architecture does not have is the identity."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()

        def norm(present: bool) -> nn.Module:
            if not present:
                return nn.Identity()
            return RMSNorm(
                config.hidden_size, eps=config.norm_eps, dtype=ctx.dtype, weight_offset=config.norm_weight_offset
            )

        pre, post = config.norms in ("pre", "pre_post"), config.norms in ("pre_post", "post")
        self.attn_norm, self.attn_post_norm = norm(pre), norm(post)
        self.mlp_norm, self.mlp_post_norm = norm(pre), norm(post)
        self.self_attn = AttentionBlock(config, ctx, layer)
        self.mlp = GatedMLP(config, ctx)
        self._multiplier = config.residual_multiplier

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """`hidden` is what the layer before added last; it is merged into `residual` here."""
        residual = merge_residual(hidden, residual, self._multiplier)
        hidden = self.attn_post_norm(self.self_attn(self.attn_norm(residual), rotation, batch))
        residual = merge_residual(hidden, residual, self._multiplier)
        return self.mlp_post_norm(self.mlp(self.mlp_norm(residual))), residual


def merge_residual(hidden: Tensor, residual: Tensor | None, multiplier: float | None) -> Tensor:
    """The residual stream after `hidden` is added; before the first layer it is `hidden` itself."""
    if residual is None:
        return hidden
    return residual + hidden if multiplier is None else residual + hidden * multiplier

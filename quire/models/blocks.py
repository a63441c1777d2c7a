"""The blocks that decoder models are made of: attention, gated MLP and the layer around them."""

from __future__ import annotations

from torch import Tensor, nn

from quire.attention.base import AttentionSpec
from quire.layers.activation import gated_activation
from quire.layers.attention import Attention, ForwardBatch
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import ParallelRMSNorm, RMSNorm
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.ops.rope import apply_rope

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
        self.q_norm = _qk_norm(config, ctx, config.num_heads)
        self.k_norm = _qk_norm(config, ctx, config.num_kv_heads)
        self.norm_each_head = config.qk_norm == "head"
        self.head_dim = config.head_dim
        self.split = [size * config.head_dim for size in self._local_heads]
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

    @property
    def _local_heads(self) -> tuple[int, int, int]:
        return self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, self.qkv_proj.num_kv_heads

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split(self.split, dim=-1)
        if not self.norm_each_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.norm_each_head:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = apply_rope(q, k, *rotation)
        out: Tensor = self.o_proj(self.attention(q, k, v, batch))
        return out


def _qk_norm(config: DecoderConfig, ctx: BuildContext, num_heads: int) -> nn.Module:
    if config.qk_norm == "head":
        return RMSNorm(config.head_dim, eps=config.norm_eps, dtype=ctx.dtype, weight_offset=config.norm_weight_offset)
    if config.qk_norm == "full":
        return ParallelRMSNorm(num_heads * config.head_dim, eps=config.norm_eps, dtype=ctx.dtype, group=ctx.group)
    return nn.Identity()


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

"""The blocks that decoder models are made of: attention, gated MLP and the layer around a mixer and an MLP.

Knows who reads whose result, not the forms that layers pass on between them (see layers/fusion.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionSpec, HeadNorm, Rotation
from quire.layers.activation import gated_activation, gated_matmul
from quire.layers.attention import Attention, AttentionSinks, ForwardBatch, WantedTokens, keeps_heads
from quire.layers.fusion import ROWS, Forms, Passed, Stage, Stream, on_rows, whole
from quire.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import LayerNorm, ParallelRMSNorm, ResidualMerge, RMSNorm
from quire.layers.rope.parameters import QueryTemperature, RopeParameters
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.models.kinds import MIXERS, MLP, MLPS, NONE, Mixer
from quire.ops.scale import SCALE, SCALE_ROWS
from quire.ops.select import GATHER_ROWS
from quire.types.cache import LayerKV
from quire.types.errors import ConfigError


class AttentionBlock(Mixer):
    """qkv projection, attention with its q/k norm and rotation, output projection."""

    ends = ("qkv_proj", "o_proj")

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        self.qkv_proj: Linear
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = qkv_proj = QKVParallelLinear(
            config.hidden_size, *heads, bias=config.qkv_bias, interleaved=config.interleaved_rope, **ctx.split
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias, **ctx.split
        )
        num_heads, num_kv_heads = qkv_proj.num_heads, qkv_proj.num_kv_heads
        self.sinks = AttentionSinks(config.num_heads, ctx.group) if config.attention_sinks else None
        rotates = isinstance(config.rope[layer], RopeParameters)
        # A norm of what is rotated is left out where nothing is.
        kind = config.qk_norm if rotates or config.qk_norm != "unit_rotated" else "none"
        self.qk_norm = QK_NORMS[kind](config, ctx, num_heads, num_kv_heads)
        self._tempered = num_heads * config.head_dim if isinstance(config.rope[layer], QueryTemperature) else None
        self._scale_rows = SCALE_ROWS.bind(ctx.target)
        self.attention = Attention(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale,
                sliding_window=config.sliding_windows[layer],
                chunked=config.chunked,
                soft_cap=config.attention_soft_cap,
                sinks=None if self.sinks is None else self.sinks.weight,
                norms_rotated=kind.endswith("rotated"),
                causal=config.causal,
            ),
            layer,
            ctx.target,
        )

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        return keeps_heads(config.num_kv_heads, config.head_dim, config.sliding_windows[layer], config.chunked)

    def settle(self) -> None:
        if self.qk_norm.hands_on and self._tempered is None:
            self.qkv_proj.feed(self.attention.accepts)

    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        qkv, head_norm = self.qk_norm(self.qkv_proj(hidden))
        if self._tempered is not None:
            assert rotation is not None
            qkv, rotation = self._scale_rows(whole(qkv), rotation[0], self._tempered), None
        return self.o_proj(self.attention(qkv, head_norm, rotation, batch))


class NoQKNorm(nn.Module):
    """Query and key features are used as they are."""

    hands_on = True  # what the projection gives goes to attention, whatever form it has
    _norm: HeadNorm | None = None

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()

    def forward(self, qkv: Any) -> tuple[Passed, HeadNorm | None]:
        """(qkv, what attention is to do to each head before the rotation)."""
        return qkv, self._norm


class PerHeadQKNorm(NoQKNorm):
    """Each head is normalized by itself; all query heads share a weight, and so do all key heads."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(config, ctx, num_heads, num_kv_heads)
        kind: dict[str, Any] = {"eps": config.norm_eps, "weight_offset": config.norm_weight_offset}
        self.q = RMSNorm(config.head_dim, target=ctx.target, **kind)
        self.k = RMSNorm(config.head_dim, target=ctx.target, **kind)
        self._norm = HeadNorm(self.q.weight, self.k.weight, config.norm_eps, config.norm_weight_offset)


class UnitQKNorm(NoQKNorm):
    """Each head is normalized by itself, without a weight."""

    ones: Tensor  # [head_dim]

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(config, ctx, num_heads, num_kv_heads)
        self.register_buffer("ones", torch.ones(config.head_dim, dtype=ctx.dtype), persistent=False)
        self._norm = HeadNorm(self.ones, self.ones, config.norm_eps, 0.0)


class FullWidthQKNorm(NoQKNorm):
    """All query heads are normalized together, and so are all key heads."""

    hands_on = False

    def __init__(self, config: DecoderConfig, ctx: BuildContext, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(config, ctx, num_heads, num_kv_heads)
        if ctx.group.size > config.num_kv_heads:
            raise ConfigError(
                f"a norm over all {config.num_kv_heads} KV heads cannot be split over {ctx.group.size} ranks; "
                f"use a tensor parallel size of at most {config.num_kv_heads}"
            )
        self.q, self.k = (
            ParallelRMSNorm(heads * config.head_dim, eps=config.norm_eps, **ctx.split)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        self._widths = [num_heads * config.head_dim, num_kv_heads * config.head_dim, num_kv_heads * config.head_dim]

    def forward(self, qkv: Any) -> tuple[Passed, HeadNorm | None]:
        q, k, v = qkv.split(self._widths, dim=-1)
        return torch.cat((self.q(q), self.k(k), v), dim=-1), None


QK_NORMS: dict[str, type[NoQKNorm]] = {
    "none": NoQKNorm,
    "head": PerHeadQKNorm,
    "head_rotated": PerHeadQKNorm,
    "unit_rotated": UnitQKNorm,
    "full": FullWidthQKNorm,
}


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x))."""

    ends = ("gate_up_proj", "down_proj")

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__(config, ctx, layer)
        width = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, {"gate_proj": width, "up_proj": width}, bias=config.mlp_bias, **ctx.split
        )
        self.down_proj = RowParallelLinear(width, config.hidden_size, bias=config.mlp_bias, **ctx.split)
        self._activation, self._target = config.activation, ctx.target
        gated_activation(config.activation, ctx.target)  # an unknown one is refused before weights are read

    def settle(self) -> None:
        self._gated = gated_matmul(self.gate_up_proj, self._activation, self._target, self.down_proj.accepts)

    def forward(self, hidden: Passed) -> Passed:
        return self.down_proj(self._gated(hidden))


def make_norm(config: DecoderConfig, ctx: BuildContext) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    if config.layer_norms:
        return LayerNorm(config.hidden_size, eps=config.norm_eps, target=ctx.target, bias=config.norm_bias)
    return RMSNorm(
        config.hidden_size, eps=config.norm_eps, target=ctx.target, weight_offset=config.norm_weight_offset
    )


class DecoderLayer(Stage):
    """Mixer and MLP on a residual stream. A norm that an architecture does not have is the identity."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        mixer, mlp = config.mixers[layer], config.mlps[layer]
        self.self_attn = MIXERS.get(mixer)(config, ctx, layer) if mixer != NONE else None
        self.mlp = MLPS.get(mlp)(config, ctx, layer) if mlp != NONE else None

        def norm() -> RMSNorm | LayerNorm:
            return make_norm(config, ctx)

        pre, post = config.norms in ("pre", "pre_post"), config.norms in ("pre_post", "post")
        is_normed = layer == 0 and config.embedding_norm
        self.attn_norm = norm() if pre and mixer != NONE and not is_normed else ResidualMerge()
        self.attn_post_norm = norm() if post and mixer != NONE else nn.Identity()
        self.mlp_norm = norm() if pre and mlp != NONE else ResidualMerge()
        self.mlp_post_norm = norm() if post and mlp != NONE else nn.Identity()
        self._adds_as_is = not post and config.residual_multiplier is None
        self._multiplier = config.residual_multiplier
        self._gather_rows, self._scale = GATHER_ROWS.bind(ctx.target), SCALE.bind(ctx.target)

    @property
    def accepts(self) -> Forms:
        return self.mlp_norm.accepts if self.self_attn is None else self.attn_norm.accepts

    def feed(self, accepted: Forms) -> None:
        last = self.mlp or self.self_attn
        if last is not None:
            last.feed(accepted if self._adds_as_is else accepted & ROWS)

    def settle(self) -> None:
        if self.self_attn is not None:
            self.attn_norm.feed(self.self_attn.accepts)
        if self.mlp is not None:
            self.mlp_norm.feed(self.mlp.accepts)
        if self.self_attn is not None and self.mlp is not None:
            self.self_attn.feed(self.mlp_norm.accepts if self._adds_as_is else ROWS)

    def forward(
        self, hidden: Passed, residual: Stream | None, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Passed, Stream]:
        """`hidden` is what the layer before added last; it is merged into `residual` here.

        With wanted tokens both results are of those alone.
        """
        wanted = batch.wanted
        if self.self_attn is not None:
            normed, residual = self.attn_norm.merge(hidden, residual)
            hidden = self._added(self.attn_post_norm, self.self_attn(normed, rotation, batch))
        elif wanted is not None:
            hidden, residual = self._narrowed(hidden, residual, wanted)
        if wanted is not None and self.self_attn is not None:
            assert residual is not None
            residual = self._gather_rows(whole(residual), wanted.tokens)
        if self.mlp is None:
            assert residual is not None, "a layer has a mixer or an MLP"
            return hidden, residual
        normed, residual = self.mlp_norm.merge(hidden, residual)
        return self._added(self.mlp_post_norm, self.mlp(normed)), residual

    def _narrowed(self, hidden: Passed, residual: Stream | None, wanted: WantedTokens) -> tuple[Tensor, Tensor]:
        """The wanted tokens, of a layer in which no token reads another."""
        added = whole(hidden)
        before = torch.zeros_like(added) if residual is None else whole(residual)
        wanted.finite.copy_((before + added).sum(-1, dtype=torch.float32).isfinite())
        return self._gather_rows(added, wanted.tokens), self._gather_rows(before, wanted.tokens)

    def _added(self, norm: nn.Module, given: Passed) -> Passed:
        """What is added to the stream of what a block gives."""
        if self._adds_as_is:
            return given
        factor = self._multiplier
        return on_rows(lambda x: norm(x) if factor is None else self._scale(norm(x), factor), given)

"""The encoder with rotated positions: norms before attention and MLP, a gated MLP, windows on both sides.

An architecture gives its DecoderConfig, which says all of this, and the norms' kind.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Self

from torch import Tensor, nn

from quire.attention.base import AttentionSpec, Rotation
from quire.layers.attention import Attention, ForwardBatch, WantedTokens, keeps_heads
from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.fusion import Passed, Stage, whole
from quire.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.layers.rope.embedding import rotary_embedding
from quire.models.base import BuildContext, Model, ModelDescription
from quire.models.config import DecoderConfig
from quire.models.encoder import Encoder
from quire.models.heads import make_heads
from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs
from quire.ops.activation import GELU_AND_MUL
from quire.ops.select import GATHER_ROWS


class RotaryEncoderLayer(Stage):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int, eps: float, norm_bias: bool) -> None:
        super().__init__()
        kind: dict[str, Any] = {"target": ctx.target, "group": ctx.group}
        hidden, width = config.hidden_size, config.intermediate_size
        heads, head_dim = config.num_heads, config.head_dim
        self.attn_norm, self.mlp_norm = (
            LayerNorm(hidden, eps=eps, target=ctx.target, bias=norm_bias) if wanted else None
            for wanted in (layer > 0, True)
        )
        self.qkv_proj = QKVParallelLinear(hidden, heads, heads, head_dim, bias=config.qkv_bias, **kind)
        self.o_proj = RowParallelLinear(heads * head_dim, hidden, bias=config.o_bias, **kind)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, {"gate_proj": width, "up_proj": width}, bias=config.mlp_bias, **kind
        )
        self.down_proj = RowParallelLinear(width, hidden, bias=config.mlp_bias, **kind)
        mine, window = self.qkv_proj.num_heads, config.sliding_windows[layer]
        spec = AttentionSpec(mine, mine, head_dim, head_dim**-0.5, sliding_window=window, causal=False)
        self.attention = Attention(spec, layer, ctx.target)
        self._gate, self._gather_rows = GELU_AND_MUL.bind(ctx.target), GATHER_ROWS.bind(ctx.target)

    def forward(
        self,
        hidden: Passed,
        residual: Tensor | None,
        rotation: Rotation,
        batch: ForwardBatch,
        wanted: WantedTokens | None,
    ) -> tuple[Passed, Tensor]:
        """(what the next layer adds to the residual stream, that stream); of the wanted tokens alone if there are."""
        if self.attn_norm is None:
            normed, total = hidden, whole(hidden)
        else:
            normed, total = self.attn_norm.merge(hidden, residual)
        mixed = self.o_proj(self.attention(self.qkv_proj(normed), None, rotation, batch, wanted))
        if wanted is not None:
            total = self._gather_rows(total, wanted.tokens)
        assert self.mlp_norm is not None
        read, total = self.mlp_norm.merge(mixed, total)
        return self.down_proj(self._gate(whole(self.gate_up_proj(read)))), total


class NormedEmbeddings(nn.Module):
    def __init__(self, config: DecoderConfig, ctx: BuildContext, eps: float, norm_bias: bool) -> None:
        super().__init__()
        self.words = VocabParallelEmbedding(config.vocab_size, config.hidden_size, target=ctx.target, group=ctx.group)
        self.norm = LayerNorm(config.hidden_size, eps=eps, target=ctx.target, bias=norm_bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.norm(self.words(input_ids))
        return out


class RotaryEncoder(Encoder):
    rotary: nn.ModuleList

    def __init__(self, stack: DecoderConfig, ctx: BuildContext, norm_bias: bool) -> None:
        Model.__init__(self)
        norm: dict[str, Any] = {"eps": stack.norm_eps, "norm_bias": norm_bias}
        embeddings = self.embeddings = NormedEmbeddings(stack, ctx, **norm)
        self.heads = make_heads(ctx.heads, ctx.target, embeddings.words)
        self.layers = nn.ModuleList(
            RotaryEncoderLayer(stack, ctx, layer, **norm) for layer in range(stack.num_layers)
        )
        self.final_norm = LayerNorm(stack.hidden_size, eps=stack.norm_eps, target=ctx.target, bias=norm_bias)
        ropes = list(dict.fromkeys(stack.rope))
        self.rotary = nn.ModuleList(rotary_embedding(rope, ctx.max_model_len, ctx.target) for rope in ropes if rope)
        self._rotary_of_layer = [ropes.index(rope) for rope in stack.rope]

    @classmethod
    @abstractmethod
    def stack_config(cls, config: dict[str, Any]) -> DecoderConfig:
        """Sizes, rotations and windows of the layers."""

    @classmethod
    def built(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        return cls(cls.stack_config(config), ctx, bool(config.get("norm_bias")))

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        stack = cls.stack_config(config)
        kept = tuple(keeps_heads(stack.num_heads, stack.head_dim, window) for window in stack.sliding_windows)
        return replace(super().describe(config), layers=kept)

    def token_inputs(self, max_rows: int, max_model_len: int) -> TokenInputs:
        return PLAIN_INPUTS

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        hidden: Passed = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        residual: Tensor | None = None
        rotations: list[Rotation] = [rotary(positions) for rotary in self.rotary]
        for index, layer in enumerate(self.layers):
            wanted = batch.wanted if index == len(self.layers) - 1 else None
            hidden, residual = layer(hidden, residual, rotations[self._rotary_of_layer[index]], batch, wanted)
        return whole(self.final_norm.merge(hidden, residual)[0])

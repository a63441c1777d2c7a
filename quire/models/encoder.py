"""The encoder that BERT and its relatives are made of: learned positions, bidirectional attention, norms behind.

An architecture maps its config onto EncoderConfig and its tensors' names onto those here.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionSpec
from quire.layers.attention import Attention, ForwardBatch, WantedTokens, keeps_heads
from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.fusion import Stage, whole
from quire.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.layers.weights import WeightMap
from quire.models.base import BuildContext, Model, ModelDescription
from quire.ops.activation import GELU
from quire.ops.select import GATHER_ROWS
from quire.types.errors import ModelError

STACKED: dict[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
# What stands on top of the encoder in a checkpoint and is not read: the heads of what it was trained for.
HEADS = ("cls.*", "lm_head.*", "classifier.*", "vocab_*", "*pooler.dense.*", "*position_ids", "*token_type_ids")


@dataclass(frozen=True)
class EncoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # in the table of positions
    num_token_types: int = 0  # all tokens are of the first; 0: there is no such table
    first_position: int = 0  # of the first token, among the positions
    norm_eps: float = 1e-12

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def check_supported(config: dict[str, Any], activation: str) -> None:
    """What no encoder here does is refused by its name."""
    if activation != "gelu":
        raise ModelError(f"unknown activation {activation!r} in the config of an encoder; known: gelu")
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise ModelError(f"position_embedding_type is {positions!r} but encoders here have absolute ones")
    if config.get("is_decoder"):
        raise ModelError("is_decoder is set: this config is of a decoder, and encoders see whole prompts")


class EncoderEmbeddings(nn.Module):
    def __init__(self, config: EncoderConfig, ctx: BuildContext) -> None:
        super().__init__()

        def table(rows: int) -> VocabParallelEmbedding:
            return VocabParallelEmbedding(rows, config.hidden_size, target=ctx.target, group=ctx.group)

        self.words = table(config.vocab_size)
        self.positions = table(config.num_positions)
        self.types = table(config.num_token_types) if config.num_token_types else None
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, target=ctx.target)
        self._first = config.first_position

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.words(input_ids)
        if self.types is not None:
            hidden = hidden + self.types(torch.zeros_like(input_ids))
        out: Tensor = self.norm(hidden + self.positions(positions + self._first))
        return out


class EncoderLayer(Stage):
    """Attention and MLP, each added to what it read and then normalized."""

    def __init__(self, config: EncoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": True, "target": ctx.target, "group": ctx.group}
        hidden, width, heads, head_dim = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.head_dim,
        )
        self.qkv_proj = QKVParallelLinear(hidden, heads, heads, head_dim, **kind)
        self.o_proj = RowParallelLinear(heads * head_dim, hidden, **kind)
        self.up_proj = ColumnParallelLinear(hidden, width, **kind)
        self.down_proj = RowParallelLinear(width, hidden, **kind)
        self.attn_norm, self.mlp_norm = (LayerNorm(hidden, eps=config.norm_eps, target=ctx.target) for _ in range(2))
        mine = self.qkv_proj.num_heads
        spec = AttentionSpec(mine, mine, head_dim, head_dim**-0.5, causal=False)
        self.attention = Attention(spec, layer, ctx.target)
        self._gelu, self._gather_rows = GELU.bind(ctx.target), GATHER_ROWS.bind(ctx.target)

    def forward(self, hidden: Tensor, batch: ForwardBatch, wanted: WantedTokens | None) -> Tensor:
        """[n, hidden] -> [n, hidden], or of the wanted tokens alone."""
        mixed = self.o_proj(self.attention(self.qkv_proj(hidden), None, None, batch, wanted))
        if wanted is not None:
            hidden = self._gather_rows(hidden, wanted.tokens)
        normed, _ = self.attn_norm.merge(mixed, hidden)
        hidden = whole(normed)
        normed, _ = self.mlp_norm.merge(self.down_proj(self._gelu(whole(self.up_proj(hidden)))), hidden)
        return whole(normed)


class Encoder(Model):
    capabilities = frozenset({"pools", "encodes"})
    names: ClassVar[dict[str, str]]
    """Segments of the architecture's tensor names, and what they are called here."""
    outer: ClassVar[dict[str, str]]
    """The same of the first segments, before which checkpoints with a head have a prefix."""
    prefix: ClassVar[str]

    def __init__(self, config: EncoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(config, ctx)
        self.layers = nn.ModuleList(EncoderLayer(config, ctx, layer) for layer in range(config.num_layers))

    @classmethod
    @abstractmethod
    def encoder_config(cls, config: dict[str, Any]) -> EncoderConfig:
        """Map a Hugging Face config onto the shared blocks' sizes."""

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        model = cls(cls.encoder_config(config), ctx)
        below = "" if str(config["architectures"][0]).endswith("Model") else f"{cls.prefix}."
        outer = {below + old: new for old, new in cls.outer.items()}
        model.weight_map = WeightMap({**outer, **cls.names}, STACKED, HEADS)
        return model

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        encoder = cls.encoder_config(config)
        kept = keeps_heads(encoder.num_heads, encoder.head_dim, None)
        return ModelDescription(
            vocab_size=encoder.vocab_size,
            hidden_size=encoder.hidden_size,
            num_layers=encoder.num_layers,
            max_position_embeddings=encoder.num_positions - encoder.first_position,
            layers=(kept,) * encoder.num_layers,
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        hidden: Tensor = self.embeddings(input_ids, positions) if inputs_embeds is None else inputs_embeds
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, batch, batch.wanted if index == len(self.layers) - 1 else None)
        return hidden

"""DraftHead: a small module on top of a target's hidden states that guesses the token after the next.

A head reads pairs: the hidden state of a token, and the token after it. It has a decoder layer of its own, which sees
the pairs before. The target's embeddings, and mostly its LM head, are used and not copied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor

from quire.layers.attention import ForwardBatch
from quire.layers.fusion import whole
from quire.layers.linear import Linear, Piece
from quire.layers.rope.embedding import rotary_embedding
from quire.models.base import BuildContext, Model, ModelDescription
from quire.models.blocks import DecoderLayer
from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderLM, described
from quire.ops.grouped import ADD_SHARED
from quire.ops.select import JOIN_COLUMNS


class DraftHead(Model):
    capabilities = frozenset()
    num_hidden_read = 1
    prefix: ClassVar[str] = ""
    """What names of its tensors begin with in the target's checkpoint; "": it has a checkpoint of its own."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose inputs it reads, side by side; none: it reads the last hidden states."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.layer = DecoderLayer(config, ctx, 0)
        rope = config.rope[0]
        self.rotary = None if rope is None else rotary_embedding(rope, ctx.max_model_len, ctx.target)
        self._join, self._add = JOIN_COLUMNS.bind(ctx.target), ADD_SHARED.bind(ctx.target)
        self._embed: Callable[[Tensor], Tensor]
        self._target_logits: Callable[[Tensor, bool], Tensor]

    def use(self, target: DecoderLM) -> None:
        """Take what it shares with the target, which has its weights and keeps from now on what the head reads."""
        self._embed, self._target_logits = target.embed, target.compute_logits
        target.taps = self.taps

    @classmethod
    @abstractmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        """Of its one layer, by the config of the checkpoint that it is in."""

    @classmethod
    def from_config(cls, config: dict[str, Any], ctx: BuildContext) -> Self:
        return cls(cls.layer_config(config), ctx)

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        return described(cls.layer_config(config))

    def run_layer(self, hidden: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """The residual stream that leaves its layer."""
        rotation = None if self.rotary is None else self.rotary(positions)
        added, residual = self.layer(hidden, None, rotation, batch)
        return self._add(whole(added), residual, None)

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """`inputs_embeds` are the hidden states before the tokens."""
        assert inputs_embeds is not None
        return self.run_layer(self.read(self._embed(input_ids), inputs_embeds), positions, batch)

    def read(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """What its layer reads of tokens and of hidden states, [n, hidden] each."""
        raise AssertionError("a head that does not read them by itself runs its layer by itself")

    def joined(self, first: Tensor, second: Tensor, project: Linear) -> Tensor:
        """A projection of two vectors of each token, side by side."""
        return whole(project(self._join(first, second)))

    def compute_logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        return self._target_logits(hidden, whole)


def whole_linear(in_features: int, out_features: int, ctx: BuildContext, *, bias: bool = False) -> Linear:
    """A matrix that every rank has all of."""
    return Linear(in_features, (Piece(None, out_features, 0, out_features),), bias=bias, target=ctx.target)

"""Heads of models that pool: what a vector of hidden states goes through to become classes or a vector of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.fusion import whole
from quire.layers.linear import Linear, Piece
from quire.layers.norm import LayerNorm
from quire.layers.weights import WeightedLayer, WeightMap, empty_parameter
from quire.ops.activation import GELU, relu, tanh
from quire.ops.base import Target
from quire.types.pooling import HeadLayer, Heads


def num_labels(config: dict[str, Any]) -> int:
    """Of a classifier; two if the config is silent, as in transformers."""
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)


class TiedLinear(WeightedLayer):
    """hidden @ table^T + bias over the storage of the token embeddings."""

    def __init__(self, table: VocabParallelEmbedding, target: Target) -> None:
        super().__init__()
        self._table = (table,)  # no child of this module: its weights are the embedding's own
        self.bias = empty_parameter(table.vocab_size, dtype=target.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._table[0].method.multiply(hidden) + self.bias


class HeadStage(nn.Module):
    def __init__(self, layer: HeadLayer, target: Target, table: VocabParallelEmbedding | None) -> None:
        super().__init__()
        self.linear: Linear | TiedLinear
        if layer.tied:
            assert table is not None
            self.linear = TiedLinear(table, target)
        else:
            piece = Piece(None, layer.out_size, 0, layer.out_size)
            self.linear = Linear(layer.in_size, [piece], bias=layer.bias, target=target)
        activations: Mapping[str, Callable[[Tensor], Tensor]]
        activations = {"tanh": tanh, "relu": relu, "gelu": GELU.bind(target)}
        self._activation = None if layer.activation is None else activations[layer.activation]
        self.norm: LayerNorm | None = None
        if layer.norm is not None:
            eps, bias = layer.norm_eps, layer.norm_bias
            self.norm = LayerNorm(layer.out_size, eps=eps, bias=bias, target=target)

    def forward(self, hidden: Tensor) -> Tensor:
        out = whole(self.linear(hidden))
        if self._activation is not None:
            out = self._activation(out)
        return out if self.norm is None else self.norm(out)


class PoolingHead(nn.Module):
    """[m, in size] -> [m, out size], each row by itself."""

    def __init__(self, layers: tuple[HeadLayer, ...], target: Target, table: VocabParallelEmbedding | None) -> None:
        super().__init__()
        self.stages = nn.ModuleList(HeadStage(layer, target, table) for layer in layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for stage in self.stages:
            hidden = stage(hidden)
        return hidden


def make_heads(heads: Heads, target: Target, table: VocabParallelEmbedding | None = None) -> nn.ModuleDict:
    return nn.ModuleDict({name: PoolingHead(layers, target, table) for name, layers in heads.items()})


def with_heads(weights: WeightMap, heads: Heads) -> WeightMap:
    """The same map where the heads' tensors are read too: by the names that checkpoints have for them."""
    names = [
        (source, f"heads.{name}.stages.{index}.{part}")
        for name, layers in heads.items()
        for index, layer in enumerate(layers)
        for source, part in ((layer.source, "linear"), (layer.norm, "norm"))
        if source is not None
    ]
    # Longer names first: one may be the beginning of another.
    return weights.reading(*(source for source, _ in names)).renaming_first(*sorted(names, reverse=True))

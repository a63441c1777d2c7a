"""Embeddings of distances between tokens, which DeBERTa compares tokens with in the scores of attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.layers.biased_attention import by_distance
from quire.layers.fusion import whole
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm


class DistanceEmbeddings:
    """What one layer's scores get from embeddings of distances, which it projects as it does tokens."""

    def __init__(self, qkv_proj: Linear, rows: Tensor, norm: LayerNorm | None, kinds: tuple[str, ...]) -> None:
        self._qkv_proj, self._rows, self._norm, self._kinds = qkv_proj, rows, norm, kinds
        self._projected: tuple[Tensor, Tensor] | None = None  # queries and keys [heads, rows, head_dim]
        self.buckets = torch.zeros(0, dtype=torch.int64)  # [2 L - 1]: the row of each distance j - i

    def make(self, query: Tensor, keys: Tensor) -> Tensor:
        heads, length, dim = query.shape
        if self._projected is None:
            rows = self._rows if self._norm is None else self._norm(self._rows)
            parts = whole(self._qkv_proj(rows)).view(len(rows), 3, heads, dim).permute(1, 2, 0, 3).contiguous()
            self._projected, self.buckets = (parts[0], parts[1]), self.buckets.to(query.device)
        index = by_distance(self.buckets, length)
        out = query.new_zeros(heads, length, length)
        if "c2p" in self._kinds:
            out += (query @ self._projected[1].mT).gather(2, index.expand_as(out))
        if "p2c" in self._kinds:
            out += (keys @ self._projected[0].mT).gather(2, index.T.expand_as(out)).mT
        return out / math.sqrt(dim * (1 + len(self._kinds)))


def distance_rows(longest: int, span: int, buckets: int, farthest: int) -> Tensor:
    """The row of each distance j - i from 1 - longest on, among 2 * span; far ones share buckets by logarithm."""
    distances = torch.arange(longest - 1, -longest, -1)  # i - j
    if buckets > 0:
        middle = buckets // 2
        size = torch.where(distances.abs() < middle, middle - 1, distances.abs())
        far = ((size / middle).log() / torch.tensor((farthest - 1) / middle).log() * (middle - 1)).ceil() + middle
        distances = torch.where(size <= middle, distances, (far * distances.sign()).long())
    return (distances + span).clamp(0, 2 * span - 1)

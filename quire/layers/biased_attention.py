"""Attention in both directions whose scores have biases: whole prompts, one after the other, without a cache.

No kernel knows such biases, so steps of these models run eagerly, over ops of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, HeadNorm, Rotation
from quire.layers.attention import Attention, ForwardBatch
from quire.layers.fusion import Passed, whole
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm
from quire.ops.base import Target
from quire.platform.recording import NotRecordableError

Bias = Callable[[Tensor, Tensor], Tensor]
"""Of queries and keys [heads, n, head_dim] of a prompt: what is added to their scores, [heads, n, n]."""


class BiasedAttention(Attention):
    """`make_bias` is set by the model before the first step."""

    recordable = False

    def __init__(self, spec: AttentionSpec, layer_index: int, target: Target, make_bias: Bias) -> None:
        super().__init__(spec, layer_index, target)
        self.make_bias = make_bias

    def forward(self, qkv: Passed, head_norm: HeadNorm | None, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        if batch.lengths is None:
            raise NotRecordableError("adds biases to the scores of attention")
        qkv, width = whole(qkv), self.spec.num_heads * self.spec.head_dim
        out = qkv.new_zeros(qkv.shape[0], width)
        start = 0
        queries, _, attended = batch.lengths
        for length, seen in zip(queries, attended or queries, strict=True):
            part = slice(start, start + length)
            # Copies: torch may sum in another order where memory is aligned differently.
            heads = qkv[part].view(length, 3, self.spec.num_heads, -1).permute(1, 2, 0, 3).contiguous()
            query, keys, values = heads.unbind(0)
            scores = torch.baddbmm(self.make_bias(query, keys), query, keys.transpose(1, 2), alpha=self.spec.scale)
            if seen < length:
                scores[..., seen:] = -torch.inf
            own = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
            out[part] = own.transpose(0, 1).reshape(length, width)
            start += length
        if batch.wanted is None:
            return out
        self.backend.note_finite(qkv[:, width:], batch.wanted.finite)
        return self._gather_rows(out, batch.wanted.tokens)


def by_distance(values: Tensor, length: int) -> Tensor:
    """values [.., 2 L - 1] of distances 1 - L to L - 1 -> [.., length, length]: at (i, j) that of distance j - i."""
    middle = values.shape[-1] // 2
    return values[..., middle + 1 - length : middle + length].unfold(-1, length, 1).flip(-2)


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

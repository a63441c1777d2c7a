"""Attention in both directions whose scores have biases: whole prompts, one after the other, without a cache.

No kernel knows such biases, so steps of these models run eagerly, over ops of torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, HeadNorm, Rotation
from quire.layers.attention import Attention, ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, whole
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

    def forward(
        self,
        qkv: Passed,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        batch: ForwardBatch,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        if batch.lengths is None:
            raise NotRecordableError("adds biases to the scores of attention")
        qkv, width = whole(qkv), self.spec.num_heads * self.spec.head_dim
        out = qkv.new_zeros(qkv.shape[0], width)
        start = 0
        for length in batch.lengths.queries:
            part = slice(start, start + length)
            # Copies: torch may sum in another order where memory is aligned differently.
            heads = qkv[part].view(length, 3, self.spec.num_heads, -1).permute(1, 2, 0, 3).contiguous()
            query, keys, values = heads.unbind(0)
            scores = torch.baddbmm(self.make_bias(query, keys), query, keys.transpose(1, 2), alpha=self.spec.scale)
            own = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
            out[part] = own.transpose(0, 1).reshape(length, width)
            start += length
        if wanted is None:
            return out
        self.backend.note_finite(qkv[:, width:], wanted.finite)
        return self._gather_rows(out, wanted.tokens)


def by_distance(values: Tensor, length: int) -> Tensor:
    """values [.., 2 L - 1] of distances 1 - L to L - 1 -> [.., length, length]: at (i, j) that of distance j - i."""
    middle = values.shape[-1] // 2
    return values[..., middle + 1 - length : middle + length].unfold(-1, length, 1).flip(-2)

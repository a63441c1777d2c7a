"""Attention as a layer: what the model asks for, bound later to a backend, a cache and a KV group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, HeadNorm, Rotation, Written
from quire.layers.fusion import Form, Forms, Passed, Stage, whole
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.select import GATHER_ROWS
from quire.ops.split_k import PartialSums
from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """Tokens whose hidden states are asked for; of the others the last layer computes only keys and values."""

    tokens: Tensor  # [m] int64
    attention: list[AttentionMetadata]  # of these tokens' queries alone, one per KV group
    finite: Tensor  # [num_tokens_padded] bool, set by the last layer: whether a token's keys and values are finite


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the layers read about one step beside its tokens."""

    attention: list[AttentionMetadata]  # one per KV group
    wanted: WantedTokens | None = None  # None: all of them


class AttentionSinks(WeightedLayer):
    """For each head the score of a key that has no value; see AttentionSpec."""

    def __init__(self, num_heads: int, group: ParallelGroup) -> None:
        super().__init__()
        self._num_heads, self._slice = num_heads, group.slice_of(num_heads, "attention heads")
        self.weight = empty_parameter(self._slice[1], dtype=torch.float32)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        return {None: (self._num_heads,)}

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        self.weight.data.copy_(as_tensor(weight).narrow(0, *self._slice))


class Attention(Stage):
    """Holds no parameters. `bind` must be called once, after the KV cache is allocated."""

    backend: AttentionBackend
    cache: Tensor
    group: int

    def __init__(self, spec: AttentionSpec, layer_index: int, target: Target) -> None:
        super().__init__()
        self.spec = spec
        self.layer_index = layer_index
        self._gather_rows = GATHER_ROWS.bind(target)

    @property
    def accepts(self) -> Forms:
        return frozenset({Form.PARTIAL_SUMS})

    def bind(self, backend: AttentionBackend, cache: Tensor, group: int) -> None:
        """`cache` is this layer's part of the KV cache, `group` the index into `ForwardBatch.attention`."""
        lacking = backend.lacks(self.spec)
        if lacking is not None:
            raise ConfigError(
                f"the model has {lacking}, which {backend.name} attention does not do; set --device cpu"
            )
        self.backend = backend
        self.cache = cache
        self.group = group

    def unbind(self) -> None:
        """Let go of the cache, until the next `bind`."""
        self.cache = self.cache[:0].clone()

    def forward(
        self,
        qkv: Passed,
        head_norm: HeadNorm | None,
        rotation: Rotation,
        batch: ForwardBatch,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim] -> [n or wanted, num_heads * head_dim]."""
        metadata = batch.attention[self.group]
        place = (head_norm, rotation, self.cache, metadata)
        if isinstance(qkv, PartialSums) and wanted is None:
            written = self.backend.write_partial_sums(self.spec, qkv, *place)
            return self.backend.attend(self.spec, written, self.cache, metadata)
        qkv = whole(qkv)
        written = self.backend.write(self.spec, qkv, *place)
        if wanted is None:
            return self.backend.attend(self.spec, written, self.cache, metadata)
        self.backend.note_finite(qkv[:, self.spec.num_heads * self.spec.head_dim :], wanted.finite)
        query = self._gather_rows(written.query, wanted.tokens)
        return self.backend.attend(self.spec, Written(query), self.cache, wanted.attention[self.group])

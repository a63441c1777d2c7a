"""Attention as a layer: what the model asks for, bound later to a backend, a cache and a KV group."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    GroupBackend,
    HeadNorm,
    HostLengths,
    LayerCache,
    Rotation,
    Written,
)
from quire.layers.adapters import AdapterTokens
from quire.layers.fusion import PLAIN, Form, Forms, Passed, Stage, whole
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.select import GATHER_ROWS
from quire.ops.split_k import PartialSums
from quire.parallel.groups import ParallelGroup
from quire.types.cache import KVForm, LayerKV


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
    adapters: AdapterTokens | None = None  # of the tokens that are computed; None: no row has one
    lengths: HostLengths | None = None  # None in a captured step

    def every_token(self) -> ForwardBatch:
        """The same for layers before the last, where all tokens' hidden states are wanted."""
        return self if self.wanted is None else replace(self, wanted=None)


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


def keeps_heads(num_kv_heads: int, head_dim: int, sliding_window: int | None, chunked: bool = False) -> LayerKV:
    """What attention over heads keeps."""
    kind = "full" if sliding_window is None else "chunked" if chunked else "sliding"
    return LayerKV(kind, sliding_window, form=KVForm(num_kv_heads, head_dim))


class CachedLayer(Stage):
    """A layer that keeps something. `bind` must be called once, after its cache is allocated."""

    backend: GroupBackend
    cache: Tensor
    group: int

    @property
    @abstractmethod
    def keeps(self) -> LayerKV:
        """In this process, which may hold a part of the heads."""

    @abstractmethod
    def cache_shape(
        self, backend: AttentionBackend, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Shape of a cache tensor with `num_blocks` of what this layer keeps."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of that tensor, where keys and values are `dtype`."""
        return dtype

    def bind(self, backend: GroupBackend, cache: Tensor, group: int) -> None:
        """`cache` is this layer's part of the KV cache, `group` the index into `ForwardBatch.attention`."""
        self.backend = backend
        self.cache = cache
        self.group = group

    def unbind(self) -> None:
        """Let go of the cache, until the next `bind`."""
        self.cache = self.cache[:0].clone()

    @abstractmethod
    def heal(self, block_ids: Tensor) -> None:
        """Replace every value of these blocks [n] int64 that is not finite by zero."""


class AttentionLayer(CachedLayer):
    """Attention of any form; holds no parameters."""

    backend: AttentionBackend
    recordable = True  # whether it calls ops and its backend alone

    def __init__(self, spec: AttentionSpec, layer_index: int, target: Target) -> None:
        super().__init__()
        self.spec = spec
        self.layer_index = layer_index
        self._gather_rows = GATHER_ROWS.bind(target)

    def cache_shape(
        self, backend: AttentionBackend, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        return backend.cache_shape(num_blocks, block_size, self.spec.num_kv_heads, self.spec.line_width(dtype), dtype)

    def heal(self, block_ids: Tensor) -> None:
        self.backend.heal(self.cache, block_ids)


class Attention(AttentionLayer):
    """Over heads of keys and values."""

    @property
    def accepts(self) -> Forms:
        return frozenset({Form.PARTIAL_SUMS}) if self.spec.causal else PLAIN

    @property
    def keeps(self) -> LayerKV:
        spec = self.spec
        return keeps_heads(spec.num_kv_heads, spec.head_dim, spec.sliding_window, spec.chunked)

    def forward(self, qkv: Passed, head_norm: HeadNorm | None, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim] -> [n or wanted, num_heads * head_dim]."""
        at, wanted = LayerCache(self.spec, self.cache, batch.attention[self.group]), batch.wanted
        if isinstance(qkv, PartialSums) and wanted is None:
            return self.backend.attend(at, self.backend.write_partial_sums(at, qkv, head_norm, rotation))
        qkv = whole(qkv)
        written = self.backend.write(at, qkv, head_norm, rotation)
        if wanted is None:
            return self.backend.attend(at, written)
        self.backend.note_finite(qkv[:, self.spec.num_heads * self.spec.head_dim :], wanted.finite)
        query = self._gather_rows(written.query, wanted.tokens)
        if batch.adapters is not None:
            batch.adapters.narrow(wanted.tokens)
        return self.backend.attend(at._replace(metadata=wanted.attention[self.group]), Written(query))

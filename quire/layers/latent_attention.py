"""Latent attention as layers: projections with a rotated part, up-projections of heads, attention over latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, Rotation, Written
from quire.attention.latent import IndexInputs, LatentBackend, LatentWeights
from quire.layers.attention import AttentionLayer, ForwardBatch, WantedTokens
from quire.layers.linear import Linear, Piece
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scheme import F32, Weight, as_tensor, matrix_of, rows_of
from quire.layers.weights import NO_SCHEMES, Schemes, WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.parallel.groups import ParallelGroup
from quire.types.cache import KVForm, LayerKV


class RotatedLinear(Linear):
    """Merged projections of whose outputs some are rotated.

    `interleaved`: of a piece's index, the heads it has and the outputs of each that are rotated, as (first, end),
    where features of a checkpoint that are rotated together lie side by side; they are kept half of that part apart.
    """

    def __init__(
        self,
        in_features: int,
        pieces: Sequence[Piece],
        *,
        bias: bool,
        target: Target,
        interleaved: Mapping[int, tuple[int, int, int]],
    ) -> None:
        super().__init__(in_features, pieces, bias=bias, target=target)
        self._interleaved = interleaved

    def _arranged(self, index: int, rows: Weight) -> Weight:
        if index not in self._interleaved:
            return rows
        return rows_of(rows, _in_halves(rows.shape[0], *self._interleaved[index]))


def _in_halves(size: int, heads: int, first: int, end: int) -> Tensor:
    """The order in which pairs of features [first, end) of each head, side by side, come to lie in two halves."""
    order = torch.arange(size).view(heads, -1)
    order[:, first:end] = order[:, first:end].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return order.flatten()


class RotatedLayerNorm(LayerNorm):
    """Of features whose first `interleaved` are rotated and lie in pairs in a checkpoint; 0: none do."""

    def __init__(self, width: int, interleaved: int, *, eps: float, target: Target) -> None:
        super().__init__(width, eps=eps, target=target)
        self._interleaved = interleaved

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        super().load(parameter, piece, rows_of(weight, _in_halves(weight.shape[0], 1, 0, self._interleaved)))


class ScaledRMSNorm(RMSNorm):
    """A norm and a constant factor behind it."""

    def __init__(self, width: int, scale: float, *, eps: float, target: Target) -> None:
        super().__init__(width, eps=eps, target=target)
        self._factor = scale

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        super().load(parameter, piece, as_tensor(weight) if self._factor == 1.0 else as_tensor(weight) * self._factor)


class UpProjections(WeightedLayer):
    """For each head a matrix to its keys and one to its values, from the latent that all heads share.

    Both are kept [heads, in, out] as the absorbed form reads them, in a float type whatever the checkpoint has: they
    are a small part of a model.
    """

    key_up: Tensor
    value_up: Tensor

    def __init__(
        self, num_heads: int, kv_rank: int, nope_dim: int, value_dim: int, *, target: Target, group: ParallelGroup
    ) -> None:
        super().__init__()
        self._all_heads, (self._first, self.num_heads) = num_heads, group.slice_of(num_heads, "attention heads")
        self._rank, self._nope, self._value = kv_rank, nope_dim, value_dim
        self._target, self._device = target, torch.get_default_device()

    def allocate(self, path: str = "", schemes: Schemes = NO_SCHEMES) -> Self:
        dtype = self._kept_as(schemes)
        with self._device:
            self.key_up = empty_parameter(self.num_heads, self._nope, self._rank, dtype=dtype)
            self.value_up = empty_parameter(self.num_heads, self._rank, self._value, dtype=dtype)
        return self

    def _kept_as(self, schemes: Schemes) -> torch.dtype:
        """Where activations are float32, half of that does for weights that were stored in no more."""
        element = next(iter(schemes.values()), F32).element
        if self._target.dtype != torch.float32 or element == "F32":
            return self._target.dtype
        return torch.bfloat16 if element == "BF16" else torch.float16

    def weight_names(self) -> tuple[str, ...]:
        return ("weight",)

    def pieces(self, parameter: str) -> dict[str | None, tuple[int, ...]]:
        """As GGUF files have them; other checkpoints have one tensor, of which a head has rows of both."""
        keys, values = (self._rank, self._nope), (self._value, self._rank)
        return {"k_b_proj": (self._all_heads, *keys), "v_b_proj": (self._all_heads, *values)}

    def whole_shape(self, parameter: str) -> tuple[int, ...]:
        return (self._all_heads * (self._nope + self._value), self._rank)

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        mine = range(self._first, self._first + self.num_heads)
        if piece is None:
            heads = as_tensor(weight).view(self._all_heads, -1, self._rank)[mine.start : mine.stop]
            self.key_up.data.copy_(heads[:, : self._nope])
            self.value_up.data.copy_(heads[:, self._nope :].transpose(1, 2))
            return
        up = self.key_up if piece == "k_b_proj" else self.value_up
        for index, head in enumerate(mine):
            up.data[index].copy_(as_tensor(matrix_of(weight, head)).t())


def keeps_latent(head_dim: int, value_dim: int, index_dim: int) -> LayerKV:
    return LayerKV("latent", form=KVForm(1, head_dim, value_dim, index_dim))


class LatentAttention(AttentionLayer):
    """Attention over latents; holds no parameters."""

    @property
    def keeps(self) -> LayerKV:
        assert self.spec.value_dim is not None
        return keeps_latent(self.spec.head_dim, self.spec.value_dim, self.spec.index_dim)

    def cache_shape(
        self, backend: AttentionBackend, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        return backend.cache_shape(num_blocks, block_size, 1, self.spec.head_dim + self.spec.index_dim, dtype)

    def forward(
        self,
        weights: LatentWeights,
        q: Tensor,
        latent: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        wanted: WantedTokens | None = None,
        index: IndexInputs | None = None,
    ) -> Tensor:
        """q [n, heads, nope_dim + rope_dim], latent [n, kv_rank + rope_dim] -> [n or wanted, heads * value_dim]."""
        backend, metadata = self.backend, batch.attention[self.group]
        assert isinstance(backend, LatentBackend)
        written = backend.write_latent(self.spec, weights, q, latent, rotation, self.cache, metadata)
        if index is not None:
            written = written._replace(of_index=backend.write_index(self.spec, index, rotation, self.cache, metadata))
        if wanted is not None:
            backend.note_finite(latent, wanted.finite)
            query, *of_index = (
                self._gather_rows(part, wanted.tokens) for part in (written.query, *(written.of_index or ()))
            )
            written = Written(query, of_index=(of_index[0], of_index[1]) if of_index else None)
            metadata = wanted.attention[self.group]
            if batch.adapters is not None:
                batch.adapters.narrow(wanted.tokens)
        return backend.attend_latent(self.spec, weights, written, self.cache, metadata)

"""Latent attention as layers: projections with a rotated part, up-projections of heads, attention over latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from quire.attention.base import LayerCache, Rotation, Written
from quire.attention.latent import IndexInputs, LatentBackend, LatentWeights
from quire.layers.attention import AttentionLayer, ForwardBatch
from quire.layers.linear import Linear, Piece, in_halves
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.quant.registry import choose_quantization
from quire.layers.scheme import F32, StoredMatrix, Weight, as_tensor, matrix_of
from quire.layers.weights import NO_SCHEMES, Schemes, WeightedLayer, empty_parameter
from quire.ops.base import Target
from quire.ops.latent import GROUP, with_scales
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

    def _order(self, index: int) -> Tensor | None:
        return in_halves(self._pieces[index].size, *found) if (found := self._interleaved.get(index)) else None


class RotatedLayerNorm(LayerNorm):
    """Of features whose first `interleaved` are rotated and lie in pairs in a checkpoint; 0: none do."""

    def __init__(self, width: int, interleaved: int, *, eps: float, target: Target) -> None:
        super().__init__(width, eps=eps, target=target)
        self._interleaved = interleaved

    def kept_order(self, piece: str | None) -> Tensor | None:
        return in_halves(self.weight.shape[0], 1, 0, self._interleaved)


class ScaledRMSNorm(RMSNorm):
    """A norm and a constant factor behind it."""

    def __init__(self, width: int, scale: float, *, eps: float, target: Target) -> None:
        super().__init__(width, eps=eps, target=target)
        self._factor = scale

    def load(self, parameter: str, piece: str | None, weight: Weight) -> None:
        super().load(parameter, piece, as_tensor(weight) if self._factor == 1.0 else as_tensor(weight) * self._factor)


class UpProjections(WeightedLayer):
    """For each head a matrix to its keys and one to its values, from the latent that all heads share.

    Both are kept [heads, in, out] as the absorbed form reads them, in a float type; Q8_0 stays 8 bits where kernels
    read it so. All else is decoded: they are a small part of a model.
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
        with self._device:
            self.key_up = self._empty(self._nope, self._rank, schemes, "k_b_proj")
            self.value_up = self._empty(self._rank, self._value, schemes, "v_b_proj")
        return self

    def _empty(self, inner: int, outputs: int, schemes: Schemes, piece: str) -> nn.Parameter:
        dtype = self._kept_as(schemes, piece)
        lines = inner if dtype != torch.int8 else inner + 2 * inner // GROUP
        return empty_parameter(self.num_heads, lines, outputs, dtype=dtype)

    def _kept_as(self, schemes: Schemes, piece: str) -> torch.dtype:
        """Where activations are float32, half of that does for weights that were stored in no more."""
        element = schemes.get(("weight", piece), next(iter(schemes.values()), F32)).element
        if self._target.dtype != torch.float32 or element == "F32":
            return self._target.dtype
        has_codes = element == "Q8_0" and ("weight", piece) in schemes
        if has_codes and choose_quantization(self._target).rounds_activations:
            return torch.int8
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
        key, value = (self._nope, self._rank), (self._rank, self._value)
        name, sizes = ("key_up", key) if piece == "k_b_proj" else ("value_up", value)
        up: Tensor = getattr(self, name)
        if up.dtype == torch.int8 and isinstance(weight, Tensor):  # announced in blocks, and comes as floats
            up = empty_parameter(self.num_heads, *sizes, dtype=self._target.dtype)
            setattr(self, name, up)
        for index, head in enumerate(mine):
            matrix = matrix_of(weight, head)
            up.data[index].copy_(_coded(matrix) if up.dtype == torch.int8 else as_tensor(matrix).t())


def _coded(matrix: Weight) -> Tensor:
    """A head's matrix [out, in] of Q8_0 as `per_head` takes it."""
    assert isinstance(matrix, StoredMatrix)
    plain, (rows, columns) = matrix.plain(), matrix.shape
    codes = plain.scheme.codes(plain.tensors, (rows, columns))
    return with_scales(codes.t(), plain.scheme.scale_values(plain.tensors).t())


def keeps_latent(head_dim: int, value_dim: int, index_dim: int) -> LayerKV:
    return LayerKV("latent", form=KVForm(1, head_dim, value_dim, index_dim))


class LatentAttention(AttentionLayer):
    """Attention over latents; holds no parameters."""

    @property
    def keeps(self) -> LayerKV:
        assert self.spec.value_dim is not None
        return keeps_latent(self.spec.head_dim, self.spec.value_dim, self.spec.index_dim)

    def forward(
        self,
        weights: LatentWeights,
        q: Tensor,
        latent: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        index: IndexInputs | None = None,
    ) -> Tensor:
        """q [n, heads, nope_dim + rope_dim], latent [n, kv_rank + rope_dim] -> [n or wanted, heads * value_dim]."""
        backend, wanted = self.backend, batch.wanted
        at = LayerCache(self.spec, self.cache, batch.attention[self.group])
        assert isinstance(backend, LatentBackend)
        written = backend.write_latent(at, weights, q, latent, rotation)
        if index is not None:
            written = written._replace(of_index=backend.write_index(at, index, rotation))
        if wanted is not None:
            backend.note_finite(latent, wanted.finite)
            query, *of_index = (
                self._gather_rows(part, wanted.tokens) for part in (written.query, *(written.of_index or ()))
            )
            written = Written(query, of_index=(of_index[0], of_index[1]) if of_index else None)
            choice = at.metadata.choice
            at = at._replace(metadata=wanted.attention[self.group])
            if choice is not None:
                rows = (self._gather_rows(part, wanted.tokens) for part in choice[:2])
                at.metadata.choice = (*rows, *choice[2:])
            if batch.adapters is not None:
                batch.adapters.narrow(wanted.tokens)
        return backend.attend_latent(at, weights, written)

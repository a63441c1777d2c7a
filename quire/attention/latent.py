"""What a backend of latent attention is: it keeps one compressed vector of each token, from which all heads read.

The absorbed form: a head's queries are multiplied by its key up-projection, so that they meet the compressed vectors
themselves, and what attention gives is multiplied by its value up-projection. To attention this is one KV head, whose
values are the first dimensions of its keys.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, HeadNorm, LayerCache, Rotation, Written
from quire.ops.split_k import PartialSums
from quire.types.errors import EngineError

_NOT_HEADS = "this backend keeps latents, and heads of keys and values are asked of it"


class LatentWeights(NamedTuple):
    """What a layer does to the latent of a token before it is kept, and to that of its heads."""

    norm: Tensor  # [kv_rank], of the RMS norm of what is compressed
    eps: float
    key_up: Tensor  # [heads, nope_dim, kv_rank], or codes with scales: see ops/latent.py
    value_up: Tensor  # [heads, kv_rank, value_dim], likewise


class IndexInputs(NamedTuple):
    """What a sparse indexer makes of a step's tokens; the first dimensions of queries and keys are to be rotated."""

    query: Tensor  # [n, heads, dim]
    key: Tensor  # [n, dim]
    weights: Tensor  # [n, heads]


class LatentBackend(AttentionBackend):
    """The spec of a layer has one KV head of head_dim = kv_rank + rope_dim, and value_dim = kv_rank."""

    block_axis = 0

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_dim)

    @abstractmethod
    def write_latent(
        self, at: LayerCache, weights: LatentWeights, q: Tensor, latent: Tensor, rotation: Rotation
    ) -> Written:
        """Norm and rotate latents and write them into the cache; absorb and rotate queries. Mutates the cache only.

        q [n, heads, nope_dim + rope_dim], latent [n, kv_rank + rope_dim]: views whose last dimension is contiguous.
        """

    def write_index(self, at: LayerCache, index: IndexInputs, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotate and keep index keys; return index queries, rotated and scaled, and the weights of their heads.

        With an fp8 cache queries are codes of fp8 too, whose scales the weights have in.
        """
        raise EngineError(f"{self.name} attention has no sparse indexer")

    @abstractmethod
    def attend_latent(self, at: LayerCache, weights: LatentWeights, written: Written) -> Tensor:
        """[n, heads * value_dim], of what `write_latent` returned; padding is undefined.

        A layer with an indexer leaves its choice of keys in the metadata; one that shares a choice reads it there.
        """

    def write(
        self, at: LayerCache, qkv: Tensor | PartialSums, head_norm: HeadNorm | None, rotation: Rotation
    ) -> Written:
        raise EngineError(_NOT_HEADS)

    def attend(self, at: LayerCache, written: Written) -> Tensor:
        raise EngineError(_NOT_HEADS)

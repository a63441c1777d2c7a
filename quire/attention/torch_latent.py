"""Latent attention in plain torch: the reference, with the same tiles of keys as attention over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata, AttentionSpec, Rotation, Written
from quire.attention.latent import LatentBackend, LatentWeights
from quire.attention.torch_ref import TorchAttention, TorchMetadata, attend_unit, plan_units
from quire.ops.norm import rms_norm
from quire.ops.per_head import per_head
from quire.ops.rope import apply_rope


class TorchLatentAttention(LatentBackend, TorchAttention):
    def write_latent(
        self,
        spec: AttentionSpec,
        weights: LatentWeights,
        q: Tensor,
        latent: Tensor,
        rotation: Rotation,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Written:
        assert isinstance(metadata, TorchMetadata)
        rank, nope_dim = weights.norm.shape[0], weights.key_up.shape[1]
        shared = rotated(latent[:, None, rank:], rotation)[:, 0]
        kept = torch.cat((rms_norm(latent[:, :rank], weights.norm, weights.eps), shared), dim=-1)
        slots = metadata.slots
        lines = cache.view(-1, cache.shape[-1])[:, : spec.head_dim]
        lines.index_copy_(0, slots, kept[: slots.shape[0]].to(cache.dtype))
        absorbed = per_head(q[..., :nope_dim], weights.key_up)
        return Written(torch.cat((absorbed, rotated(q[..., nope_dim:], rotation)), dim=-1))

    def attend_latent(
        self,
        spec: AttentionSpec,
        weights: LatentWeights,
        written: Written,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert isinstance(metadata, TorchMetadata)
        assert spec.value_dim is not None
        query = written.query
        scaled, out = query * spec.scale, query.new_zeros(query.shape[0], spec.num_heads * spec.value_dim)
        min_rows = self.find_min_rows(spec.head_dim, spec.value_dim, query.dtype)
        for unit in plan_units(metadata, spec, query.element_size()):
            lines = cache.index_select(0, unit.block_ids).view(unit.num_rows, -1, cache.shape[-1])
            keys, values = lines[..., : spec.head_dim], lines[..., : spec.value_dim].contiguous()
            out.index_copy_(0, unit.tokens, attend_unit(spec, scaled, keys, values, unit, unit.mask, min_rows))
        return per_head(out.view(-1, spec.num_heads, spec.value_dim), weights.value_up).flatten(1)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    return x if rotation is None else apply_rope(x, *rotation)

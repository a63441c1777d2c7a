"""Latent attention in plain torch: the reference, with the same tiles of keys as attention over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, LayerCache, Rotation, Written
from quire.attention.latent import IndexInputs, LatentBackend, LatentWeights
from quire.attention.torch_ref import TorchAttention, TorchMetadata, Unit, attend_unit, keep, plan_units
from quire.ops.fp8 import FP8
from quire.ops.latent import index_codes, index_keys, index_scales, index_scores, per_head, top_keys
from quire.ops.norm import rms_norm
from quire.ops.rope import apply_rope


class TorchLatentAttention(LatentBackend, TorchAttention):
    def write_latent(
        self, at: LayerCache, weights: LatentWeights, q: Tensor, latent: Tensor, rotation: Rotation
    ) -> Written:
        spec, cache, metadata = at
        assert isinstance(metadata, TorchMetadata)
        rank = weights.norm.shape[0]
        nope_dim = q.shape[2] - (spec.head_dim - rank)
        shared = rotated(latent[:, None, rank:], rotation)[:, 0]
        kept = torch.cat((rms_norm(latent[:, :rank], weights.norm, weights.eps), shared), dim=-1)
        keep(cache.view(-1, cache.shape[-1])[:, : spec.head_dim], 0, metadata.slots, kept[: len(metadata.slots)])
        absorbed = per_head(q[..., :nope_dim], weights.key_up)
        return Written(torch.cat((absorbed, rotated(q[..., nope_dim:], rotation)), dim=-1))

    def write_index(self, at: LayerCache, index: IndexInputs, rotation: Rotation) -> tuple[Tensor, Tensor]:
        spec, cache, metadata = at
        assert isinstance(metadata, TorchMetadata)
        key, query = rotated(index.key[:, None], rotation)[:, 0], rotated(index.query, rotation)
        num_heads, dim = query.shape[1:]
        weights = index.weights.float() * num_heads**-0.5
        lines = cache.view(-1, cache.shape[-1])[:, spec.head_dim :]
        if cache.dtype == FP8:
            codes, exponents = index_codes(key)
            lines, key = lines.view(torch.uint8)[:, : dim + 1], torch.cat((codes.view(torch.uint8), exponents), -1)
            codes, exponents = index_codes(query)
            query, weights = codes.to(query.dtype), weights * index_scales(exponents[..., 0])
        keep(lines, 0, metadata.slots, key[: len(metadata.slots)])
        return query * dim**-0.5, weights

    def attend_latent(self, at: LayerCache, weights: LatentWeights, written: Written) -> Tensor:
        spec, cache, metadata = at
        assert isinstance(metadata, TorchMetadata)
        assert spec.value_dim is not None
        query = written.query
        scaled, out = query * spec.scale, query.new_zeros(query.shape[0], spec.num_heads * spec.value_dim)
        min_rows = self.find_min_rows(spec.head_dim, spec.value_dim, query.dtype)
        units = plan_units(metadata, spec, query.element_size())
        if written.of_index is not None:  # of each token the keys that it does not attend to, by their positions
            shape = (query.shape[0], max(unit.mask.shape[-1] for unit in units))
            metadata.choice = (torch.ones(shape, dtype=torch.bool, device=query.device),)
        for unit in units:
            kept = cache.index_select(0, unit.block_ids).view(unit.num_rows, -1, cache.shape[-1])
            keys = kept[..., : spec.head_dim].to(query.dtype)
            values = keys[..., : spec.value_dim].contiguous()
            mask = unit.mask
            if spec.top_k is not None and metadata.choice is not None:
                hidden = metadata.choice[0][:, : mask.shape[-1]]
                if written.of_index is not None:
                    found = self._not_chosen(spec, written.of_index, kept[..., spec.head_dim :], unit)
                    hidden[unit.tokens] = found.flatten(0, 2)
                mask = hidden[unit.tokens].view(mask.shape)
            out.index_copy_(0, unit.tokens, attend_unit(spec, scaled, keys, values, unit, mask, min_rows))
        return per_head(out.view(-1, spec.num_heads, spec.value_dim), weights.value_up).flatten(1)

    def _not_chosen(self, spec: AttentionSpec, index: tuple[Tensor, Tensor], kept: Tensor, unit: Unit) -> Tensor:
        """The unit's mask, with the keys that the indexer does not choose."""
        assert spec.top_k is not None
        if kept.shape[1] <= spec.top_k:
            return unit.mask
        query, weights = (part.index_select(0, unit.tokens) for part in index)
        heads, dim = query.shape[1:]
        shape = (unit.num_rows, unit.num_queries)
        flat = query.view(unit.num_rows, unit.num_queries * heads, dim)
        min_rows = self.find_min_rows(dim, dim, query.dtype)
        padded = torch.nn.functional.pad(flat, (0, 0, 0, max(0, min_rows - flat.shape[1])))
        keys, scales = index_keys(kept, dim)
        products = torch.bmm(padded, keys.to(query.dtype).transpose(1, 2))[:, : flat.shape[1]]
        scores = index_scores(products.view(*shape, heads, -1), weights.view(*shape, heads)) * scales[..., None, :]
        return ~top_keys(scores, unit.mask[:, :, 0], spec.top_k)[:, :, None]


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    return x if rotation is None else apply_rope(x, *rotation)

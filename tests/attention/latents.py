"""Random latent sequences, run step by step through a backend, and the unabsorbed form in float64 beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import AttentionSpec, LayerCache, make_batch
from quire.attention.latent import IndexInputs, LatentBackend, LatentWeights
from quire.ops.latent import index_scores, top_keys
from quire.ops.norm import rms_norm
from quire.ops.rope import apply_rope, gather_rotation

BLOCK = 16
MAX_LEN = 400


class Latents:
    """Sequences with scattered blocks. Sizes: heads, nope_dim, rope_dim, kv_rank, value_dim; of a sparse indexer
    heads, dim and top-k."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int, int],
        lengths: list[int],
        backend: LatentBackend,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        block_size: int = BLOCK,
        device: str = "cpu",
        up_dtype: torch.dtype | None = None,
        index: tuple[int, int, int] | None = None,
        rotates: bool = True,
    ) -> None:
        heads, nope, rope, rank, value = sizes
        index_heads, index_dim, top_k = index or (0, 0, None)
        generator = torch.Generator().manual_seed(seed)
        self.sizes, self.lengths, self.backend, self.block_size = sizes, lengths, backend, block_size
        self.dtype, self.device = dtype, device
        self.spec = AttentionSpec(
            heads, 1, rank + rope, (nope + rope) ** -0.5, value_dim=rank, index_dim=index_dim, top_k=top_k
        )
        blocks = [-(-n // block_size) for n in lengths]
        order = 1 + torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed + 1))
        kv_dtype = kv_dtype or dtype
        shape = backend.cache_shape(sum(blocks) + 1, block_size, 1, self.spec.line_width(kv_dtype), kv_dtype)
        self.cache = torch.zeros(shape, dtype=kv_dtype, device=device)
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            self.tables[row, : len(part)] = part

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = [random(n, heads, nope + rope) for n in lengths]
        self.latent = [random(n, rank + rope) for n in lengths]
        up = up_dtype or dtype
        self.weights = LatentWeights(
            (1 + 0.1 * random(rank)).to(device, dtype),
            1e-6,
            (random(heads, nope, rank) * rank**-0.5).to(device, up),
            (random(heads, rank, value) * rank**-0.5).to(device, up),
        )
        angles = torch.rand(MAX_LEN, rope // 2, generator=generator) * 6.3
        angles = angles if rotates else torch.zeros_like(angles)
        self.angles, self.rotates = torch.cat((angles.cos(), angles.sin()), -1), rotates
        widths = (index_heads * index_dim, index_dim, index_heads)
        self.index = [tuple(random(n, width) for width in widths) for n in lengths] if index else None
        self.out = [torch.full((n, heads * value), torch.nan) for n in lengths]
        self.done = [0] * len(lengths)

    def step(self, counts: dict[int, int], *, decode: bool = False, padding: int = 3) -> None:
        """Compute the next counts[row] tokens of each row, in one batch in the dict's order, then padding."""
        rows, size = list(counts), self.block_size
        spans = {row: slice(self.done[row], self.done[row] + counts[row]) for row in rows}
        positions = [torch.arange(s.start, s.stop) for s in spans.values()]
        slots = torch.cat(
            [self.tables[r, p // size].long() * size + p % size for r, p in zip(rows, positions, strict=True)]
        )
        padding = 0 if decode else padding
        batch = make_batch(
            query_lens=[counts[r] for r in rows],
            context_lens=[spans[r].stop for r in rows],
            block_tables=self.tables[rows].to(self.device),
            slot_mapping=torch.cat([slots, torch.zeros(padding, dtype=torch.int64)]).to(self.device),
            block_size=size,
        )

        def joined(parts: list[Tensor]) -> Tensor:
            """As views of one tensor, as projections give them."""
            whole = torch.cat([*(parts[r][spans[r]] for r in rows), torch.ones(padding, *parts[0].shape[1:])])
            return torch.cat((whole, whole), dim=-1).to(self.device, self.dtype)[..., : whole.shape[-1]]

        turned = torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)])
        rotation = gather_rotation(self.angles, turned, torch.float32)
        cos, sin = (part.to(self.device, self.dtype) for part in rotation)
        if decode:
            kind = self.backend.decode_kind([spans[r].stop for r in rows], len(rows))
            metadata = self.backend.prepare(batch, kind, ())
        else:
            metadata = self.backend.prepare_eager(batch)
        q, latent = joined([x.flatten(1) for x in self.q]), joined(self.latent)
        heads = q.unflatten(-1, (self.sizes[0], -1))
        at = LayerCache(self.spec, self.cache, metadata)
        written = self.backend.write_latent(at, self.weights, heads, latent, (cos, sin) if self.rotates else None)
        if self.index is not None:
            query, key, weights = (joined([of[part] for of in self.index]) for part in range(3))
            inputs = IndexInputs(query.unflatten(-1, (weights.shape[-1], -1)), key, weights)
            of_index = self.backend.write_index(at, inputs, (cos, sin))
            written = written._replace(of_index=of_index)
        out = self.backend.attend_latent(at, self.weights, written).float().cpu()
        start = 0
        for row in rows:
            self.out[row][spans[row]] = out[start : start + counts[row]]
            start += counts[row]
            self.done[row] += counts[row]

    def unabsorbed(self, row: int) -> Tensor:
        """Keys and values of each head made of the latents, then causal attention, in float64."""
        heads, nope, _, rank, _ = self.sizes
        n = self.lengths[row]
        cos, sin = gather_rotation(self.angles.double(), torch.arange(n), torch.float64)
        q, latent = (x[row].to(self.dtype).double() for x in (self.q, self.latent))
        up = self.weights
        normed = rms_norm(latent[:, :rank].float(), up.norm.cpu().float(), up.eps).double()
        shared = apply_rope(latent[:, None, rank:], cos, sin)
        keys = torch.einsum("nr,hdr->nhd", normed, up.key_up.cpu().double())
        keys = torch.cat((keys, shared.expand(-1, heads, -1)), -1)
        values = torch.einsum("nr,hrd->nhd", normed, up.value_up.cpu().double())
        q = torch.cat((q[..., :nope], apply_rope(q[..., nope:], cos, sin)), -1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.spec.scale
        hidden = torch.ones(n, n).triu(1).bool()
        if self.index is not None and self.spec.top_k is not None:
            query, key, weight = (x.to(self.dtype).double() for x in self.index[row])
            query = apply_rope(query.unflatten(-1, (weight.shape[-1], -1)), cos, sin)
            products = torch.einsum("qhd,kd->qhk", query, apply_rope(key[:, None], cos, sin)[:, 0])
            hidden = ~top_keys(index_scores(products, weight.float()), hidden, self.spec.top_k)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(n, -1)

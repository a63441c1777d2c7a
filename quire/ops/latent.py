"""What latent attention needs besides attention: a matrix for each head, and the sparse indexer's choice of keys."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.base import F32, Op, native, triton, triton_pair
from quire.ops.fp8 import FP8, FP8_MAX

_TILE = 32  # tokens at once, always, so that a token's bits do not depend on how many there are
GROUP = 32  # codes of an output that share a scale


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, heads, in] times weight [heads, in, out], of any float type -> [n, heads, out] in x's type.

    The last dimension of x is contiguous; the others may lie apart. A weight of int8 has scales, see `with_scales`.
    """
    n = x.shape[0]
    weight = (scaled(weight, x.shape[2]) if weight.dtype == torch.int8 else weight).to(x.dtype)
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, -n % _TILE))
    out = torch.cat(
        [torch.bmm(padded[:, start : start + _TILE], weight) for start in range(0, padded.shape[1], _TILE)], dim=1
    )
    return out[:, :n].transpose(0, 1).contiguous()


def with_scales(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [.., in, out] int8 and scales [.., in / GROUP, out] -> both in one [.., in + 2 * in / GROUP, out] int8.

    A weight is its code times a float16 that it shares with GROUP neighbours along `in`.
    """
    lines = scales.to(torch.float16).contiguous().view(torch.int8)
    return torch.cat((codes, lines.view(*codes.shape[:-2], -1, codes.shape[-1])), dim=-2)


def scaled(weight: Tensor, inner: int) -> Tensor:
    """What `with_scales` made, as float32 [.., in, out]."""
    lines = weight[..., inner:, :].flatten(-2).view(torch.float16)
    scales = lines.view(*weight.shape[:-2], inner // GROUP, weight.shape[-1]).float()
    return weight[..., :inner, :].float() * scales.repeat_interleave(GROUP, -2)


PER_HEAD = Op(per_head, 1e-4, *triton_pair("latent"), native("latent"))


INDEX_SCALE = 16  # bytes behind an index key in an fp8 cache: that of its scale, and 15 that keep lines aligned


def index_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [.., dim] fp8, bytes [.., 1] uint8): x is codes times the power of two that a byte stands for.

    The largest code is in [128, 256): all but numbers below 2^-13 of the largest keep three bits of mantissa.
    """
    bits = x.float().abs().amax(-1, keepdim=True).view(torch.int32)
    exponents = (bits.bitwise_right_shift(23) - 71).clamp(0, 126).to(torch.uint8)  # 127 is a NaN of fp8
    return (x.float() / index_scales(exponents)).clamp(-FP8_MAX, FP8_MAX).to(FP8), exponents


def index_scales(exponents: Tensor) -> Tensor:
    """2^(exponent - 63) as float32, of bytes."""
    return (exponents.int() + 64).bitwise_left_shift(23).view(torch.float32)


def index_keys(kept: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Index keys [.., dim] of lines of a cache, and their scales [..], which are 1 but in fp8."""
    if kept.dtype == FP8:
        return kept[..., :dim], index_scales(kept[..., dim].view(torch.uint8))
    return kept, kept.new_ones(kept.shape[:-1], dtype=torch.float32)


def index_scores(products: Tensor, weights: Tensor) -> Tensor:
    """products [..., heads, keys] of index queries and keys, weights [..., heads] -> scores [..., keys] float32.

    Heads are added from the first to the last.
    """
    total = products[..., 0, :].float().clamp(min=0.0) * weights[..., 0, None]
    for head in range(1, products.shape[-2]):
        total = total + products[..., head, :].float().clamp(min=0.0) * weights[..., head, None]
    return total


def top_keys(scores: Tensor, hidden: Tensor, top_k: int) -> Tensor:
    """Which of the keys [..., keys] are the best `top_k` of those not hidden; of equals, the lower positions.

    All that are not hidden, where there are no more.
    """
    if scores.shape[-1] <= top_k:
        return ~hidden
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    return torch.zeros_like(hidden).scatter_(-1, order, True) & ~hidden


def select_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    rows: Tensor,
    contexts: Tensor,
    starts: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Of each token the cache slots [n, top_k] int32 of its best keys, by position, and their number [n] int32.

    query [n, heads, dim], weights [n, heads], keys [blocks, block_size, dim] or a view of a wider cache, those of fp8
    with their scales; the rows of the batch as in AttentionBatch. Slots that are left over are 0. Padding has one, in
    the null block.
    """
    slots = query.new_zeros(query.shape[0], top_k, dtype=torch.int32)
    counts, size = torch.ones_like(slots[:, 0]), keys.shape[1]
    for row, (first, end) in enumerate(pairwise(starts.tolist())):
        positions = torch.arange(int(contexts[row]), device=query.device)
        lines = tables[rows[row], positions // size].long() * size + positions % size
        found_keys, scales = index_keys(keys[lines // size, lines % size], query.shape[2])
        products = query[first:end].float() @ found_keys.float().T
        seen = positions[len(positions) - (end - first) :] + 1
        scores = index_scores(products, weights[first:end].float()) * scales
        for token, chosen in enumerate(top_keys(scores, positions >= seen[:, None], top_k), first):
            found = lines[chosen]
            slots[token, : len(found)], counts[token] = found.to(torch.int32), len(found)
    return slots, counts


SELECT_KEYS = Op(select_keys, 0.0, native("index"), triton("index", F32))

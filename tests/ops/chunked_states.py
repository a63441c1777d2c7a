"""The recurrence of quire/ops/states.py token by token and in chunks, in the type of its inputs; no states."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def by_token(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, strengths: Tensor | None, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Results [n, heads, value_dim] and the matrix after them; token by token, from matrix [heads, key_dim, dim].

    queries, keys [n, heads, key_dim]; values [n, heads, value_dim]; strengths [n, heads]; decays [n, heads], or of
    each channel of a key [n, heads, key_dim].
    """
    out = []
    for t in range(len(values)):
        decay = decays[t, :, None] if decays.dim() == 2 else decays[t]
        matrix, value = matrix * decay[..., None], values[t]
        if strengths is not None:
            value = (value - torch.einsum("hkv,hk->hv", matrix, keys[t])) * strengths[t, :, None]
        matrix = matrix + torch.einsum("hk,hv->hkv", keys[t], value)
        out.append(torch.einsum("hkv,hk->hv", matrix, queries[t]))
    return torch.stack(out), matrix


def in_chunks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    matrix: Tensor,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """The same by matmuls over chunks that end at multiples of 64; `first` is the position of the first token."""
    out, begin = [], 0
    while begin < len(values):
        end = min(len(values), (first + begin) // CHUNK * CHUNK + CHUNK - first)
        q, k, v = (part[begin:end].transpose(0, 1) for part in (queries, keys, values))
        total = decays[begin:end].reshape(end - begin, len(q), -1).transpose(0, 1).log().cumsum(1)
        exponents = total[:, :, None] - total[:, None]  # [heads, i, j, channels that decay by themselves, or 1]
        factors = exponents.where(torch.ones(end - begin, end - begin).tril().bool()[..., None], 0.0).exp()
        scores = torch.einsum("hik,hjk,hijk->hij", q, k, factors.expand(-1, -1, -1, k.shape[-1])).tril()
        if strengths is not None:
            strength = strengths[begin:end].T[..., None]
            pairs = torch.einsum("hik,hjk,hijk->hij", k, k, factors.expand(-1, -1, -1, k.shape[-1]))
            a = torch.eye(end - begin, dtype=v.dtype) + (pairs * strength).tril(-1)
            w = torch.linalg.solve_triangular(a, k * strength * total.exp(), upper=False)
            u = torch.linalg.solve_triangular(a, v * strength, upper=False)
            v = u - w @ matrix
        out.append(((q * total.exp()) @ matrix + scores @ v).transpose(0, 1))
        matrix = matrix * total[:, -1, :, None].exp() + (k * (total[:, -1:] - total).exp()).mT @ v
        begin = end
    return torch.cat(out), matrix

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
        total = decays[begin:end].T.log().cumsum(-1)
        factors = (total[:, :, None] - total[:, None]).tril().exp().tril()
        if strengths is not None:
            strength = strengths[begin:end].T[..., None]
            a = torch.eye(end - begin, dtype=v.dtype) + ((k @ k.mT) * factors * strength).tril(-1)
            w = torch.linalg.solve_triangular(a, k * strength * total.exp()[..., None], upper=False)
            u = torch.linalg.solve_triangular(a, v * strength, upper=False)
            v = u - w @ matrix
        out.append(((q @ matrix) * total.exp()[..., None] + ((q @ k.mT) * factors) @ v).transpose(0, 1))
        whole = total[:, -1:, None]
        matrix = matrix * whole.exp() + (k * (whole - total[..., None]).exp()).mT @ v
        begin = end
    return torch.cat(out), matrix

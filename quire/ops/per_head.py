"""One matrix for each head: the up-projections of latent attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton

PerHead = Callable[[Tensor, Tensor], Tensor]

_TILE = 32  # tokens at once, always, so that a token's bits do not depend on how many there are


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, heads, in] times weight [heads, in, out], of any float type -> [n, heads, out] in x's type.

    The last dimension of x is contiguous; the others may lie apart.
    """
    n = x.shape[0]
    weight = weight.to(x.dtype)
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, -n % _TILE))
    out = torch.cat(
        [torch.bmm(padded[:, start : start + _TILE], weight) for start in range(0, padded.shape[1], _TILE)], dim=1
    )
    return out[:, :n].transpose(0, 1).contiguous()


PER_HEAD: Op[PerHead] = Op(
    "per_head",
    per_head,
    1e-4,
    (
        triton("per_head", "latent", varies=True),
        triton("per_head_fixed", "latent", name="triton_fixed"),
        native("per_head", "latent"),
    ),
)

"""One matrix for each head: the up-projections of latent attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native

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


def generate_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n, heads = (1, 2, 5, 16, 17, 70)[seed % 6], (1, 4, 3)[seed % 3]
    inner, outputs = 16 * (1 + seed % 5), 16 * (1 + seed % 7)
    x = torch.randn(n, heads, inner + 8, generator=generator)[..., :inner]
    return x, torch.randn(heads, inner, outputs, generator=generator) * inner**-0.5


PER_HEAD: Op[PerHead] = Op(
    "per_head",
    per_head,
    generate_inputs,
    1e-4,
    (
        Implementation("triton", "triton.latent:per_head", ("cuda",), varies=True),
        Implementation("triton_fixed", "triton.latent:per_head_fixed", ("cuda",)),
        native("per_head", "latent"),
    ),
)

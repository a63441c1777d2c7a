"""Soft-capping of scores and logits."""

from __future__ import annotations

from torch import Tensor

from quire.ops.base import Op, native


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), with tanh written through exp: torch's own tanh may round tail elements differently.

    Computed in float32: near 0 the two terms cancel, which bfloat16 would turn into steps of a quarter at cap 50.
    """
    return (cap - (2.0 * cap) / ((x.float() * (2.0 / cap)).exp_() + 1.0)).to(x.dtype)


SOFT_CAP = Op("soft_cap", soft_cap, 1e-5, (native("soft_cap"),))

"""Soft-capping of scores and logits."""

from __future__ import annotations

from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), with tanh written through exp: torch's own tanh may round tail elements differently."""
    return cap - (2.0 * cap) / ((x * (2.0 / cap)).exp_() + 1.0)

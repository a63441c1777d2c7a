"""Rotary position embedding ops: gather a step's rotations once, then rotate in every layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


def gather_rotation(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors of one step: cos and sign-folded sin, each [n, 1, rotary_dim].

    cos_sin: [max_model_len, rotary_dim] float32, cosines and then sines; positions: [n].
    Gathering once per step and not per layer matters: at batch 1 every small op counts.
    """
    return _factors(cos_sin.index_select(0, positions).to(dtype))


def gather_rotation_by_axis(
    cos_sin: Tensor, positions: Tensor, axes: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same for tokens with a position on each of several axes, of which each frequency follows one.

    positions: [num_axes, n]; axes: [rotary_dim / 2] int64, the axis of each frequency.
    """
    columns = torch.arange(cos_sin.shape[1], device=cos_sin.device)
    return _factors(cos_sin[positions[axes.repeat(2)].T, columns].to(dtype))


def _factors(lines: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = lines.unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim of each head; halves are paired (i, i + rotary_dim / 2).

    x: [n, num_heads, head_dim], query and key heads together; cos, sin: from `gather_rotation`.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    swapped = torch.roll(x, rotary_dim // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))


GatherRotation = Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
GATHER_ROTATION: Op[GatherRotation] = Op(
    "gather_rotation", gather_rotation, 0.0, (triton("gather_rotation", "gather"), native("gather_rotation"))
)
GATHER_ROTATION_BY_AXIS = Op("gather_rotation_by_axis", gather_rotation_by_axis, 0.0)

"""Rotary position embedding ops, and from projected qkv to heads."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton
from quire.ops.norm import rms_norm


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


GATHER_ROTATION = Op(gather_rotation, 0.0, triton("gather"), native())
GATHER_ROTATION_BY_AXIS = Op(gather_rotation_by_axis, 0.0)


def split_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rotation: tuple[Tensor, Tensor] | None,
    norms_rotated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [n, num_heads, dim], k, v [n, num_kv_heads, dim]) of qkv [n, (num_heads + 2 * num_kv_heads) * dim].

    Query and key heads stay together until both are rotated: half as many small ops.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if rotation is not None and norms_rotated:
        qk, rotation = apply_rope(qk, *rotation), None
    if q_weight is not None and k_weight is not None:
        q = rms_norm(qk[:, :num_heads], q_weight, eps, weight_offset)
        qk = torch.cat((q, rms_norm(qk[:, num_heads:], k_weight, eps, weight_offset)), dim=1)
    if rotation is not None:
        qk = apply_rope(qk, *rotation)
    return qk[:, :num_heads], qk[:, num_heads:], v

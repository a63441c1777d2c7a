"""The recurrences of recurrent layers, and the norm behind them: their torch references, which define them.

All are one recurrence of a matrix per head (ops/states.py) and differ in what its keys, values and decays are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton
from quire.ops.states import StatePlaces, StateShape, gated_conv, recur, short_conv

_L2_EPS = 1e-6


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    cache: Tensor,
    places: StatePlaces,
    shape: StateShape,
    floor: float = 0.0,
) -> Tensor:
    """The gated delta rule (Gated DeltaNet; Kimi delta attention where decay_dim is key_dim): [n, heads * value_dim].

    qkv [n, 2 * key_heads * key_dim + heads * value_dim], whose queries and keys are made unit vectors here;
    a matrix decays by exp(a * softplus(decay + dt_bias)), or with a floor < 0 of the exponent by
    exp(floor * sigmoid(-a * (decay + dt_bias))), and sigmoid(strength) is the strength of the delta rule.
    decay [n, heads * decay_dim], dt_bias [heads * decay_dim], strength [n, heads], a [heads].
    """
    keys, count = shape.num_key_heads * shape.key_dim, qkv.shape[0]
    q, k, v = qkv.float().split([keys, keys, shape.num_heads * shape.value_dim], dim=-1)
    q, k = (_unit(part.view(count, shape.num_key_heads, -1)) for part in (q, k))
    given = (decay.float() + dt_bias).view(count, shape.num_heads, -1)
    decays = floor / (1.0 + torch.exp(given * a[:, None])) if floor else softplus(given) * a[:, None]
    strengths = 1.0 / (1.0 + torch.exp(-strength.float()))
    out = recur(
        q * shape.key_dim**-0.5,
        k,
        v.view(count, shape.num_heads, -1),
        torch.exp(decays),
        strengths,
        cache,
        places,
        shape,
    )
    return out.flatten(1).to(qkv.dtype)


def state_space(
    xbc: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    skip: Tensor,
    dt_limits: tuple[float, float],
    cache: Tensor,
    places: StatePlaces,
    shape: StateShape,
) -> Tensor:
    """State-space duality (Mamba-2): [n, heads * value_dim].

    xbc [n, heads * value_dim + 2 * key_heads * key_dim]: x, then B and C of each group; dt [n, heads]. A matrix
    decays by exp(dt * a), and B x (dt * x) is added; C reads it, and skip * x is added. dt_bias, a, skip: [heads].
    """
    count, keys = xbc.shape[0], shape.num_key_heads * shape.key_dim
    x, b, c = xbc.float().split([shape.num_heads * shape.value_dim, keys, keys], dim=-1)
    x = x.view(count, shape.num_heads, -1)
    step = softplus(dt.float() + dt_bias).clamp(*dt_limits)
    b, c = (part.view(count, shape.num_key_heads, -1) for part in (b, c))
    out = recur(c, b, x * step[..., None], torch.exp(step * a)[..., None], None, cache, places, shape)
    total: Tensor = out + x * skip[:, None]
    return total.flatten(1).to(xbc.dtype)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    skip: Tensor,
    cache: Tensor,
    places: StatePlaces,
    shape: StateShape,
) -> Tensor:
    """The selective scan (Mamba): every channel is a head whose values are single numbers: [n, channels].

    x, dt [n, channels], dt before its softplus; b, c [n, key_dim]; a [channels, key_dim]; skip [channels].
    """
    wide, step = x.float(), softplus(dt.float())
    keys, queries = (part.float()[:, None] for part in (b, c))
    decays = torch.exp(step[..., None] * a)
    out = recur(queries, keys, (wide * step)[..., None], decays, None, cache, places, shape)
    return (out[..., 0] + wide * skip).to(x.dtype)


def linear_attention(qkv: Tensor, decay: Tensor, cache: Tensor, places: StatePlaces, shape: StateShape) -> Tensor:
    """Lightning attention: qkv [n, heads * 3 * dim] with each head's query, key and value together; decay [heads]."""
    count = qkv.shape[0]
    q, k, v = qkv.float().view(count, shape.num_heads, 3, -1).unbind(2)
    decays = decay[None, :, None].expand(count, -1, 1)
    return recur(q, k, v, decays, None, cache, places, shape).flatten(1).to(qkv.dtype)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, sigmoid: bool = False
) -> Tensor:
    """RMS norm of x [n, width] in `groups` equal parts, times silu (or sigmoid) of gate [n, width].

    With norm_first the gate multiplies the normed values, else those that are normed. weight: [width], or that of one
    part, for all of them.
    """
    wide, wide_gate = x.float(), gate.float()
    factor = 1.0 / (1.0 + torch.exp(-wide_gate))
    if not sigmoid:
        factor = factor * wide_gate
    if not norm_first:
        wide = wide * factor
    parts = wide.unflatten(-1, (groups, -1))
    parts = parts * parts.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    out: Tensor = (parts * weight.float().view(-1, parts.shape[-1])).flatten(1)
    return (out * factor if norm_first else out).to(x.dtype)


def gate(x: Tensor, gates: Tensor, silu: bool = False) -> Tensor:
    """x * sigmoid(gates), or x * silu(gates); all [n, width]."""
    wide = gates.float()
    factor = 1.0 / (1.0 + torch.exp(-wide))
    gated: Tensor = x.float() * (factor * wide if silu else factor)
    return gated.to(x.dtype)


def compact(x: Tensor) -> Tensor:
    """Columns x [n, width] of a wider tensor, by themselves."""
    return x.contiguous()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), in float64 inside: there torch's log differs by less than shows in float32."""
    wide = x.double()
    return (wide.clamp(min=0.0) + torch.log1p(torch.exp(-wide.abs()))).float()


def _unit(x: Tensor) -> Tensor:
    return x * (x.pow(2).sum(-1, keepdim=True) + _L2_EPS).rsqrt()


_CONV = triton("short_conv"), native("states")
_SERIAL = triton("states"), native("states")
# In the fast mode long rows have a form of their own, whose bits follow from how a row is cut.
_CHUNKED = triton("chunked_states", varies=True, name="chunked"), *_SERIAL
SHORT_CONV = Op(short_conv, 1e-5, *_CONV, changes=(4,))
GATED_CONV = Op(gated_conv, 1e-5, *_CONV, changes=(3,))
GATED_DELTA = Op(gated_delta, 1e-5, *_CHUNKED, changes=(5,))
STATE_SPACE = Op(state_space, 1e-5, *_CHUNKED, changes=(6,))
SELECTIVE_SCAN = Op(selective_scan, 1e-5, *_SERIAL, changes=(6,))
LINEAR_ATTENTION = Op(linear_attention, 1e-5, *_CHUNKED, changes=(2,))
GATED_NORM = Op(gated_norm, 1e-5, *_CONV)
GATE = Op(gate, 1e-5, *_CONV)
COMPACT = Op(compact, 0.0, native("states"))

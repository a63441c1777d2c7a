"""The recurrences of recurrent layers, and the norm behind them: their torch references, which define them.

All are one recurrence of a matrix per head (ops/states.py) and differ in what its keys, values and decays are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native
from quire.ops.states import ROLLBACK, StatePlaces, StateShape, gated_conv, recur, short_conv

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


def _places(seed: int, generator: torch.Generator) -> tuple[StatePlaces, int]:
    """Three rows of which the first begins, in blocks of 4 tokens, and the number of their tokens."""
    counts = [1 + (seed + 5) % 9, 1, 1 + seed % 3]
    contexts = torch.tensor([counts[0], 6, 17])
    starts = torch.tensor([0, *counts]).cumsum(0)
    tables = 1 + torch.randperm(24, generator=generator).view(3, 8)
    tables[0, 0] = 0 if counts[0] > 4 else tables[0, 0]  # an entry without a block
    return StatePlaces(tables.int(), torch.arange(3), contexts.int(), starts.int(), 4), sum(counts)


def generate_conv(seed: int) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    places, count = _places(seed, generator)
    shape = StateShape(16 * (1 + seed % 3), 3 + seed % 2)
    x, bias = (torch.randn(*size, shape.conv_channels, generator=generator) for size in ((count,), ()))
    weight = torch.randn(shape.conv_channels, shape.conv_width, generator=generator)
    cache = torch.randn(25, shape.size, generator=generator)
    return x, weight, bias if seed % 2 else None, bool(seed % 3), cache, places, shape


def generate_gated_conv(seed: int) -> tuple[object, ...]:
    x, weight, bias, _, cache, places, shape = generate_conv(seed)
    assert isinstance(x, Tensor)
    return torch.cat((x, x.flip(0), 1.0 - x), dim=1), weight, bias, cache, places, shape


def _recurrent(seed: int, shape: StateShape) -> tuple[torch.Generator, StatePlaces, int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    places, count = _places(seed, generator)
    cache = torch.randn(25, shape.size, generator=generator) * 0.3
    firsts = (places.contexts - torch.diff(places.starts)).tolist()
    for row, first in enumerate(firsts):  # a state holds how many tokens it is after
        if first:
            block = int(places.tables[row, (first - 1) // 4])
            cache[block, shape.conv_size] = max(0, first - 1 - seed % ROLLBACK)
            cache[block, shape.conv_size + 1 + shape.matrix_size :].abs_()
    return generator, places, count, cache


def generate_delta(seed: int) -> tuple[object, ...]:
    shape = StateShape(8, 2, 4, 2, 16, 16 * (1 + seed % 2), 16 if seed % 3 == 0 else 1)
    generator, places, count, cache = _recurrent(seed, shape)
    sizes = (2 * 32 + 4 * shape.value_dim, 4 * shape.decay_dim, 4)
    qkv, decay, strength = (torch.randn(count, size, generator=generator) for size in sizes)
    a, bias = -torch.rand(4, generator=generator), torch.randn(4 * shape.decay_dim, generator=generator)
    return qkv, decay, strength, a, bias, cache, places, shape, -5.0 if seed % 4 == 3 else 0.0


def generate_state_space(seed: int) -> tuple[object, ...]:
    shape = StateShape(8, 2, 4, 1 + seed % 2, 16 * (1 + seed % 2), 8)
    generator, places, count, cache = _recurrent(seed, shape)
    xbc = torch.randn(count, 32 + 2 * shape.num_key_heads * shape.key_dim, generator=generator)
    dt, vectors = torch.randn(count, 4, generator=generator), torch.rand(3, 4, generator=generator)
    return xbc, dt, vectors[0], -vectors[1], vectors[2], (0.0, 1.5), cache, places, shape


def generate_scan(seed: int) -> tuple[object, ...]:
    shape = StateShape(8, 2, 24, 1, 16, 1, 16)
    generator, places, count, cache = _recurrent(seed, shape)
    x, dt = torch.randn(2, count, 24, generator=generator).unbind(0)
    b, c = torch.randn(2, count, 16, generator=generator).unbind(0)
    a, skip = -torch.rand(24, 16, generator=generator), torch.rand(24, generator=generator)
    return x, dt, b, c, a, skip, cache, places, shape


def generate_linear(seed: int) -> tuple[object, ...]:
    shape = StateShape(0, 1, 4, 4, 16, 16)
    generator, places, count, cache = _recurrent(seed, shape)
    qkv = torch.randn(count, 4 * 48, generator=generator)
    return qkv, torch.rand(4, generator=generator), cache, places, shape


def generate_norm(seed: int) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    groups = 1 + seed % 3
    x, gate = torch.randn(2, 5, 32 * groups, generator=generator).unbind(0)
    weight = torch.randn(32 * (groups if seed % 2 else 1), generator=generator)
    return x, gate, weight, 1e-6, groups, bool(seed % 2), bool(seed % 5 == 0)


def generate_gate(seed: int) -> tuple[Tensor, Tensor, bool]:
    x, gates = torch.randn(
        2, 1 + seed % 5, 16 * (1 + seed % 3), generator=torch.Generator().manual_seed(seed)
    ).unbind(0)
    return x, gates, bool(seed % 2)


def generate_columns(seed: int) -> tuple[Tensor]:
    wide = torch.randn(1 + seed % 5, 40, generator=torch.Generator().manual_seed(seed))
    return (wide[:, seed % 7 : 16 + seed % 7],)


def _implementations(name: str, module: str = "short_conv", *, chunked: bool = False) -> tuple[Implementation, ...]:
    """`chunked`: long rows have a form of their own in the fast mode, whose bits follow from how a row is cut."""
    in_chunks = Implementation("chunked", f"triton.chunked_states:{name}", ("cuda",), varies=True)
    serial = Implementation("triton", f"triton.{module}:{name}", ("cuda",)), native(name, "states")
    return (in_chunks, *serial) if chunked else serial


SHORT_CONV = Op("short_conv", short_conv, generate_conv, 1e-5, _implementations("short_conv"), changes=(4,))
GATED_CONV = Op("gated_conv", gated_conv, generate_gated_conv, 1e-5, _implementations("gated_conv"), changes=(3,))
_DELTA, _SPACE, _LINEAR = (
    _implementations(name, "states", chunked=True) for name in ("gated_delta", "state_space", "linear_attention")
)
GATED_DELTA = Op("gated_delta", gated_delta, generate_delta, 1e-5, _DELTA, changes=(5,))
STATE_SPACE = Op("state_space", state_space, generate_state_space, 1e-5, _SPACE, changes=(6,))
_SCAN = _implementations("selective_scan", "states")
SELECTIVE_SCAN = Op("selective_scan", selective_scan, generate_scan, 1e-5, _SCAN, changes=(6,))
LINEAR_ATTENTION = Op("linear_attention", linear_attention, generate_linear, 1e-5, _LINEAR, changes=(2,))
GATED_NORM = Op("gated_norm", gated_norm, generate_norm, 1e-5, _implementations("gated_norm"))
GATE = Op("gate", gate, generate_gate, 1e-5, _implementations("gate"))
COMPACT = Op("compact", compact, generate_columns, 0.0, (native("compact", "states"),))

"""The native library's functions of recurrent layers over tensors: float32, on the host; columns may be strided."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty


class Places(Protocol):
    """See StatePlaces in quire/ops/states.py."""

    @property
    def tables(self) -> Tensor: ...
    @property
    def rows(self) -> Tensor: ...
    @property
    def contexts(self) -> Tensor: ...
    @property
    def starts(self) -> Tensor: ...
    @property
    def block_size(self) -> int: ...


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cache: Tensor, places: Places, shape: Any
) -> Tensor:
    return _conv(x, None, None, weight, bias, silu, cache, places, shape)


def gated_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor, places: Places, shape: Any) -> Tensor:
    b, c, x = bcx.chunk(3, dim=-1)
    return _conv(x, b, c, weight, bias, False, cache, places, shape)


def _conv(
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cache: Tensor,
    places: Places,
    shape: Any,
) -> Tensor:
    out = empty(x.shape[0], shape.conv_channels)
    bound().short_conv(
        x.data_ptr(),
        _address(before),
        _address(after),
        x.stride(0),
        weight.data_ptr(),
        _address(bias),
        cache.data_ptr(),
        cache.stride(0),
        *_rows(places),
        out.data_ptr(),
        places.rows.shape[0],
        places.block_size,
        shape.conv_channels,
        shape.conv_width,
        shape.conv_slots,
        int(silu),
    )
    return out


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    cache: Tensor,
    places: Places,
    shape: Any,
    floor: float = 0.0,
) -> Tensor:
    tokens, heads, keys = qkv.shape[0], shape.num_heads, shape.num_key_heads
    qk = empty(tokens, 2 * keys, shape.key_dim)
    decays, strengths = empty(tokens, heads, shape.decay_dim), empty(tokens, heads)
    bound().delta_inputs(
        qkv.data_ptr(),
        qkv.stride(0),
        decay.data_ptr(),
        decay.stride(0),
        strength.data_ptr(),
        strength.stride(0),
        a.data_ptr(),
        dt_bias.data_ptr(),
        floor,
        qk.data_ptr(),
        decays.data_ptr(),
        strengths.data_ptr(),
        tokens,
        heads,
        keys,
        shape.key_dim,
        shape.decay_dim,
    )
    values = qkv[:, 2 * keys * shape.key_dim :]
    return _recur(qk[:, :keys], qk[:, keys:], values, decays, strengths, None, cache, places, shape)


def state_space(
    xbc: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    skip: Tensor,
    dt_limits: tuple[float, float],
    cache: Tensor,
    places: Places,
    shape: Any,
) -> Tensor:
    width, keys = shape.num_heads * shape.value_dim, shape.num_key_heads * shape.key_dim
    x, b, c = xbc.split([width, keys, keys], dim=-1)
    values, decays = _scan_inputs(x, dt, dt_bias, a, dt_limits, shape)
    return _recur(c, b, values, decays, None, (skip, x), cache, places, shape)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    skip: Tensor,
    cache: Tensor,
    places: Places,
    shape: Any,
) -> Tensor:
    values, decays = _scan_inputs(x, dt, None, a, (0.0, float("inf")), shape)
    return _recur(c, b, values, decays, None, (skip, x), cache, places, shape)


def _scan_inputs(
    x: Tensor, dt: Tensor, dt_bias: Tensor | None, a: Tensor, limits: tuple[float, float], shape: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads = x.shape[0], shape.num_heads
    values, decays = empty(tokens, heads * shape.value_dim), empty(tokens, heads, shape.decay_dim)
    bound().scan_inputs(
        x.data_ptr(),
        x.stride(0),
        dt.data_ptr(),
        dt.stride(0),
        _address(dt_bias),
        a.data_ptr(),
        *limits,
        values.data_ptr(),
        decays.data_ptr(),
        tokens,
        heads,
        shape.value_dim,
        shape.decay_dim,
    )
    return values, decays


def _recur(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    skip: tuple[Tensor, Tensor] | None,
    cache: Tensor,
    places: Places,
    shape: Any,
) -> Tensor:
    from_conv = cache[:, shape.conv_size :]
    out = empty(values.shape[0], shape.num_heads * shape.value_dim)
    factors, skipped = skip or (None, None)
    common = (
        decays.data_ptr(),
        _address(strengths),
    )
    state = (from_conv.data_ptr(), cache.stride(0), *_rows(places))
    bound().recurrence(
        queries.data_ptr(),
        queries.stride(0),
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        *common,
        _address(factors),
        _address(skipped),
        0 if skipped is None else skipped.stride(0),
        *state,
        out.data_ptr(),
        places.rows.shape[0],
        places.block_size,
        shape.num_heads,
        shape.num_key_heads,
        shape.key_dim,
        shape.value_dim,
        shape.decay_dim,
        shape.rollback,
        shape.waiting,
    )
    bound().keep_inputs(
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        *common,
        *state,
        places.rows.shape[0],
        places.block_size,
        shape.num_heads,
        *shape.input_sizes[:3],
        shape.matrix_size,
        shape.rollback,
        shape.waiting,
    )
    return out


def linear_attention(qkv: Tensor, decay: Tensor, cache: Tensor, places: Places, shape: Any) -> Tensor:
    q, k, v = qkv.view(qkv.shape[0], shape.num_heads, 3, -1).unbind(2)
    decays = decay[None].expand(qkv.shape[0], -1).contiguous()
    q, k, v = q.flatten(1), k.flatten(1), v.flatten(1)
    return _recur(q, k, v, decays, None, None, cache, places, shape)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, sigmoid: bool = False
) -> Tensor:
    x = x.contiguous()
    rows, width = x.shape
    size = width // groups
    out = empty(rows, width)
    bound().gated_norm(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        groups,
        size,
        size if weight.shape[0] == width else 0,
        eps,
        int(norm_first),
        int(sigmoid),
    )
    return out


def gate(x: Tensor, gates: Tensor, silu: bool = False) -> Tensor:
    x = x.contiguous()
    out = empty(*x.shape)
    bound().gate(x.data_ptr(), gates.data_ptr(), gates.stride(0), out.data_ptr(), *x.shape, int(silu))
    return out


def compact(x: Tensor) -> Tensor:
    """x [n, width] contiguous."""
    if x.is_contiguous():
        return x
    assert x.stride(1) == 1
    out = empty(*x.shape)
    bound().copy_columns(x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape)
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(places: Places) -> tuple[int, ...]:
    tables = places.tables
    return (
        tables.data_ptr(),
        tables.stride(0),
        places.rows.data_ptr(),
        places.contexts.data_ptr(),
        places.starts.data_ptr(),
    )

"""The native library's functions over tensors: float32, contiguous, on the host; logits come in any float type."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: object = None) -> Tensor:
    """x [n, K] @ weight [N, K].T + bias [N]. Every element is summed in the same order whatever n is."""
    x = x.contiguous()
    rows, inner = x.shape
    n = weight.shape[0]
    out = empty(rows, n)
    bound().linear(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), rows, n, inner
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    out = empty(*flat.shape)
    bound().add_rms_norm(
        flat.data_ptr(),
        None,
        weight.data_ptr(),
        out.data_ptr(),
        None,
        *flat.shape,
        flat.stride(0),
        eps,
        weight_offset,
    )
    return out.view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = empty(*x.shape), empty(*x.shape)
    bound().add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        *x.shape,
        x.stride(0),
        eps,
        weight_offset,
    )
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _layer_norm(x, None, weight, bias, eps)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _layer_norm(x, residual.contiguous(), weight, bias, eps)


def _layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    out, total = empty(*x.shape), x if residual is None else empty(*x.shape)
    bound().add_layer_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        None if residual is None else total.data_ptr(),
        *x.shape,
        x.stride(0),
        eps,
    )
    return out, total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, 0)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, 1)


def _gated(gate_up: Tensor, activation: int) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty(rows, width)
    bound().gated(gate_up.data_ptr(), out.data_ptr(), rows, width, activation)
    return out


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, 3)


def gelu(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = empty(*x.shape)
    bound().gelu(x.data_ptr(), out.data_ptr(), *x.shape)
    return out


def scale(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    out = empty(*x.shape)
    bound().scale(x.data_ptr(), out.data_ptr(), *x.shape, factor)
    return out


def scale_rows(x: Tensor, factors: Tensor, count: int) -> Tensor:
    x, factors = x.contiguous(), factors.contiguous()
    out = empty(*x.shape)
    bound().scale_rows(x.data_ptr(), factors.data_ptr(), out.data_ptr(), *x.shape, factors.stride(0), count)
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    x = x.contiguous()
    out = empty(*x.shape)
    bound().soft_cap(x.data_ptr(), out.data_ptr(), *x.shape, cap)
    return out


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    x = x.contiguous()
    if x.element_size() != 4:
        return x.index_select(0, indices)
    out = empty(indices.shape[0], *x.shape[1:], dtype=x.dtype)
    bound().gather_rows(
        x.data_ptr(), indices.contiguous().data_ptr(), out.data_ptr(), indices.shape[0], x.shape[1:].numel()
    )
    return out


def embed(table: Tensor, token_ids: Tensor) -> Tensor:
    return gather_rows(table, token_ids.long())


def tokens_in_range(token_ids: Tensor, first: int, size: int) -> Tensor:
    token_ids = token_ids.long().contiguous()
    out = empty(token_ids.shape[0], dtype=torch.int64)
    bound().tokens_in_range(token_ids.data_ptr(), out.data_ptr(), token_ids.shape[0], first, size)
    return out


def clear_outside_range(token_ids: Tensor, rows: Tensor, first: int, size: int) -> Tensor:
    assert rows.is_contiguous()
    token_ids = token_ids.long().contiguous()
    bound().clear_outside_range(token_ids.data_ptr(), rows.data_ptr(), *rows.shape, first, size)
    return rows


def take_columns(x: Tensor, first: int, width: int) -> Tensor:
    x = x.contiguous()
    out = empty(x.shape[0], width)
    bound().copy_columns(x.data_ptr() + 4 * first, x.stride(0), out.data_ptr(), x.shape[0], width)
    return out


def join_columns(first: Tensor, second: Tensor) -> Tensor:
    first, second = first.contiguous(), second.contiguous()
    out = empty(first.shape[0], first.shape[1] + second.shape[1])
    widths = (first.shape[1], second.shape[1])
    bound().join_columns(first.data_ptr(), second.data_ptr(), out.data_ptr(), first.shape[0], *widths)
    return out


def spread_logits(logits: Tensor, offsets: Tensor, size: int) -> Tensor:
    logits = logits.contiguous()
    out = empty(logits.shape[0], size)
    bound().spread_logits(logits.data_ptr(), offsets.data_ptr(), out.data_ptr(), *logits.shape, size)
    return out


def first_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    if scores.stride(-1) != 1:
        scores = scores.contiguous()
    rows, size = scores.shape
    ids, best = empty(rows, dtype=torch.int64), empty(rows)
    bound().first_max(scores.data_ptr(), rows, size, scores.stride(0), ids.data_ptr(), best.data_ptr())
    return ids, best


def sample_within(logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    rows, size = logits.shape
    tokens, highest = empty(rows, dtype=torch.int32), empty(rows)
    parameters, seeds, positions = parameters.contiguous(), seeds.contiguous(), positions.contiguous()
    bound().sample_within(
        logits.data_ptr(),
        parameters.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        rows,
        size,
        logits.stride(0),
        tokens.data_ptr(),
        highest.data_ptr(),
    )
    return tokens, highest


def gather_rotation(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens, rotary = positions.shape[0], cos_sin.shape[1]
    cos, sin = empty(tokens, 1, rotary), empty(tokens, 1, rotary)
    bound().gather_rotation(
        cos_sin.data_ptr(), positions.contiguous().data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, rotary
    )
    return cos, sin

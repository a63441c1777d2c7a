"""LoRA over tensors: the kernels of the native library that add adapters to linear layers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty

_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")  # the numbers are those of gate.h


def tile_adapters(slots: Tensor, num_slots: int) -> Tensor:
    """See quire/ops/lora.py, as for the others."""
    tiles = empty(slots.shape[0], 17, dtype=torch.int32)
    bound().tile_adapters(slots.data_ptr(), tiles.data_ptr(), slots.shape[0], num_slots)
    return tiles


def shrink_lora(x: Tensor, down: Tensor, tiles: Tensor, ranks: Tensor) -> Tensor:
    x = x.contiguous()
    _, pieces, max_rank, inner = down.shape
    shrunk = empty(1, x.shape[0], pieces * max_rank)
    bound().shrink_lora(
        x.data_ptr(),
        down.data_ptr(),
        _is_half(down),
        tiles.data_ptr(),
        ranks.data_ptr(),
        shrunk.data_ptr(),
        x.shape[0],
        inner,
        pieces,
        max_rank,
    )
    return shrunk


def expand_lora(
    out: Tensor, shrunk: Tensor, up: Tensor, tiles: Tensor, ranks: Tensor, widths: tuple[int, ...]
) -> Tensor:
    bound().expand_lora(
        shrunk.data_ptr(),
        up.data_ptr(),
        _is_half(up),
        tiles.data_ptr(),
        ranks.data_ptr(),
        _kept(widths).data_ptr(),
        out.data_ptr(),
        out.shape[0],
        len(widths),
        up.shape[1],
        out.shape[1],
    )
    return out


def expand_lora_gated(
    out: Tensor, shrunk: Tensor, up: Tensor, tiles: Tensor, ranks: Tensor, activation: str
) -> Tensor:
    tokens, width = out.shape[0], out.shape[1] // 2
    gated = empty(tokens, width)
    bound().expand_lora_gated(
        out.data_ptr(),
        shrunk.data_ptr(),
        up.data_ptr(),
        _is_half(up),
        tiles.data_ptr(),
        ranks.data_ptr(),
        gated.data_ptr(),
        tokens,
        up.shape[1],
        width,
        _ACTIVATIONS.index(activation),
    )
    return gated


def _is_half(matrices: Tensor) -> bool:
    """Whether adapters are kept in float16; else they are in float32."""
    assert matrices.dtype in (torch.float16, torch.float32)
    return matrices.dtype == torch.float16


@cache
def _kept(widths: tuple[int, ...]) -> Tensor:
    """As memory that recorded calls may go on reading."""
    return torch.tensor(widths, dtype=torch.int32)


def gather_adapters(row_slots: Tensor, rows: Tensor, starts: Tensor, size: int) -> Tensor:
    out = empty(size, dtype=torch.int32)
    bound().gather_adapters(
        row_slots.data_ptr(), rows.data_ptr(), starts.data_ptr(), out.data_ptr(), rows.shape[0], size
    )
    return out


def look_up_lora(token_ids: Tensor, down: Tensor, slots: Tensor) -> Tensor:
    _, _, max_rank, tokens = down.shape
    out = empty(1, token_ids.shape[0], max_rank)
    bound().look_up_lora(
        *(token_ids.data_ptr(), down.data_ptr(), _is_half(down), slots.data_ptr(), out.data_ptr()),
        *(token_ids.shape[0], max_rank, tokens),
    )
    return out


def pick_adapters(slots: Tensor, first: int, count: int) -> Tensor:
    out = empty(slots.shape[0], dtype=torch.int32)
    bound().pick_adapters(slots.data_ptr(), out.data_ptr(), slots.shape[0], first, count)
    return out


def select_adapters(slots: Tensor, tokens: Tensor) -> Tensor:
    out = empty(tokens.shape[0], dtype=torch.int32)
    bound().select_adapters(slots.data_ptr(), tokens.data_ptr(), out.data_ptr(), tokens.shape[0])
    return out

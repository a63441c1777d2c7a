"""What encoders read and give beside their layers: embeddings of places, and sums of prompts' hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.platform.transfer import upload

_TILE = tl.constexpr(64)  # tokens of a partial sum, as TILE of ops/encoder.py
_COLUMNS = 64


@triton.jit
def _add_places_kernel(
    x_ptr, positions_ptr, types_ptr, places_ptr, out_ptr, width, first, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = tl.load(places_ptr + row)
    out = tl.load(x_ptr + row * width + columns, mask=inside)
    if types_ptr is not None:
        # Rounded after each addition, as ops of torch do it.
        kind = tl.load(types_ptr + (place >> 32) * width + columns, mask=inside)
        out = (out.to(tl.float32) + kind.to(tl.float32)).to(out.dtype)
    if positions_ptr is not None:
        at = tl.load(positions_ptr + ((place & 0xFFFFFFFF) + first) * width + columns, mask=inside)
        out = (out.to(tl.float32) + at.to(tl.float32)).to(out.dtype)
    tl.store(out_ptr + row * width + columns, out, mask=inside)


@triton.jit
def _tile_sum(hidden_ptr, first, count, columns, width, stride, COLUMNS: tl.constexpr):
    """[COLUMNS] float32: halves of a tile's rows are added to each other until one is left."""
    rows = tl.arange(0, _TILE)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    values = tl.load(hidden_ptr + (first + rows)[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    values = values.to(tl.float32)
    for halving in tl.static_range(6):
        values = tl.sum(tl.reshape(values, (2, _TILE >> (halving + 1), COLUMNS)), axis=0)
    return tl.reshape(values, (COLUMNS,))


@triton.jit(do_not_specialize=["num_prompts"])
def _prompt_sums_kernel(
    hidden_ptr, spans_ptr, out_ptr, num_prompts, width, stride, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    begin_dependent(PDL)
    prompt = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(spans_ptr + prompt)
    count = tl.load(spans_ptr + num_prompts + prompt)
    total = _tile_sum(hidden_ptr, first, count, columns, width, stride, COLUMNS)
    for start in range(_TILE, count, _TILE):
        total += _tile_sum(hidden_ptr, first + start, count - start, columns, width, stride, COLUMNS)
    tl.store(out_ptr + prompt.to(tl.int64) * width + columns, total, mask=columns < width)


def add_places(x: Tensor, positions: Tensor | None, types: Tensor | None, places: Tensor, first: int) -> Tensor:
    """x [n, width], contiguous as the tables are, plus the rows of each token's type and position."""
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        warps = max(1, min(8, block // 256))
        _add_places_kernel[(rows,)](
            x, positions, types, places, out, width, first, BLOCK=block, num_warps=warps, **launch_options()
        )
    return out


def prompt_sums(hidden: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """[n, size] -> [prompts, size] float32: the sum of each prompt's tokens, counts[i] of them from starts[i] on."""
    width = hidden.shape[1]
    spans = upload([*starts, *counts], hidden.device, torch.int64)
    out = torch.empty(len(starts), width, dtype=torch.float32, device=hidden.device)
    grid = (len(starts), triton.cdiv(width, _COLUMNS))
    _prompt_sums_kernel[grid](
        hidden, spans, out, len(starts), width, hidden.stride(0), COLUMNS=_COLUMNS, num_warps=4, **launch_options()
    )
    return out

"""LoRA: tokens sorted into tiles of one adapter each, and the two kernels by which tiles go through its matrices.

A program has one tile, so it reads the matrices of one adapter and no batch mate's adapter makes it longer. A token's
sums have one order, whatever else is in its tile and however many tiles there are: over splits of the inner dimension
of one size, which are then added from the first to the last, by one kernel or by the other.

A layer's shrinking comes before its matmul and lets it start only once all kernels before are done: what the
expanding reads before it waits, tiles and adapters, is there by then.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import gate_times_up
from quire.kernels.triton.launch import allow_dependents, begin_dependent, launch_options, wait_for_predecessor

_TOKENS = 16  # of a tile; the narrowest of a matrix unit
_AT_ONCE = 2048  # tokens that are sorted at a time
_PIECE = 128  # of the inner dimension at a time
_SPLIT = 512  # inner elements that are one partial sum
_LINES = 64  # of several pieces that are read together, at most
_COLUMNS = 128
_MANY = 128  # tiles, of which each adds up its splits itself


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gather_slots_kernel(
    row_slots_ptr, rows_ptr, starts_ptr, out_ptr, num_rows, num_tokens, steps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """`steps`: halvings that find a token's row."""
    begin_dependent(PDL)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + num_rows
    for _ in range(steps):  # the last row that starts at the token or before it
        middle = (low + high + 1) // 2
        starts = tl.load(starts_ptr + middle)
        low, high = tl.where(starts <= tokens, middle, low), tl.where(starts <= tokens, high, middle - 1)
    inside = (low < num_rows) & (tokens < num_tokens)
    rows = tl.load(rows_ptr + low, mask=inside, other=0)
    slots = tl.load(row_slots_ptr + rows, mask=inside, other=-1)
    tl.store(out_ptr + tokens, slots, mask=tokens < num_tokens)


def gather_adapters(row_slots: Tensor, rows: Tensor, starts: Tensor, size: int) -> Tensor:
    """See quire/ops/lora.py."""
    out = torch.empty(size, dtype=torch.int32, device=rows.device)
    block = 128
    _gather_slots_kernel[(triton.cdiv(size, block),)](
        row_slots, rows, starts, out, len(rows), size, len(rows).bit_length(), BLOCK=block, num_warps=4,
        **launch_options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_adapters_kernel(
    slots_ptr, tiles_ptr, num_tokens, num_slots,
    SLOTS: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program writes the tiles of one slot; the last one those of no slot, and those that there are not."""
    begin_dependent(PDL)
    slot = tl.program_id(0)
    WIDTH: tl.constexpr = 1 + TOKENS
    tokens, bins, places = tl.arange(0, AT_ONCE), tl.arange(0, SLOTS), tl.arange(0, TOKENS)
    counts = tl.zeros([SLOTS], tl.int32)
    for start in range(0, num_tokens, AT_ONCE):
        found = tl.load(slots_ptr + start + tokens, mask=start + tokens < num_tokens, other=-1)
        counts += tl.histogram(tl.where(found < 0, SLOTS - 1, found), SLOTS)
    num_tiles = tl.where(bins < num_slots, (counts + TOKENS - 1) // TOKENS, 0)
    first = tl.sum(tl.where(bins < slot, num_tiles, 0))
    count = 0
    for start in range(0, num_tokens, AT_ONCE):
        inside = start + tokens < num_tokens
        found = tl.load(slots_ptr + start + tokens, mask=inside, other=num_slots)
        mine = (inside & (tl.where(found < 0, num_slots, found) == slot)).to(tl.int32)
        rank = count + tl.cumsum(mine, axis=0) - 1
        at = (first + rank // TOKENS) * WIDTH + 1 + rank % TOKENS
        tl.store(tiles_ptr + at, start + tokens, mask=mine > 0)
        count += tl.sum(mine)
    mine = tl.cdiv(count, TOKENS)
    for start in range(0, mine, AT_ONCE):
        named = tl.zeros([AT_ONCE], tl.int32) + tl.where(slot < num_slots, slot, -1)
        tl.store(tiles_ptr + (first + start + tokens) * WIDTH, named, mask=start + tokens < mine)
    left = mine * TOKENS - count  # of the last tile
    last = tiles_ptr + (first + mine) * WIDTH - TOKENS
    tl.store(last + places, tl.full([TOKENS], -1, tl.int32), mask=places >= TOKENS - left)
    if slot == num_slots:
        for start in range((first + mine) * WIDTH, num_tokens * WIDTH, AT_ONCE):
            none = tl.full([AT_ONCE], -1, tl.int32)
            tl.store(tiles_ptr + start + tokens, none, mask=start + tokens < num_tokens * WIDTH)


def tile_adapters(slots: Tensor, num_slots: int) -> Tensor:
    """See quire/ops/lora.py."""
    count = len(slots)
    tiles = torch.empty(count, 1 + _TOKENS, dtype=torch.int32, device=slots.device)
    at_once = max(16, min(_AT_ONCE, int(triton.next_power_of_2(count))))
    _tile_adapters_kernel[(num_slots + 1,)](
        slots, tiles, count, num_slots, SLOTS=triton.next_power_of_2(num_slots + 1), TOKENS=_TOKENS,
        AT_ONCE=at_once, num_warps=4, **launch_options(),
    )  # fmt: skip
    return tiles


@triton.jit
def _shrink_split(x_at, w_at, x_mask, w_mask, begin, inner, PIECE: tl.constexpr, SPLIT: tl.constexpr, sums):
    """sums [tokens, lines] + the sum over one split of the inner dimension."""
    for start in range(0, SPLIT, PIECE):
        at = begin + start + tl.arange(0, PIECE)
        x = tl.load(x_at + at[None, :], mask=x_mask & (at < inner)[None, :], other=0.0)
        weight = tl.load(w_at + at[:, None], mask=w_mask & (at < inner)[:, None], other=0.0)
        sums = tl.dot(x, weight.to(x.dtype), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr, down_ptr, tiles_ptr, ranks_ptr, partial_ptr,
    num_tokens, inner, x_stride, lines, splits,
    RANK: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial [splits, num_tokens, lines]: the sums over each split for LINES lines; WHOLE: [1, ...], their sum."""
    wait_for_predecessor(PDL)
    allow_dependents(PDL)
    tile, split = tl.program_id(0), tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * (1 + TOKENS))
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    if rank > 0:
        tokens = tl.load(tiles_ptr + tile * (1 + TOKENS) + 1 + tl.arange(0, TOKENS))
        line = tl.program_id(1) * LINES + tl.arange(0, LINES)
        x_at = x_ptr + tokens[:, None].to(tl.int64) * x_stride
        w_at = down_ptr + (slot.to(tl.int64) * lines + line)[None, :] * inner
        x_mask, w_mask = (tokens >= 0)[:, None], ((line < lines) & (line % RANK < rank))[None, :]
        found = tl.zeros([TOKENS, LINES], tl.float32)
        if WHOLE:
            for part in range(splits):
                none = tl.zeros([TOKENS, LINES], tl.float32)
                found += _shrink_split(x_at, w_at, x_mask, w_mask, part * SPLIT, inner, PIECE, SPLIT, none)
        else:
            found = _shrink_split(x_at, w_at, x_mask, w_mask, split * SPLIT, inner, PIECE, SPLIT, found)
        place = (split.to(tl.int64) * num_tokens + tokens[:, None]) * lines + line[None, :]
        tl.store(partial_ptr + place, found, mask=x_mask & (line < lines)[None, :])


def shrink_lora(x: Tensor, down: Tensor, tiles: Tensor, ranks: Tensor) -> Tensor:
    """See quire/ops/lora.py. The rank that there is room for is a power of two of at least 16, or made one."""
    num_slots, pieces, room, inner = down.shape
    rank = _padded(room)
    if rank > room:  # only in tests: adapters are kept as kernels want them
        down = torch.nn.functional.pad(down, (0, 0, 0, rank - room))
    count, lines, splits = len(x), pieces * rank, triton.cdiv(inner, _SPLIT)
    num_tiles = _num_tiles(count, num_slots)
    whole = num_tiles >= _MANY
    together = int(triton.next_power_of_2(lines)) if whole and lines <= _LINES else rank
    partial = torch.empty(1 if whole else splits, count, lines, dtype=torch.float32, device=x.device)
    _shrink_kernel[(num_tiles, triton.cdiv(lines, together), 1 if whole else splits)](
        x, down, tiles, ranks, partial, count, inner, x.stride(0), lines, splits,
        RANK=rank, LINES=together, TOKENS=_TOKENS, PIECE=_PIECE, SPLIT=_SPLIT, WHOLE=whole, **launch_options(),
    )  # fmt: skip
    return partial if rank == room else partial.view(-1, count, pieces, rank)[..., :room].flatten(2)


@triton.jit
def _added(partial_ptr, up, tokens, rank, num_tokens, lines, piece, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """The sum of the splits of one piece times up, float32 [tokens, columns]."""
    line = tl.arange(0, RANK)
    shrunk = tl.zeros([tokens.shape[0], RANK], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (tokens[:, None].to(tl.int64) + split * num_tokens) * lines + piece * RANK + line[None, :]
        shrunk += tl.load(partial_ptr + place, mask=(tokens >= 0)[:, None] & (line < rank)[None, :], other=0.0)
    return tl.dot(shrunk.to(up.dtype), up, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    partial_ptr, up_ptr, tiles_ptr, ranks_ptr, blocks_ptr, out_ptr,
    num_tokens, outputs, lines, out_stride,
    RANK: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out += the sum of the splits times up, for some columns of one piece."""
    allow_dependents(PDL)
    tile, block = tl.program_id(0), blocks_ptr + tl.program_id(1) * 3
    piece, end = tl.load(block), tl.load(block + 2)
    columns = tl.load(block + 1) + tl.arange(0, COLUMNS)
    line = tl.arange(0, RANK)
    slot = tl.load(tiles_ptr + tile * (1 + TOKENS))
    tokens = tl.load(tiles_ptr + tile * (1 + TOKENS) + 1 + tl.arange(0, TOKENS))
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    up = tl.load(
        up_ptr + (slot.to(tl.int64) * RANK + line)[:, None] * outputs + columns[None, :],
        mask=(columns < end)[None, :] & (line < rank)[:, None],
        other=0.0,
    )
    wait_for_predecessor(PDL)  # also where there is nothing to do: who waits for this kernel waits for those before
    if rank > 0:
        place = out_ptr + tokens[:, None].to(tl.int64) * out_stride + columns[None, :]
        mask = (tokens >= 0)[:, None] & (columns < end)[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        added = _added(partial_ptr, up, tokens, rank, num_tokens, lines, piece, RANK, SPLITS)
        tl.store(place, (before + added).to(out_ptr.dtype.element_ty), mask=mask)


def expand_lora(
    out: Tensor, shrunk: Tensor, up: Tensor, tiles: Tensor, ranks: Tensor, widths: tuple[int, ...]
) -> Tensor:
    """See quire/ops/lora.py."""
    num_slots, room, outputs = up.shape
    rank, (splits, count, _) = _padded(room), shrunk.shape
    if rank > room:
        up = torch.nn.functional.pad(up, (0, 0, 0, rank - room))
        shrunk = torch.nn.functional.pad(shrunk.view(splits, count, -1, room), (0, rank - room)).flatten(2)
    num_tiles = _num_tiles(count, num_slots)
    columns = 2 * _COLUMNS if num_tiles >= _MANY else _COLUMNS
    blocks = _column_blocks(widths, columns, out.device)
    _expand_kernel[(num_tiles, len(blocks))](
        shrunk, up, tiles, ranks, blocks, out, count, outputs, shrunk.shape[2], out.stride(0),
        RANK=rank, SPLITS=splits, TOKENS=_TOKENS, COLUMNS=columns, **launch_options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_gated_kernel(
    partial_ptr, up_ptr, tiles_ptr, ranks_ptr, x_ptr, out_ptr,
    num_tokens, width, lines, x_stride,
    GELU: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [n, width] = the activation of gates x[:, :width] times x[:, width:], with what adapters add to both."""
    allow_dependents(PDL)
    tile, columns = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line, inside = tl.arange(0, RANK), columns < width
    slot = tl.load(tiles_ptr + tile * (1 + TOKENS))
    tokens = tl.load(tiles_ptr + tile * (1 + TOKENS) + 1 + tl.arange(0, TOKENS))
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    up_at = up_ptr + (slot.to(tl.int64) * RANK + line)[:, None] * (2 * width) + columns[None, :]
    wanted = inside[None, :] & (line < rank)[:, None]
    of_gate = tl.load(up_at, mask=wanted, other=0.0)
    of_up = tl.load(up_at + width, mask=wanted, other=0.0)
    wait_for_predecessor(PDL)
    if tl.max(tokens) >= 0:
        mask = (tokens >= 0)[:, None] & inside[None, :]
        place = x_ptr + tokens[:, None].to(tl.int64) * x_stride + columns[None, :]
        gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
        if rank > 0:  # rounded as two kernels would do it
            gate += _added(partial_ptr, of_gate, tokens, rank, num_tokens, lines, 0, RANK, SPLITS)
            up += _added(partial_ptr, of_up, tokens, rank, num_tokens, lines, 1, RANK, SPLITS)
            gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
            up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = gate_times_up(gate, up, GELU).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + tokens[:, None].to(tl.int64) * width + columns[None, :], out, mask=mask)


def expand_lora_gated(
    out: Tensor, shrunk: Tensor, up: Tensor, tiles: Tensor, ranks: Tensor, activation: str
) -> Tensor:
    """See quire/ops/lora.py."""
    num_slots, room, outputs = up.shape
    rank, (splits, count, _), width = _padded(room), shrunk.shape, outputs // 2
    if rank > room:
        up = torch.nn.functional.pad(up, (0, 0, 0, rank - room))
        shrunk = torch.nn.functional.pad(shrunk.view(splits, count, -1, room), (0, rank - room)).flatten(2)
    found = torch.empty(count, width, dtype=out.dtype, device=out.device)
    num_tiles = min(count, 1 + _num_tiles(count, num_slots))
    _expand_gated_kernel[(num_tiles, triton.cdiv(width, _COLUMNS))](
        shrunk, up, tiles, ranks, out, found, count, width, shrunk.shape[2], out.stride(0),
        GELU=activation == "gelu_tanh", RANK=rank, SPLITS=splits, TOKENS=_TOKENS, COLUMNS=_COLUMNS,
        **launch_options(),
    )  # fmt: skip
    return found


def _padded(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))


def _num_tiles(count: int, num_slots: int) -> int:
    """The largest number of tiles that `count` tokens can be sorted into."""
    return min(count, num_slots + count // _TOKENS)


@cache
def _column_blocks(widths: tuple[int, ...], columns: int, device: torch.device) -> Tensor:
    """[blocks, 3] int32: what a program has of the outputs: its piece, the first of its columns, the piece's end."""
    blocks, start = [], 0
    for piece, width in enumerate(widths):
        blocks += [(piece, column, start + width) for column in range(start, start + width, columns)]
        start += width
    return torch.tensor(blocks, dtype=torch.int32, device=device)

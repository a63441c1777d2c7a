"""What a plan tells the device about its rows: requests that start, and new blocks. Read from the host's memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CELLS = 128  # of block tables, for a program
_TOKENS = 1024


@triton.jit(do_not_specialize=["count"])
def _write_blocks_kernel(
    packed_ptr,  # [4, count] int32, on the host: groups, rows, columns, blocks
    tables_ptr,
    count,
    group_stride,
    row_stride,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    group = tl.load(packed_ptr + index, mask=inside, other=0).to(tl.int64)
    row = tl.load(packed_ptr + count + index, mask=inside, other=0).to(tl.int64)
    column = tl.load(packed_ptr + 2 * count + index, mask=inside, other=0)
    block = tl.load(packed_ptr + 3 * count + index, mask=inside, other=0)
    tl.store(tables_ptr + group * group_stride + row * row_stride + column, block, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _start_rows_kernel(
    packed_ptr,  # int32, on the host: a header of FIELDS numbers for each row, then the tokens of all
    token_ids_ptr,
    numbers_ptr,
    count,
    token_stride,
    numbers_stride,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    header = packed_ptr + tl.program_id(0) * FIELDS
    row = tl.load(header).to(tl.int64)
    length = tl.load(header + 1)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    tokens = tl.load(packed_ptr + count * FIELDS + tl.load(header + 2) + places, mask=inside, other=0)
    tl.store(token_ids_ptr + row * token_stride + places, tokens, mask=inside)
    if tl.program_id(1) == 0:
        low, high = tl.load(header + 5).to(tl.int64), tl.load(header + 6).to(tl.int64)
        tl.store(numbers_ptr + row, length.to(tl.int64))
        tl.store(numbers_ptr + numbers_stride + row, tl.load(header + 3).to(tl.int64))
        tl.store(numbers_ptr + 2 * numbers_stride + row, tl.load(header + 4).to(tl.int64))
        tl.store(numbers_ptr + 3 * numbers_stride + row, (high << 32) | (low & 0xFFFFFFFF))


def write_blocks(tables: Tensor, packed: Tensor) -> Tensor:
    """tables[group, row, column] = block for each column of packed [4, n] int32, which may lie in pinned memory."""
    count = packed.shape[1]
    _write_blocks_kernel[(triton.cdiv(count, _CELLS),)](
        packed, tables, count, tables.stride(0), tables.stride(1), BLOCK=_CELLS, num_warps=4
    )
    return tables


def start_rows(token_ids: Tensor, numbers: Tensor, packed: Tensor, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """See quire/ops/step.py. `packed` may lie in pinned memory."""
    _start_rows_kernel[(count, triton.cdiv(longest, _TOKENS))](
        packed,
        token_ids,
        numbers,
        count,
        token_ids.stride(0),
        numbers.stride(0),
        FIELDS=7,
        BLOCK=_TOKENS,
        num_warps=4,
    )
    return token_ids, numbers

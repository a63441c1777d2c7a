"""What a plan says of its rows, written where steps find it: new blocks, and requests that start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from quire.ops.base import Op, triton
from quire.types.step import RowStart

_FIELDS = 7  # a row's number, its tokens, where they begin, prompt tokens, computed tokens, two halves of its seed


def write_blocks(tables: Tensor, packed: Tensor) -> Tensor:
    """tables[group, row, column] = block for each column of packed [4, n] int32. Mutates and returns `tables`.

    `packed` may lie on the host where the device can read it.
    """
    groups, rows, columns, blocks = packed.to(torch.int64).unbind(0)
    tables[groups, rows, columns] = blocks.to(tables.dtype)
    return tables


WRITE_BLOCKS = Op(
    "write_blocks", write_blocks, 0.0, (triton("write_blocks", "rows", (torch.float32,)),), changes=(0,)
)


def pack_starts(starts: Sequence[RowStart]) -> list[int]:
    """Requests that start, as `start_rows` reads them: a header for each, then the known tokens of all."""
    headers: list[int] = []
    begin = 0
    for start in starts:
        length = len(start.token_ids)
        seed = (start.seed & 0xFFFFFFFF, start.seed >> 32 & 0xFFFFFFFF)
        headers += (start.row, length, begin, start.num_prompt_tokens, start.num_computed_tokens, *seed)
        begin += length
    return [*headers, *chain.from_iterable(start.token_ids for start in starts)]


def start_rows(token_ids: Tensor, numbers: Tensor, packed: Tensor, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """Fill the rows of `count` requests that start, as packed by `pack_starts`; the longest has `longest` tokens.

    token_ids: [rows, length] int32; numbers: [4, rows] int64: known, prompt and computed tokens, seeds. Mutates and
    returns both. `packed` may lie on the host where the device can read it.
    """
    headers, tokens = packed[: count * _FIELDS].view(count, _FIELDS).to(torch.int64), packed[count * _FIELDS :]
    for row, length, begin in headers[:, :3].tolist():
        token_ids[row, :length] = tokens[begin : begin + length]
    rows, lengths, _, prompt, computed, low, high = headers.unbind(1)
    numbers[:, rows] = torch.stack((lengths, prompt, computed, high << 32 | low & 0xFFFFFFFF))
    return token_ids, numbers


START_ROWS = Op("start_rows", start_rows, 0.0, (triton("start_rows", "rows", (torch.float32,)),), changes=(0, 1))

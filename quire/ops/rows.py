"""What a plan says of its rows, written where steps find it: new blocks, and requests that start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op
from quire.types.step import RowStart

_FIELDS = 7  # a row's number, its tokens, where they begin, prompt tokens, computed tokens, two halves of its seed


def write_blocks(tables: Tensor, packed: Tensor) -> Tensor:
    """tables[group, row, column] = block for each column of packed [4, n] int32. Mutates and returns `tables`.

    `packed` may lie on the host where the device can read it.
    """
    groups, rows, columns, blocks = packed.to(torch.int64).unbind(0)
    tables[groups, rows, columns] = blocks.to(tables.dtype)
    return tables


def generate_blocks(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    groups, rows, columns = 1 + seed % 3, 30, 11
    cells = torch.randperm(groups * rows * columns, generator=generator)[: 1 + 70 * seed]
    blocks = torch.randint(1, 1 << 30, cells.shape, generator=generator)
    packed = torch.stack((cells // (rows * columns), cells // columns % rows, cells % columns, blocks))
    return torch.zeros(groups, rows, columns, dtype=torch.int32), packed.to(torch.int32)


WRITE_BLOCKS = Op(
    "write_blocks",
    write_blocks,
    generate_blocks,
    0.0,
    (Implementation("triton", "triton.rows:write_blocks", ("cuda",), (torch.float32,)),),
    changes=(0,),
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


def generate_starts(seed: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
    generator = torch.Generator().manual_seed(seed)
    rows, longest = 9, 1 + 300 * seed
    packed: list[int] = []
    tokens: list[int] = []
    chosen = torch.randperm(rows, generator=generator)[: 1 + seed % 5].tolist()
    for row in chosen:
        length, *numbers = torch.randint(1, longest + 1, (3,), generator=generator).tolist()
        words = torch.randint(-(1 << 31), 1 << 31, (2,), generator=generator).tolist()
        packed += (row, length, len(tokens), *numbers, *words)
        tokens += torch.randint(1 << 17, (length,), generator=generator).tolist()
    room = torch.zeros(rows, longest + 8, dtype=torch.int32)
    return room, torch.zeros(4, rows, dtype=torch.int64), torch.tensor(packed + tokens).int(), len(chosen), longest


START_ROWS = Op(
    "start_rows",
    start_rows,
    generate_starts,
    0.0,
    (Implementation("triton", "triton.rows:start_rows", ("cuda",), (torch.float32,)),),
    changes=(0, 1),
)

"""The two ends of a decode step over permanent rows: gather its inputs, then choose and append tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.memory import empty
from quire.kernels.cpu.ops import first_max


def gather_inputs(
    rows: Tensor, token_ids: Tensor, num_computed: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(input_ids, positions, contexts int32, slots of each KV group) of rows that each compute one token.

    rows: [n] int64; token_ids: [max_rows, max_len] int32; num_computed: [max_rows] int64; tables: [groups, max_rows,
    max_blocks] int32.
    """
    count = rows.shape[0]
    input_ids, positions = empty(count, dtype=torch.int64), empty(count, dtype=torch.int64)
    contexts = empty(count, dtype=torch.int32)
    bound().gather_tokens(
        rows.data_ptr(),
        token_ids.data_ptr(),
        num_computed.data_ptr(),
        token_ids.stride(0),
        count,
        input_ids.data_ptr(),
        positions.data_ptr(),
        contexts.data_ptr(),
    )
    slots = [empty(count, dtype=torch.int64) for _ in tables]
    for table, of_group in zip(tables, slots, strict=True):
        bound().gather_slots(
            rows.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            block_size,
            count,
            of_group.data_ptr(),
        )
    return input_ids, positions, contexts, slots


def append_likeliest(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_tokens: Tensor, num_computed: Tensor, scratch_row: int
) -> Tensor:
    """Append each row's likeliest token (the lowest id among equals) and advance the row; `scratch_row` stays.

    Returns [n, 2] int32: the tokens, and 1 where the logits were not finite.
    """
    ids, best = first_max(logits)
    out = empty(len(ids), 2, dtype=torch.int32)
    bound().append_tokens(
        rows.data_ptr(),
        ids.data_ptr(),
        best.data_ptr(),
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        num_computed.data_ptr(),
        token_ids.stride(0),
        scratch_row,
        len(ids),
        out.data_ptr(),
    )
    return out

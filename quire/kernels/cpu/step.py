"""The two ends of a decode step over permanent rows: gather its inputs, then draw and append tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.memory import empty
from quire.kernels.cpu.ops import draw_within


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


def draw_by_row(
    logits: Tensor, rows: Tensor, table: Tensor, seeds: Tensor, num_tokens: Tensor, num_prompt_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """draw_within for rows [n] whose parameters are columns of table [4, max_rows] float64."""
    count = rows.shape[0]
    parameters = empty(4, count, dtype=torch.float64)
    row_seeds, positions = empty(count, dtype=torch.int64), empty(count, dtype=torch.int64)
    bound().gather_draws(
        rows.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        seeds.data_ptr(),
        num_tokens.data_ptr(),
        num_prompt_tokens.data_ptr(),
        count,
        parameters.data_ptr(),
        row_seeds.data_ptr(),
        positions.data_ptr(),
    )
    return draw_within(logits, parameters, row_seeds, positions)


def append_chosen(
    tokens: Tensor,
    highest: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    scratch_row: int,
) -> Tensor:
    """Append tokens [n] int32 to their rows and advance these; `scratch_row` stays.

    Returns [n, 2] int32: the tokens, and 1 where the highest logit is not finite.
    """
    out = empty(len(tokens), 2, dtype=torch.int32)
    bound().append_tokens(
        rows.data_ptr(),
        tokens.data_ptr(),
        highest.data_ptr(),
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        num_computed.data_ptr(),
        token_ids.stride(0),
        scratch_row,
        len(tokens),
        out.data_ptr(),
    )
    return out

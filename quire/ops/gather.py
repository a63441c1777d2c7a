"""What a step feeds to the model, gathered from the permanent rows: token ids, positions and cache slots."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton


def gather_decode(
    rows: Tensor, token_ids: Tensor, num_computed: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, ...]:
    """Inputs of rows [n] int64 that each compute one token: (input_ids, positions, contexts, *slots of each group).

    A position is a token's index in its row, which its slots follow; what rotates it may be another (TokenInputs).
    token_ids [max_rows, max_len] int32; num_computed [max_rows] int64; tables [groups, max_rows, max_blocks] int32.
    All are [n] int64 but for contexts, int32: how many tokens each row has computed after the step.
    """
    positions = num_computed[rows]
    input_ids = token_ids[rows, positions].to(torch.int64)
    slots = [_slots(table, rows, positions, block_size) for table in tables]
    return input_ids, positions, (positions + 1).to(torch.int32), *slots


def gather_mixed(
    rows: Tensor,
    contexts: Tensor,
    query_starts: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    tables: Tensor,
    block_size: int,
    size: int,
) -> tuple[Tensor, ...]:
    """Inputs of rows with any numbers of tokens, which then count as computed: (input_ids, positions, *slots).

    Row rows[i] has the tokens from query_starts[i] to query_starts[i + 1], of which the last has the position
    contexts[i] - 1; num_computed is set to contexts. Rows without a token are padding. Tokens beyond the last, up to
    `size`, are 0 at position 0, and go to the null block. contexts and query_starts are int32.
    """
    counts = (query_starts[1:] - query_starts[:-1]).to(torch.int64)
    total = int(query_starts[-1])
    line = torch.arange(len(rows), device=rows.device).repeat_interleave(counts, output_size=total)
    tokens = torch.arange(total, device=rows.device)
    positions = contexts[line].to(torch.int64) - query_starts[1:][line] + tokens
    token_rows = rows[line]
    present = counts > 0
    num_computed[rows[present]] = contexts[present].to(torch.int64)

    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, size - total))

    input_ids = token_ids[token_rows, positions].to(torch.int64)
    slots = [pad(_slots(table, token_rows, positions, block_size)) for table in tables]
    return pad(input_ids), pad(positions), *slots


def _slots(table: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Where each token's key and value go: block_id * block_size + offset."""
    return table[rows, positions // block_size].to(torch.int64) * block_size + positions % block_size


def gather_sampling(
    rows: Tensor,
    table: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the op draw_within reads of rows [n]: their columns of table [4, max_rows], seeds, output positions.

    Of each row ahead [n] int32 drafts come before what is drawn.
    """
    positions = num_tokens.index_select(0, rows) - num_prompt_tokens.index_select(0, rows)
    if ahead is not None:
        positions = positions + ahead
    return table.index_select(1, rows), seeds.index_select(0, rows), positions


GATHER_DECODE = Op(
    "gather_decode",
    gather_decode,
    0.0,
    (triton("gather_decode", "step", (torch.float32,)), native("gather_decode", "step")),
)
GATHER_MIXED = Op(
    "gather_mixed",
    gather_mixed,
    0.0,
    (triton("gather_mixed", "step", (torch.float32,)), native("gather_mixed", "step")),
    changes=(4,),
)
GATHER_SAMPLING = Op("gather_sampling", gather_sampling, 0.0, (native("gather_sampling", "step"),))

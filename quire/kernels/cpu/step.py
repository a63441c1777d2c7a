"""The two ends of a step over permanent rows: its inputs gathered, and its tokens appended."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty


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
    """See quire/ops/step.py."""
    input_ids, positions = empty(size, dtype=torch.int64), empty(size, dtype=torch.int64)
    num_rows = rows.shape[0]
    bound().gather_mixed(
        rows.data_ptr(),
        contexts.data_ptr(),
        query_starts.data_ptr(),
        token_ids.data_ptr(),
        num_computed.data_ptr(),
        token_ids.stride(0),
        num_rows,
        size,
        input_ids.data_ptr(),
        positions.data_ptr(),
    )
    slots = [empty(size, dtype=torch.int64) for _ in tables]
    for table, of_group in zip(tables, slots, strict=True):
        bound().gather_slots(
            rows.data_ptr(),
            query_starts.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            block_size,
            num_rows,
            size,
            of_group.data_ptr(),
        )
    return input_ids, positions, *slots


def gather_decode(
    rows: Tensor, token_ids: Tensor, num_computed: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, ...]:
    """See quire/ops/step.py."""
    count = rows.shape[0]
    input_ids, positions = empty(count, dtype=torch.int64), empty(count, dtype=torch.int64)
    contexts = empty(count, dtype=torch.int32)
    row_ids, known, computed = rows.data_ptr(), token_ids.data_ptr(), num_computed.data_ptr()
    places = (input_ids.data_ptr(), positions.data_ptr(), contexts.data_ptr())
    bound().gather_decode(row_ids, known, computed, token_ids.stride(0), count, *places)
    slots = [empty(count, dtype=torch.int64) for _ in tables]
    for table, of_group in zip(tables, slots, strict=True):
        place = (table.data_ptr(), table.stride(0), block_size)
        bound().decode_slots(row_ids, positions.data_ptr(), *place, count, of_group.data_ptr())
    return input_ids, positions, contexts, *slots


def gather_sampling(
    rows: Tensor,
    table: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See quire/ops/step.py."""
    count = rows.shape[0]
    parameters = empty(4, count, dtype=torch.float64)
    row_seeds, positions = empty(count, dtype=torch.int64), empty(count, dtype=torch.int64)
    bound().gather_sampling(
        rows.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        seeds.data_ptr(),
        num_tokens.data_ptr(),
        num_prompt_tokens.data_ptr(),
        None if ahead is None else ahead.data_ptr(),
        count,
        parameters.data_ptr(),
        row_seeds.data_ptr(),
        positions.data_ptr(),
    )
    return parameters, row_seeds, positions


def place_drafts(
    rows: Tensor,
    query_starts: Tensor,
    contexts: Tensor,
    sample_rows: Tensor,
    ahead: Tensor,
    drafts: Tensor,
    sample_contexts: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
) -> Tensor:
    """See quire/ops/step.py."""
    bound().place_drafts(
        rows.data_ptr(),
        query_starts.data_ptr(),
        contexts.data_ptr(),
        sample_rows.data_ptr(),
        ahead.data_ptr(),
        drafts.data_ptr(),
        sample_contexts.data_ptr(),
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        num_computed.data_ptr(),
        token_ids.stride(0),
        len(rows),
        len(sample_rows),
    )
    return token_ids


def append_tokens(
    tokens: Tensor,
    highest: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    scratch_row: int,
    raw_highest: Tensor | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """See quire/ops/step.py."""
    out = empty(len(tokens), 2, dtype=torch.int32)
    bound().append_tokens(
        rows.data_ptr(),
        tokens.data_ptr(),
        highest.data_ptr(),
        None if raw_highest is None else raw_highest.data_ptr(),
        1 if raw_highest is None else raw_highest.shape[1],
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        num_computed.data_ptr(),
        token_ids.stride(0),
        scratch_row,
        None if ahead is None else ahead.data_ptr(),
        len(tokens),
        out.data_ptr(),
    )
    return out


def append_greedy(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    scratch_row: int,
    ahead: Tensor | None = None,
) -> Tensor:
    """See quire/ops/step.py."""
    logits = logits.float()
    count, size = logits.shape
    tokens, highest = empty(count, dtype=torch.int32), empty(count)
    bound().greedy(logits.data_ptr(), count, size, logits.stride(0), tokens.data_ptr(), highest.data_ptr())
    return append_tokens(tokens, highest, rows, token_ids, num_tokens, num_computed, scratch_row, ahead=ahead)

"""The two ends of a step that stays on the device: inputs are gathered, tokens are chosen and appended."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.drafts import accept_drafts
from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.types import status

_CHUNK = 8192
_TOKENS = 128  # of a step with prompts, for a program
_BAD_LOGITS = tl.constexpr(status.BAD_LOGITS)
_NO_TOKEN = tl.constexpr(status.NO_TOKEN)
_OVERFLOWS = tl.constexpr(status.OVERFLOWS)


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(
    rows_ptr,
    token_ids_ptr,
    num_computed_ptr,
    tables_ptr,
    input_ids_ptr,
    positions_ptr,
    contexts_ptr,
    slots_ptr,
    token_stride,
    table_stride,
    group_stride,
    count,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    position = tl.load(num_computed_ptr + row)
    tl.store(input_ids_ptr + index, tl.load(token_ids_ptr + row * token_stride + position).to(tl.int64))
    tl.store(positions_ptr + index, position)
    tl.store(contexts_ptr + index, (position + 1).to(tl.int32))
    for group in tl.static_range(NUM_GROUPS):
        table = tables_ptr + group * group_stride + row * table_stride
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        tl.store(slots_ptr + group * count + index, block * BLOCK_SIZE + position % BLOCK_SIZE)


@triton.jit
def _gather_mixed_kernel(
    rows_ptr,  # [max_rows] int64
    contexts_ptr,
    starts_ptr,  # [max_rows + 1] int32; those of rows that are not there are the number of tokens
    token_ids_ptr,
    num_computed_ptr,
    tables_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    max_rows,
    token_stride,
    table_stride,
    group_stride,
    count,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.zeros([BLOCK], tl.int32)  # of a token's row: how many rows end before it
    for first in range(0, max_rows, ROWS):
        places = first + tl.arange(0, ROWS)
        ends = tl.load(starts_ptr + 1 + places, mask=places < max_rows, other=2147483647)
        index += tl.sum((tokens[:, None] >= ends[None, :]).to(tl.int32), axis=1)
        if tl.program_id(0) == 0:
            begins = tl.load(starts_ptr + places, mask=places < max_rows, other=2147483647)
            is_row = begins < ends
            row = tl.load(rows_ptr + places, mask=is_row, other=0)
            context = tl.load(contexts_ptr + places, mask=is_row, other=0)
            tl.store(num_computed_ptr + row, context.to(tl.int64), mask=is_row)
    is_token = index < max_rows
    row = tl.load(rows_ptr + index, mask=is_token, other=0)
    end = tl.load(starts_ptr + 1 + index, mask=is_token, other=0)
    context = tl.load(contexts_ptr + index, mask=is_token, other=0)
    position = tl.where(is_token, context - end + tokens, 0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + row * token_stride + position, mask=is_token, other=0)
    inside = tokens < count
    tl.store(input_ids_ptr + tokens, token_id.to(tl.int64), mask=inside)
    tl.store(positions_ptr + tokens, position, mask=inside)
    for group in tl.static_range(NUM_GROUPS):
        table = tables_ptr + group * group_stride + row * table_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        slot = tl.where(is_token, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(slots_ptr + group * count + tokens, slot, mask=inside)


@triton.jit
def _highest_kernel(
    logits_ptr, best_ptr, at_ptr, vocab_size, logits_stride, num_chunks, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    begin_dependent(PDL)
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + index * logits_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    # NaN counts as infinitely high, so that it is found and reported.
    logits = tl.where(logits == logits, logits, float("inf"))
    best = tl.max(logits, axis=0)
    at = tl.min(tl.where(logits == best, tokens, vocab_size), axis=0)
    tl.store(best_ptr + index * num_chunks + chunk, best)
    tl.store(at_ptr + index * num_chunks + chunk, at)


@triton.jit
def _append_kernel(
    rows_ptr,
    best_ptr,
    at_ptr,
    raw_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    out_ptr,
    token_stride,
    num_chunks,
    raw_chunks,
    scratch_row,
    APPENDS: tl.constexpr,  # else accept_drafts does, which has to see all tokens of a row
    CHUNKS: tl.constexpr,
    RAW_CHUNKS: tl.constexpr,  # 0: what was chosen from is what the model said
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    best = tl.load(best_ptr + index * num_chunks + chunks, mask=inside, other=float("-inf"))
    at = tl.load(at_ptr + index * num_chunks + chunks, mask=inside, other=0)
    highest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == highest, at, 2147483647), axis=0)
    raw = highest
    code = tl.zeros([], tl.int32)
    if RAW_CHUNKS > 0:
        chunks = tl.arange(0, RAW_CHUNKS)
        raw = tl.max(
            tl.load(raw_ptr + index * raw_chunks + chunks, mask=chunks < raw_chunks, other=float("-inf")), axis=0
        )
        code = tl.where(highest == float("-inf"), _NO_TOKEN, tl.where(highest == float("inf"), _OVERFLOWS, 0))
    code = tl.where((raw == float("inf")) | (raw == float("-inf")), _BAD_LOGITS, code)
    tl.store(out_ptr + 2 * index, token.to(tl.int32))
    tl.store(out_ptr + 2 * index + 1, code.to(tl.int32))
    row = tl.load(rows_ptr + index)
    if APPENDS and row != scratch_row:
        length = tl.load(num_tokens_ptr + row)
        tl.store(token_ids_ptr + row * token_stride + length, token.to(tl.int32))
        tl.store(num_tokens_ptr + row, length + 1)
        tl.store(num_computed_ptr + row, length)  # a row samples when all it knew is computed


def gather_decode(
    rows: Tensor, token_ids: Tensor, num_computed: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, ...]:
    """See quire/ops/step.py."""
    count, num_groups = rows.shape[0], tables.shape[0]
    input_ids, positions = torch.empty_like(rows), torch.empty_like(rows)
    contexts = torch.empty(count, dtype=torch.int32, device=rows.device)
    slots = torch.empty(num_groups, count, dtype=torch.int64, device=rows.device)
    _gather_kernel[(count,)](
        rows,
        token_ids,
        num_computed,
        tables,
        input_ids,
        positions,
        contexts,
        slots,
        token_ids.stride(0),
        tables.stride(1),
        tables.stride(0),
        count,
        NUM_GROUPS=num_groups,
        BLOCK_SIZE=block_size,
        num_warps=1,
        **launch_options(),
    )
    return input_ids, positions, contexts, *slots.unbind(0)


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
    num_groups, device = tables.shape[0], rows.device
    input_ids, positions = torch.empty(2, size, dtype=torch.int64, device=device).unbind(0)
    slots = torch.empty(num_groups, size, dtype=torch.int64, device=device)
    _gather_mixed_kernel[(triton.cdiv(size, _TOKENS),)](
        rows,
        contexts,
        query_starts,
        token_ids,
        num_computed,
        tables,
        input_ids,
        positions,
        slots,
        rows.shape[0],
        token_ids.stride(0),
        tables.stride(1),
        tables.stride(0),
        size,
        NUM_GROUPS=num_groups,
        BLOCK_SIZE=block_size,
        BLOCK=_TOKENS,
        ROWS=32,
        num_warps=4,
        **launch_options(),
    )
    return input_ids, positions, *slots.unbind(0)


def find_highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of each chunk of logits [rows, size], and its place: [rows, chunks] float32 and int32."""
    count, size = logits.shape
    chunks = triton.cdiv(size, _CHUNK)
    best = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    at = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    _highest_kernel[(count, chunks)](
        logits, best, at, size, logits.stride(0), chunks, CHUNK=_CHUNK, num_warps=8, **launch_options()
    )
    return best, at


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
    return _append(*find_highest(logits), rows, token_ids, num_tokens, num_computed, scratch_row, ahead=ahead)


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
    state = (token_ids, num_tokens, num_computed)
    return _append(highest.unsqueeze(1), tokens.unsqueeze(1), rows, *state, scratch_row, raw_highest, ahead)


def _append(
    best: Tensor,
    at: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    scratch_row: int,
    raw_highest: Tensor | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """`best` and `at` [n, chunks] are the highest logit of each part of a row and its token."""
    count, chunks = best.shape
    raw_chunks = 0 if raw_highest is None else raw_highest.shape[1]
    out = torch.empty(count, 2, dtype=torch.int32, device=best.device)
    _append_kernel[(count,)](
        rows,
        best,
        at,
        best if raw_highest is None else raw_highest,
        token_ids,
        num_tokens,
        num_computed,
        out,
        token_ids.stride(0),
        chunks,
        raw_chunks,
        scratch_row,
        APPENDS=ahead is None,
        CHUNKS=triton.next_power_of_2(chunks),
        RAW_CHUNKS=triton.next_power_of_2(raw_chunks) if raw_chunks else 0,
        num_warps=1,
        **launch_options(),
    )
    if ahead is not None:
        accept_drafts(out, rows, ahead, token_ids, num_tokens, num_computed, scratch_row)
    return out

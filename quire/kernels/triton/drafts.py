"""Drafts of a step that stays on the device: placed behind the known tokens of their rows, and accepted or not."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_BLOCK = 128


@triton.jit(do_not_specialize=["num_rows", "num_samples"])
def _place_kernel(
    rows_ptr,
    starts_ptr,
    contexts_ptr,
    sample_rows_ptr,
    ahead_ptr,
    drafts_ptr,
    sample_contexts_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    token_stride,
    num_rows,
    num_samples,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = places < num_rows
    begins = tl.load(starts_ptr + places, mask=is_row, other=0)
    count = tl.load(starts_ptr + 1 + places, mask=is_row, other=0) - begins
    is_row = is_row & (count > 0)
    row = tl.load(rows_ptr + places, mask=is_row, other=0)
    exact = (tl.load(num_computed_ptr + row, mask=is_row, other=0) + count).to(tl.int32)
    bound = tl.load(contexts_ptr + places, mask=is_row, other=0)
    tl.store(contexts_ptr + places, tl.minimum(exact, bound), mask=is_row)
    is_sample = places < num_samples
    row = tl.load(sample_rows_ptr + places, mask=is_sample, other=0)
    known = tl.load(num_tokens_ptr + row, mask=is_sample, other=0)
    is_sample = is_sample & (known > 0)
    ahead = tl.load(ahead_ptr + places, mask=is_sample, other=0)
    bound = tl.load(sample_contexts_ptr + places, mask=is_sample, other=0)
    context = tl.minimum((known + ahead).to(tl.int32), bound)
    tl.store(sample_contexts_ptr + places, context, mask=is_sample)
    is_draft = is_sample & (ahead > 0)
    draft = tl.load(drafts_ptr + places, mask=is_draft, other=0)
    tl.store(token_ids_ptr + row * token_stride + context - 1, draft, mask=is_draft)


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
    count = max(len(rows), len(sample_rows))
    _place_kernel[(triton.cdiv(count, _BLOCK),)](
        rows,
        query_starts,
        contexts,
        sample_rows,
        ahead,
        drafts,
        sample_contexts,
        token_ids,
        num_tokens,
        num_computed,
        token_ids.stride(0),
        len(rows),
        len(sample_rows),
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(),
    )
    return token_ids


@triton.jit(do_not_specialize=["count"])
def _accept_kernel(
    out_ptr,
    rows_ptr,
    ahead_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    token_stride,
    scratch_row,
    count,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    # The program of a row's first place takes all of the row's.
    if (row != scratch_row) & (tl.load(ahead_ptr + place) == 0):
        length = tl.load(num_tokens_ptr + row)
        known = token_ids_ptr + row * token_stride + length
        token = tl.load(out_ptr + 2 * place)
        held = 0
        holds = True
        while holds:
            following = place + held + 1
            drafts = tl.load(ahead_ptr + following, mask=following < count, other=0)
            holds = (drafts > 0) & (tl.load(known + held) == token)
            if holds:
                held += 1
                token = tl.load(out_ptr + 2 * following)
        tl.store(known + held, token)
        tl.store(num_computed_ptr + row, length + held)
        tl.store(num_tokens_ptr + row, length + held + 1)


def accept_drafts(
    out: Tensor,
    rows: Tensor,
    ahead: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    scratch_row: int,
) -> None:
    """The end of append_tokens with drafts: `out` [m, 2] has the tokens."""
    _accept_kernel[(len(rows),)](
        out,
        rows,
        ahead,
        token_ids,
        num_tokens,
        num_computed,
        token_ids.stride(0),
        scratch_row,
        len(rows),
        num_warps=1,
        **launch_options(),
    )

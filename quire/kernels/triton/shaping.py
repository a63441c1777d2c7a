"""What changes logits before a token is drawn, by tables indexed by row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_CHUNK = 4096  # tokens of a program, as in quire/ops/shaping.py
_ENTRIES = 64  # edits at a time
_POSITIONS = 1024  # tokens of a row that a program counts
_FIXED_COLUMNS = 4  # of an edit, as in quire/ops/shaping.py
_IN_PROMPT = tl.constexpr(1 << 30)  # above any count of outputs


@triton.jit
def _keep_allowed_kernel(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    lines_ptr,
    ahead_ptr,
    out_ptr,
    highest_ptr,
    vocab_size,
    logits_stride,
    words,
    lines_stride,
    num_chunks,
    NUM_LINES: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    x = tl.load(logits_ptr + index * logits_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    # NaN counts as infinitely high, so that it is found and reported.
    tl.store(highest_ptr + index * num_chunks + chunk, tl.max(tl.where(x == x, x, float("inf")), axis=0))
    row = tl.load(rows_ptr + index)
    for k in tl.static_range(NUM_LINES):
        line = tl.load(lines_ptr + k * lines_stride + row).to(tl.int64)
        limit = tl.where(line >= 0, vocab_size, 0)  # without a mask nothing is read, and all is allowed
        if HAS_AHEAD and k == 0:
            line += tl.load(ahead_ptr + index)
        word = tl.load(masks_ptr + line * words + tokens // 32, mask=tokens < limit, other=-1)
        x = tl.where((word >> (tokens % 32)) & 1 == 1, x, float("-inf"))
    tl.store(out_ptr + index * vocab_size + tokens, x, mask=inside)


def keep_allowed(
    logits: Tensor, rows: Tensor, masks: Tensor, lines: Tensor, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See quire/ops/shaping.py."""
    count, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _CHUNK)
    out = torch.empty(count, vocab_size, dtype=torch.float32, device=logits.device)
    highest = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    _keep_allowed_kernel[(count, chunks)](
        logits,
        rows,
        masks,
        lines,
        rows if ahead is None else ahead,
        out,
        highest,
        vocab_size,
        logits.stride(0),
        masks.stride(0),
        lines.stride(0),
        chunks,
        NUM_LINES=lines.shape[0],
        HAS_AHEAD=ahead is not None,
        CHUNK=_CHUNK,
        num_warps=8,
        **launch_options(),
    )
    return out, highest


@triton.jit
def _edit_kernel(
    out_ptr,
    rows_ptr,
    edits_ptr,
    starts_ptr,
    counts_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_prompt_ptr,
    ahead_ptr,
    out_stride,
    edit_stride,
    token_stride,
    HAS_AHEAD: tl.constexpr,
    ENTRIES: tl.constexpr,
    BEFORE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    count = tl.load(counts_ptr + row)
    first = tl.load(starts_ptr + row).to(tl.int64)
    known = tl.load(num_tokens_ptr + row)
    if HAS_AHEAD:
        known += tl.load(ahead_ptr + index)
    outputs = known - tl.load(num_prompt_ptr + row)
    # First what is added, a number to a token; then what is banned, since threads must not overwrite a ban.
    for banning in tl.static_range(2):
        for start in range(0, count, ENTRIES):
            entries = start + tl.arange(0, ENTRIES)
            inside = entries < count
            edit = edits_ptr + (first + entries) * edit_stride
            token = tl.load(edit, mask=inside, other=0)
            value = tl.load(edit + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
            active = inside & (outputs < tl.load(edit + 2, mask=inside, other=0))
            active = active & (tl.load(edit + 3, mask=inside, other=0) <= outputs)
            for k in tl.static_range(BEFORE):
                wanted = tl.load(edit + 4 + k, mask=inside, other=-1)
                there = tl.load(token_ids_ptr + row * token_stride + tl.maximum(known - 1 - k, 0))
                active = active & ((wanted == -1) | (wanted == there))
            at = out_ptr + index * out_stride + token
            if banning == 0:
                active = active & (value > float("-inf"))
                x = tl.load(at, mask=active, other=float("-inf"))
                tl.store(at, x + value, mask=active & (x > float("-inf")))
            else:
                tl.store(at, value, mask=active & (value == float("-inf")))
        tl.debug_barrier()


def edit_logits(
    logits: Tensor,
    rows: Tensor,
    edits: Tensor,
    starts: Tensor,
    counts: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> Tensor:
    """See quire/ops/shaping.py."""
    _edit_kernel[(len(rows),)](
        logits,
        rows,
        edits,
        starts,
        counts,
        token_ids,
        num_tokens,
        num_prompt_tokens,
        rows if ahead is None else ahead,
        logits.stride(0),
        edits.stride(0),
        token_ids.stride(0),
        HAS_AHEAD=ahead is not None,
        ENTRIES=_ENTRIES,
        BEFORE=edits.shape[1] - _FIXED_COLUMNS,
        num_warps=2,
        **launch_options(),
    )
    return logits


@triton.jit
def _is_penalized(penalties_ptr, stride, row):
    presence = tl.load(penalties_ptr + row)
    frequency = tl.load(penalties_ptr + stride + row)
    repetition = tl.load(penalties_ptr + 2 * stride + row)
    return (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0), presence, frequency, repetition


@triton.jit
def _clear_kernel(
    rows_ptr, penalties_ptr, seen_ptr, vocab_size, penalties_stride, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    begin_dependent(PDL)
    index = tl.program_id(0).to(tl.int64)
    wanted, _, _, _ = _is_penalized(penalties_ptr, penalties_stride, tl.load(rows_ptr + index))
    if wanted:
        tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        tl.store(seen_ptr + index * vocab_size + tokens, tl.zeros([CHUNK], tl.int32), mask=tokens < vocab_size)


@triton.jit
def _count_kernel(
    rows_ptr,
    penalties_ptr,
    seen_ptr,
    token_ids_ptr,
    num_tokens_ptr,
    num_prompt_ptr,
    ahead_ptr,
    vocab_size,
    penalties_stride,
    token_stride,
    HAS_AHEAD: tl.constexpr,
    POSITIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    wanted, _, _, _ = _is_penalized(penalties_ptr, penalties_stride, row)
    known = tl.load(num_tokens_ptr + row)
    if HAS_AHEAD:
        known += tl.load(ahead_ptr + index)
    if wanted & (tl.program_id(1) * POSITIONS < known):
        positions = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
        tokens = tl.load(token_ids_ptr + row * token_stride + positions, mask=positions < known, other=-1)
        # Placeholders of media may lie outside the vocabulary.
        counted = (tokens >= 0) & (tokens < vocab_size)
        num_prompt = tl.load(num_prompt_ptr + row)
        at = seen_ptr + index * vocab_size + tokens
        tl.atomic_add(at, tokens * 0 + 1, mask=counted & (positions >= num_prompt), sem="relaxed")
        tl.atomic_or(at, tokens * 0 + _IN_PROMPT, mask=counted & (positions < num_prompt), sem="relaxed")


@triton.jit
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    penalties_ptr,
    seen_ptr,
    vocab_size,
    logits_stride,
    penalties_stride,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    wanted, presence, frequency, repetition = _is_penalized(penalties_ptr, penalties_stride, row)
    if wanted:
        tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = tokens < vocab_size
        at = logits_ptr + index * logits_stride + tokens
        x = tl.load(at, mask=inside, other=0.0)
        possible = x > float("-inf")  # what is banned stays so
        seen = tl.load(seen_ptr + index * vocab_size + tokens, mask=inside, other=0)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(seen != 0, repeated, x)
        outputs = seen & (_IN_PROMPT - 1)
        x = x - outputs.to(tl.float32) * frequency
        x = x - tl.where(outputs > 0, presence, 0.0)
        tl.store(at, x, mask=inside & possible)


def penalize(
    logits: Tensor,
    rows: Tensor,
    penalties: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    ahead: Tensor | None = None,
) -> Tensor:
    """See quire/ops/shaping.py."""
    count, vocab_size = logits.shape
    grid = (count, triton.cdiv(vocab_size, _CHUNK))
    seen = torch.empty(count, vocab_size, dtype=torch.int32, device=logits.device)
    options = launch_options()
    _clear_kernel[grid](rows, penalties, seen, vocab_size, penalties.stride(0), CHUNK=_CHUNK, num_warps=8, **options)
    _count_kernel[(count, triton.cdiv(token_ids.shape[1], _POSITIONS))](
        rows,
        penalties,
        seen,
        token_ids,
        num_tokens,
        num_prompt_tokens,
        rows if ahead is None else ahead,
        vocab_size,
        penalties.stride(0),
        token_ids.stride(0),
        HAS_AHEAD=ahead is not None,
        POSITIONS=_POSITIONS,
        num_warps=4,
        **options,
    )
    _penalize_kernel[grid](
        logits,
        rows,
        penalties,
        seen,
        vocab_size,
        logits.stride(0),
        penalties.stride(0),
        CHUNK=_CHUNK,
        num_warps=8,
        **launch_options(fused=False),
    )
    return logits

"""What changes logits before a token is drawn, for recorded steps: everything lies in tables indexed by row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_CHUNK = 4096  # tokens of a program, as in quire/ops/keep_allowed.py


@triton.jit
def _keep_allowed_kernel(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    lines_ptr,
    out_ptr,
    highest_ptr,
    vocab_size,
    logits_stride,
    words,
    lines_stride,
    num_chunks,
    NUM_LINES: tl.constexpr,
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
        word = tl.load(masks_ptr + line * words + tokens // 32, mask=tokens < limit, other=-1)
        x = tl.where((word >> (tokens % 32)) & 1 == 1, x, float("-inf"))
    tl.store(out_ptr + index * vocab_size + tokens, x, mask=inside)


def keep_allowed(logits: Tensor, rows: Tensor, masks: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
    """See quire/ops/keep_allowed.py."""
    count, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _CHUNK)
    out = torch.empty(count, vocab_size, dtype=torch.float32, device=logits.device)
    highest = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    _keep_allowed_kernel[(count, chunks)](
        logits,
        rows,
        masks,
        lines,
        out,
        highest,
        vocab_size,
        logits.stride(0),
        masks.stride(0),
        lines.stride(0),
        chunks,
        NUM_LINES=lines.shape[0],
        CHUNK=_CHUNK,
        num_warps=8,
        **launch_options(),
    )
    return out, highest

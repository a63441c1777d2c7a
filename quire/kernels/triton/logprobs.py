"""Log-probabilities of a chosen token and of the top-k tokens, in one pass over the logits and a small second one.

The first pass sums up chunks of a row, and keeps the highest logit of each group of tokens. The second merges the
chunks; and since the first `count` groups, ordered by their highest logit, hold the first `count` tokens, it reads
just those again. Sums are of integers, so that a row has the same bits whatever the type of its logits, where they
lie, how many rows there are and how many tokens are asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options

_GROUP = 128  # tokens that share a highest logit
_CHUNK = 4096  # tokens of a program of the first pass
_WIDTHS = (0, 8, 32)  # slots for top-k tokens in the kernel of the second pass: each is compiled once
_MOST = 20  # the largest k that it finds; a larger one is sorted
_SORTED_ROWS = 16  # at a time, since a sort needs much memory
_NOTHING = tl.constexpr(-(1 << 63))  # a key that comes after all others
_ONE = tl.constexpr(float(1 << 40))  # what a probability of 1 is as an integer


@triton.jit
def _keys(x, ids):
    """int64 in the order of tokens, the first the highest: by number, then by lower id."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # no negative zero: it would be another key
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (flipped.to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _take_first(keys):
    """(the number and the id of the highest key, the keys without it)"""
    first = tl.max(keys, axis=0)
    flipped = (first >> 32).to(tl.int32)
    x = (flipped ^ ((flipped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return x, (first & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF, tl.where(keys == first, _NOTHING, keys)


@triton.jit
def _sum_kernel(
    logits_ptr,
    chosen_ptr,
    group_highest_ptr,  # [rows, groups] float32
    highest_ptr,  # [rows, chunks] float32
    sum_ptr,  # [rows, chunks] int64: of exp(logit - highest)
    higher_ptr,  # [rows, chunks] int32: how many are higher than the chosen one
    vocab_size,
    logits_stride,
    num_groups,
    num_chunks,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    line_ptr = logits_ptr + row * logits_stride
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(line_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    chosen = tl.load(line_ptr + tl.load(chosen_ptr + row).to(tl.int64)).to(tl.float32)
    group_highest = tl.max(x, axis=1)
    tl.store(group_highest_ptr + row * num_groups + groups, group_highest, mask=groups < num_groups)
    highest = tl.max(group_highest, axis=0)
    weights = tl.exp(x - tl.where(highest > float("-inf"), highest, 0.0)) * _ONE
    at = row * num_chunks + chunk
    tl.store(highest_ptr + at, highest)
    tl.store(sum_ptr + at, tl.sum(tl.sum(weights.to(tl.int64), axis=1), axis=0))
    tl.store(higher_ptr + at, tl.sum(tl.sum((x > chosen).to(tl.int32), axis=1), axis=0))


@triton.jit(do_not_specialize=["count"])
def _merge_kernel(
    logits_ptr,
    chosen_ptr,
    group_highest_ptr,
    highest_ptr,
    sum_ptr,
    higher_ptr,
    integers_ptr,  # [rows, 1 + count] int32
    logprobs_ptr,  # [rows, 1 + count] float32
    normalizer_ptr,  # [rows, 2] float32
    vocab_size,
    logits_stride,
    num_groups,
    num_chunks,
    count,
    WIDTH: tl.constexpr,  # at least `count`; 0: none
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    line_ptr = logits_ptr + row * logits_stride
    chunks = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunks
    chunk_highest = tl.load(highest_ptr + at, mask=chunks < num_chunks, other=float("-inf"))
    highest = tl.max(chunk_highest, axis=0)
    highest = tl.where(highest > float("-inf"), highest, 0.0)
    sums = tl.load(sum_ptr + at, mask=chunks < num_chunks, other=0)
    sums = (sums.to(tl.float64) * tl.exp(chunk_highest - highest).to(tl.float64)).to(tl.int64)
    total = tl.maximum(tl.sum(sums, axis=0), 1)  # of what is impossible altogether there is no logarithm
    log_sum = tl.log(total.to(tl.float64) / _ONE).to(tl.float32)
    tl.store(normalizer_ptr + row * 2, highest)
    tl.store(normalizer_ptr + row * 2 + 1, log_sum)
    higher = tl.load(higher_ptr + at, mask=chunks < num_chunks, other=0)
    chosen = tl.load(line_ptr + tl.load(chosen_ptr + row).to(tl.int64)).to(tl.float32)
    integers_ptr += row * (1 + count)
    logprobs_ptr += row * (1 + count)
    tl.store(integers_ptr, 1 + tl.sum(higher, axis=0))
    tl.store(logprobs_ptr, chosen - highest - log_sum)
    if WIDTH > 0:
        groups = tl.arange(0, GROUPS)
        best = tl.load(group_highest_ptr + row * num_groups + groups, mask=groups < num_groups, other=0.0)
        keys = tl.where(groups < num_groups, _keys(best, groups), _NOTHING)
        places = tl.arange(0, WIDTH)
        found = tl.full([WIDTH], -1, tl.int32)
        for place in range(tl.minimum(count, num_groups)):
            _, group, keys = _take_first(keys)
            found = tl.where(places == place, group, found)
        tokens = found[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (tokens >= 0) & (tokens < vocab_size)
        x = tl.load(line_ptr + tokens, mask=inside, other=0.0).to(tl.float32)
        keys = tl.where(inside, _keys(x, tokens), _NOTHING)
        keys = tl.reshape(keys, [WIDTH * GROUP])
        for place in range(count):
            logit, token, keys = _take_first(keys)
            tl.store(integers_ptr + 1 + place, token)
            tl.store(logprobs_ptr + 1 + place, logit - highest - log_sum)


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See quire/ops/logprobs.py."""
    rows, vocab_size = logits.shape
    count = min(count, vocab_size)
    found = count if count <= _MOST else 0
    groups, chunks = triton.cdiv(vocab_size, _GROUP), triton.cdiv(vocab_size, _CHUNK)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    inputs = (
        logits,
        chosen,
        scratch(rows, groups),
        scratch(rows, chunks),
        scratch(rows, chunks, dtype=torch.int64),
        scratch(rows, chunks, dtype=torch.int32),
    )
    sizes = (vocab_size, logits.stride(0), groups, chunks)
    integers, values = scratch(rows, 1 + found, dtype=torch.int32), scratch(rows, 1 + found)
    normalizers = scratch(rows, 2)
    _sum_kernel[(rows, chunks)](
        *inputs, *sizes, GROUPS=_CHUNK // _GROUP, GROUP=_GROUP, num_warps=8, **launch_options()
    )
    _merge_kernel[(rows,)](
        *inputs,
        integers,
        values,
        normalizers,
        *sizes,
        found,
        WIDTH=next(width for width in _WIDTHS if width >= found),
        CHUNKS=triton.next_power_of_2(chunks),
        GROUPS=triton.next_power_of_2(groups),
        GROUP=_GROUP,
        num_warps=4,
        **launch_options(),
    )
    if found == count:
        return integers, values
    top = torch.cat([_sorted(some, count) for some in logits.split(_SORTED_ROWS)])
    top_values = logits.gather(1, top).to(torch.float32) - normalizers[:, :1] - normalizers[:, 1:]
    return torch.cat([integers, top.to(torch.int32)], dim=1), torch.cat([values, top_values], dim=1)


def _sorted(logits: Tensor, count: int) -> Tensor:
    """The first `count` tokens in order: [m, count] int64."""
    without_negative_zero = logits.to(torch.float32) + 0.0
    return without_negative_zero.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()

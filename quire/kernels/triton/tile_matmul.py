"""Products as tiles of outputs x tokens: the weight is the left operand, so a few tokens still fill the matrix units.

Weights are [out_features, in_features]. Within a split the inner sum always runs in the same order, whatever the
number of tokens; with one split a token's result therefore never depends on the other tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import allow_dependents, launch_options, prefetch_lines, wait_for_predecessor

_MIN_TOKENS = 16  # the narrowest tile of a matrix unit


@triton.jit
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,  # [splits, M, N] float32
    counters_ptr,  # [tiles] int32, zero before and after
    x_scale_ptr,  # [M] float32
    weight_scale_ptr,  # [N] float32
    M,
    N,
    K,
    k_per_split,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,  # every split is whole pieces of BK
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,  # pieces of the weight asked for while the kernel before still runs
    PDL: tl.constexpr,
):
    allow_dependents(PDL)
    token_tiles = tl.cdiv(M, BT)
    output_tiles = tl.cdiv(N, BN)
    # Programs that run together share weights and activations: GROUP output tiles at a time walk over the tokens.
    place = tl.program_id(0)
    first_output = place // (GROUP * token_tiles) * GROUP
    group = tl.minimum(output_tiles - first_output, GROUP)
    tile = first_output + place % (GROUP * token_tiles) % group
    token_tile = place % (GROUP * token_tiles) // group
    split = tl.program_id(1)
    tokens = token_tile * BT + tl.arange(0, BT)
    outputs = tile * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    token_mask = tokens < M
    out_mask = outputs < N
    begin = split * k_per_split
    end = tl.minimum(begin + k_per_split, K)
    w_at = weight_ptr + outputs.to(tl.int64)[:, None] * K + (begin + inner)[None, :]
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * K + (begin + inner)[:, None]
    if PDL:
        prefetch_lines(weight_ptr, outputs, K, begin, end, N, BK, PREFETCH)
    wait_for_predecessor(PDL)
    acc = tl.zeros([BN, BT], tl.float32)
    for start in range(begin, end, BK):
        if EVEN:
            w = tl.load(w_at, mask=out_mask[:, None], other=0.0)
            x = tl.load(x_at, mask=token_mask[None, :], other=0.0)
        else:
            present = start + inner < end
            w = tl.load(w_at, mask=out_mask[:, None] & present[None, :], other=0.0)
            x = tl.load(x_at, mask=token_mask[None, :] & present[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_at += BK
        x_at += BK
    at = tokens.to(tl.int64)[None, :] * N + outputs[:, None]
    mask = token_mask[None, :] & out_mask[:, None]
    if SPLITS > 1:
        tl.store(parts_ptr + split * (M * N).to(tl.int64) + at, acc, mask=mask)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + place, 1, sem="acq_rel")
        if arrived != SPLITS - 1:
            return
        acc = tl.zeros([BN, BT], tl.float32)
        for other in range(SPLITS):
            acc += tl.load(parts_ptr + other * (M * N).to(tl.int64) + at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + place, 0)
    if SCALED:
        x_scale = tl.load(x_scale_ptr + tokens, mask=token_mask, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + outputs, mask=out_mask, other=0.0)
        acc = acc * x_scale[None, :] * weight_scale[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=out_mask, other=0.0).to(tl.float32)[:, None]
    out_at = tokens.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(
        out_ptr + out_at,
        tl.trans(acc).to(out_ptr.dtype.element_ty),
        mask=token_mask[:, None] & out_mask[None, :],
    )


@dataclass(frozen=True)
class TileShape:
    """How a product is cut. Of these only `splits` can change a bit of the result."""

    splits: int = 1  # of the inner sum, over programs
    bt: int = 0  # tokens of a tile; 0: all of them
    bn: int = 64  # outputs of a tile
    bk: int = 128  # of the inner dimension at a time
    group: int = 8  # tiles of outputs that walk over the tokens together
    prefetch: int = 2  # pieces of the weight asked for while the kernel before still runs
    num_warps: int = 4
    num_stages: int = 4


_DEFAULT_SHAPE = TileShape()


def matmul_tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    shape: TileShape = _DEFAULT_SHAPE,
    counters: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias -> [M, N].

    `scales` are those of x's lines [M] and of the weight's lines [N], both float32. More than one split needs
    `counters`: zeros, int32, one for each tile of outputs x tokens.
    """
    m, k = x.shape
    n = weight.shape[0]
    splits, bn, bk = shape.splits, shape.bn, shape.bk
    bt = shape.bt or max(_MIN_TOKENS, triton.next_power_of_2(m))
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else out
    k_per_split = triton.cdiv(triton.cdiv(k, splits), bk) * bk
    x_scale, weight_scale = (out, out) if scales is None else scales
    _tile_kernel[(triton.cdiv(n, bn) * triton.cdiv(m, bt), splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        out if counters is None else counters,
        x_scale,
        weight_scale,
        m,
        n,
        k,
        k_per_split,
        HAS_BIAS=bias is not None,
        SCALED=scales is not None,
        EVEN=k % bk == 0,
        SPLITS=splits,
        BT=bt,
        BN=bn,
        BK=bk,
        GROUP=shape.group,
        PREFETCH=shape.prefetch,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out

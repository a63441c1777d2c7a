"""Routing: the router's logits, and a program for each token that chooses its experts and their weights."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.kernels.triton.matmul import arrival_counters, matmul_one_row
from quire.kernels.triton.tile_matmul import TileShape, matmul_tiles

# A router has few outputs: without splits a matmul would keep one or two programs busy. Always as many, so that a
# token's logits do not depend on how many others there are.
_SPLITS = 8
_TOKENS = 64  # of a tile
_PIECE = 64  # of the inner dimension
_MANY_TOKENS = 1024  # whose tiles fill the device without splits


class Routing(Protocol):
    """See quire/ops/routing.py."""

    top_k: int
    score: str
    weighting: str
    renormalize: bool
    scale: float
    num_groups: int
    top_groups: int
    group_score: str
    least_sum: float
    mixer_margin: float


@triton.jit
def _best(values, lanes, COUNT: tl.constexpr):
    """The index of the largest of values [COUNT], of equal ones the first; NaN counts as the least."""
    values = tl.where(values == values, values, float("-inf"))
    return tl.min(tl.where(values == tl.max(values), lanes, COUNT))


@triton.jit
def _within_groups(choice, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr):
    """-inf for all lanes but those of the TOP best groups; a group is as good as its best expert, or its best two."""
    grouped = tl.reshape(choice, [GROUPS, SIZE])
    groups, members = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    score = tl.max(grouped, axis=1)
    if TOP2:
        best = tl.min(tl.where(grouped == score[:, None], members[None, :], SIZE), axis=1)
        score += tl.max(tl.where(members[None, :] == best[:, None], float("-inf"), grouped), axis=1)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP):
        # Groups that are kept already come after all others.
        group = _best(tl.where(kept > 0, float("-inf"), score), tl.where(kept > 0, GROUPS, groups), GROUPS)
        kept = tl.where(groups == group, 1, kept)
    return tl.reshape(tl.where((kept > 0)[:, None], grouped, float("-inf")), [GROUPS * SIZE])


@triton.jit
def _route_kernel(
    logits_ptr,  # [n, experts] float32
    bias_ptr,
    ids_ptr,  # [n, K] int32
    weights_ptr,  # [n, K] float32
    num_groups,
    group_size,
    scale,
    least_sum,
    margin,
    SCORE: tl.constexpr,
    WEIGHTING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,  # 0: all of them
    TOP2: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    LANES: tl.constexpr = GROUPS * SIZE
    lanes, slots = tl.arange(0, LANES), tl.arange(0, SLOTS)
    exists = (lanes // SIZE < num_groups) & (lanes % SIZE < group_size)
    experts = lanes // SIZE * group_size + lanes % SIZE
    logits_ptr += row * num_groups * group_size
    logits = tl.load(logits_ptr + experts, mask=exists, other=float("-inf"))
    scores = logits
    if SCORE == "softmax":
        exps = tl.exp(logits - tl.max(logits))
        scores = exps / tl.sum(exps)
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORE == "sqrt_softplus":
        scores = tl.sqrt(tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=exists, other=0.0)
    choice = tl.where(exists, choice, float("-inf"))
    if TOP_GROUPS > 0:
        choice = _within_groups(choice, GROUPS, SIZE, TOP_GROUPS, TOP2)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.full([SLOTS], float("-inf") if WEIGHTING == "softmax" else 0.0, tl.float32)
    taken = ~exists
    total = 0.0
    for slot in tl.static_range(K):
        # Experts that are taken come after all others, also where what is left is -inf.
        lane = _best(tl.where(taken, float("-inf"), choice), tl.where(taken, LANES, lanes), LANES)
        chosen = lanes == lane
        value = tl.sum(tl.where(chosen, scores if WEIGHTING == "scores" else logits, 0.0))
        if WEIGHTING == "sigmoid":
            value = 1.0 / (1.0 + tl.exp(-value))
        if WEIGHTING == "sparse_mixer":
            far = (value - logits) / tl.maximum(tl.abs(logits), value) > margin
            value = 1.0 / tl.sum(tl.where(taken | far, 0.0, tl.exp(logits - value)))
        taken = taken | chosen
        ids = tl.where(slots == slot, lane // SIZE * group_size + lane % SIZE, ids)
        weights = tl.where(slots == slot, value, weights)
        total += value
    if WEIGHTING == "softmax":
        weights = tl.exp(weights - tl.max(weights))
        total = 0.0
        for slot in tl.static_range(K):
            total += tl.sum(tl.where(slots == slot, weights, 0.0))
        weights = weights / total
        total = 1.0
    if RENORMALIZE:
        weights = weights / tl.maximum(total, least_sum)
    at = row * K + slots
    tl.store(ids_ptr + at, ids, mask=slots < K)
    tl.store(weights_ptr + at, weights * scale, mask=slots < K)


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits float32 [n, experts], bias [experts] -> (expert ids [n, k] int32, weights [n, k] float32)."""
    rows, num_experts = logits.shape
    k = routing.top_k
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    limited = routing.top_groups < routing.num_groups
    groups = routing.num_groups if limited else 1
    size = num_experts // groups
    lanes = int(triton.next_power_of_2(groups)), int(triton.next_power_of_2(size))
    if rows:
        _route_kernel[(rows,)](
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            groups,
            size,
            routing.scale,
            routing.least_sum,
            routing.mixer_margin,
            SCORE=routing.score,
            WEIGHTING=routing.weighting,
            HAS_BIAS=bias is not None,
            RENORMALIZE=routing.renormalize,
            TOP_GROUPS=routing.top_groups if limited else 0,
            TOP2=routing.group_score == "top2",
            K=k,
            SLOTS=int(triton.next_power_of_2(k)),
            GROUPS=lanes[0],
            SIZE=lanes[1],
            num_warps=1 if lanes[0] * lanes[1] <= 128 else 2,
            **launch_options(fused=False),
        )
    return ids, weights


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, hidden] of any type, weight [experts, hidden] float32 -> x @ weight.T + bias in float32 [n, experts]."""
    rows = x.shape[0]
    splits, many = min(_SPLITS, triton.cdiv(weight.shape[1], _PIECE)), rows >= _MANY_TOKENS
    bt, bn = (128, 64) if many else (max(16, min(_TOKENS, int(triton.next_power_of_2(rows)))), 32)
    shape = TileShape(splits, in_turn=many, bt=bt, bn=bn, bk=_PIECE, num_stages=3)
    precision = "halves" if x.element_size() == 2 else "tf32x3"
    counters = arrival_counters(x.device)
    return matmul_tiles(x, weight, bias, shape=shape, counters=counters, out_dtype=torch.float32, precision=precision)


def router_logits_fast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same, where bits may depend on the number of tokens."""
    if x.shape[0] == 1:
        return matmul_one_row(x, weight, bias, rows=1, out_dtype=torch.float32)
    return router_logits(x, weight, bias)

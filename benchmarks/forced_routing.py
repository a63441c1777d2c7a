"""Uniform routing for benchmarks on dummy weights, which would else send most tokens to a few experts.

The experts of a token are a seeded uniform choice by its layer and by the bits of its first logit, which differ from
token to token. One small kernel takes the place of the one that chooses by logits, and the text that comes out is
irrelevant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import begin_dependent, launch_options
from quire.layers.experts import Router
from quire.layers.quant.plain import PlainLinear


@triton.jit
def _choose_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    seed,
    num_experts,
    most,
    K: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    bits = tl.load(logits_ptr + row * num_experts).to(tl.int32, bitcast=True)
    noise = tl.where(lanes < most, tl.rand(bits ^ seed, lanes), -1.0)
    for slot in tl.static_range(K):
        lane = tl.min(tl.where(noise == tl.max(noise), lanes, LANES))
        tl.store(ids_ptr + row * K + slot, lane)
        tl.store(weights_ptr + row * K + slot, 1.0 / K)
        noise = tl.where(lanes == lane, -1.0, noise)


def choose_uniformly(logits: Tensor, top_k: int, seed: int, most: int | None = None) -> tuple[Tensor, Tensor]:
    """logits [n, experts] -> (expert ids [n, top_k] int32, equal weights [n, top_k] float32); of the first `most`."""
    rows, experts = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        lanes = int(triton.next_power_of_2(experts))
        _choose_kernel[(rows,)](
            logits,
            ids,
            weights,
            seed,
            experts,
            most or experts,
            K=top_k,
            LANES=lanes,
            num_warps=1,
            **launch_options(),
        )
    return ids, weights


def force_uniform_routing(most: int | None = None) -> None:
    """All routers built from now on choose uniformly, among the first `most` experts of a layer."""
    seeds: dict[int, int] = {}

    def choose(self: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.method, PlainLinear)
        logits = self._logits(x, self.method.weight, self.method.bias)
        return choose_uniformly(logits, self.routing.top_k, 7919 * seeds.setdefault(id(self), len(seeds)), most)

    Router.choose = choose  # type: ignore[method-assign]


def distinct_experts(num_experts: int, top_k: int, num_tokens: int, most: int | None = None) -> float:
    """The number of distinct experts that `num_tokens` tokens of a layer read, in the mean of a few layers."""
    counts = []
    for layer in range(8):
        logits = torch.randn(num_tokens, num_experts, device="cuda")
        counts.append(choose_uniformly(logits, top_k, 7919 * layer, most)[0].unique().numel())
    return sum(counts) / len(counts)

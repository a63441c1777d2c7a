"""Uniform routing for benchmarks on dummy weights, which would else send most tokens to a few experts.

The experts of a token are a seeded uniform choice by its layer and by the bits of its first logit, which differ from
token to token. It costs one small kernel in each layer, and the text that comes out is irrelevant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.layers.experts import Router
from quire.layers.quant.plain import PlainLinear


@triton.jit
def _noise_kernel(logits_ptr, seed, num_experts, LANES: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    logits_ptr += row * num_experts
    bits = tl.load(logits_ptr).to(tl.int32, bitcast=True)
    tl.debug_barrier()
    tl.store(logits_ptr + lanes, tl.rand(bits ^ seed, lanes), mask=lanes < num_experts)


def make_uniform(logits: Tensor, seed: int) -> None:
    """Overwrite logits [n, experts] with noise."""
    rows, experts = logits.shape
    if rows:
        _noise_kernel[(rows,)](logits, seed, experts, LANES=int(triton.next_power_of_2(experts)), num_warps=1)


def force_uniform_routing() -> None:
    """All routers built from now on choose uniformly."""
    seeds: dict[int, int] = {}

    def choose(self: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.method, PlainLinear)
        logits = self._logits(x, self.method.weight, self.method.bias)
        make_uniform(logits, 7919 * seeds.setdefault(id(self), len(seeds)))
        return self._route(logits, None, self.routing)

    Router.choose = choose  # type: ignore[method-assign]


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """The number of distinct experts that `num_tokens` tokens of a layer read, in the mean of a few layers."""
    counts = []
    for layer in range(8):
        logits = torch.randn(num_tokens, num_experts, device="cuda")
        make_uniform(logits, 7919 * layer)
        counts.append(logits.topk(top_k).indices.unique().numel())
    return sum(counts) / len(counts)

"""Inputs of the ops in quire/ops/routing.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.routing import Routing

ROUTINGS = (
    Routing(2, renormalize=True),
    Routing(4),
    Routing(3, score="sigmoid", renormalize=True, scale=2.5, num_groups=4, top_groups=2, group_score="top2"),
    Routing(4, score="logits", weighting="softmax"),
    Routing(6, num_groups=4, top_groups=3, scale=16.0),
    Routing(1, score="logits", weighting="sigmoid"),
    Routing(2, score="logits", weighting="sparse_mixer", mixer_margin=0.02),
    Routing(8, score="sqrt_softplus", renormalize=True, scale=1.5),
)


def generate_inputs(seed: int) -> tuple[Tensor, Tensor | None, Routing]:
    generator = torch.Generator().manual_seed(seed)
    rows, experts = (1, 2, 5, 64)[seed % 4], (8, 32, 60, 128)[seed // 2 % 4]
    # Few values, so that many are equal.
    logits = torch.randint(-12, 12, (rows, experts), generator=generator) * 0.25
    bias = torch.randint(0, 4, (experts,), generator=generator) * 0.125 if seed % 3 == 2 else None
    return logits, bias, ROUTINGS[seed % len(ROUTINGS)]


def generate_router_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    rows, hidden, experts = (1, 3, 40)[seed % 3], 16 * (1 + 3 * (seed % 8)), (8, 60, 128)[seed // 2 % 3]
    weight = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
    bias = torch.randn(experts, generator=generator) if seed % 2 else None
    return torch.randn(rows, hidden, generator=generator), weight, bias


INPUTS = {"route": generate_inputs, "router_logits": generate_router_inputs}

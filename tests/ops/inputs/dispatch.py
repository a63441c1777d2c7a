"""Inputs of the ops in quire/ops/routing.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.inputs.grouped import some_experts, some_sizes


def generate_local_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    n, k, experts, _, _ = some_sizes(seed)
    generator, held = torch.Generator().manual_seed(seed), experts // 2
    columns = [torch.randperm(experts, generator=generator) for _ in range((1, 5)[seed % 2])]
    ids, weights = some_experts(n, k, experts, generator), torch.rand(n, k, generator=generator)
    return ids, weights, torch.stack(columns, 1).to(torch.int32), held // 2, held, held


def generate_counted(seed: int) -> tuple[Tensor, Tensor]:
    return generate_local_inputs(seed)[0], torch.arange(16)


INPUTS = {"local_experts": generate_local_inputs, "count_experts": generate_counted}

"""Kernels of experts that several processes hold, over tensors. See quire/ops/routing.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.tracing import empty


def local_experts(
    expert_ids: Tensor, weights: Tensor, places: Tensor, first: int, count: int, elsewhere: int
) -> tuple[Tensor, Tensor]:
    expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
    rows, k = expert_ids.shape
    local, kept = empty(rows, k, dtype=torch.int32), empty(rows, k)
    given = (expert_ids.data_ptr(), weights.data_ptr(), places.data_ptr())
    slots = (places.shape[1], first, count, elsewhere)
    bound().local_experts(*given, local.data_ptr(), kept.data_ptr(), rows, k, *slots)
    return local, kept


def count_experts(expert_ids: Tensor, counts: Tensor) -> Tensor:
    expert_ids = expert_ids.contiguous()
    bound().count_experts(expert_ids.data_ptr(), counts.data_ptr(), *expert_ids.shape)
    return counts


def expert_routes(expert_ids: Tensor, places: Tensor, share: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    expert_ids = expert_ids.contiguous()
    rows, k = expert_ids.shape
    found = tuple(empty(*shape, 2, dtype=torch.int64) for shape in ((rows,), (rows, k), (rows,)))
    given = (expert_ids.data_ptr(), places.data_ptr(), *(routes.data_ptr() for routes in found))
    bound().expert_routes(*given, rows, k, places.shape[1], share, size)
    return found[0], found[1], found[2]


def add_slots(slots: Tensor, weights: Tensor, rank: int, size: int) -> Tensor:
    slots, weights = slots.contiguous(), weights.contiguous()
    rows, k, width = slots.shape
    out = empty(rows, width)
    bound().add_slots(slots.data_ptr(), weights.data_ptr(), out.data_ptr(), rows, k, width, rank, size)
    return out

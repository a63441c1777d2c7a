"""Which slots compute the experts of tokens, and how often each expert is chosen.

`places` [experts, cycle] int32 has the slots of each expert: token i of a step goes to the one in column i % cycle.
Slots are numbered over all processes, each of which holds an equal share of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.ops.base import Op, native

LocalExperts = Callable[[Tensor, Tensor, Tensor, int, int, int], tuple[Tensor, Tensor]]
CountExperts = Callable[[Tensor, Tensor], Tensor]


def local_experts(
    expert_ids: Tensor, weights: Tensor, places: Tensor, first: int, count: int, elsewhere: int
) -> tuple[Tensor, Tensor]:
    """Experts as the process numbers them that has slots [first, first + count): ids and weights [n, k] -> the same.

    Those of other processes become `elsewhere`, with a weight of 0.
    """
    columns = torch.arange(expert_ids.shape[0], device=places.device) % places.shape[1]
    local = places[expert_ids.long(), columns.unsqueeze(1)] - first
    is_here = (local >= 0) & (local < count)
    return local.masked_fill(~is_here, elsewhere), weights.masked_fill(~is_here, 0.0)


def count_experts(expert_ids: Tensor, counts: Tensor) -> Tensor:
    """Add to counts [experts] int64 how often each is in expert_ids [n, k]; the result is `counts`."""
    chosen = expert_ids.flatten().long()
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen))


LOCAL_EXPERTS: Op[LocalExperts] = Op("local_experts", local_experts, 0.0, (native("local_experts", "experts"),))
COUNT_EXPERTS: Op[CountExperts] = Op(
    "count_experts", count_experts, 0.0, (native("count_experts", "experts"),), changes=(1,)
)

"""Routing: which experts a token goes to, with which weights, which slots compute them, and how often each is chosen.

`places` [experts, cycle] int32 has the slots of each expert: token i of a step goes to the one in column i % cycle.
Slots are numbered over all processes, each of which holds an equal share of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.ops.base import F32, Op, native, triton
from quire.ops.invariance import MatmulRecipe
from quire.ops.linear import linear_transposed

# Always the same number of rows at once, so that a row's bits do not depend on how many there are.
_TILES = MatmulRecipe(min_rows=32, row_tile=32)

Score = Literal["softmax", "sigmoid", "sqrt_softplus", "logits"]
Weighting = Literal["scores", "softmax", "sigmoid", "sparse_mixer"]


@dataclass(frozen=True)
class Routing:
    """How an architecture routes. The choice is by score plus bias, the weights are made of what was chosen."""

    top_k: int
    score: Score = "softmax"  # of all experts' logits; "logits": as they are
    weighting: Weighting = "scores"
    """What the chosen experts' weights are: their scores; or of their logits a softmax over the chosen ones, a
    sigmoid, or sparse mixer's softmax, which leaves out experts chosen before and those far below the best."""
    renormalize: bool = False  # divide the weights of a token by their sum
    scale: float = 1.0  # on all weights, at the end
    num_groups: int = 1  # groups of equal size that the experts are divided into
    top_groups: int = 1  # the best groups, which experts are chosen from
    group_score: Literal["max", "top2"] = "max"  # a group is as good as its best expert, or its best two together
    least_sum: float = 1e-20  # renormalizing divides by no less
    mixer_margin: float = 0.0  # sparse mixer: how far below the best, relatively, an expert still counts


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits float32 [n, experts], bias [experts] -> (expert ids [n, k] int32, weights [n, k] float32).

    The best expert comes first, and of equal ones that with the lower id. Everything is computed row by row in
    float32: a row's result does not depend on other rows.
    """
    scores = _SCORES[routing.score](logits)
    choice = scores if bias is None else scores + bias
    if routing.top_groups < routing.num_groups:
        choice = _within_groups(choice, routing)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_k]
    return ids.to(torch.int32), weigh(logits, ids, routing)


def weigh(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """The weights [n, k] float32 of experts ids [n, k] int64, however they were chosen."""
    scores = _SCORES[routing.score](logits)
    weights = _WEIGHTS[routing.weighting](logits, scores, ids, routing)
    if routing.renormalize:
        weights = weights / _slot_sum(weights).clamp(min=routing.least_sum)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    return weights


def _within_groups(choice: Tensor, routing: Routing) -> Tensor:
    """-inf for all experts but those of the best groups."""
    grouped = choice.view(choice.shape[0], routing.num_groups, -1)
    best = grouped.sort(-1, descending=True)[0]
    group_scores = best[..., 0] if routing.group_score == "max" else best[..., 0] + best[..., 1]
    groups = group_scores.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_groups]
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, groups, True)
    return torch.where(kept.unsqueeze(-1), grouped, -torch.inf).view(choice.shape)


def _softmax(logits: Tensor) -> Tensor:
    exps = (logits - logits.max(-1, keepdim=True)[0]).exp()
    return exps / exps.sum(-1, keepdim=True)


def _sigmoid(logits: Tensor) -> Tensor:
    return 1.0 / (1.0 + (-logits).exp())


def _sqrt_softplus(logits: Tensor) -> Tensor:
    return (logits.clamp(min=0.0) + (1.0 + (-logits.abs()).exp()).log()).sqrt()


def _slot_sum(values: Tensor) -> Tensor:
    """[n, k] -> [n, 1], added from the first slot to the last."""
    total = values[:, :1]
    for slot in range(1, values.shape[1]):
        total = total + values[:, slot : slot + 1]
    return total


def _chosen_softmax(logits: Tensor, scores: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    chosen = logits.gather(1, ids)
    exps = (chosen - chosen.max(-1, keepdim=True)[0]).exp()
    return exps / _slot_sum(exps)


def _sparse_mixer(logits: Tensor, scores: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    weights, open_logits = [], logits
    for slot in range(ids.shape[1]):
        expert = ids[:, slot : slot + 1]
        best = logits.gather(1, expert)
        far = (best - logits) / logits.abs().maximum(best) > routing.mixer_margin
        weights.append(_softmax(open_logits.masked_fill(far, -torch.inf)).gather(1, expert))
        open_logits = open_logits.scatter(1, expert, -torch.inf)
    return torch.cat(weights, dim=1)


_SCORES: dict[Score, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrt_softplus": _sqrt_softplus,
    "logits": lambda logits: logits,
}
_WEIGHTS: dict[Weighting, Callable[[Tensor, Tensor, Tensor, Routing], Tensor]] = {
    "scores": lambda logits, scores, ids, routing: scores.gather(1, ids),
    "softmax": _chosen_softmax,
    "sigmoid": lambda logits, scores, ids, routing: _sigmoid(logits.gather(1, ids)),
    "sparse_mixer": _sparse_mixer,
}


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, hidden] of any type, weight [experts, hidden] float32 -> x @ weight.T + bias in float32 [n, experts].

    A row's result does not depend on other rows.
    """
    return linear_transposed(x.float(), weight, bias, _TILES)


ROUTE = Op(route, 1e-5, native("grouped"), triton("routing", F32))
_FAST = triton("routing", F32, function="{}_fast", name="triton_fast", varies=True)
ROUTER_LOGITS = Op(router_logits, 1e-4, _FAST, triton("routing", F32))


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


LOCAL_EXPERTS = Op(local_experts, 0.0, native("experts"))
COUNT_EXPERTS = Op(count_experts, 0.0, native("experts"), changes=(1,))

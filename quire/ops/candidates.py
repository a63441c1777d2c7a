"""Sampling on logits that ranks share by vocabulary: each rank offers the few tokens that can be the choice.

A row's offer of `count` tokens is 1 + 2 * count numbers: the highest logit of the rank's slice, infinite where one is
NaN; logits in the order of token ids, -inf where fewer tokens are offered; and these ids, as the bits of int32. Rows
whose limits cannot be kept by offers, min_p or top_p without top_k, need all logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import F32, Op, native, triton
from quire.ops.gumbel import gumbel_of
from quire.ops.sample import draw, first_max, keep_prefix, scale_logits, within_limits

SampledRows = tuple[Tensor, Tensor, Tensor]  # parameters, seeds and positions of rows, see quire/ops/sample.py


def offer_candidates(logits: Tensor, first_token: int, count: int, sampled: SampledRows | None = None) -> Tensor:
    """What a rank offers of logits [m, n], of tokens from first_token on: [m, 1 + 2 * count] float32.

    A greedy row offers its highest logit, a row with a top_k (at most `count`) its top k, others the highest after
    Gumbel noise is added. Without `sampled` all rows are greedy.
    """
    (rows, size), logits = logits.shape, logits.to(torch.float32)
    best, highest = first_max(logits)
    kept = torch.zeros(rows, size, dtype=torch.bool, device=logits.device)
    if sampled is None:
        kept.scatter_(1, best.unsqueeze(1), True)
    else:
        (temperature, _, top_k, _), seeds, positions = sampled
        scaled = scale_logits(logits, temperature)
        one = torch.where(temperature == 0.0, best, draw(scaled, seeds, positions, first_token))
        kept.scatter_(1, one.unsqueeze(1), True)
        first_k = keep_prefix(scaled, torch.ones_like(kept, dtype=torch.int64), top_k.clamp(1, count).to(torch.int64))
        kept = torch.where(((temperature == 0.0) | (top_k == 0.0)).unsqueeze(1), kept, first_k)
    places = kept.logical_not().to(torch.int8).sort(dim=1, stable=True).indices[:, :count]
    is_kept = kept.gather(1, places)
    offered = torch.where(is_kept, logits.gather(1, places), -torch.inf)
    places = torch.where(is_kept, places, 0)
    padding = (0, max(0, count - size))
    ids = torch.nn.functional.pad(first_token + places, padding, value=first_token).to(torch.int32)
    offered = torch.nn.functional.pad(offered, padding, value=-torch.inf)
    highest = torch.where(highest.isnan(), torch.inf, highest)
    return torch.cat([highest.unsqueeze(1), offered, ids.view(torch.float32)], dim=1)


def sample_among(offers: Tensor, ranks: int, sampled: SampledRows | None = None) -> tuple[Tensor, Tensor]:
    """What sample_within gives for logits of which these are the offers [m, ranks * (1 + 2 * count)] in rank order:
    tokens [m] int32 and the highest logits [m] float32."""
    of_ranks = offers.view(offers.shape[0], ranks, -1)
    count = of_ranks.shape[2] // 2
    logits = of_ranks[:, :, 1 : 1 + count].flatten(1)
    ids = of_ranks[:, :, 1 + count :].contiguous().view(torch.int32).flatten(1).to(torch.int64)
    places, _ = first_max(logits)
    if sampled is not None:
        parameters, seeds, positions = sampled
        scores = within_limits(logits, parameters) + gumbel_of(seeds, positions, ids)
        places = torch.where(parameters[0] == 0.0, places, first_max(scores)[0])
    return ids.gather(1, places.unsqueeze(1)).squeeze(1).to(torch.int32), of_ranks[:, :, 0].amax(1)


OFFER_CANDIDATES = Op(offer_candidates, 0.0, triton("candidates", F32), native("candidates"))
SAMPLE_AMONG = Op(sample_among, 0.0, triton("candidates", F32), native("candidates"))

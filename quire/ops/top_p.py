"""top_p: keeps the shortest prefix of the order whose probability reaches p of the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op
from quire.ops.order import keep_prefix

_ONE = float(1 << 40)


def weights_of(probabilities: Tensor, logits: Tensor) -> Tensor:
    """Probabilities [m, n] as int64 multiples of 2^-40, 0 where the logit is -inf."""
    return (probabilities * _ONE).to(torch.int64).masked_fill_(logits == -torch.inf, 0)


def needed_weight(weights: Tensor, top_p: Tensor) -> Tensor:
    """[m] int64: the weight that the kept prefix must reach."""
    total = weights.sum(1).to(torch.float64)  # at most a little over 2^40, so exact
    return (total * top_p).ceil_().to(torch.int64).clamp_(min=1)


def keep_top_p(logits: Tensor, probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The logits [m, n], -inf for what is cut off; at least one token stays.

    probabilities [m, n] may be those of more tokens: what has a logit of -inf counts nothing, and top_p [m] float64
    is of what the others have together.
    """
    weights = weights_of(probabilities, logits)
    return logits.masked_fill(~keep_prefix(logits, weights, needed_weight(weights, top_p)), -torch.inf)


KEEP_TOP_P = Op("keep_top_p", keep_top_p, 0.0)

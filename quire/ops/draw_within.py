"""The draw of a token for each row within its temperature, min_p, top_k and top_p."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native, triton
from quire.ops.choice import draw, first_max
from quire.ops.order import keep_prefix
from quire.ops.top_p import keep_top_p


def draw_within(logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each line of logits [m, vocab_size], and its highest logit: [m] int32, [m] float32.

    parameters [4, m] float64: temperature (0 is greedy), the logarithm of min_p (-inf: none), top_k
    (0: none), top_p (1: none). seeds and positions [m] int64 key the noise. Limits apply in the order min_p, top_k,
    top_p. The highest logit is infinite where one is NaN, and the token then any valid one.
    """
    logits = logits.to(torch.float32)
    greedy, highest = first_max(logits)
    tokens = torch.where(parameters[0] == 0.0, greedy, draw(within_limits(logits, parameters), seeds, positions))
    return tokens.to(torch.int32), torch.where(highest.isnan(), torch.inf, highest)


def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [m, n] float32 divided by temperature [m]; those of greedy rows stay as they are."""
    return logits / torch.where(temperature == 0.0, 1.0, temperature).to(torch.float32).unsqueeze(1)


def within_limits(logits: Tensor, parameters: Tensor) -> Tensor:
    """logits [m, n] divided by the temperature, -inf for what min_p, top_k and top_p leave out."""
    temperature, log_min_p, top_k, top_p = parameters
    size, scaled = logits.shape[1], scale_logits(logits, temperature)
    lowest = scaled.amax(-1) + log_min_p.to(torch.float32)
    scaled = scaled.masked_fill(scaled < lowest.unsqueeze(1), -torch.inf)
    probabilities = (scaled - scaled.amax(-1, keepdim=True)).exp()  # what they add up to makes no difference
    counts = torch.where(top_k == 0.0, size, top_k).to(torch.int64)
    scaled = scaled.masked_fill(~keep_prefix(scaled, torch.ones_like(scaled, dtype=torch.int64), counts), -torch.inf)
    within_p = keep_top_p(scaled, probabilities, top_p)
    return torch.where((top_p < 1.0).unsqueeze(1), within_p, scaled)


DRAW_WITHIN = Op(
    "draw_within", draw_within, 0.0, (triton("draw_within", "sampling", (torch.float32,)), native("draw_within"))
)

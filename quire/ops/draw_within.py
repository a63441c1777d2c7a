"""The draw of a token for each row within its temperature, min_p, top_k and top_p."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Implementation, Op, native
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


def generate_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, size = 1 + seed % 6, (1, 130, 5000, 9001)[seed % 4]
    # Few values, so that many are equal and cuts fall among them.
    logits = torch.randint(-40, 40, (rows, size), generator=generator) * 0.25

    def some(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (rows,), generator=generator)]

    parameters = torch.stack(
        [
            some([0.0, 0.7, 1.0, 1.9]),
            some([-torch.inf, -torch.inf, -0.5, -3.0]),
            some([0.0, 1.0, 5.0, 20.0, 1e6]),
            some([1.0, 1.0, 0.05, 0.5, 0.95]),
        ]
    )
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return logits, parameters, seeds, torch.randint(0, 2**40, (rows,), generator=generator)


DRAW_WITHIN = Op(
    "draw_within",
    draw_within,
    generate_inputs,
    0.0,
    (Implementation("triton", "triton.sampling:draw_within", ("cuda",), (torch.float32,)), native("draw_within")),
)

"""The choice of a token from its scores: the first highest one, plain or with Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import Op, native
from quire.ops.gumbel import gumbel_noise

_BLOCK = 128  # tokens per block when looking for the first maximum
# Counters of the random generator at a time: their int64 words should stay in a core's cache.
_COUNTERS = 36 * 1024


def first_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of each row, the lower index among equals, and its score: [m] int64, [m] float32 of [m, n].

    A row with NaN has score NaN and some valid index.
    """
    size = scores.shape[1]
    whole = size // _BLOCK * _BLOCK
    # Block maxima first: finding the place is then cheap, and much faster than an argmax over everything.
    tops = scores[:, :whole].reshape(len(scores), size // _BLOCK, _BLOCK).amax(-1)
    if whole < size:
        tops = torch.cat([tops, scores[:, whole:].amax(-1, keepdim=True)], dim=1)
    best = tops.amax(-1, keepdim=True)
    block = _first_equal(tops, best)
    places = block.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK, device=scores.device)
    places = places.clamp_(max=size - 1)
    return places.gather(1, _first_equal(scores.gather(1, places), best).unsqueeze(1)).squeeze(1), best.squeeze(1)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor, first_token: int = 0) -> Tensor:
    """[m] int64: the place of a token for each line of logits [m, n], already divided by the temperature.

    seeds and positions are [m] int64. Ties go to the lower token id. The logits are of tokens from first_token on.
    """
    size = logits.shape[1]
    lines = max(1, _COUNTERS * 4 // size)
    tokens = []
    for start in range(0, len(logits), lines):
        part = slice(start, start + lines)
        noise = gumbel_noise(seeds[part], positions[part], size, first_token)
        tokens.append(first_max(noise.add_(logits[part]))[0])
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _first_equal(values: Tensor, wanted: Tensor) -> Tensor:
    """[m] int64: the first place where values [m, n] equals wanted [m, 1]; the last place if nowhere."""
    size = values.shape[1]
    places = torch.arange(size, device=values.device)
    return torch.where(values == wanted, places, size - 1).amin(-1)


FIRST_MAX = Op("first_max", first_max, 0.0, (native("first_max"),))
DRAW = Op("draw", draw, 0.0)

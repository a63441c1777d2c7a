"""The draw: argmax for greedy rows, argmax of logit plus Gumbel noise for the others. Knows no parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.gumbel import gumbel_noise, gumbel_noise_at
from quire.worker.sampling.order import first_max, first_max_of

# Counters of the random generator at a time: their int64 words should stay in a core's cache.
_COUNTERS = 36 * 1024


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[m] int64: a token for each line of logits [m, vocab_size], already divided by the temperature.

    seeds and positions are [m] int64. Ties go to the lower token id.
    """
    size = logits.shape[1]
    lines = max(1, _COUNTERS * 4 // size)
    tokens = []
    for start in range(0, len(logits), lines):
        part = slice(start, start + lines)
        noise = gumbel_noise(seeds[part], positions[part], size)
        tokens.append(first_max(noise.add_(logits[part]))[0])
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def draw_of(logits: Tensor, token_ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The same among candidates: logits [m, k] of token_ids [m, k]. Equal to `draw` with all others at -inf."""
    return first_max_of(gumbel_noise_at(seeds, positions, token_ids).add_(logits), token_ids)

"""The draw among few candidates: argmax of logit plus Gumbel noise. Knows no parameters."""

from __future__ import annotations

from torch import Tensor

from quire.ops.gumbel import gumbel_noise_at
from quire.ops.order import first_max_of


def draw_of(logits: Tensor, token_ids: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A token for each line: logits [m, k] of token_ids [m, k]. Equal to the op `draw` with all others at -inf."""
    return first_max_of(gumbel_noise_at(seeds, positions, token_ids).add_(logits), token_ids)

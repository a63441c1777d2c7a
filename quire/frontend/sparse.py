"""Sparse vectors as FlagEmbedding has them: the weight of each token id that has one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray


def by_token(
    weights: NDArray[np.float32], token_ids: Sequence[int] = (), left_out: Collection[int] = ()
) -> dict[str, float]:
    """The weights that are not zero, by token id.

    `weights` are of the vocabulary [size], or of the prompt's tokens `token_ids` [num_tokens, 1]: of equal tokens the
    highest counts, and those that are `left_out` have none.
    """
    if weights.ndim == 1:
        (tokens,) = np.nonzero(weights)
        return {str(token): float(weights[token]) for token in tokens.tolist()}
    found: dict[str, float] = {}
    for token, weight in zip(token_ids, weights[:, 0].tolist(), strict=True):
        if weight > 0 and token not in left_out:
            found[str(token)] = max(weight, found.get(str(token), 0.0))
    return found

"""Sparse vectors as FlagEmbedding has them: the weight of each token id that has one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def by_token(weights: NDArray[np.float32]) -> dict[str, float]:
    """Of weights [vocabulary]: those that are not zero, by token id."""
    (tokens,) = np.nonzero(weights)
    return {str(token): float(weights[token]) for token in tokens.tolist()}

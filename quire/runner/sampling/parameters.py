"""temperature, min_p, top_k and top_p of a row, as the op sample_within reads them."""

from __future__ import annotations

import math

from quire.types.sampling import SamplingParams


def sampling_parameters(params: SamplingParams, vocab_size: int) -> tuple[float, float, int, float]:
    """Zeros, as of a row that was never set, are greedy."""
    if params.greedy:
        return 0.0, -math.inf, 0, 1.0
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return params.temperature, log_min_p, top_k, params.top_p

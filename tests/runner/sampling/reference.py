"""What sampling means, written plainly in NumPy: one row at a time, sort and add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.types.sampling import SamplingParams
from tests.ops.test_gumbel import numpy_noise

F32 = np.float32


@dataclass
class Row:
    """A request in the middle of its generation."""

    params: SamplingParams
    prompt: list[int]
    outputs: list[int]
    seed: int
    eos_token_ids: tuple[int, ...] = ()


def shape(logits: np.ndarray, row: Row) -> np.ndarray:
    """Everything that may change the likeliest token."""
    params, x = row.params, logits.astype(F32).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -np.inf
    for word in params.bad_words_token_ids:
        before = list(word[:-1])
        if len(row.outputs) >= len(before) and row.outputs[len(row.outputs) - len(before) :] == before:
            x[word[-1]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += F32(bias)
    if len(row.outputs) < params.min_tokens:
        for token in (*row.eos_token_ids, *params.stop_token_ids):
            x[token] = -np.inf
    repetition = F32(params.repetition_penalty)
    for token in set(row.prompt + row.outputs):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(row.outputs):
        x[token] -= F32(row.outputs.count(token)) * F32(params.frequency_penalty)
        x[token] -= F32(params.presence_penalty)
    return x


def in_order(x: np.ndarray) -> list[int]:
    return sorted(range(len(x)), key=lambda token: (-x[token], token))


def narrow(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, min_p, top_k, top_p."""
    x = x / F32(params.temperature)
    if params.min_p > 0:
        x[x < x.max() + F32(math.log(params.min_p))] = -np.inf
    order = in_order(x)
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        order = order[: nucleus_size(x, order, params.top_p)]
    kept = np.full_like(x, -np.inf)
    kept[order] = x[order]
    return kept


def nucleus_size(x: np.ndarray, order: list[int], top_p: float) -> int:
    probabilities = np.exp(x[order].astype(np.float64) - x.max())
    probabilities /= probabilities.sum()
    total, size = 0.0, 0
    for probability in probabilities:
        if size and total >= top_p:
            break
        total += probability
        size += 1
    return size


def nucleus_margin(x: np.ndarray, params: SamplingParams) -> float:
    """How far top_p is from the nearest running sum: below rounding error the cut is anybody's guess."""
    if params.greedy or params.top_p >= 1:
        return 1.0
    x = narrow(x, SamplingParams(temperature=params.temperature, min_p=params.min_p, top_k=params.top_k))
    probabilities = np.sort(np.exp(x.astype(np.float64) - x.max()))[::-1]
    return float(np.abs(np.cumsum(probabilities / probabilities.sum()) - params.top_p).min())


def sample(logits: np.ndarray, row: Row) -> int | None:
    """The token, or None if there is none."""
    x = shape(logits, row)
    if x.max() == -np.inf:
        return None
    if row.params.greedy:
        return in_order(x)[0]
    x = narrow(x, row.params)
    return in_order(x + numpy_noise(row.seed, len(row.outputs), len(x)))[0]


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max()
    return x - math.log(np.exp(x).sum())

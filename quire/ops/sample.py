"""From logits to a token: the highest one, or a draw with Gumbel noise within temperature, min_p, top_k and top_p.

All of sampling uses one order of tokens: higher logit first, and among equals the lower token id. Every function here
gives a row the same result in whatever batch it stands, and leaves nothing to how a device breaks ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import F32, Op, native, triton
from quire.ops.gumbel import gumbel_noise

_CHUNK = 1 << 17  # tokens at a time in a radix select: its int64 temporaries should stay in a core's cache


def top_k_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens in order: values and token ids, both [m, count]."""
    size = logits.shape[1]
    # Value and id make one integer, so no two are equal and topk has nothing to decide.
    reverse_ids = torch.arange(size - 1, -1, -1, device=logits.device)
    keys = ((_sortable(logits).to(torch.int64) << 32) | reverse_ids).topk(count, dim=1).values
    token_ids = (size - 1) - (keys & 0xFFFFFFFF)
    return logits.gather(1, token_ids), token_ids


def keep_prefix(logits: Tensor, weights: Tensor, needed: Tensor, chunk: int = _CHUNK) -> Tensor:
    """Which tokens are in the shortest prefix of the order whose weights add up to `needed`: bool [m, n].

    Weights [m, n] and needed [m] are int64, so sums are exact in any order of addition. A radix select: three
    passes over the digits of the sort key find the last kept value, a running sum cuts among its equals. It is
    faster than sorting a vocabulary, and indifferent to ties.
    """
    lines = max(1, chunk // logits.shape[1])
    parts = zip(torch.split(logits, lines), torch.split(weights, lines), torch.split(needed, lines), strict=True)
    return torch.cat([_keep_prefix(*part) for part in parts])


def _keep_prefix(logits: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    ranks = 0x7FFFFFFF - _sortable(logits).to(torch.int64)  # [0, 2^32), smaller is earlier
    needed = needed.unsqueeze(1)
    last = torch.zeros_like(needed)
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        digits = (ranks >> shift) & ((1 << bits) - 1)
        mass = torch.zeros(len(logits), 1 << bits, dtype=torch.int64, device=logits.device)
        mass.scatter_add_(1, digits, weights)
        total = mass.cumsum(1)
        digit = torch.searchsorted(total, needed).clamp_(max=(1 << bits) - 1)
        needed = needed - (total.gather(1, digit) - mass.gather(1, digit))
        weights = weights * (digits == digit)
        last |= digit << shift
    before = weights.cumsum(1) - weights
    return (ranks < last) | ((ranks == last) & (before < needed))


def _sortable(values: Tensor) -> Tensor:
    """float32 as int32 in the same order; -0.0 and 0.0 are equal."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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


FIRST_MAX = Op(first_max, 0.0, native())
DRAW = Op(draw, 0.0)


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


KEEP_TOP_P = Op(keep_top_p, 0.0)


def sample_within(logits: Tensor, parameters: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
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


SAMPLE_WITHIN = Op(sample_within, 0.0, triton("sampling", F32), native())

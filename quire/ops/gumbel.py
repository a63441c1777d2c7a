"""Gumbel noise as a pure function of (seed, position, token id), the same bits on every device.

This docstring is the specification; a C++ or Triton implementation must give the same bits. All floating-point
steps are single IEEE float32 operations, rounded to nearest even; a multiply and an add are never fused.

Random word
    key     = (seed mod 2^32, (seed >> 32) mod 2^32), the seed being 64 bits
    counter = (token_id // 4, position mod 2^32, (position >> 32) mod 2^32, 0x47554D42)
    w       = word (token_id mod 4) of philox4x32(counter, key); see quire/ops/philox.py

Uniform, in (0, 1]
    v = (float(w) + 0.5) * 2^-32        float(w) rounds to nearest even
    u = max(1 - v, 2^-25)
    `v` keeps its relative precision near 0. That end decides which unlikely tokens can win, and a uniform with
    a fixed grid of 2^-24 would make tokens of probability below 1e-7 practically impossible. v is 1 for the
    last 128 words; the maximum keeps log(u) finite.

Exponential, E = -log(1 - v)
    split u as below into (e, f); where e = 0, replace f by -v, which is 1 - v - 1 before it was rounded
    E = -(poly(f) + float(e) * LN2)

Gumbel, G = -log(E)
    split E into (e, f);  G = -(poly(f) + float(e) * LN2)

split(x), for a normal x > 0: x = 2^e * (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    i = bits(x) - 0x3F3504F3            bits of float32 as int32; the constant is sqrt(1/2)
    e = i >> 23                         arithmetic shift
    f = float_from_bits((i & 0x7FFFFF) + 0x3F3504F3) - 1

poly(f) = log(1 + f)
    q = C7;  for C in C6 .. C0: q = q * f + C    (a multiply, then an add)
    poly = (q * f) * f + f

C0..C7 are our own minimax fit of (log(1 + f) - f) / f^2 on [sqrt(1/2) - 1, sqrt(2) - 1], weighted by |f| so
that the relative error of log(1 + f) is levelled (iteratively reweighted least squares over Chebyshev nodes in
float64, rounded to float32; tests/ops/test_gumbel.py repeats the fit). The logarithm is within 3e-7 relative
of the true one. G lies between -2.86 (v = 1) and 22.88 (w = 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.philox import WORD, philox4x32

DOMAIN = 0x47554D42  # "GUMB": other uses of the same seed must take another tag
SQRT_HALF_BITS = 0x3F3504F3
LN2 = 0.693147182464599609375  # float32(log 2)
MIN_UNIFORM = 2.0**-25
LOG_COEFFICIENTS = (  # C0..C7, every one exact in float32
    -0.4999998211860657,
    0.3333393335342407,
    -0.25002583861351013,
    0.19963476061820984,
    -0.16551794111728668,
    0.14883700013160706,
    -0.14426842331886292,
    0.0897943452000618,
)


def gumbel_noise(seeds: Tensor, positions: Tensor, count: int, first: int = 0) -> Tensor:
    """Noise for `count` tokens from `first` on: [m, count] float32 from seeds and positions [m] int64."""
    blocks = torch.arange(first // 4, (first + count + 3) // 4, device=seeds.device).unsqueeze(0)
    words = torch.empty(seeds.shape[0], blocks.shape[1], 4, dtype=torch.float32, device=seeds.device)
    for index, word in enumerate(_words(seeds, positions, blocks)):
        words[..., index].copy_(word)
    return _gumbel(words.flatten(1))[:, first % 4 : first % 4 + count]


def gumbel_of(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Noise for token_ids [m, n] int64, the same bits: [m, n] float32."""
    words = torch.stack(_words(seeds, positions, token_ids // 4), dim=-1)
    return gumbel_from_words(words.gather(-1, (token_ids % 4).unsqueeze(-1)).squeeze(-1))


def gumbel_from_words(words: Tensor) -> Tensor:
    """Noise from raw words, int64 in [0, 2^32)."""
    return _gumbel(words.to(torch.float32))


def natural_log(x: Tensor) -> Tensor:
    """log(x) of normal positive float32, by the operations of the specification."""
    exponent, f = _split(x)
    return _log(exponent, f)


def _words(seeds: Tensor, positions: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    domain = torch.full_like(seeds, DOMAIN)
    counter = (blocks, positions & WORD, (positions >> 32) & WORD, domain)
    return philox4x32(counter, (seeds & WORD, (seeds >> 32) & WORD))


def _gumbel(word: Tensor) -> Tensor:
    """`word` is float(w), and is overwritten."""
    v = word.add_(0.5).mul_(2.0**-32)
    exponent, f = _split((1.0 - v).clamp_(min=MIN_UNIFORM))
    f = _select(exponent >> 31, f, v.neg_())
    exponential = _log(exponent, f).neg_()
    return natural_log(exponential).neg_()


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    shifted = x.view(torch.int32) - SQRT_HALF_BITS
    exponent = shifted >> 23
    fraction = shifted.bitwise_and_(0x7FFFFF).add_(SQRT_HALF_BITS).view(torch.float32).sub_(1.0)
    return exponent, fraction


def _select(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where the int32 mask is all ones, y where it is zero; several times faster than torch.where."""
    y_bits = y.view(torch.int32)
    return (x.view(torch.int32) ^ y_bits).bitwise_and_(mask).bitwise_xor_(y_bits).view(torch.float32)


def _log(exponent: Tensor, f: Tensor) -> Tensor:
    *rest, highest = LOG_COEFFICIENTS
    q = f * highest
    q.add_(rest[-1])
    for coefficient in reversed(rest[:-1]):
        q.mul_(f).add_(coefficient)
    q.mul_(f).mul_(f).add_(f)
    return q.add_(exponent.to(torch.float32).mul_(LN2))

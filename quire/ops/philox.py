"""Philox4x32-10, the counter-based generator behind every random number of sampling, on torch integers.

Specification (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), all words
being unsigned 32-bit integers:

    for round = 0 .. 9:
        p0 = 0xD2511F53 * c0          (64-bit product)
        p1 = 0xCD9E8D57 * c2
        (c0, c1, c2, c3) = (high(p1) ^ c1 ^ k0, low(p1), high(p0) ^ c3 ^ k1, low(p0))
        (k0, k1) = (k0 + 0x9E3779B9, k1 + 0xBB67AE85)   modulo 2^32

torch has no full set of unsigned operations, so words are int64 tensors with values in [0, 2^32). A product
wraps modulo 2^64, which leaves its 64 bits right; an arithmetic shift and a mask then give the high word.
"""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words for each counter. Inputs are int64 in [0, 2^32) and broadcast with each other.

    A word that is the same along a dimension should have size 1 there: the first rounds then stay small.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIER_0
        p1 = c2 * _MULTIPLIER_1
        # c1 and c3 are whole products, with garbage above bit 31; the mask after the xor removes it.
        c0 = ((p1 >> 32) ^ c1 ^ k0) & WORD
        c2 = ((p0 >> 32) ^ c3 ^ k1) & WORD
        c1, c3 = p1, p0
        k0 = (k0 + _WEYL_0) & WORD
        k1 = (k1 + _WEYL_1) & WORD
    return c0, c1 & WORD, c2, c3 & WORD

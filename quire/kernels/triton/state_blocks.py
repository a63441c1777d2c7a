"""Which blocks of a row keep a state of a recurrent layer."""

from __future__ import annotations

import triton
import triton.language as tl

SCAN = 128  # blocks of a long prompt that are looked at together for one that keeps a state


@triton.jit
def next_kept(table, entry, entries, SCAN: tl.constexpr):
    """The next entry from this one on whose block keeps a state, and that block; (entries or more, 0) without one.

    Few blocks of a long prompt do: the next of them is looked for among many at once.
    """
    block = tl.zeros([], tl.int64)
    while (block == 0) & (entry < entries):
        ahead = entry + tl.arange(0, SCAN)
        found = tl.load(table + ahead, mask=ahead < entries, other=0)
        entry = tl.min(tl.where(found > 0, ahead, entry + SCAN), axis=0)
        block = tl.sum(tl.where(ahead == entry, found, 0), axis=0).to(tl.int64)
    return entry, block

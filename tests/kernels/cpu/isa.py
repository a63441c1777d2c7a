"""What tests of native kernels share: every instruction set that this machine runs, and the thread count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings

from quire.kernels.cpu import library

LIBRARY = library.load()
INSTRUCTION_SETS = LIBRARY.instruction_sets if LIBRARY else []
FEW = 10  # examples: profiles that try fewer leave out what others nearly are
# Matmuls of integers apart, AVX-512 is VNNI without them, and for those it takes AVX2's.
_TRIED = [
    isa
    for isa in INSTRUCTION_SETS
    if settings.default.max_examples >= FEW or isa != "avx512" or "avx512vnni" not in INSTRUCTION_SETS
]

needs_library = pytest.mark.skipif(LIBRARY is None, reason="needs a C++ compiler")
each_instruction_set = pytest.mark.parametrize("isa", _TRIED)


def examples(count: int) -> settings:
    """So many examples of a property, or fewer where the profile asks for few: tools/sanitize.py --quick does."""
    return settings(max_examples=min(count, settings.default.max_examples), deadline=None)


@contextmanager
def using(isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Run the kernels of one instruction set, or with so many threads, and go back afterwards."""
    assert LIBRARY is not None
    before = LIBRARY.instruction_set, LIBRARY.num_threads
    LIBRARY.select(isa or before[0])
    if threads is not None:
        LIBRARY.set_threads(threads)
    try:
        yield
    finally:
        LIBRARY.select(before[0])
        if threads is not None:
            LIBRARY.set_threads(before[1])

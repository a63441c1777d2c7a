"""The kernels' own tests, on a library that checks every access to memory."""

from __future__ import annotations

import pytest

from tests.kernels.cpu.isa import needs_library
from tools import sanitize


@pytest.mark.nightly
@pytest.mark.timeout(900)
@needs_library
def test_the_kernels_touch_only_their_memory() -> None:
    assert sanitize.main([]) == 0

"""Under the address sanitizer every matrix lies in memory of its own, so that a step past its end is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.config import env
from quire.kernels.cpu import library, matrix

if env.cpu_sanitizers():
    assert library.load() is not None, "the tests would all be skipped"


class SeparateMemory:
    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture(autouse=True, scope="session")
def separate_panels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if env.cpu_sanitizers():
            patch.setattr(matrix, "_arena", SeparateMemory())
        yield

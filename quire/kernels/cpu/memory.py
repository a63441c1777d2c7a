"""Where the kernels' results are allocated, so that a recording knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_listeners: list[list[Tensor]] = []


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for a kernel to fill."""
    if not _listeners:
        return torch.empty(shape, dtype=dtype)
    _listeners[-1].append(torch.zeros(shape, dtype=dtype))
    return _listeners[-1][-1]


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """The tensors that `empty` makes in this context; the list keeps them alive.

    They are zero, so that nobody has to fill them."""
    _listeners.append([])
    try:
        yield _listeners[-1]
    finally:
        _listeners.pop()

"""Where the kernels' results are allocated, so that a recording knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_listeners: list[list[Tensor]] = []


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for a kernel to fill."""
    tensor = torch.empty(shape, dtype=dtype)
    if _listeners:
        _listeners[-1].append(tensor)
    return tensor


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """The tensors that `empty` makes in this context; the list keeps them alive."""
    _listeners.append([])
    try:
        yield _listeners[-1]
    finally:
        _listeners.pop()

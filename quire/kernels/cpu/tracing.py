"""Traces of kernel calls: what a thread's kernels are called with, instead of carrying the calls out.

Results are allocated here too, so that a trace knows them. Other threads' kernels go on as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class CallTrace:
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)  # what `empty` made, kept alive; zeros, since no kernel ran


class _Active(threading.local):
    trace: CallTrace | None = None


_active = _Active()


class Kernel:
    """A function of the library, which is called or, while this thread is traced, noted."""

    __slots__ = ("_function", "_name")

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        self._name, self._function = name, function

    def __call__(self, *arguments: Any) -> None:
        trace = _active.trace
        if trace is None:
            self._function(*arguments)
        else:
            trace.calls.append((self._name, arguments))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for a kernel to fill."""
    trace = _active.trace
    if trace is None:
        return torch.empty(shape, dtype=dtype)
    trace.buffers.append(torch.zeros(shape, dtype=dtype))
    return trace.buffers[-1]


@contextmanager
def traced() -> Iterator[CallTrace]:
    """Note what this thread's kernels are called with inside the context, and the memory they are given."""
    assert _active.trace is None, "a trace inside a trace"
    _active.trace = CallTrace()
    try:
        yield _active.trace
    finally:
        _active.trace = None
